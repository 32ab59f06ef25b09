//! Synthetic containers and checkpoints: valid in every respect, of weights that mean nothing, and as large as wanted.

pub mod checkpoint;
pub mod container;
mod popularity;
pub mod shape;
mod sidecars;
mod weights;

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use waste_common::cli::{ByteSize, Exit, Failure, Output, Progress, Unit};
use waste_common::container::MANIFEST;
use waste_common::io::filesystem;
use waste_common::plan::ModelSizes;

pub use checkpoint::CheckpointSpec;
pub use container::ContainerSpec;
pub use popularity::Popularity;
use shape::{Format, Name};

/// Writing a synthetic container.
#[derive(Clone, Debug, clap::Args)]
pub struct SynthArgs {
    /// The shape
    pub shape: Name,
    /// The directory to write
    pub out: PathBuf,
    /// Only the first layers
    #[arg(long, value_name = "N", help_heading = "Shape")]
    pub layers: Option<u64>,
    /// Fewer experts a layer
    #[arg(long, value_name = "N", help_heading = "Shape")]
    pub experts: Option<u64>,
    /// How experts are stored
    #[arg(long, value_enum, default_value_t, conflicts_with = "checkpoint", help_heading = "Shape")]
    pub format: Format,
    /// Write a checkpoint (MXFP4 or bf16 experts, bf16 trunk) instead of a container
    #[arg(long, help_heading = "Shape")]
    pub checkpoint: bool,
    /// Experts of normally distributed weights rounded to MXFP4, as those of a trained model nearly are
    #[arg(long, requires = "checkpoint", help_heading = "Weights")]
    pub gaussian: bool,
    /// Seed of the weights; the same seed gives the same bytes
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Weights")]
    pub seed: u64,
    /// Share of a token's experts that any other token used too: how popular popular experts are
    #[arg(long, value_name = "SHARE", default_value_t = Popularity::REUSE, help_heading = "Weights")]
    pub reuse: f64,
    /// Leave out the checksums that go beyond format v0
    #[arg(long, conflicts_with = "checkpoint", help_heading = "Weights")]
    pub no_checksums: bool,
    /// Write over what is there
    #[arg(long)]
    pub force: bool,
}

#[derive(Serialize)]
struct Report {
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<String>,
    arch: &'static str,
    layers: usize,
    experts: usize,
    bytes: u64,
    seed: u64,
    seconds: f64,
}

/// Writes what is asked for.
///
/// # Errors
/// The shape cannot be cut so (exit 2), there is something at OUT (2), or the disk is full (4).
pub fn run(args: SynthArgs, output: &Output) -> Result<Exit, Failure> {
    let start = Instant::now();
    let (config, model) = shape::shaped(args.shape, args.layers, args.experts)?;
    if !(0.0..=1.0).contains(&args.reuse) {
        return Err(Failure::usage(format!("--reuse {}: expected a share from 0 to 1", args.reuse)));
    }
    let there = [MANIFEST, "config.json"].into_iter().find(|name| args.out.join(name).exists());
    if let (Some(name), false) = (there, args.force) {
        let path = args.out.join(name);
        return Err(Failure::usage(format!("{} exists; --force writes over it", path.display())));
    }
    let popularity = match &model.moe {
        Some(moe) => Popularity::for_reuse(moe.experts, moe.top_k, args.reuse),
        None => Popularity::NONE,
    };
    let experts = model.moe.as_ref().map_or(0, |moe| moe.experts);
    let out = args.out.display().to_string();
    let (bytes, container, checkpoint) = if args.checkpoint {
        let spec = CheckpointSpec {
            config: &config,
            model: &model,
            seed: args.seed,
            popularity,
            gaussian: args.gaussian,
        };
        let bytes = checkpoint::bytes(&spec);
        check_space(&args.out, bytes)?;
        let progress = Progress::new(output, "writing", bytes, Unit::Bytes);
        checkpoint::write(&args.out, &spec, &|bytes| progress.add(bytes))?;
        progress.finish();
        (bytes, None, Some(out))
    } else {
        let quant = args.format.quant();
        let bytes = ModelSizes::of_config_with(&config, &quant)?.container_bytes;
        check_space(&args.out, bytes)?;
        let checksums = !args.no_checksums;
        let spec =
            ContainerSpec { config: &config, model: &model, quant, seed: args.seed, popularity, checksums };
        let progress = Progress::new(output, "writing", bytes, Unit::Bytes);
        container::write(&args.out, &spec, &|bytes| progress.add(bytes))?;
        progress.finish();
        (bytes, Some(out), None)
    };
    let seconds = start.elapsed().as_secs_f64();
    let (seed, layers) = (args.seed, model.layers());
    let report = Report { container, checkpoint, arch: model.arch, layers, experts, bytes, seed, seconds };
    if output.json() {
        output.result(&report)?;
    } else {
        writeln!(
            output.text(),
            "{}: {} of {layers} layers with {experts} experts, written in {seconds:.1} s",
            args.out.display(),
            ByteSize(bytes),
        )?;
    }
    Ok(Exit::Done)
}

/// Asks before the first byte whether the disk has room for all of them.
fn check_space(out: &Path, bytes: u64) -> Result<(), Failure> {
    let place = std::path::absolute(out).ok();
    let place = place.as_deref().and_then(|path| path.ancestors().find(|path| path.exists()));
    let free = place.and_then(|place| filesystem(place).ok()?.free_bytes);
    match free {
        Some(free) if free < bytes => Err(Failure::new(
            Exit::Space,
            "disk_full",
            format!(
                "{} needs {}, and {} are free there; cut the shape with --layers or --experts",
                out.display(),
                ByteSize(bytes),
                ByteSize(free)
            ),
        )),
        _ => Ok(()),
    }
}
