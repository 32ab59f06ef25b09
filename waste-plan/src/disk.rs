//! The disk's part of a plan: whether the files fit, and how fast reading experts lets a token be.

use std::path::Path;

use serde::Serialize;
use serde_json::Value;
use waste_common::cli::Failure;
use waste_common::cli::chain::Kind;
use waste_common::io::{existing, filesystem};
use waste_common::json;
use waste_common::plan::MemoryPlan;

/// Whether the files fit. The keys are those of the JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Space {
    pub dest: String,
    pub disk_kind: String,
    /// Container, and checkpoint if it is not there yet.
    pub disk_needed_bytes: u64,
    pub disk_free_bytes: Option<u64>,
    /// None where the system does not say what is free.
    pub disk_fits: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_warning: Option<&'static str>,
}

impl Space {
    /// Looks at the file system of `dest`, which need not exist yet.
    ///
    /// # Errors
    /// No directory above it can be looked at (exit 3).
    pub fn look(dest: &Path, kind: Kind, plan: &MemoryPlan) -> Result<Space, Failure> {
        let system = existing(dest).and_then(|path| filesystem(&path)).map_err(|error| {
            Failure::data("dest", format!("cannot look at the disk of {}: {error}", dest.display()))
        })?;
        // Only a bare configuration has its checkpoint still to be downloaded.
        let staging = match kind {
            Kind::Config => plan.checkpoint_bytes.unwrap_or(0),
            Kind::Checkpoint | Kind::Container => 0,
        };
        let needed = plan.container_bytes.saturating_add(staging);
        Ok(Space {
            dest: dest.display().to_string(),
            disk_kind: system.kind,
            disk_needed_bytes: needed,
            disk_free_bytes: system.free_bytes,
            disk_fits: system.free_bytes.map(|free| needed <= free),
            disk_warning: system.warning,
        })
    }
}

/// A bound on the speed of decoding. The keys are those of the JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Estimate {
    pub disk_gbps: f64,
    pub hit_rate: f64,
    pub bytes_per_token: u64,
    pub disk_seconds_per_token: f64,
    /// None where nothing is read, so that the disk sets no bound.
    pub tokens_per_second_max: Option<f64>,
}

/// The disk's speed and what the cache is expected to save it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    gbps: f64,
    hit_rate: Option<f64>,
}

impl Speed {
    /// A disk that reads `gbps` (10^9 bytes) a second, and the share of experts found in the cache, if it is given.
    ///
    /// # Errors
    /// A speed or share that is none (exit 2).
    pub fn new(gbps: f64, hit_rate: Option<f64>) -> Result<Speed, Failure> {
        if !(gbps.is_finite() && gbps > 0.0) {
            return Err(Failure::usage(format!("--disk-gbps is {gbps}; expected a number above 0")));
        }
        if let Some(rate) = hit_rate.filter(|rate| !(0.0..=1.0).contains(rate)) {
            return Err(Failure::usage(format!("--hit-rate is {rate}; expected a number from 0 to 1")));
        }
        Ok(Speed { gbps, hit_rate })
    }
}

impl Estimate {
    /// What a disk allows. Without a hit rate all experts are found if the cache holds all, else none.
    pub fn new(plan: &MemoryPlan, speed: Speed) -> Estimate {
        let hit_rate = speed.hit_rate.unwrap_or(if plan.holds_all_experts() { 1.0 } else { 0.0 });
        let bytes = (plan.working_set_bytes as f64 * (1.0 - hit_rate)).round() as u64;
        let seconds = bytes as f64 / (speed.gbps * 1e9);
        Estimate {
            disk_gbps: speed.gbps,
            hit_rate,
            bytes_per_token: bytes,
            disk_seconds_per_token: seconds,
            tokens_per_second_max: Some(1.0 / seconds).filter(|rate| rate.is_finite()),
        }
    }
}

/// The speed that `waste-bench disk --json` measured, in GB a second: `gbps`, or `bytes_per_second`.
///
/// # Errors
/// The file cannot be read or says no speed (exit 3).
pub fn measured(file: &Path) -> Result<f64, Failure> {
    let object = json::read(file, 1 << 20)?;
    let number = |key: &str| object.get(key).and_then(Value::as_f64).filter(|n| n.is_finite() && *n > 0.0);
    let gbps = number("gbps").or_else(|| Some(number("bytes_per_second")? / 1e9));
    gbps.ok_or_else(|| {
        Failure::data(
            "bench",
            format!(
                "{} has no `gbps` or `bytes_per_second` above 0; expected the output of `waste-bench disk --json`",
                file.display()
            ),
        )
    })
}
