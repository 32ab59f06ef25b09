//! How fast a disk delivers records, past the page cache.
//!
//! A figure that came from RAM is worse than none: the file is written past the page cache, read past it, and the
//! storage layer's own count of bytes must agree; otherwise the tool says so and gives no figure.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use waste_common::cli::{ByteSize, Exit, Failure, Interrupt, Output, Progress, Unit};
use waste_common::files::FileError;
use waste_common::io::{ALIGNMENT, AlignedBuf, Bypass, DirectWriter, ReadFile, filesystem};
use waste_common::machine::storage_bytes_read;

use crate::environment::Environment;
use crate::random::Random;
use crate::report::{Cell, FormatArgs, Report, Table, emit};

/// Bytes of one write.
const BLOCK: usize = 4 << 20;
/// Share of the bytes read that the storage layer must have delivered.
const PROOF: f64 = 0.95;
/// Free space that is left alone.
const SPARE: u64 = 64 << 20;
/// Most reads in flight.
const DEPTH_MAX: usize = 64;
/// Longest record.
const RECORD_MAX: u64 = 64 << 20;
/// Records a file holds at least: fewer would be read from the drive's own cache.
const RECORDS_MIN: u64 = 4;

/// Measuring a disk.
#[derive(Clone, Debug, clap::Args)]
pub struct DiskArgs {
    /// A directory on the disk; a file is written there and removed afterwards
    pub dir: PathBuf,
    /// Size of the file
    #[arg(long, value_name = "SIZE", default_value = "1GiB", help_heading = "Work")]
    pub size: ByteSize,
    /// Sizes of a read [default: 128 KiB, and the experts of Kimi-Linear-48B and Kimi K3]
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', default_values = ["128KiB", "2666496", "12406784"], help_heading = "Work")]
    pub record: Vec<ByteSize>,
    /// Reads in flight
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values = ["1", "2", "4", "8"], help_heading = "Work")]
    pub depth: Vec<usize>,
    /// Seconds each combination is read for
    #[arg(long, value_name = "S", default_value_t = 1.0, help_heading = "Work")]
    pub seconds: f64,
}

/// In which order records are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// One after the other.
    Sequential,
    /// Anywhere.
    Random,
}

/// One combination.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The order.
    pub pattern: Pattern,
    /// Bytes of a read.
    pub record_bytes: u64,
    /// Reads in flight.
    pub depth: usize,
    /// Reads done.
    pub reads: u64,
    /// Bytes read.
    pub bytes: u64,
    /// 10^9 bytes a second.
    pub gbps: f64,
    /// Mean milliseconds of a read.
    pub latency_ms_mean: f64,
    /// Most milliseconds of a read.
    pub latency_ms_max: f64,
}

#[derive(Serialize)]
struct Record {
    directory: String,
    filesystem: Option<String>,
    machine: Environment,
    file_bytes: u64,
    bypass: bool,
    /// What the bypass is known from: `storage` (the system's count of bytes), `flag` (the system took the request).
    proof: &'static str,
    reason: Option<String>,
    /// The speed for expert reads: the best random one of the largest records. Read by `waste-plan --bench`.
    gbps: Option<f64>,
    write_gbps: Option<f64>,
    rows: Vec<Row>,
}

/// Measures a disk: done, or no if its reads cannot be kept from being served by RAM.
///
/// # Errors
/// Wrong sizes (exit 2), no room (4), or the disk fails (3).
pub fn run(args: DiskArgs, format: FormatArgs, output: &Output) -> Result<Exit, Failure> {
    let size = check(&args)?;
    let interrupt = Interrupt::install()?;
    let place = filesystem(&args.dir).map_err(FileError::io("look at", &args.dir))?;
    if place.free_bytes.is_some_and(|free| free < size.saturating_add(SPARE)) {
        let free = ByteSize(place.free_bytes.unwrap_or(0));
        let message = format!(
            "{}: a file of {} does not fit into the {free} free; see --size",
            args.dir.display(),
            ByteSize(size)
        );
        return Err(Failure::new(Exit::Space, "disk_full", message));
    }
    if let Some(warning) = place.warning {
        output.warn(format_args!("{}: {warning}", args.dir.display()));
    }
    let mut record = Record {
        directory: args.dir.display().to_string(),
        filesystem: Some(place.kind),
        machine: Environment::probe()?,
        file_bytes: size,
        bypass: false,
        proof: if storage_bytes_read().is_some() { "storage" } else { "flag" },
        reason: None,
        gbps: None,
        write_gbps: None,
        rows: Vec::new(),
    };
    let scratch = Scratch(args.dir.join(format!(".waste-bench-{}.tmp", std::process::id())));
    let (seconds, written_past) = write(&scratch.0, size, output, &interrupt)?;
    let file = ReadFile::open(&scratch.0, Bypass::On)?;
    record.reason = match (written_past, file.reason()) {
        (_, Some(reason)) => Some(reason.to_owned()),
        (false, None) => Some("the file could not be written past the page cache".to_owned()),
        (true, None) => None,
    };
    if record.reason.is_none() {
        record.write_gbps = Some(1e-9 * size as f64 / seconds);
        match measure(&args, &file, output, &interrupt)? {
            Ok(rows) => record.rows = rows,
            Err(reason) => record.reason = Some(reason),
        }
    }
    record.bypass = record.reason.is_none();
    if !record.bypass {
        record.write_gbps = None;
    }
    let largest = record.rows.iter().map(|row| row.record_bytes).max();
    let random = |row: &&Row| row.pattern == Pattern::Random && Some(row.record_bytes) == largest;
    record.gbps = record.rows.iter().filter(random).map(|row| row.gbps).reduce(f64::max);
    finish(&record, format, output)?;
    Ok(if record.bypass { Exit::Done } else { Exit::No })
}

fn finish(record: &Record, format: FormatArgs, output: &Output) -> Result<(), Failure> {
    let kind = record.filesystem.as_deref().unwrap_or("unknown");
    let heading = vec![
        record.machine.line(),
        format!("{}: {kind}, a file of {}", record.directory, ByteSize(record.file_bytes)),
    ];
    let mut closing = Vec::new();
    if let Some(reason) = &record.reason {
        closing.push(format!("No figure: reads were served from RAM, or might have been: {reason}."));
    }
    if let (Some(gbps), Some(write)) = (record.gbps, record.write_gbps) {
        let proof = match record.proof {
            "storage" => "the storage layer delivered every byte",
            _ => "the system took the request to bypass its cache",
        };
        closing.push(format!("{gbps:.2} GB/s for experts; written at {write:.2} GB/s; {proof}."));
    }
    emit(output, format, &Report { heading, tables: vec![table(&record.rows)], closing, record })
}

/// The file's size in whole records of every size.
fn check(args: &DiskArgs) -> Result<u64, Failure> {
    let size = args.size.bytes().next_multiple_of(BLOCK as u64);
    for record in &args.record {
        let bytes = record.bytes();
        if bytes == 0 || !bytes.is_multiple_of(ALIGNMENT as u64) || bytes > RECORD_MAX.min(size / RECORDS_MIN)
        {
            return Err(Failure::usage(format!(
                "--record {bytes}: expected a multiple of {ALIGNMENT} bytes, at most 64 MiB and a quarter of the file's {size}"
            )));
        }
    }
    if args.depth.iter().any(|depth| !(1..=DEPTH_MAX).contains(depth)) {
        return Err(Failure::usage(format!("--depth: expected 1 to {DEPTH_MAX} reads in flight")));
    }
    if !(args.seconds > 0.0 && args.seconds <= 3600.0) {
        return Err(Failure::usage(format!(
            "--seconds {}: expected more than 0, at most 3600",
            args.seconds
        )));
    }
    Ok(size)
}

/// Removed whatever happens.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Writes random bytes, which no disk can compress; seconds, and whether the page cache was bypassed.
fn write(path: &Path, size: u64, output: &Output, interrupt: &Interrupt) -> Result<(f64, bool), Failure> {
    let progress = Progress::new(output, "writing", size, Unit::Bytes);
    let mut writer = DirectWriter::create(path).map_err(FileError::io("create", path))?;
    let mut block = AlignedBuf::zeroed(BLOCK)?;
    let mut random = Random::new(0x5eed);
    let start = Instant::now();
    for _ in 0..size / BLOCK as u64 {
        interrupt.check()?;
        block.bytes_mut().copy_from_slice(&random.bytes(BLOCK, |x| x));
        writer.append(&block).map_err(FileError::io("write", path))?;
        progress.add(BLOCK as u64);
    }
    let bypass = writer.bypass();
    writer.finish().map_err(FileError::io("sync", path))?;
    progress.finish();
    Ok((start.elapsed().as_secs_f64(), bypass))
}

/// All combinations; or why their figures would be none.
fn measure(
    args: &DiskArgs,
    file: &ReadFile,
    output: &Output,
    interrupt: &Interrupt,
) -> Result<Result<Vec<Row>, String>, Failure> {
    let cells = 2 * args.record.len() * args.depth.len();
    let progress = Progress::new(output, "reading", cells as u64, Unit::Count);
    let mut rows = Vec::new();
    for pattern in [Pattern::Sequential, Pattern::Random] {
        for record in &args.record {
            for &depth in &args.depth {
                interrupt.check()?;
                let before = storage_bytes_read();
                let row = cell(file, pattern, record.bytes(), depth, args.seconds, &interrupt.flag())?;
                if let (Some(before), Some(after)) = (before, storage_bytes_read()) {
                    let share = after.saturating_sub(before) as f64 / row.bytes as f64;
                    if share < PROOF {
                        return Ok(Err(format!(
                            "of the {} read, the storage layer delivered {:.0} %",
                            ByteSize(row.bytes),
                            100.0 * share
                        )));
                    }
                }
                rows.push(row);
                progress.add(1);
            }
        }
    }
    progress.finish();
    Ok(Ok(rows))
}

/// Reads records with `depth` threads until the time is up.
fn cell(
    file: &ReadFile,
    pattern: Pattern,
    record_bytes: u64,
    depth: usize,
    seconds: f64,
    cancelled: &AtomicBool,
) -> Result<Row, Failure> {
    let records = file.len() / record_bytes;
    let next = AtomicU64::new(0);
    let start = Instant::now();
    let limit = Duration::from_secs_f64(seconds);
    let worker = &|number: usize| -> Result<(u64, f64, f64), Failure> {
        let mut buffer = AlignedBuf::zeroed(record_bytes as usize)?;
        let mut random = Random::of_piece(record_bytes, "disk", number as u64);
        let (mut reads, mut total, mut most) = (0, 0.0, 0.0_f64);
        // At least one read each, so that every figure has reads behind it.
        while reads == 0 || (start.elapsed() < limit && !cancelled.load(Ordering::Relaxed)) {
            let index = match pattern {
                Pattern::Sequential => next.fetch_add(1, Ordering::Relaxed) % records,
                Pattern::Random => random.below(records),
            };
            let begin = Instant::now();
            file.read_at(index * record_bytes, buffer.bytes_mut())?;
            std::hint::black_box(buffer.bytes());
            let latency = begin.elapsed().as_secs_f64();
            (reads, total, most) = (reads + 1, total + latency, most.max(latency));
        }
        Ok((reads, total, most))
    };
    let results: Vec<Result<(u64, f64, f64), Failure>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..depth).map(|number| scope.spawn(move || worker(number))).collect();
        let panicked = || Err(Failure::internal("a reading thread panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    });
    let elapsed = start.elapsed().as_secs_f64();
    let (mut reads, mut total, mut most) = (0, 0.0, 0.0_f64);
    for result in results {
        let (count, sum, max) = result?;
        (reads, total, most) = (reads + count, total + sum, most.max(max));
    }
    let bytes = reads * record_bytes;
    Ok(Row {
        pattern,
        record_bytes,
        depth,
        reads,
        bytes,
        gbps: 1e-9 * bytes as f64 / elapsed,
        latency_ms_mean: 1e3 * total / reads as f64,
        latency_ms_max: 1e3 * most,
    })
}

fn table(rows: &[Row]) -> Table {
    let cells = |row: &Row| {
        let pattern = match row.pattern {
            Pattern::Sequential => "sequential",
            Pattern::Random => "random",
        };
        vec![
            Cell::Text(pattern.to_owned()),
            Cell::Bytes(row.record_bytes),
            Cell::Count(row.depth as u64),
            Cell::Count(row.reads),
            Cell::Number(row.gbps, 3),
            Cell::Number(row.latency_ms_mean, 3),
            Cell::Number(row.latency_ms_max, 3),
        ]
    };
    Table {
        title: "reads past the page cache",
        columns: vec![
            ("pattern", "pattern"),
            ("record", "record_bytes"),
            ("depth", "depth"),
            ("reads", "reads"),
            ("GB/s", "gbps"),
            ("ms mean", "latency_ms_mean"),
            ("ms max", "latency_ms_max"),
        ],
        rows: rows.iter().map(cells).collect(),
    }
}
