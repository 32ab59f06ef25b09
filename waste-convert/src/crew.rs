//! The workers: each layer is converted in one of a few processes, so that a crash ends that layer only. A layer whose
//! worker died is tried once more.

use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use waste_common::cli::{Interrupt, Output};
use waste_common::error::Exit;

use crate::error::ConvertError;
use crate::layer::Errors;
use crate::worker::{Begin, Event, Order, Report, read_line, write_line};

/// How often a layer is tried whose worker dies.
const TRIES: u32 = 2;

/// What the workers are.
pub struct Crew<'a> {
    /// This program.
    pub program: PathBuf,
    /// What each is told first.
    pub begin: Begin,
    /// How many there are.
    pub workers: usize,
    /// Where deaths are reported.
    pub output: &'a Output,
    /// Ends all.
    pub interrupt: &'a Interrupt,
}

/// What a crew asks and tells its owner, from several threads.
pub trait Owner: Sync {
    /// The next layer; waits until one can be begun, or the crew is stopped. `None` when there will be no more.
    fn next(&self, stopped: &dyn Fn() -> bool) -> Option<u16>;
    /// So many more experts of a layer are encoded; negative if they were lost with a worker.
    fn experts(&self, layer: u16, experts: i64);
    /// A layer is finished and durable.
    fn done(&self, layer: u16, errors: Errors) -> Result<(), ConvertError>;
}

/// One running worker. It ends when its input does.
struct Worker {
    child: Child,
    orders: Orders,
    events: BufReader<ChildStdout>,
}

/// A worker's input; `None` once it is to end.
type Orders = Arc<Mutex<Option<ChildStdin>>>;

impl Drop for Worker {
    fn drop(&mut self) {
        drop(lock(&self.orders).take());
        let _ = self.child.wait();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How a try ended.
enum Ended {
    Done(Errors),
    Failed(Report),
    /// The worker is gone.
    Died(String),
}

#[derive(Default)]
struct Shared {
    failure: Option<ConvertError>,
    /// No more layers are begun.
    stop: bool,
    /// The inputs of all workers, to be closed when the user interrupts.
    inputs: Vec<Orders>,
}

impl Crew<'_> {
    /// Whether a worker can be started here at all: an emulator may not be able to.
    pub fn can_start(&self) -> Result<(), std::io::Error> {
        self.start().map(drop)
    }

    /// Converts the layers that `owner` names. A layer that fails does not keep the others from being finished,
    /// unless the disk is full or the user interrupts.
    ///
    /// # Errors
    /// The first failure.
    pub fn work(&self, owner: &impl Owner) -> Result<(), ConvertError> {
        let shared = Mutex::new(Shared::default());
        std::thread::scope(|scope| {
            let slots: Vec<_> =
                (0..self.workers).map(|_| scope.spawn(|| self.slot(owner, &shared))).collect();
            while !slots.iter().all(|slot| slot.is_finished()) {
                if self.interrupt.requested() {
                    lock(&shared).inputs.iter().for_each(|input| drop(lock(input).take()));
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let shared = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
        match shared.failure {
            Some(failure) => Err(failure),
            None if self.interrupt.requested() => Err(ConvertError::Interrupted),
            None => Ok(()),
        }
    }

    /// One worker after the other, until there are no more layers.
    fn slot(&self, owner: &impl Owner, shared: &Mutex<Shared>) {
        let mut worker = None;
        loop {
            let stopped = || lock(shared).stop || self.interrupt.requested();
            if stopped() {
                return;
            }
            let Some(layer) = owner.next(&stopped) else { return };
            let mut tries = 0;
            loop {
                tries += 1;
                let fail = |error: ConvertError, stop: bool| {
                    let mut shared = lock(shared);
                    shared.stop |= stop;
                    shared.failure.get_or_insert(error);
                };
                match self.try_layer(layer, &mut worker, owner, shared) {
                    Ended::Done(errors) => {
                        if self.begin.some {
                            // It holds shards open that may be removed now.
                            worker = None;
                        }
                        if let Err(error) = owner.done(layer, errors) {
                            fail(error, true);
                        }
                    }
                    Ended::Failed(report) => {
                        // What another layer would meet too.
                        let exits = [Exit::Space, Exit::Interrupted];
                        let stop = exits.iter().any(|exit| exit.code() == report.exit);
                        if !stop {
                            self.output.warn(format_args!("layer {layer}: {}", report.message));
                        }
                        fail(ConvertError::Worker { layer, report: Box::new(report) }, stop);
                    }
                    Ended::Died(how) => {
                        worker = None;
                        if self.interrupt.requested() {
                            return;
                        }
                        if tries < TRIES {
                            self.output.warn(format_args!(
                                "the worker of layer {layer} {how}; the layer is tried once more"
                            ));
                            continue;
                        }
                        fail(ConvertError::WorkerDied { layer, how }, false);
                    }
                }
                break;
            }
        }
    }

    fn try_layer(
        &self,
        layer: u16,
        worker: &mut Option<Worker>,
        owner: &impl Owner,
        shared: &Mutex<Shared>,
    ) -> Ended {
        let running = match worker {
            Some(worker) => worker,
            None => match self.start() {
                Ok(started) => {
                    lock(shared).inputs.push(started.orders.clone());
                    worker.insert(started)
                }
                Err(error) => return Ended::Died(format!("could not be started: {error}")),
            },
        };
        let told = match &mut *lock(&running.orders) {
            Some(orders) => write_line(orders, &Order::Layer(layer)).is_ok(),
            None => false,
        };
        if !told {
            return Ended::Died(running.ended());
        }
        let mut encoded = 0;
        loop {
            // The worker stops by itself when its parent is interrupted: it gets the signal, or the end of its input.
            match read_line(&mut running.events) {
                Ok(Some(Event::Ready)) => {}
                Ok(Some(Event::Experts(experts))) => {
                    let experts = i64::try_from(experts).unwrap_or(i64::MAX);
                    encoded += experts;
                    owner.experts(layer, experts);
                }
                Ok(Some(Event::Done(errors))) => return Ended::Done(errors),
                Ok(Some(Event::Failed(report))) => {
                    owner.experts(layer, -encoded);
                    return Ended::Failed(report);
                }
                Ok(None) => {
                    owner.experts(layer, -encoded);
                    return Ended::Died(running.ended());
                }
                Err(error) => {
                    owner.experts(layer, -encoded);
                    return Ended::Died(format!("says what is not understood ({error})"));
                }
            }
        }
    }

    fn start(&self) -> std::io::Result<Worker> {
        let mut child = Command::new(&self.program)
            .args(["worker", "worker", "--worker"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let Some((mut orders, events)) = pipes else { return Err(std::io::ErrorKind::BrokenPipe.into()) };
        write_line(&mut orders, &Order::Begin(self.begin.clone()))?;
        let mut events = BufReader::new(events);
        // A process that cannot run the program may take what is written to it and end without a word.
        match read_line(&mut events)? {
            Some(Event::Ready) => {}
            _ => return Err(std::io::ErrorKind::UnexpectedEof.into()),
        }
        let orders = Arc::new(Mutex::new(Some(orders)));
        Ok(Worker { child, orders, events })
    }
}

impl Worker {
    /// How the process ended: its output has.
    fn ended(&mut self) -> String {
        drop(lock(&self.orders).take());
        match self.child.wait() {
            Ok(status) => format!("ended with {status}"),
            Err(error) => format!("cannot be awaited: {error}"),
        }
    }
}
