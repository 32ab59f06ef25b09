//! One run: a prompt and the tokens after it, with all counters around each phase.

use std::time::Instant;

use serde::Serialize;
use waste_common::machine::major_faults;
use waste_engine::experts::ReadStats;
use waste_engine::{Engine, EngineError, Part, Profile, Session, Wanted};

/// The tokens of a run. What is decoded does not depend on what is predicted, so that all runs do the same work.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Taken in at once.
    pub prompt: Vec<u32>,
    /// Taken in one by one.
    pub decode: Vec<u32>,
}

/// What is timed apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The prompt.
    Prefill,
    /// The tokens after it.
    Decode,
}

impl Phase {
    /// Both, in their order.
    pub const ALL: [Phase; 2] = [Phase::Prefill, Phase::Decode];

    /// `prefill` or `decode`.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Prefill => "prefill",
            Phase::Decode => "decode",
        }
    }
}

/// What one phase of one run took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Tokens taken in.
    pub tokens: usize,
    /// Wall clock.
    pub seconds: f64,
    /// What the expert store did.
    pub reads: ReadStats,
    /// Seconds spent on each part of the work.
    pub parts: [f64; Part::ALL.len()],
    /// Page faults that had to read from disk; 0 where the system does not say.
    pub major_faults: u64,
}

impl Sample {
    /// Tokens a second.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    /// Milliseconds a token.
    pub fn ms(&self) -> f64 {
        1e3 * self.seconds / self.tokens as f64
    }
}

/// Runs the workload from an empty state; a phase without tokens gives an empty sample.
///
/// # Errors
/// As [`Engine::forward`].
pub fn run(engine: &Engine, session: &mut Session, work: &Workload) -> Result<[Sample; 2], EngineError> {
    session.reset();
    let prompt = if work.prompt.is_empty() { 1 } else { work.prompt.len() };
    Ok([
        sample(engine, session, work.prompt.chunks(prompt))?,
        sample(engine, session, work.decode.chunks(1))?,
    ])
}

fn step(engine: &Engine, session: &mut Session, tokens: &[u32]) -> Result<(), EngineError> {
    engine.forward(session, tokens, Wanted::Last, &mut |_, logits| {
        std::hint::black_box(logits);
        Ok(())
    })
}

/// Runs some tokens, in steps, with all counters around them.
fn sample(
    engine: &Engine,
    session: &mut Session,
    steps: std::slice::Chunks<'_, u32>,
) -> Result<Sample, EngineError> {
    let tokens = steps.clone().map(<[u32]>::len).sum();
    let (before, profile, faults) =
        (engine.read_stats(), session.profile().clone(), major_faults().unwrap_or(0));
    let start = Instant::now();
    for tokens in steps {
        step(engine, session, tokens)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let major_faults = major_faults().unwrap_or(0).saturating_sub(faults);
    let reads = engine.read_stats().since(&before);
    Ok(Sample { tokens, seconds, reads, parts: parts(&profile, session.profile()), major_faults })
}

fn parts(before: &Profile, after: &Profile) -> [f64; Part::ALL.len()] {
    Part::ALL.map(|part| (after.spent(part) - before.spent(part)).as_secs_f64())
}
