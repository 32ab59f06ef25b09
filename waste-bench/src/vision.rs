//! How fast a model's vision tower encodes an image, beside the products of matrices that it is made of.

use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use waste_common::cli::{Exit, Failure, Output, resolve_model};
use waste_common::config::Vision as Shape;
use waste_common::plan::PlanOptions;
use waste_engine::compute::Compute;
use waste_engine::kernels::Kernels;
use waste_engine::matrix::Matrix;
use waste_engine::vision::{Limits, PATCHES_DEFAULT, Vision, VisionConfig};
use waste_engine::{Arith, open_source};

use crate::random::Random;

/// Side of the picture that is encoded, in pixels.
const SIDE: usize = 896;

/// Measuring the vision tower.
#[derive(Clone, Debug, clap::Args)]
pub struct VisionArgs {
    /// A container or a checkpoint directory with a tower, or `-` for the JSON of the previous tool
    pub model: PathBuf,
    /// Runs; the best one counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// Compute threads [default: one a CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Shrink the picture to so many patches; a quarter of them become tokens
    #[arg(long, value_name = "N", default_value_t = PATCHES_DEFAULT as u64, value_parser = clap::value_parser!(u64).range(4..=PATCHES_DEFAULT as u64))]
    pub max_patches: u64,
}

#[derive(Serialize)]
struct Report {
    model: String,
    side: usize,
    patches: usize,
    tokens: usize,
    layers: usize,
    kernels: &'static str,
    threads: usize,
    runs: u32,
    /// Reading the file and encoding it.
    seconds: f64,
    /// Thousand million multiplications and additions a second.
    tower_gflops: f64,
    /// The same of one product of matrices of the tower's size.
    gemm_gflops: f64,
    of_gemm: f64,
}

/// Encodes a made-up picture and multiplies matrices, in turns.
///
/// # Errors
/// The model has no tower, or it cannot be loaded.
pub fn run(args: VisionArgs, output: &Output) -> Result<Exit, Failure> {
    let model = resolve_model(&args.model)?;
    let (source, config) = open_source(model.path())?;
    let Some(shape) = &config.vision else {
        return Err(Failure::data("no_vision", format!("{} has no vision tower", model.path().display())));
    };
    let mut reading = VisionConfig::read(&source, &config)?;
    reading.set_patch_limit(args.max_patches as usize)?;
    let threads = args.threads.map_or(PlanOptions::default().threads, |threads| threads as usize);
    let kernels = Kernels::from_env()?;
    let compute = Compute::new(kernels, Arith::Exact, threads, None, 0)?;
    output.note("loading the tower");
    let tower = Vision::with_config(&source, &config, reading, Limits::default())?;
    let picture = picture();
    let tokens = tower.measure(&picture)?.tokens;
    let patches = 4 * tokens;

    let matrix = Matrix::f32(shape.intermediate, shape.hidden, noise(shape.intermediate * shape.hidden));
    let (x, mut y) = (noise(patches * shape.hidden), vec![0.0; patches * shape.intermediate]);
    let products = (2 * patches * shape.hidden * shape.intermediate) as f64;
    let (mut seconds, mut gemm) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..args.runs {
        let start = Instant::now();
        tower.rows(&compute, &picture)?;
        seconds = seconds.min(start.elapsed().as_secs_f64());
        // One product takes a hundredth of the tower's time: several, for a fair best.
        for _ in 0..5 {
            let start = Instant::now();
            compute.run(|| matrix.apply(&compute, &x, &mut y));
            gemm = gemm.min(start.elapsed().as_secs_f64());
        }
    }
    let (tower_gflops, gemm_gflops) = (operations(shape, patches) / seconds / 1e9, products / gemm / 1e9);
    let report = Report {
        model: model.path().display().to_string(),
        side: SIDE,
        patches,
        tokens,
        layers: shape.layers,
        kernels: kernels.name,
        threads,
        runs: args.runs,
        seconds,
        tower_gflops,
        gemm_gflops,
        of_gemm: tower_gflops / gemm_gflops,
    };
    if output.json() {
        output.result(&report)?;
        return Ok(Exit::Done);
    }
    writeln!(
        output.text(),
        "an image of {SIDE} x {SIDE}: {patches} patches, {tokens} tokens, {} layers: {seconds:.2} s\n\
         tower   {tower_gflops:7.1} GFLOP/s, {:.0} % of\n\
         product {gemm_gflops:7.1} GFLOP/s of matrices of its size ({} kernels, {threads} threads)",
        report.layers,
        100.0 * report.of_gemm,
        report.kernels
    )?;
    Ok(Exit::Done)
}

/// Multiplications and additions for an image: the projections of every patch, attention of all to all, the merger.
fn operations(shape: &Shape, patches: usize) -> f64 {
    let [hidden, qkv, inner, text] =
        [shape.hidden, shape.qkv, shape.intermediate, shape.text_hidden].map(|n| n as f64);
    let count = patches as f64;
    let layer = 4.0 * hidden * qkv + 2.0 * hidden * inner + 2.0 * count * qkv;
    let patch = 3.0 * (shape.patch * shape.patch) as f64 * hidden + shape.layers as f64 * layer;
    let merged = 4.0 * hidden;
    2.0 * (count * patch + count / 4.0 * merged * (merged + text))
}

/// A made-up picture, as a BMP file of 24 bits a pixel.
fn picture() -> Vec<u8> {
    let pixels = 3 * SIDE * SIDE;
    let mut file = b"BM".to_vec();
    let header =
        [54 + pixels as u32, 0, 54, 40, SIDE as u32, SIDE as u32, 1 | 24 << 16, 0, pixels as u32, 0, 0, 0, 0];
    header.iter().for_each(|field| file.extend(field.to_le_bytes()));
    file.extend((0..pixels).map(|i| (i / 3 % SIDE * (i / 3 / SIDE) / 1000 + 80 * (i % 3)) as u8));
    file
}

fn noise(n: usize) -> Vec<f32> {
    let mut random = Random::new(1);
    (0..n).map(|_| random.normal()).collect()
}
