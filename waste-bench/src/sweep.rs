//! Which budget to use: decoding with rising budgets, until the machine pages.
//!
//! Budgets rise within a round, rounds repeat, and each row is opened anew, so that what drifts meets all of them
//! alike. From the first row that pages on, nothing larger is tried: its figures would be worth nothing, and the
//! machine would suffer.

use std::path::PathBuf;
use std::str::FromStr;

use serde::Serialize;
use waste_common::cli::{ByteSize, Exit, Failure, Interrupt, Output, Progress, Unit, resolve_model};
use waste_common::machine::{Machine, peak_rss_bytes};
use waste_common::plan::Budget;
use waste_engine::{EngineOptions, open};

use crate::environment::Environment;
use crate::report::{Cell, FormatArgs, Report, Table, emit};
use crate::speed::arm::{Open, Subject};
use crate::speed::measure::{Phase, Sample};
use crate::speed::rows::Row as SpeedRow;
use crate::speed::settings::{EngineArgs, Settings, SettingsRecord};
use crate::speed::{Measured, PAGING_FROM, WorkArgs, check, workloads};

/// Share of the best speed that a smaller budget must reach to be preferred.
const GOOD_ENOUGH: f64 = 0.97;
/// Most budgets of a sweep.
const STEPS_MAX: usize = 64;

/// A range of budgets, `4GiB..16GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    from: u64,
    to: u64,
}

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Range, String> {
        let wrong = || "expected two sizes such as 4GiB..16GiB, the smaller one first".to_owned();
        let (from, to) = text.split_once("..").ok_or_else(wrong)?;
        let size =
            |text: &str| text.parse::<ByteSize>().map(ByteSize::bytes).map_err(|error| error.to_string());
        let (from, to) = (size(from)?, size(to)?);
        if from > to { Err(wrong()) } else { Ok(Range { from, to }) }
    }
}

impl Range {
    /// `steps` budgets from end to end.
    fn budgets(self, steps: usize) -> Vec<u64> {
        let last = steps.saturating_sub(1).max(1) as u128;
        let width = u128::from(self.to - self.from);
        let mut budgets: Vec<u64> =
            (0..steps as u128).map(|step| self.from + (width * step / last) as u64).collect();
        budgets.dedup();
        budgets
    }
}

/// Sweeping over budgets.
#[derive(Debug, clap::Args)]
pub struct SweepArgs {
    /// A container, a checkpoint directory, or `-` for the JSON of the previous tool
    pub model: PathBuf,
    /// The budgets, from the first to the last
    #[arg(long, value_name = "A..B")]
    pub budget: Range,
    /// How many budgets
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub steps: usize,
    /// The work
    #[command(flatten)]
    pub work: WorkArgs,
    /// Opening the model
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    budget_bytes: u64,
    cache_slots: u64,
    holds_all_experts: bool,
    /// The machine paged: the figures are worth nothing.
    paging: bool,
    #[serde(flatten)]
    speed: SpeedRow,
}

#[derive(Serialize)]
struct Record {
    #[serde(flatten)]
    model: Measured,
    machine: Environment,
    settings: SettingsRecord,
    rows: Vec<Row>,
    /// The budget to use; none if even the first row paged.
    budget_bytes: Option<u64>,
}

struct Step {
    budget: u64,
    slots: u64,
    all: bool,
    samples: Vec<Sample>,
    paging: bool,
    peak: Option<u64>,
}

/// Sweeps: done, or no if even the smallest budget makes the machine page.
///
/// # Errors
/// A budget below the floor, or a run that fails.
pub fn run(args: SweepArgs, format: FormatArgs, output: &Output) -> Result<Exit, Failure> {
    if !(1..=STEPS_MAX).contains(&args.steps) {
        return Err(Failure::usage(format!("--steps {}: expected 1 to {STEPS_MAX}", args.steps)));
    }
    check(&args.work, args.engine.ctx)?;
    if args.work.tokens == 0 {
        return Err(Failure::usage("--tokens 0: a sweep measures decoding"));
    }
    let model = resolve_model(&args.model)?;
    let interrupt = Interrupt::install()?;
    let mut settings = Settings::of(&args.engine, Budget::Auto)?;
    settings.engine = EngineOptions { cancelled: interrupt.flag(), ..settings.engine };
    let subject =
        Subject { dir: model.path(), sizes: open::sizes(model.path())?, machine: Machine::probe()? };
    let works = workloads(&args.work, subject.sizes.config.vocab, settings.plan.parallel);
    let empty =
        |budget| Step { budget, slots: 0, all: false, samples: Vec::new(), paging: false, peak: None };
    let mut steps: Vec<Step> = args.budget.budgets(args.steps).into_iter().map(empty).collect();
    let progress = Progress::new(output, "measuring", (args.work.runs * steps.len()) as u64, Unit::Count);
    for _ in 0..args.work.runs {
        for step in &mut steps {
            settings.plan.budget = Budget::Bytes(step.budget);
            let mut open = Open::new(&subject, &settings)?;
            (step.slots, step.all) = (open.plan.cache_slots, open.plan.holds_all_experts());
            for _ in 0..args.work.warm_up {
                open.run(&works)?;
            }
            let sample = open.run(&works)?[Phase::Decode as usize];
            step.paging |= sample.major_faults > PAGING_FROM;
            step.samples.push(sample);
            step.peak = peak_rss_bytes();
            progress.add(1);
            if step.paging {
                break;
            }
        }
        // What is beyond a row that paged is not tried again.
        let kept = steps.iter().position(|step| step.paging).map_or(steps.len(), |at| at + 1);
        steps.truncate(kept);
    }
    progress.finish();
    let rows: Vec<Row> = steps.iter().filter_map(row).collect();
    let budget_bytes = best(&rows);
    let record = Record {
        model: Measured::open(subject.dir)?,
        machine: Environment::probe()?,
        settings: settings.record(),
        rows,
        budget_bytes,
    };
    let heading = vec![record.machine.line(), record.model.line()];
    let closing = match budget_bytes {
        Some(bytes) => format!("Use --budget {bytes} ({}).", ByteSize(bytes)),
        None => "The machine paged with the smallest budget already: start lower.".to_owned(),
    };
    let tables = vec![table(&record.rows)];
    emit(output, format, &Report { heading, tables, closing: vec![closing], record: &record })?;
    Ok(if budget_bytes.is_some() { Exit::Done } else { Exit::No })
}

fn row(step: &Step) -> Option<Row> {
    Some(Row {
        budget_bytes: step.budget,
        cache_slots: step.slots,
        holds_all_experts: step.all,
        paging: step.paging,
        speed: SpeedRow::of(
            &ByteSize(step.budget).to_string(),
            Phase::Decode,
            "warm",
            &step.samples,
            step.peak,
        )?,
    })
}

/// The smallest budget that is nearly as fast as the fastest, among those that do not page.
fn best(rows: &[Row]) -> Option<u64> {
    let sound = || rows.iter().filter(|row| !row.paging);
    let fastest = sound().map(|row| row.speed.tokens_per_second.median).reduce(f64::max)?;
    sound()
        .find(|row| row.speed.tokens_per_second.median >= GOOD_ENOUGH * fastest)
        .map(|row| row.budget_bytes)
}

fn table(rows: &[Row]) -> Table {
    let cells = |row: &Row| {
        let speed = &row.speed;
        vec![
            Cell::Bytes(row.budget_bytes),
            Cell::Count(row.cache_slots),
            Cell::Count(speed.tokens_per_second.n as u64),
            Cell::Number(speed.tokens_per_second.mean, 2),
            Cell::Number(speed.tokens_per_second.sd, 2),
            Cell::Number(speed.ms_per_token.mean, 2),
            Cell::Number(speed.stall_ms_per_token, 2),
            Cell::maybe(speed.hit_rate.map(|rate| 100.0 * rate), 1),
            Cell::Bytes(speed.bytes_per_token.round() as u64),
            Cell::Number(speed.major_faults, 0),
            Cell::Text(if row.paging { "paging" } else { "ok" }.to_owned()),
        ]
    };
    Table {
        title: "decoding, warm",
        columns: vec![
            ("budget", "budget_bytes"),
            ("slots", "cache_slots"),
            ("runs", "runs"),
            ("tok/s", "tokens_per_second_mean"),
            ("± sd", "tokens_per_second_sd"),
            ("ms/token", "ms_per_token_mean"),
            ("stall ms", "stall_ms_per_token"),
            ("hits %", "hit_percent"),
            ("read/token", "bytes_per_token"),
            ("faults", "major_faults"),
            ("state", "state"),
        ],
        rows: rows.iter().map(cells).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_rise() {
        let range: Range = "1GiB..3GiB".parse().unwrap();
        assert_eq!(range.budgets(3), [1 << 30, 2 << 30, 3 << 30]);
        assert_eq!(range.budgets(1), [1 << 30]);
        assert_eq!("1G..1G".parse::<Range>().unwrap().budgets(4), [1 << 30]);
        for wrong in ["", "1G", "2G..1G", "1G..", "..1G", "1Q..2G"] {
            assert!(wrong.parse::<Range>().is_err(), "{wrong}");
        }
    }

    fn row(budget: u64, rate: f64, paging: bool) -> Row {
        let sample = Sample { tokens: 10, seconds: 10.0 / rate, ..Sample::default() };
        let speed = SpeedRow::of("", Phase::Decode, "warm", &[sample], None).unwrap();
        Row { budget_bytes: budget, cache_slots: 1, holds_all_experts: false, paging, speed }
    }

    #[test]
    fn the_smallest_good_budget_wins_and_paging_rows_do_not_count() {
        assert_eq!(best(&[row(1, 5.0, false), row(2, 9.8, false), row(3, 10.0, false)]), Some(2));
        assert_eq!(best(&[row(1, 5.0, false), row(2, 100.0, true)]), Some(1));
        assert_eq!(best(&[row(1, 5.0, true)]), None);
    }
}
