//! A worker process: converts the layers its parent names, one at a time. Both talk JSON lines, orders on the worker's
//! standard input, events on its standard output; the end of the input ends the worker.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use waste_common::cli::{Failure, Interrupt};
use waste_common::error::Coded;

use crate::conversion::jobs;
use crate::error::ConvertError;
use crate::layer::{Errors, LayerJob, Tick, convert_layer};
use crate::options::Options;
use crate::source::Source;
use crate::state::{self, LayerLock};

/// Longest line that is read.
pub const LINE_BYTES_MAX: u64 = 1 << 20;

/// What a parent says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The first line.
    Begin(Begin),
    /// Convert a layer.
    Layer(u16),
}

/// What a worker works on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Begin {
    pub checkpoint: PathBuf,
    pub container: PathBuf,
    pub options: Options,
    pub importance: Option<PathBuf>,
    pub threads: usize,
    /// Shards of the checkpoint come and go: those of other layers may not be there.
    pub some: bool,
}

/// What a worker answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The worker runs and knows what it is to do.
    Ready,
    /// So many more experts of the layer are encoded.
    Experts(u64),
    /// The layer is finished and durable.
    Done(Errors),
    /// It cannot be finished.
    Failed(Report),
}

/// An error, as it is told to the parent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Report {
    pub code: String,
    pub exit: u8,
    pub message: String,
    pub fields: Map<String, Value>,
}

impl Report {
    fn of(error: &ConvertError) -> Self {
        Report {
            code: error.code().to_owned(),
            exit: error.exit().code(),
            message: error.to_string(),
            fields: error.fields(),
        }
    }
}

/// Reads one JSON line; `None` at the end.
///
/// # Errors
/// It cannot be read, or is not what is expected.
pub fn read_line<T: for<'de> Deserialize<'de>>(reader: &mut impl BufRead) -> std::io::Result<Option<T>> {
    let mut line = Vec::new();
    if reader.take(LINE_BYTES_MAX).read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

/// Writes one JSON line.
///
/// # Errors
/// The other side is gone.
pub fn write_line(writer: &mut impl Write, value: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    writer.write_all(&line)?;
    writer.flush()
}

/// The worker's main.
///
/// # Errors
/// It was not started by a parent.
pub fn run(interrupt: &Interrupt) -> Result<(), Failure> {
    let (sender, orders) = mpsc::channel();
    let gone = interrupt.clone();
    // Reads ahead, so that the parent's end is noticed in the middle of a layer.
    std::thread::spawn(move || {
        let mut stdin = BufReader::new(std::io::stdin());
        while let Ok(Some(order)) = read_line::<Order>(&mut stdin) {
            if sender.send(order).is_err() {
                break;
            }
        }
        gone.request();
    });
    let Ok(Order::Begin(begin)) = orders.recv() else {
        return Err(Failure::usage("a worker is started by waste-convert itself"));
    };
    if say(&Event::Ready).is_err() {
        return Ok(());
    }
    let mut opened = None;
    for order in orders {
        let Order::Layer(layer) = order else { break };
        let event = match convert(&begin, &mut opened, layer, interrupt) {
            Ok(errors) => Event::Done(errors),
            Err(error) => Event::Failed(Report::of(&error)),
        };
        // Nobody is left to be told that nobody listens.
        if say(&event).is_err() {
            break;
        }
    }
    Ok(())
}

fn say(event: &Event) -> std::io::Result<()> {
    write_line(&mut std::io::stdout().lock(), event)
}

/// The checkpoint is opened for the first layer, so that whatever is wrong with it is told as an event.
type Opened = Option<(Source, Vec<LayerJob>, rayon::ThreadPool)>;

fn convert(
    begin: &Begin,
    opened: &mut Opened,
    layer: u16,
    interrupt: &Interrupt,
) -> Result<Errors, ConvertError> {
    let (source, jobs, pool) = match opened {
        Some(opened) => opened,
        None => {
            let open = if begin.some { Source::open_some } else { Source::open };
            let source =
                open(&begin.checkpoint)?.weigh(begin.importance.as_deref(), begin.options.importance)?;
            let jobs = jobs(&source, &begin.options.quant())?;
            let pool = rayon::ThreadPoolBuilder::new().num_threads(begin.threads).build();
            let pool = pool.map_err(|source| ConvertError::Threads { threads: begin.threads, source })?;
            opened.insert((source, jobs, pool))
        }
    };
    let job = jobs.iter().find(|job| job.layer == layer).ok_or(ConvertError::NoSuchLayer { layer })?;
    let tick = |experts| {
        // A parent that is gone has closed our input too, which sets the flag.
        if experts > 0 && say(&Event::Experts(experts)).is_err() {
            interrupt.request();
        }
        if interrupt.requested() { Err(ConvertError::Interrupted) } else { Ok(()) }
    };
    pool.install(|| finish_layer(source, job, &begin.options, &begin.container, &tick))
}

/// Converts a layer and records that it is finished; waits for another process that is at it.
///
/// # Errors
/// See [`convert_layer`].
pub fn finish_layer(
    source: &Source,
    job: &LayerJob,
    options: &Options,
    dir: &Path,
    tick: Tick,
) -> Result<Errors, ConvertError> {
    let fingerprint = options.fingerprint(&source.fingerprint);
    let lock = LayerLock::acquire(dir, job.layer)?;
    // It may have finished it.
    if lock.waited
        && let Some(errors) = state::finished(dir, job, &fingerprint)?
    {
        tick(job.experts as u64)?;
        return Ok(errors);
    }
    state::forget(dir, job.layer)?;
    source.check_layer(job.layer.into())?;
    let errors = convert_layer(source, job, options, dir, tick)?;
    state::record(dir, job.layer, &errors, &fingerprint)?;
    Ok(errors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written() {
        let mut pipe = Vec::new();
        let errors = Errors { gate: 0.1, up: 0.2, down: 0.3 };
        for event in [Event::Experts(3), Event::Done(errors)] {
            write_line(&mut pipe, &event).unwrap();
        }
        write_line(&mut pipe, &Order::Layer(7)).unwrap();
        assert!(pipe.starts_with(b"{\"experts\":3}\n{\"done\":{\"gate\":0.1,"));
        let mut reader = BufReader::new(&pipe[..]);
        assert_eq!(read_line(&mut reader).unwrap(), Some(Event::Experts(3)));
        assert_eq!(read_line(&mut reader).unwrap(), Some(Event::Done(errors)));
        assert_eq!(read_line(&mut reader).unwrap(), Some(Order::Layer(7)));
        assert_eq!(read_line::<Order>(&mut reader).unwrap(), None);
        assert!(read_line::<Order>(&mut BufReader::new(&b"{\"lay"[..])).is_err());
    }
}
