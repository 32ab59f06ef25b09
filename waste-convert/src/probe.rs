//! What a conversion will take: bytes, disk, and time from one expert that is encoded and thrown away.

use serde::Serialize;
use waste_common::cli::ByteSize;

use crate::layer::show;
use crate::layer::{Errors, Probe};

/// The tool's JSON with `--dry-run`.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct DryRun {
    pub container: String,
    pub checkpoint: String,
    pub arch: String,
    pub format: &'static str,
    pub effort: &'static str,
    pub layers: usize,
    pub experts: usize,
    /// Of the checkpoint's shards.
    pub source_bytes: u64,
    /// Of the container.
    pub container_bytes: u64,
    /// What is still to be written, work files included.
    pub needed_bytes: u64,
    pub free_bytes: Option<u64>,
    pub fits: bool,
    /// None for a model without routed experts.
    pub probe: Option<Probe>,
    /// For all layers, with the threads of this run.
    pub eta_seconds: Option<f64>,
}

impl std::fmt::Display for DryRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let DryRun { container_bytes, needed_bytes, source_bytes, .. } = self;
        write!(
            f,
            "{} would take {} (from {}), {} of it still to be written",
            self.container,
            ByteSize(*container_bytes),
            ByteSize(*source_bytes),
            ByteSize(*needed_bytes)
        )?;
        match self.free_bytes {
            Some(free) if self.fits => write!(f, "; {} are free", ByteSize(free))?,
            Some(free) => write!(f, "; only {} are free", ByteSize(free))?,
            None => {}
        }
        if let (Some(probe), Some(eta)) = (&self.probe, self.eta_seconds) {
            let errors: &Errors = &probe.error;
            write!(
                f,
                "\nabout {:.1} h for {} layers of {} experts, effort {}: one expert takes {:.2} s, {} error {}",
                eta / 3600.0,
                self.layers,
                self.experts / self.layers.max(1),
                self.effort,
                probe.expert_seconds,
                self.format,
                show(errors)
            )?;
        }
        Ok(())
    }
}

/// The tool's JSON with `--status`.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct Status {
    pub container: String,
    pub checkpoint: String,
    pub finished: bool,
    pub trunk: bool,
    pub done_layers: Vec<u16>,
    pub owed_layers: Vec<u16>,
    pub needed_bytes: u64,
    pub free_bytes: Option<u64>,
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.finished {
            return write!(f, "{} is finished", self.container);
        }
        let list = |layers: &[u16]| match layers {
            [] => "none".to_owned(),
            layers => crate::error::layer_list(layers),
        };
        write!(
            f,
            "{}: layers done {}, owed {}; trunk {}; {} still to be written",
            self.container,
            list(&self.done_layers),
            list(&self.owed_layers),
            if self.trunk { "done" } else { "owed" },
            ByteSize(self.needed_bytes)
        )?;
        match self.free_bytes {
            Some(free) => write!(f, ", {} are free", ByteSize(free)),
            None => Ok(()),
        }
    }
}
