//! What a container or a checkpoint is; reads no weights.

use serde::Serialize;
use waste_common::cli::{Exit, Failure, Output, resolve_model};
use waste_common::config::Mixer;
use waste_common::tensors;
use waste_engine::open_source;
use waste_engine::weights::Source;

use crate::args::InfoArgs;
use crate::open::size;

#[derive(Serialize)]
struct Report {
    engine: &'static str,
    arch: &'static str,
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<String>,
    layers: usize,
    kda_layers: usize,
    mla_layers: usize,
    moe_layers: usize,
    experts: usize,
    top_k: usize,
    hidden: usize,
    vocab: usize,
    params_total: u64,
    params_active: u64,
    quantization: String,
    record_bytes: u64,
    bytes: u64,
    vision: bool,
}

/// Prints what a model is.
pub fn run(args: InfoArgs, output: &Output) -> Result<Exit, Failure> {
    let model = resolve_model(&args.model)?;
    let (source, config) = open_source(model.path())?;
    let (params_total, params_active) = tensors::parameters(&config);
    let name = || Some(model.path().display().to_string());
    let (mut container_path, mut checkpoint_path) = (None, None);
    let (kind, quantization, record_bytes, bytes) = match &source {
        Source::Container(container) => {
            container_path = name();
            let banks: u64 = container.manifest().layers.values().map(|bank| bank.bytes).sum();
            let codebooks = container.codebooks().map_or(0, |books| books.source().bytes());
            let quant = &container.manifest().expert_quant;
            let record = container.geometry().map_or(0, |geometry| geometry.record_bytes() as u64);
            let bits = f64::from(quant.stages * quant.bits().bits()) / 8.0;
            let quantization = format!("{} ({bits:.2} bits per weight)", quant.fmt.name());
            ("container", quantization, record, banks + codebooks + container.trunk().source().bytes())
        }
        Source::Checkpoint(checkpoint) => {
            checkpoint_path = name();
            let packed = checkpoint.names().any(|name| name.ends_with(".weight_packed"));
            let quantization = if packed { "MXFP4 experts" } else { "none" };
            ("checkpoint", quantization.to_owned(), 0, checkpoint.bytes())
        }
    };
    let moe = config.moe.as_ref();
    let report = Report {
        engine: env!("CARGO_PKG_VERSION"),
        arch: config.arch,
        kind,
        container: container_path,
        checkpoint: checkpoint_path,
        layers: config.layers(),
        kda_layers: config.count(Mixer::Kda),
        mla_layers: config.count(Mixer::Mla),
        moe_layers: config.moe_layers().count(),
        experts: moe.map_or(0, |moe| moe.experts),
        top_k: moe.map_or(0, |moe| moe.top_k),
        hidden: config.hidden,
        vocab: config.vocab,
        params_total,
        params_active,
        quantization,
        record_bytes,
        bytes,
        vision: config.vision.is_some(),
    };
    if output.json() {
        output.result(&report)?;
        return Ok(Exit::Done);
    }
    let mut out = output.text();
    writeln!(out, "{} {}: {}", report.arch, report.kind, model.path().display())?;
    writeln!(
        out,
        "layers        {} ({} KDA, {} MLA; {} with experts)",
        report.layers, report.kda_layers, report.mla_layers, report.moe_layers
    )?;
    writeln!(out, "experts       {} a layer, {} a token", report.experts, report.top_k)?;
    writeln!(
        out,
        "parameters    {:.3e} in all, {:.3e} a token",
        report.params_total as f64, report.params_active as f64
    )?;
    writeln!(out, "hidden size   {}, vocabulary {}", report.hidden, report.vocab)?;
    writeln!(out, "experts as    {}", report.quantization)?;
    writeln!(
        out,
        "size          {}{}",
        size(report.bytes),
        if report.vision { ", with a vision tower" } else { "" }
    )?;
    Ok(Exit::Done)
}
