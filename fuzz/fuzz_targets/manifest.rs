//! A container's manifest: parsed, checked, configured, planned.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use waste_common::config::ModelConfig;
use waste_common::container::Manifest;
use waste_common::machine::Machine;
use waste_common::plan::{ModelSizes, PlanOptions, plan};

fuzz_target!(|data: &[u8]| {
    let file = Path::new("manifest.json");
    if let Ok(manifest) = Manifest::parse(file, data) {
        let _ = manifest.expert_shape(file);
        let _ = ModelConfig::from_container(&manifest.config);
        // What is written is what was read.
        let bytes = manifest.to_bytes().expect("it can be written");
        Manifest::parse(file, &bytes).expect("it is one again");
    }
    if let Ok(config) = serde_json::from_slice(data)
        && let Ok(sizes) = ModelSizes::of_config(&config)
    {
        let _ = plan(&sizes, &PlanOptions::default(), &Machine::with_ram(64 << 30));
    }
});
