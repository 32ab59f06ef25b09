//! How fast a model decodes and takes in prompts, with one set of options or several side by side.

pub mod arm;
pub mod layers;
pub mod measure;
pub mod rows;
pub mod settings;

use std::path::PathBuf;

use serde::Serialize;
use waste_common::cli::{ByteSize, Exit, Failure, Interrupt, Output, Progress, Unit, resolve_model};
use waste_common::machine::{Machine, peak_rss_bytes};
use waste_common::plan::{Budget, PlanOptions};
use waste_engine::weights::Source;
use waste_engine::{EngineOptions, open, open_source};

use crate::environment::Environment;
use crate::random::Random;
use crate::report::{FormatArgs, Report, emit};
use arm::{Arm, Facts, Subject};
use layers::LayerTime;
use measure::Workload;
use rows::{Ratio, Row};
use settings::{Compare, EngineArgs, Settings};

/// The share of repeated tokens that makes a synthetic model use as many experts of the token before as the real
/// Kimi-Linear-48B does: about a third.
const REPEAT: f64 = 0.4;

/// What is run.
#[derive(Clone, Debug, clap::Args)]
pub struct WorkArgs {
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Work")]
    pub prompt_tokens: usize,
    /// Tokens decoded after it
    #[arg(short = 'n', long, value_name = "N", default_value_t = 64, help_heading = "Work")]
    pub tokens: usize,
    /// Timed runs, after the cold one
    #[arg(long, value_name = "N", default_value_t = 3, help_heading = "Work")]
    pub runs: usize,
    /// Runs between the cold one and the timed ones
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Work")]
    pub warm_up: usize,
    /// Share of tokens that repeat one of the last few, as those of a text do
    #[arg(long, value_name = "SHARE", default_value_t = REPEAT, help_heading = "Work")]
    pub repeat: f64,
    /// Seed of the token ids, which are random
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Work")]
    pub seed: u64,
}

/// Measuring a model.
#[derive(Debug, clap::Args)]
pub struct SpeedArgs {
    /// A container, a checkpoint directory, or `-` for the JSON of the previous tool
    #[arg(value_name = "MODEL", required = true)]
    pub model: Option<PathBuf>,
    /// The work
    #[command(flatten)]
    pub work: WorkArgs,
    /// Measure an option's values alternately in this process: budget, threads, kernels, arith, chunk, parallel,
    /// lookahead, io-depth, direct-io or verify
    #[arg(long, value_name = "OPTION=A,B…", help_heading = "Work")]
    pub compare: Option<Compare>,
    /// Write which experts the tokens used, a JSON line a token, for `waste-bench cache`
    #[arg(long, value_name = "FILE", help_heading = "Work")]
    pub record: Option<PathBuf>,
    /// RAM the run may take: auto, max (all experts if they fit), or a size
    #[arg(long, env = "WASTE_BUDGET", value_name = "SIZE", default_value_t, help_heading = "Memory")]
    pub budget: Budget,
    /// Opening the model
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// The directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The directory, if it is a checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// `kimi-k3` or `kimi-linear`.
    pub arch: &'static str,
    /// Layers.
    pub layers: usize,
    /// SHA-256 of the manifest: which container it was.
    pub manifest_sha256: Option<String>,
}

impl Measured {
    /// Looks at a model.
    ///
    /// # Errors
    /// There is none.
    pub fn open(dir: &std::path::Path) -> Result<Measured, Failure> {
        let (source, config) = open_source(dir)?;
        let path = Some(dir.display().to_string());
        let (container, checkpoint, manifest_sha256) = match source {
            Source::Container(container) => (path, None, Some(container.manifest_sha256().to_owned())),
            Source::Checkpoint(_) => (None, path, None),
        };
        Ok(Measured { container, checkpoint, arch: config.arch, layers: config.layers(), manifest_sha256 })
    }

    /// The same in a line.
    pub fn line(&self) -> String {
        let path = self.container.as_deref().or(self.checkpoint.as_deref()).unwrap_or("");
        let sha = self.manifest_sha256.as_deref().map_or("no manifest", |sha| &sha[..sha.len().min(16)]);
        format!("{path}: {}, {} layers, manifest {sha}", self.arch, self.layers)
    }
}

#[derive(Serialize)]
struct Record {
    #[serde(flatten)]
    model: Measured,
    machine: Environment,
    prompt_tokens: usize,
    tokens: usize,
    runs: usize,
    warm_up: usize,
    repeat: f64,
    seed: u64,
    arms: Vec<Facts>,
    rows: Vec<Row>,
    layer_times: Vec<LayerTime>,
    ratios: Vec<Ratio>,
    paging: bool,
}

/// Measures a model.
///
/// # Errors
/// It cannot be opened with these options, or a run fails.
pub fn run(args: SpeedArgs, format: FormatArgs, output: &Output) -> Result<Exit, Failure> {
    let model = args.model.as_deref().ok_or_else(|| Failure::usage("a MODEL is needed; see --help"))?;
    let model = resolve_model(model)?;
    let interrupt = Interrupt::install()?;
    let mut settings = Settings::of(&args.engine, args.budget)?;
    settings.engine = EngineOptions { cancelled: interrupt.flag(), ..settings.engine };
    check(&args.work, args.engine.ctx)?;
    let subject =
        Subject { dir: model.path(), sizes: open::sizes(model.path())?, machine: Machine::probe()? };
    let mut arms: Vec<Arm> = match &args.compare {
        None => vec![Arm::new("default".to_owned(), settings)],
        Some(compare) => {
            let arms = compare.arms(&settings).map_err(Failure::usage)?;
            arms.into_iter().map(|(label, settings)| Arm::new(label, settings)).collect()
        }
    };
    let sequences = arms.iter().map(Arm::sequences).max().unwrap_or(1);
    let works = workloads(&args.work, subject.sizes.config.vocab, sequences);
    let work = &works[0];
    let together = together(&mut arms, &subject)?;
    if !together {
        output.note("the arms do not fit into RAM together: each is opened anew in every round");
    }
    let rounds = args.work.runs;
    let progress = Progress::new(output, "measuring", (rounds * arms.len()) as u64, Unit::Count);
    for round in 0..rounds {
        // Forwards and backwards in turn, so that what drifts favours none.
        let mut order: Vec<usize> = (0..arms.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for number in order {
            let arm = &mut arms[number];
            arm.round(&subject, &works, args.work.warm_up)?;
            if !together {
                arm.close();
            }
            progress.add(1);
        }
    }
    progress.finish();
    if let Some(path) = &args.record {
        arms[0].record(&subject, work, path)?;
    }

    let peak = peak_rss_bytes();
    let rows: Vec<Row> = arms.iter().flat_map(|arm| arm.rows(peak)).collect();
    let record = Record {
        model: Measured::open(subject.dir)?,
        machine: Environment::probe()?,
        prompt_tokens: work.prompt.len(),
        tokens: work.decode.len(),
        runs: rounds,
        warm_up: args.work.warm_up,
        repeat: args.work.repeat,
        seed: args.work.seed,
        arms: arms.iter().filter_map(Arm::facts).cloned().collect(),
        layer_times: layers::times(&rows, &subject.sizes.config),
        rows,
        ratios: arms.iter().skip(1).flat_map(|arm| arm.ratios(&arms[0])).collect(),
        paging: arms.iter().any(|arm| arm.major_faults() > PAGING_FROM),
    };
    let mut heading = vec![record.machine.line(), record.model.line()];
    heading.extend(record.arms.iter().map(facts_line));
    let mut closing = Vec::new();
    if record.paging {
        closing.push(
            "The machine paged while it was measured: these figures are worth nothing. Lower the budget."
                .to_owned(),
        );
    }
    let tables = vec![
        rows::table(&record.rows),
        rows::part_table(&record.rows),
        layers::table(&record.layer_times),
        rows::lookahead_table(&record.rows),
        rows::ratio_table(&record.ratios),
    ];
    emit(output, format, &Report { heading, tables, closing, record: &record })?;
    Ok(Exit::Done)
}

/// Major faults that are no sign of paging: the program's own pages come from disk the same way.
pub const PAGING_FROM: u64 = 100;

fn facts_line(facts: &Facts) -> String {
    let Facts {
        arm, settings, budget_bytes, cache_slots, kernel, direct_io, open_seconds, open_gbps, ..
    } = facts;
    format!(
        "{arm}: budget {}, {cache_slots} experts cached{}, {kernel} kernels, {} arithmetic, {} threads, {}lookahead {}, \
         {} reads in flight, direct I/O {}, opened in {open_seconds:.2} s ({open_gbps:.2} GB/s of trunk)",
        ByteSize(*budget_bytes),
        if facts.holds_all_experts { " (all)" } else { "" },
        settings.arith,
        settings.threads,
        if settings.parallel > 1 { format!("{} sequences, ", settings.parallel) } else { String::new() },
        settings.lookahead,
        settings.io_depth,
        if *direct_io { "on" } else { "off" },
    )
}

/// Checks what can be checked before anything is opened.
///
/// # Errors
/// There is nothing to run, or it does not fit into the context (exit 2).
pub fn check(work: &WorkArgs, ctx: usize) -> Result<(), Failure> {
    if work.runs == 0 {
        return Err(Failure::usage("--runs 0: nothing would be measured"));
    }
    let total = work.prompt_tokens.saturating_add(work.tokens);
    if !(0.0..=1.0).contains(&work.repeat) {
        return Err(Failure::usage(format!("--repeat {}: expected a share from 0 to 1", work.repeat)));
    }
    if total == 0 || total > ctx {
        return Err(Failure::usage(format!(
            "--prompt-tokens {} and --tokens {} must make 1 to {ctx} tokens together (--ctx)",
            work.prompt_tokens, work.tokens
        )));
    }
    Ok(())
}

/// The random tokens of a run, for each of so many sequences. Some repeat a token before them, the nearer the
/// likelier: that is what makes neighbours use the same experts.
pub fn workloads(args: &WorkArgs, vocab: usize, sequences: usize) -> Vec<Workload> {
    let of = |sequence: usize| {
        let mut random = Random::of_piece(args.seed, "tokens", sequence as u64);
        let mut tokens: Vec<u32> = Vec::with_capacity(args.prompt_tokens + args.tokens);
        for position in 0..args.prompt_tokens + args.tokens {
            let repeated = f64::from(random.float().abs()) < args.repeat;
            let back = 1 + (random.bits() | 1 << 16).trailing_zeros() as usize;
            let token = match position.checked_sub(back) {
                Some(earlier) if repeated => tokens[earlier],
                _ => random.below(vocab as u64) as u32,
            };
            tokens.push(token);
        }
        let decode = tokens.split_off(args.prompt_tokens);
        Workload { prompt: tokens, decode }
    };
    (0..sequences.clamp(1, PlanOptions::PARALLEL_MAX)).map(of).collect()
}

/// Whether all arms can be open at the same time; if so their budgets are fixed.
fn together(arms: &mut [Arm], subject: &Subject<'_>) -> Result<bool, Failure> {
    let (mut total, mut cap) = (0u64, u64::MAX);
    for arm in arms.iter_mut() {
        let (budget, limit) = arm.fix_budget(subject)?;
        total = total.saturating_add(budget);
        cap = cap.min(limit);
    }
    Ok(arms.len() == 1 || total <= cap)
}
