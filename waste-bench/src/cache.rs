//! Hit rates of the expert cache on a recorded trace, with the engine's own cache code, beside others that say how
//! good it is: least recently used, least frequently used, and the best that any policy could do.

use std::collections::HashMap;
use std::path::PathBuf;

use serde::Serialize;
use waste_common::cli::{Exit, Failure, Output, Progress, Unit};
use waste_engine::experts::ExpertId;
use waste_engine::experts::cache::{Cache, Demand, Slot};

use crate::random::Random;
use crate::report::{Cell, FormatArgs, Report, Table, emit};
use crate::trace::Trace;

/// Simulating the cache.
#[derive(Clone, Debug, clap::Args)]
pub struct CacheArgs {
    /// A routing trace: a JSON line a token, `{"layers": [[expert ids]…]}`
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// Cache sizes, in percent of all experts
    #[arg(long, value_name = "P,…", value_delimiter = ',', default_values = ["3", "6.25", "12.5", "25", "50", "75", "100"])]
    pub percent: Vec<f64>,
    /// Cache sizes in experts, instead
    #[arg(long, value_name = "N,…", value_delimiter = ',', conflicts_with = "percent")]
    pub slots: Vec<usize>,
}

/// What decides which expert goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The engine's.
    Engine,
    /// Least recently used.
    Lru,
    /// Least frequently used while cached, of a random sample; recency breaks ties.
    Lfru,
    /// The one needed latest, which only a simulation can know.
    Optimum,
}

impl Policy {
    const ALL: [Policy; 4] = [Policy::Engine, Policy::Lru, Policy::Lfru, Policy::Optimum];

    fn name(self) -> &'static str {
        match self {
            Policy::Engine => "engine",
            Policy::Lru => "lru",
            Policy::Lfru => "lfru",
            Policy::Optimum => "optimum",
        }
    }
}

/// One cache size under one policy.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What decides which expert goes.
    pub policy: Policy,
    /// Experts the cache holds.
    pub slots: usize,
    /// The same as a share of all experts.
    pub share: f64,
    /// Experts demanded.
    pub demands: u64,
    /// Found.
    pub hits: u64,
    /// Found, as a share.
    pub hit_rate: f64,
    /// The same in the second half of the trace, when the cache has filled.
    pub hit_rate_second_half: f64,
}

#[derive(Serialize)]
struct Record {
    trace: String,
    tokens: usize,
    layers: usize,
    experts: usize,
    top_k: usize,
    reuse: Option<f64>,
    rows: Vec<Row>,
}

/// Simulates all sizes and policies.
///
/// # Errors
/// The trace is none (exit 3), or a size is too small (2).
pub fn run(args: CacheArgs, format: FormatArgs, output: &Output) -> Result<Exit, Failure> {
    let trace = Trace::open(&args.trace)?;
    let all = trace.layers * trace.experts;
    let sizes = sizes(&args, &trace, all)?;
    let progress = Progress::new(output, "simulating", (sizes.len() * Policy::ALL.len()) as u64, Unit::Count);
    let mut rows = Vec::new();
    for &slots in &sizes {
        for policy in Policy::ALL {
            let found = match policy {
                Policy::Engine => engine(&trace, slots)?,
                Policy::Lru => lru(&trace, slots),
                Policy::Lfru => lfru(&trace, slots),
                Policy::Optimum => optimum(&trace, slots),
            };
            rows.push(row(policy, slots, all, &found));
            progress.add(1);
        }
    }
    progress.finish();
    let record = Record {
        trace: args.trace.display().to_string(),
        tokens: trace.tokens.len(),
        layers: trace.layers,
        experts: trace.experts,
        top_k: trace.top_k,
        reuse: trace.reuse(),
        rows,
    };
    let reuse = record.reuse.map_or(String::new(), |reuse| {
        format!(", {:.1} % of them used by the token before too", 100.0 * reuse)
    });
    let heading = vec![format!(
        "{}: {} tokens, {} layers, {} of {} experts each{reuse}",
        record.trace, record.tokens, record.layers, record.top_k, record.experts
    )];
    let tables = vec![table(&record.rows)];
    emit(output, format, &Report { heading, tables, closing: Vec::new(), record: &record })?;
    Ok(Exit::Done)
}

fn sizes(args: &CacheArgs, trace: &Trace, all: usize) -> Result<Vec<usize>, Failure> {
    let mut sizes = args.slots.clone();
    if sizes.is_empty() {
        for percent in &args.percent {
            if !(*percent > 0.0 && *percent <= 100.0) {
                return Err(Failure::usage(format!(
                    "--percent {percent}: expected more than 0, at most 100"
                )));
            }
            sizes.push((all as f64 * percent / 100.0).round() as usize);
        }
    }
    match sizes.iter().find(|&&slots| slots < 2 * trace.top_k || slots > all) {
        Some(slots) => Err(Failure::usage(format!(
            "a cache of {slots} experts: expected {} (two layers' worth) to {all} (all)",
            2 * trace.top_k
        ))),
        None => Ok(sizes),
    }
}

/// Whether each demand was a hit, in order.
type Found = Vec<bool>;

fn demands(trace: &Trace) -> impl Iterator<Item = ExpertId> + '_ {
    trace.tokens.iter().flat_map(|layers| {
        layers
            .iter()
            .enumerate()
            .flat_map(|(moe, ids)| ids.iter().map(move |&expert| ExpertId { moe: moe as u32, expert }))
    })
}

/// As the engine uses it: a layer's experts are demanded together, then used and given back.
fn engine(trace: &Trace, slots: usize) -> Result<Found, Failure> {
    let mut cache = Cache::new(slots, &vec![trace.experts; trace.layers]);
    let mut found = Found::new();
    for layers in &trace.tokens {
        for (moe, ids) in layers.iter().enumerate() {
            cache.begin(moe as u32);
            let mut pinned: Vec<(Slot, bool)> = Vec::with_capacity(ids.len());
            for &expert in ids {
                match cache.demand(ExpertId { moe: moe as u32, expert }) {
                    Demand::Hit(slot) | Demand::Ahead(slot, _) => pinned.push((slot, true)),
                    Demand::Miss(slot) => pinned.push((slot, false)),
                    Demand::Full => return Err(Failure::internal("the simulated cache has no free slot")),
                }
            }
            for &(slot, hit) in &pinned {
                found.push(hit);
                if !hit {
                    cache.filled(slot, true);
                }
            }
            pinned.iter().for_each(|&(slot, _)| cache.unpin(slot));
        }
    }
    Ok(found)
}

fn lru(trace: &Trace, slots: usize) -> Found {
    let mut last_use: HashMap<ExpertId, usize> = HashMap::new();
    let mut by_age = std::collections::BTreeMap::new();
    let use_expert = |(time, id): (usize, ExpertId)| {
        let before = last_use.insert(id, time);
        match before {
            Some(before) => {
                by_age.remove(&before);
            }
            None if last_use.len() > slots => {
                if let Some((_, oldest)) = by_age.pop_first() {
                    last_use.remove(&oldest);
                }
            }
            None => {}
        }
        by_age.insert(time, id);
        before.is_some()
    };
    demands(trace).enumerate().map(use_expert).collect()
}

/// A layer's experts are not evicted for each other.
fn lfru(trace: &Trace, slots: usize) -> Found {
    const SAMPLE: usize = 16;
    let mut random = Random::new(1);
    // By expert its slot; by slot the expert, its uses and the last of them.
    let mut places: HashMap<ExpertId, usize> = HashMap::new();
    let mut cached: Vec<(ExpertId, u64, usize)> = Vec::new();
    let mut found = Found::new();
    for (time, id) in demands(trace).enumerate() {
        let slot = places.get(&id).copied();
        found.push(slot.is_some());
        if let Some(slot) = slot {
            cached[slot].1 += 1;
            cached[slot].2 = time;
        } else if cached.len() < slots {
            places.insert(id, cached.len());
            cached.push((id, 1, time));
        } else {
            let free = |slot: &usize| cached[*slot].0.moe != id.moe || cached[*slot].2 + trace.top_k < time;
            let worth = |slot: &usize| (cached[*slot].1, cached[*slot].2);
            let sampled =
                (0..SAMPLE).map(|_| random.below(slots as u64) as usize).filter(free).min_by_key(worth);
            if let Some(slot) = sampled.or_else(|| (0..slots).filter(free).min_by_key(worth)) {
                places.remove(&cached[slot].0);
                places.insert(id, slot);
                cached[slot] = (id, 1, time);
            }
        }
    }
    found
}

/// Belady's algorithm.
fn optimum(trace: &Trace, slots: usize) -> Found {
    let ids: Vec<ExpertId> = demands(trace).collect();
    let mut next_use = vec![usize::MAX; ids.len()];
    let mut seen: HashMap<ExpertId, usize> = HashMap::new();
    for (time, &id) in ids.iter().enumerate().rev() {
        if let Some(later) = seen.insert(id, time) {
            next_use[time] = later;
        }
    }
    // The cached experts by their next use; ties are those never used again.
    let mut cached = std::collections::BTreeSet::new();
    let mut found = Found::with_capacity(ids.len());
    for (time, &id) in ids.iter().enumerate() {
        let hit = cached.remove(&(time, id.moe, id.expert));
        if !hit && cached.len() == slots {
            cached.pop_last();
        }
        cached.insert((next_use[time], id.moe, id.expert));
        found.push(hit);
    }
    found
}

fn row(policy: Policy, slots: usize, all: usize, found: &Found) -> Row {
    let hits = |found: &[bool]| found.iter().filter(|&&hit| hit).count();
    let rate = |found: &[bool]| hits(found) as f64 / found.len().max(1) as f64;
    Row {
        policy,
        slots,
        share: slots as f64 / all as f64,
        demands: found.len() as u64,
        hits: hits(found) as u64,
        hit_rate: rate(found),
        hit_rate_second_half: rate(&found[found.len() / 2..]),
    }
}

fn table(rows: &[Row]) -> Table {
    let cells = |row: &Row| {
        vec![
            Cell::Text(row.policy.name().to_owned()),
            Cell::Count(row.slots as u64),
            Cell::Number(100.0 * row.share, 1),
            Cell::Count(row.demands),
            Cell::Number(100.0 * row.hit_rate, 1),
            Cell::Number(100.0 * row.hit_rate_second_half, 1),
        ]
    };
    Table {
        title: "experts found in the cache",
        columns: vec![
            ("policy", "policy"),
            ("slots", "slots"),
            ("of all %", "percent_of_all"),
            ("demands", "demands"),
            ("hits %", "hit_percent"),
            ("2nd half %", "hit_percent_second_half"),
        ],
        rows: rows.iter().map(cells).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(ids: &[u32]) -> Trace {
        let tokens: Vec<_> = ids.iter().map(|&id| vec![vec![id]]).collect();
        Trace { tokens, experts: 8, layers: 1, top_k: 1 }
    }

    fn hits(found: &Found) -> usize {
        found.iter().filter(|&&hit| hit).count()
    }

    #[test]
    fn policies_do_what_they_are_called() {
        let cycle = trace(&[0, 1, 2, 0, 1, 2, 0, 1, 2]);
        assert_eq!(hits(&lru(&cycle, 2)), 0);
        // Of every three, one is kept: 0 1 2 | 0 hit, 1 …
        assert_eq!(hits(&optimum(&cycle, 2)), 3);
        for policy in [lru(&cycle, 3), optimum(&cycle, 3), engine(&cycle, 3).unwrap()] {
            assert_eq!(hits(&policy), 6);
        }
    }

    /// Nothing beats the optimum, and with room for all only first uses miss.
    #[test]
    fn the_real_trace_is_bounded() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/traces/olmoe-299tok.jsonl");
        let trace = Trace::open(std::path::Path::new(path)).unwrap();
        let all = trace.layers * trace.experts;
        for slots in [all / 8, all / 2] {
            let best = hits(&optimum(&trace, slots));
            for policy in [lru(&trace, slots), lfru(&trace, slots), engine(&trace, slots).unwrap()] {
                assert!(hits(&policy) <= best && best > 0);
            }
        }
        assert_eq!(hits(&lru(&trace, all)), hits(&optimum(&trace, all)));
        assert_eq!(hits(&engine(&trace, all).unwrap()), hits(&optimum(&trace, all)));
    }

    /// What the engine's policy is for.
    #[test]
    fn the_engine_is_no_worse_than_the_others_on_the_real_traces_at_any_size() {
        for name in ["kimi-linear-48b-300tok", "olmoe-299tok"] {
            let path = format!("{}/../tests/traces/{name}.jsonl", env!("CARGO_MANIFEST_DIR"));
            let trace = Trace::open(std::path::Path::new(&path)).unwrap();
            let all = trace.layers * trace.experts;
            for thousandths in [30, 45, 62, 90, 125, 180, 250, 375, 500] {
                let slots = all * thousandths / 1000;
                let engine = hits(&engine(&trace, slots).unwrap());
                let (lru, lfru) = (hits(&lru(&trace, slots)), hits(&lfru(&trace, slots)));
                assert!(engine >= lru.max(lfru), "{name}, {slots} slots: {engine}, lru {lru}, lfru {lfru}");
            }
        }
    }
}
