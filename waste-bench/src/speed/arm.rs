//! An arm: settings, the engine opened with them, and the samples taken.

use std::path::Path;
use std::time::Instant;

use serde::Serialize;
use waste_common::cli::Failure;
use waste_common::machine::{Machine, Reservation};
use waste_common::plan::{Budget, MemoryPlan, ModelSizes};
use waste_engine::open::{self, Reserved};
use waste_engine::{Engine, Sequence, Session};

use super::measure::{self, Phase, Sample, Workload};
use super::rows::{Ratio, Row};
use super::settings::{Settings, SettingsRecord};
use crate::stats::Summary;
use crate::trace;

/// The model under test.
pub struct Subject<'a> {
    /// Its directory.
    pub dir: &'a Path,
    /// Its sizes.
    pub sizes: ModelSizes,
    /// The machine.
    pub machine: Machine,
}

/// An engine that is open.
pub struct Open {
    /// The engine.
    pub engine: Engine,
    /// What everything is computed in.
    pub session: Session,
    /// Sequences that decode together; none if only the session's own decodes.
    sequences: Vec<Sequence>,
    /// What it was opened with.
    pub plan: MemoryPlan,
    /// How long opening took.
    pub seconds: f64,
    _reservation: Option<Reservation>,
}

impl Open {
    /// Opens the model.
    ///
    /// # Errors
    /// It cannot be planned, reserved or opened.
    pub fn new(subject: &Subject<'_>, settings: &Settings) -> Result<Open, Failure> {
        let what = format!("waste-bench {}", subject.dir.display());
        let Reserved { plan, reservation, .. } =
            open::reserve(&subject.sizes, &settings.plan, &subject.machine, &what)?;
        let options = settings.engine.clone().within(&plan);
        let start = Instant::now();
        let engine = Engine::open_with(subject.dir, options, settings.kernels)?;
        let session = engine.session()?;
        let seconds = start.elapsed().as_secs_f64();
        let together = if plan.parallel > 1 { plan.parallel } else { 0 };
        let sequences = (0..together).map(|_| engine.sequence()).collect();
        Ok(Open { engine, session, sequences, plan, seconds, _reservation: reservation })
    }

    /// One run, of as many workloads as sequences decode together.
    ///
    /// # Errors
    /// The engine fails or is interrupted.
    pub fn run(&mut self, works: &[Workload]) -> Result<[Sample; 2], Failure> {
        let works = &works[..self.plan.parallel.min(works.len())];
        Ok(measure::run(&self.engine, &mut self.session, &mut self.sequences, works)?)
    }
}

/// One way of running the model, and how it fared.
pub struct Arm {
    label: String,
    settings: Settings,
    open: Option<Open>,
    cold: Vec<[Sample; 2]>,
    warm: Vec<[Sample; 2]>,
    facts: Option<Facts>,
}

/// What an arm really ran with.
#[derive(Clone, Debug, Serialize)]
pub struct Facts {
    /// Its label.
    pub arm: String,
    /// What was asked for.
    pub settings: SettingsRecord,
    /// Bytes it was given.
    pub budget_bytes: u64,
    /// Experts its cache holds.
    pub cache_slots: u64,
    /// Whether that is all of them.
    pub holds_all_experts: bool,
    /// The kernels in use.
    pub kernel: &'static str,
    /// Whether expert reads went past the page cache.
    pub direct_io: bool,
    /// Seconds from opening to the first token's turn: the trunk is read and the caches made.
    pub open_seconds: f64,
    /// Bytes of the trunk read in a second of that, in GB (10^9).
    pub open_gbps: f64,
}

impl Arm {
    /// An arm that has not run yet.
    pub fn new(label: String, settings: Settings) -> Arm {
        Arm { label, settings, open: None, cold: Vec::new(), warm: Vec::new(), facts: None }
    }

    /// Sequences that are to decode together.
    pub fn sequences(&self) -> usize {
        self.settings.plan.parallel
    }

    /// Fixes the budget at what it is now, so that one arm does not shrink another's. Returns it, and the cap.
    ///
    /// # Errors
    /// The plan is refused.
    pub fn fix_budget(&mut self, subject: &Subject<'_>) -> Result<(u64, u64), Failure> {
        let plan = waste_common::plan::plan(&subject.sizes, &self.settings.plan, &subject.machine)?;
        self.settings.plan.budget = Budget::Bytes(plan.budget_bytes);
        Ok((plan.budget_bytes, plan.cap_bytes))
    }

    /// One timed run. An arm that is not open is opened; its first run is the cold one, then it is warmed up.
    ///
    /// # Errors
    /// Opening or running fails.
    pub fn round(
        &mut self,
        subject: &Subject<'_>,
        works: &[Workload],
        warm_up: usize,
    ) -> Result<(), Failure> {
        let open = match &mut self.open {
            Some(open) => open,
            None => {
                let mut open = Open::new(subject, &self.settings)?;
                self.cold.push(open.run(works)?);
                for _ in 0..warm_up {
                    open.run(works)?;
                }
                self.facts = Some(Facts {
                    arm: self.label.clone(),
                    settings: self.settings.record(),
                    budget_bytes: open.plan.budget_bytes,
                    cache_slots: open.plan.cache_slots,
                    holds_all_experts: open.plan.holds_all_experts(),
                    kernel: open.engine.kernels(),
                    direct_io: open.engine.direct_io(),
                    open_seconds: open.seconds,
                    open_gbps: 1e-9 * open.plan.trunk_bytes as f64 / open.seconds,
                });
                self.open.insert(open)
            }
        };
        self.warm.push(open.run(works)?);
        Ok(())
    }

    /// Runs the workload once more and writes the experts of every token, a JSON line each.
    ///
    /// # Errors
    /// The run fails, or the file cannot be written.
    pub fn record(&mut self, subject: &Subject<'_>, work: &Workload, path: &Path) -> Result<(), Failure> {
        let mut open = match self.open.take() {
            Some(open) => open,
            None => Open::new(subject, &self.settings)?,
        };
        let lines = trace::record(&open.engine, &mut open.session, work)?;
        self.open = Some(open);
        Ok(waste_common::files::write_atomic(path, lines.as_bytes())?)
    }

    /// Gives the engine's memory back.
    pub fn close(&mut self) {
        self.open = None;
    }

    /// What it ran with; `None` before the first round.
    pub fn facts(&self) -> Option<&Facts> {
        self.facts.as_ref()
    }

    /// Its rows.
    pub fn rows(&self, peak: Option<u64>) -> Vec<Row> {
        let mut rows = Vec::new();
        for (cache, samples) in [("cold", &self.cold), ("warm", &self.warm)] {
            for phase in Phase::ALL {
                let samples: Vec<Sample> = samples.iter().map(|run| run[phase as usize]).collect();
                rows.extend(Row::of(&self.label, phase, cache, &samples, peak));
            }
        }
        rows
    }

    /// How its warm runs compare with another's.
    pub fn ratios(&self, other: &Arm) -> Vec<Ratio> {
        let ratio = |phase: Phase| {
            let pairs = self.warm.iter().zip(&other.warm);
            let ratios: Vec<f64> =
                pairs.map(|(own, other)| own[phase as usize].rate() / other[phase as usize].rate()).collect();
            let (arm, against) = (self.label.clone(), other.label.clone());
            Some(Ratio { arm, against, phase, ratio: Summary::of(&ratios)? })
        };
        Phase::ALL.into_iter().filter_map(ratio).collect()
    }

    /// Major faults of all its timed runs.
    pub fn major_faults(&self) -> u64 {
        self.warm.iter().flatten().map(|sample| sample.major_faults).sum()
    }
}
