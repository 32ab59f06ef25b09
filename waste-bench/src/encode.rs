//! How fast weights are encoded: the search for codebook entries alone, on one thread.

use std::hint::black_box;
use std::time::Instant;

use serde::Serialize;
use waste_common::cli::{Exit, Failure, Output};
use waste_common::quant::search::{Codebooks, Vector};
use waste_common::quant::vq::VEC_DIM;

use crate::random::Random;

/// Measuring the encoder.
#[derive(Clone, Debug, clap::Args)]
pub struct EncodeArgs {
    /// Vectors of eight weights in each run
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1000..=100_000_000))]
    pub vectors: u32,
    /// Runs of each search; the best one counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
}

#[derive(Serialize)]
struct Report {
    vectors: u32,
    runs: u32,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    stages: usize,
    entries: usize,
    /// Width of the beam; 1 is the greedy search, 0 the plain one it is compared with.
    width: usize,
    vectors_per_second: f64,
    /// How many times as fast as the plain search.
    speedup: f64,
    relative_error: f64,
}

/// Measures all searches.
///
/// # Errors
/// Standard output fails.
pub fn run(args: EncodeArgs, output: &Output) -> Result<Exit, Failure> {
    let mut random = Random::new(1);
    let mut vector = || -> Vector { std::array::from_fn(|_| random.normal()) };
    let vectors: Vec<Vector> = (0..args.vectors).map(|_| vector()).collect();
    let mut rows = Vec::new();
    for (stages, entries) in [(3, 256), (4, 64)] {
        // Each stage's entries are as large as what the ones before leave over, about.
        let shrunk = |stage: usize, x: Vector| x.map(|x| x * 0.55f32.powi(stage as i32));
        let books = (0..stages).map(|stage| (0..entries).map(|_| shrunk(stage, vector())).collect());
        let books = Codebooks::new(books.collect());
        let mut plain_rate = 0.0;
        for width in [0, 1, 4, 8, 16] {
            let mut indices = vec![0; vectors.len() * stages];
            let mut best = f64::INFINITY;
            for _ in 0..args.runs {
                let start = Instant::now();
                match width {
                    0 => plain(&books, black_box(&vectors), &mut indices),
                    1 => books.greedy(black_box(&vectors), &mut indices),
                    _ => books.beam(width, black_box(&vectors), &mut indices),
                }
                black_box(&indices);
                best = best.min(start.elapsed().as_secs_f64());
            }
            let rate = f64::from(args.vectors) / best;
            if width == 0 {
                plain_rate = rate;
            }
            let relative_error = relative_error(&books, &vectors, &indices);
            let speedup = rate / plain_rate;
            rows.push(Row { stages, entries, width, vectors_per_second: rate, speedup, relative_error });
        }
    }
    let report = Report { vectors: args.vectors, runs: args.runs, rows };
    if output.json() {
        output.result(&report)?;
        return Ok(Exit::Done);
    }
    for row in &report.rows {
        let search = match row.width {
            0 => "plain".to_owned(),
            1 => "greedy".to_owned(),
            width => format!("beam {width}"),
        };
        writeln!(
            output.text(),
            "{} x {:<3}  {search:<7}  {:6.2} million vectors/s  {:5.1} x plain",
            row.stages,
            row.entries,
            row.vectors_per_second / 1e6,
            row.speedup
        )?;
    }
    Ok(Exit::Done)
}

/// The greedy search as anyone would write it down.
fn plain(books: &Codebooks, vectors: &[Vector], indices: &mut [u8]) {
    let stages = books.stages();
    for (vector, indices) in vectors.iter().zip(indices.chunks_exact_mut(stages)) {
        let mut rest = *vector;
        for (stage, index) in indices.iter_mut().enumerate() {
            let mut best = f32::INFINITY;
            for (e, entry) in books.entries(stage).iter().enumerate() {
                let distance: f32 = (0..VEC_DIM).map(|d| (rest[d] - entry[d]) * (rest[d] - entry[d])).sum();
                if distance < best {
                    (best, *index) = (distance, e as u8);
                }
            }
            rest.iter_mut().zip(&books.entries(stage)[usize::from(*index)]).for_each(|(x, c)| *x -= c);
        }
    }
}

fn relative_error(books: &Codebooks, vectors: &[Vector], indices: &[u8]) -> f64 {
    let (mut difference, mut total) = (0.0, 0.0);
    for (vector, indices) in vectors.iter().zip(indices.chunks_exact(books.stages())) {
        for (x, sum) in vector.iter().zip(books.sum(indices)) {
            difference += f64::from(x - sum) * f64::from(x - sum);
            total += f64::from(*x) * f64::from(*x);
        }
    }
    (difference / total).sqrt()
}
