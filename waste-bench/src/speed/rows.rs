//! From samples to rows.

use std::collections::BTreeMap;

use serde::Serialize;
use waste_engine::Part;
use waste_engine::experts::Rank;

use super::measure::{Phase, Sample};
use crate::report::{Cell, Table};
use crate::stats::Summary;

/// The same phase of the same arm, measured several times.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The arm, `default` if there is one only.
    pub arm: String,
    /// Prefill or decode.
    pub phase: Phase,
    /// `cold` for the first run after opening, `warm` for the later ones.
    pub cache: &'static str,
    /// Tokens of a run.
    pub tokens: usize,
    /// Tokens a second.
    pub tokens_per_second: Summary,
    /// Milliseconds a token.
    pub ms_per_token: Summary,
    /// Of these, milliseconds of waiting for reads.
    pub stall_ms_per_token: f64,
    /// All the others.
    pub compute_ms_per_token: f64,
    /// What they go to, in milliseconds by part.
    pub parts_ms_per_token: BTreeMap<&'static str, f64>,
    /// Demanded experts that were in the cache without having been read ahead, as a share; `null` without experts.
    pub hit_rate: Option<f64>,
    /// Demanded experts that a lookahead had read, or was reading.
    pub ahead_rate: Option<f64>,
    /// Demands of a run: hits, read ahead, misses.
    pub demands: u64,
    /// Bytes of experts read for a token.
    pub bytes_per_token: f64,
    /// Bytes of experts read by all runs of the row.
    pub bytes_read: u64,
    /// Bytes of experts read in a second of the phase, in GB (10^9).
    pub disk_gbps: f64,
    /// How good the lookahead's guesses were, the surest rank first.
    pub lookahead: Vec<Rank>,
    /// Page faults of a run that had to read from disk.
    pub major_faults: f64,
    /// The most RAM the process has had resident by then.
    pub peak_rss_bytes: Option<u64>,
}

impl Row {
    /// Sums samples up; `None` if there are none with tokens.
    pub fn of(
        arm: &str,
        phase: Phase,
        cache: &'static str,
        samples: &[Sample],
        peak: Option<u64>,
    ) -> Option<Row> {
        let each =
            |value: &dyn Fn(&Sample) -> f64| Summary::of(&samples.iter().map(value).collect::<Vec<_>>());
        let sum = |value: &dyn Fn(&Sample) -> u64| samples.iter().map(value).sum::<u64>();
        let tokens = sum(&|sample| sample.tokens as u64);
        let seconds: f64 = samples.iter().map(|sample| sample.seconds).sum();
        let demands = sum(&|sample| sample.reads.hits + sample.reads.ahead_hits + sample.reads.misses);
        let share = |part: u64| (demands > 0).then(|| part as f64 / demands as f64);
        let bytes = sum(&|sample| sample.reads.bytes_read);
        if tokens == 0 {
            return None;
        }
        let part_ms = |part: Part| {
            let spent: f64 = samples.iter().map(|sample| sample.parts[part as usize]).sum();
            1e3 * spent / tokens as f64
        };
        Some(Row {
            arm: arm.to_owned(),
            phase,
            cache,
            tokens: samples[0].tokens,
            tokens_per_second: each(&Sample::rate)?,
            ms_per_token: each(&Sample::ms)?,
            stall_ms_per_token: part_ms(Part::Stall),
            compute_ms_per_token: 1e3 * seconds / tokens as f64 - part_ms(Part::Stall),
            parts_ms_per_token: Part::ALL.into_iter().map(|part| (part.name(), part_ms(part))).collect(),
            hit_rate: share(sum(&|sample| sample.reads.hits)),
            ahead_rate: share(sum(&|sample| sample.reads.ahead_hits)),
            demands: demands / samples.len() as u64,
            bytes_per_token: bytes as f64 / tokens as f64,
            bytes_read: bytes,
            disk_gbps: 1e-9 * bytes as f64 / seconds,
            lookahead: lookahead(samples),
            major_faults: sum(&|sample| sample.major_faults) as f64 / samples.len() as f64,
            peak_rss_bytes: peak,
        })
    }
}

/// The ranks of all samples together.
fn lookahead(samples: &[Sample]) -> Vec<Rank> {
    let mut ranks: Vec<Rank> = Vec::new();
    for sample in samples {
        let guessed = sample.reads.guessed_ranks();
        ranks.resize(ranks.len().max(guessed.len()), Rank::default());
        for (rank, guessed) in ranks.iter_mut().zip(guessed) {
            *rank += *guessed;
        }
    }
    ranks
}

/// How much faster an arm is than the first one, run by run.
#[derive(Clone, Debug, Serialize)]
pub struct Ratio {
    /// The arm.
    pub arm: String,
    /// What it is compared with.
    pub against: String,
    /// Prefill or decode.
    pub phase: Phase,
    /// Tokens a second of one over those of the other in the same round.
    pub ratio: Summary,
}

/// The rows as a table.
pub fn table(rows: &[Row]) -> Table {
    let percent = |share: Option<f64>| Cell::maybe(share.map(|share| 100.0 * share), 1);
    let cells = |row: &Row| {
        vec![
            Cell::Text(row.arm.clone()),
            Cell::Text(row.phase.name().to_owned()),
            Cell::Text(row.cache.to_owned()),
            Cell::Count(row.tokens as u64),
            Cell::Count(row.tokens_per_second.n as u64),
            Cell::Number(row.tokens_per_second.mean, 2),
            Cell::Number(row.tokens_per_second.sd, 2),
            Cell::Number(row.tokens_per_second.min, 2),
            Cell::Number(row.tokens_per_second.median, 2),
            Cell::Number(row.ms_per_token.mean, 2),
            Cell::Number(row.stall_ms_per_token, 2),
            percent(row.hit_rate),
            percent(row.ahead_rate),
            Cell::Bytes(row.bytes_per_token.round() as u64),
            Cell::Number(row.disk_gbps, 3),
            row.peak_rss_bytes.map_or(Cell::None, Cell::Bytes),
        ]
    };
    Table {
        title: "speed",
        columns: vec![
            ("arm", "arm"),
            ("phase", "phase"),
            ("cache", "cache"),
            ("tokens", "tokens"),
            ("runs", "runs"),
            ("tok/s", "tokens_per_second_mean"),
            ("± sd", "tokens_per_second_sd"),
            ("min", "tokens_per_second_min"),
            ("median", "tokens_per_second_median"),
            ("ms/token", "ms_per_token_mean"),
            ("stall ms", "stall_ms_per_token"),
            ("hits %", "hit_percent"),
            ("ahead %", "ahead_percent"),
            ("read/token", "bytes_per_token"),
            ("disk GB/s", "disk_gbps"),
            ("peak RSS", "peak_rss_bytes"),
        ],
        rows: rows.iter().map(cells).collect(),
    }
}

/// Where the time of each row went.
pub fn part_table(rows: &[Row]) -> Table {
    let cells = |row: &Row| {
        let mut cells = vec![
            Cell::Text(row.arm.clone()),
            Cell::Text(row.phase.name().to_owned()),
            Cell::Text(row.cache.to_owned()),
            Cell::Number(row.ms_per_token.mean, 2),
            Cell::Number(row.compute_ms_per_token, 2),
        ];
        cells.extend(Part::ALL.iter().map(|part| Cell::Number(row.parts_ms_per_token[part.name()], 2)));
        cells
    };
    let mut columns = vec![
        ("arm", "arm"),
        ("phase", "phase"),
        ("cache", "cache"),
        ("ms/token", "ms_per_token_mean"),
        ("compute", "compute_ms_per_token"),
    ];
    columns.extend(Part::ALL.iter().map(|part| (part.name(), part.name())));
    Table { title: "milliseconds a token, by part", columns, rows: rows.iter().map(cells).collect() }
}

/// The lookahead's guesses as a table, by rank.
pub fn lookahead_table(rows: &[Row]) -> Table {
    let share =
        |part: u64, whole: u64| Cell::maybe((whole > 0).then(|| 100.0 * part as f64 / whole as f64), 1);
    let cells = |row: &Row| -> Vec<Vec<Cell>> {
        let ranks = row.lookahead.iter().enumerate();
        let cells = ranks.map(|(number, rank)| {
            vec![
                Cell::Text(row.arm.clone()),
                Cell::Text(row.phase.name().to_owned()),
                Cell::Text(row.cache.to_owned()),
                Cell::Count(number as u64 + 1),
                Cell::Count(rank.guessed),
                share(rank.right, rank.guessed),
                Cell::Count(rank.read),
                share(rank.used, rank.read),
            ]
        });
        cells.collect()
    };
    Table {
        title: "experts guessed a layer ahead, by rank",
        columns: vec![
            ("arm", "arm"),
            ("phase", "phase"),
            ("cache", "cache"),
            ("rank", "rank"),
            ("guessed", "guessed"),
            ("right %", "right_percent"),
            ("read", "read"),
            ("used %", "used_percent"),
        ],
        rows: rows.iter().flat_map(cells).collect(),
    }
}

/// The ratios as a table.
pub fn ratio_table(ratios: &[Ratio]) -> Table {
    let cells = |ratio: &Ratio| {
        vec![
            Cell::Text(ratio.arm.clone()),
            Cell::Text(ratio.against.clone()),
            Cell::Text(ratio.phase.name().to_owned()),
            Cell::Count(ratio.ratio.n as u64),
            Cell::Number(ratio.ratio.mean, 3),
            Cell::Number(ratio.ratio.sd, 3),
            Cell::Number(ratio.ratio.min, 3),
            Cell::Number(ratio.ratio.max, 3),
        ]
    };
    Table {
        title: "speed relative to the first arm, round by round",
        columns: vec![
            ("arm", "arm"),
            ("against", "against"),
            ("phase", "phase"),
            ("rounds", "rounds"),
            ("ratio", "ratio_mean"),
            ("± sd", "ratio_sd"),
            ("min", "ratio_min"),
            ("max", "ratio_max"),
        ],
        rows: ratios.iter().map(cells).collect(),
    }
}
