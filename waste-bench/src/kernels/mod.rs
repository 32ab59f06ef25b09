//! How fast every kernel is: against the portable one, and look-ups against a plain gather of f32 tables.
//!
//! All cases take turns, round by round, so that what drifts meets all of them alike; the best round counts.

mod cases;

use std::time::{Duration, Instant};

use serde::Serialize;
use waste_common::cli::{Exit, Failure, Interrupt, Output, Progress, Unit};
use waste_engine::kernels::Kernels;

use crate::environment::Environment;
use crate::report::{Cell, FormatArgs, Report, Table, emit};

/// The opponent of the look-ups: what a compiler makes of the obvious loop.
const PLAIN: &str = "plain f32 gather";
/// Share of the memory's bandwidth that the trunk's rows should reach on all cores.
const MEMORY: &str = "memory";

/// Measuring kernels.
#[derive(Clone, Debug, clap::Args)]
pub struct KernelArgs {
    /// Only kernels whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub only: String,
    /// Rounds; the best one counts
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub rounds: usize,
    /// Milliseconds each case is run for in a round, at least once
    #[arg(long, value_name = "MS", default_value_t = 20)]
    pub ms: u64,
    /// MiB that operands from memory are spread over: more than the caches hold
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub spread_mib: usize,
}

/// One kernel of one set on one kind of operand.
struct Case {
    /// The kernel, and the shape if there are several.
    kernel: String,
    /// The set, or [`PLAIN`], or [`MEMORY`].
    set: &'static str,
    /// `cache` or `memory`.
    from: &'static str,
    threads: usize,
    /// Bytes of operands it passes over.
    bytes: usize,
    /// Multiply-adds, or look-ups of a row and vector.
    items: usize,
    run: Box<dyn FnMut()>,
}

/// What a case took.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The kernel.
    pub kernel: String,
    /// The set; `plain f32 gather` is the opponent of the look-ups, `memory` a mere sum over memory.
    pub set: &'static str,
    /// Where the operands come from: `cache` or `memory`.
    pub from: &'static str,
    /// Threads it ran on.
    pub threads: usize,
    /// Microseconds of the best call.
    pub micros: f64,
    /// 10^9 bytes of operands a second.
    pub gbps: f64,
    /// Nanoseconds for a multiply-add, or for one row and vector of a look-up.
    pub nanos_per_item: f64,
    /// Speed relative to the portable kernel.
    pub to_portable: Option<f64>,
    /// Speed of a look-up relative to the plain f32 gather.
    pub to_plain: Option<f64>,
    /// Share of the memory's bandwidth on as many threads.
    pub of_memory: Option<f64>,
}

#[derive(Serialize)]
struct Record {
    machine: Environment,
    rounds: usize,
    rows: Vec<Row>,
}

/// Measures the kernels of this machine.
///
/// # Errors
/// Interrupted, or nothing is called that.
pub fn run(args: KernelArgs, format: FormatArgs, output: &Output) -> Result<Exit, Failure> {
    if args.rounds == 0 || !(1..=4096).contains(&args.spread_mib) {
        return Err(Failure::usage("--rounds must be at least 1, --spread-mib 1 to 4096"));
    }
    let interrupt = Interrupt::install()?;
    let sets: Vec<&'static Kernels> =
        Kernels::NAMES.iter().filter_map(|name| Kernels::named(name).ok()).collect();
    let mut cases = cases::all(&sets, args.spread_mib << 20, &args.only)?;
    if cases.iter().all(|case| case.set == MEMORY) {
        return Err(Failure::usage(format!("--only {}: no kernel is called that", args.only)));
    }
    let mut best = vec![f64::INFINITY; cases.len()];
    let progress = Progress::new(output, "measuring", (args.rounds * cases.len()) as u64, Unit::Count);
    for _ in 0..args.rounds {
        for (case, best) in cases.iter_mut().zip(&mut best) {
            *best = best.min(seconds(case, Duration::from_millis(args.ms)));
            progress.add(1);
            interrupt.check()?;
        }
    }
    progress.finish();
    let record = Record { machine: Environment::probe()?, rounds: args.rounds, rows: rows(&cases, &best) };
    let heading = vec![record.machine.line(), format!("best of {} rounds", record.rounds)];
    let tables = vec![table(&record.rows)];
    emit(output, format, &Report { heading, tables, closing: Vec::new(), record: &record })?;
    Ok(Exit::Done)
}

/// The best call within about so much time.
fn seconds(case: &mut Case, time: Duration) -> f64 {
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    loop {
        let start = Instant::now();
        (case.run)();
        best = best.min(start.elapsed().as_secs_f64());
        if begin.elapsed() >= time {
            return best;
        }
    }
}

fn rows(cases: &[Case], best: &[f64]) -> Vec<Row> {
    let find = |of: &Case, set: &str| {
        let like = |case: &Case| case.kernel == of.kernel && case.from == of.from && case.set == set;
        cases.iter().position(like).map(|at| best[at])
    };
    // Look-ups of every kind have the plain gather of their shape as opponent.
    let plain = |of: &Case| {
        let shape = of.kernel.split(' ').next_back()?;
        let like = |case: &Case| {
            case.set == PLAIN
                && case.kernel.ends_with(shape)
                && case.from == of.from
                && of.kernel.contains("rows")
        };
        cases.iter().position(like).map(|at| best[at])
    };
    let memory = |of: &Case| {
        let like = |case: &Case| case.set == MEMORY && case.threads == of.threads;
        cases.iter().position(like).map(|at| cases[at].bytes as f64 / best[at])
    };
    let row = |(case, &seconds): (&Case, &f64)| {
        let speed = case.bytes as f64 / seconds;
        Row {
            kernel: case.kernel.clone(),
            set: case.set,
            from: case.from,
            threads: case.threads,
            micros: 1e6 * seconds,
            gbps: 1e-9 * speed,
            nanos_per_item: 1e9 * seconds / case.items as f64,
            to_portable: find(case, "portable").map(|portable| portable / seconds),
            to_plain: plain(case).map(|plain| plain / seconds),
            of_memory: (case.from == MEMORY).then(|| memory(case)).flatten().map(|memory| speed / memory),
        }
    };
    cases.iter().zip(best).map(row).collect()
}

fn table(rows: &[Row]) -> Table {
    let cells = |row: &Row| {
        vec![
            Cell::Text(row.kernel.clone()),
            Cell::Text(row.set.to_owned()),
            Cell::Text(row.from.to_owned()),
            Cell::Count(row.threads as u64),
            Cell::Number(row.micros, 2),
            Cell::Number(row.gbps, 2),
            Cell::Number(row.nanos_per_item, 3),
            Cell::maybe(row.to_portable, 2),
            Cell::maybe(row.to_plain, 2),
            Cell::maybe(row.of_memory.map(|share| 100.0 * share), 0),
        ]
    };
    Table {
        title: "kernels",
        columns: vec![
            ("kernel", "kernel"),
            ("set", "set"),
            ("from", "from"),
            ("threads", "threads"),
            ("µs", "micros"),
            ("GB/s", "gbps"),
            ("ns/item", "nanos_per_item"),
            ("× portable", "to_portable"),
            ("× plain", "to_plain"),
            ("% of memory", "of_memory_percent"),
        ],
        rows: rows.iter().map(cells).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(kernel: &str, set: &'static str, from: &'static str) -> Case {
        Case { kernel: kernel.to_owned(), set, from, threads: 1, bytes: 100, items: 10, run: Box::new(|| ()) }
    }

    #[test]
    fn ratios_are_taken_to_the_right_opponent() {
        let cases = [
            case("vq_rows vq3r", "portable", "cache"),
            case("vq_rows vq3r", PLAIN, "cache"),
            case("vq_rows_fast vq3r", "portable", "cache"),
            case("vq_rows_fast vq3r", "avx2", "cache"),
            case("vq_rows_fast vq4p", "avx2", "cache"),
            case("rows_q4", "avx2", "memory"),
            case("sum", MEMORY, "memory"),
        ];
        let rows = rows(&cases, &[2.0, 3.0, 6.0, 1.0, 1.0, 4.0, 2.0]);
        assert_eq!(rows[3].to_portable, Some(6.0));
        assert_eq!(rows[3].to_plain, Some(3.0));
        assert_eq!(rows[2].to_plain, Some(0.5));
        assert_eq!((rows[4].to_plain, rows[4].to_portable), (None, None));
        assert_eq!((rows[5].of_memory, rows[5].to_plain), (Some(0.5), None));
        assert_eq!(rows[3].nanos_per_item, 1e8);
    }

    #[test]
    fn every_kernel_runs() {
        let sets: Vec<&'static Kernels> = vec![Kernels::detect()];
        let mut cases = cases::all(&sets, 1 << 20, "").unwrap();
        assert!(cases.len() > 40, "{}", cases.len());
        cases.iter_mut().for_each(|case| (case.run)());
        let none = cases::all(&sets, 1 << 20, "no such kernel").unwrap();
        assert!(none.iter().all(|case| case.set == MEMORY));
    }
}
