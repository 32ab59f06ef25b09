//! One run: a prompt and the tokens after it, with all counters around each phase.

use std::time::Instant;

use serde::Serialize;
use waste_common::machine::major_faults;
use waste_engine::experts::ReadStats;
use waste_engine::{Engine, EngineError, Part, Profile, Sequence, Session, Wanted};

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

/// Runs the workload of each sequence from an empty state, several decoding together; a phase without tokens gives an
/// empty sample. `others` are as many sequences as there are workloads, or none for one.
///
/// # Errors
/// As [`Engine::forward`].
pub fn run(
    engine: &Engine,
    session: &mut Session,
    others: &mut [Sequence],
    works: &[Workload],
) -> Result<[Sample; 2], EngineError> {
    // The session's own sequence is not touched where others are: it takes no memory then.
    if others.is_empty() {
        session.reset();
    }
    others.iter_mut().for_each(Sequence::reset);
    let tokens = |of: fn(&Workload) -> &Vec<u32>| works.iter().map(|work| of(work).len()).sum();
    let prefill = sample(engine, session, tokens(|work| &work.prompt), |session| {
        if others.is_empty() {
            return works.iter().try_for_each(|work| step(engine, session, &work.prompt));
        }
        others.iter_mut().zip(works).try_for_each(|(sequence, work)| {
            session.swap(sequence);
            let outcome = step(engine, session, &work.prompt);
            session.swap(sequence);
            outcome
        })
    })?;
    let decode = sample(engine, session, tokens(|work| &work.decode), |session| {
        for place in 0..works.first().map_or(0, |work| work.decode.len()) {
            if others.is_empty() {
                step(engine, session, &works[0].decode[place..=place])?;
                continue;
            }
            let tokens: Vec<u32> = works.iter().map(|work| work.decode[place]).collect();
            let mut group: Vec<&mut Sequence> = others.iter_mut().collect();
            engine.forward_together(session, &mut group, &tokens, &mut |_, logits| {
                std::hint::black_box(logits?);
                Ok(())
            })?;
        }
        Ok(())
    })?;
    Ok([prefill, decode])
}

fn step(engine: &Engine, session: &mut Session, tokens: &[u32]) -> Result<(), EngineError> {
    if tokens.is_empty() {
        return Ok(());
    }
    engine.forward(session, tokens, Wanted::Last, &mut |_, logits| {
        std::hint::black_box(logits);
        Ok(())
    })
}

/// Does some work on so many tokens with all counters around it.
fn sample(
    engine: &Engine,
    session: &mut Session,
    tokens: usize,
    work: impl FnOnce(&mut Session) -> Result<(), EngineError>,
) -> Result<Sample, EngineError> {
    let (before, profile, faults) =
        (engine.read_stats(), session.profile().clone(), major_faults().unwrap_or(0));
    let start = Instant::now();
    work(session)?;
    let seconds = start.elapsed().as_secs_f64();
    let major_faults = major_faults().unwrap_or(0).saturating_sub(faults);
    let reads = engine.read_stats().since(&before);
    Ok(Sample { tokens, seconds, reads, parts: parts(&profile, session.profile()), major_faults })
}

fn parts(before: &Profile, after: &Profile) -> [f64; Part::ALL.len()] {
    Part::ALL.map(|part| (after.spent(part) - before.spent(part)).as_secs_f64())
}
