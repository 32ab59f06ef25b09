//! The layers of one run: which comes next, what it waits for, and what becomes of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use waste_common::cli::{ByteSize, Interrupt, Output};

use crate::conversion::{Conversion, free_bytes};
use crate::convert::PAUSE;
use crate::crew::{Crew, Owner};
use crate::error::ConvertError;
use crate::layer::{Errors, LayerJob, show};
use crate::state;
use crate::supply::{Reclaim, Supply};
use crate::tracker::Tracker;
use crate::worker::{self, Begin};

/// Finished layers, and their errors.
pub(crate) type Layers = BTreeMap<u16, Errors>;

/// Converts layers, in worker processes where there can be any.
pub(crate) fn layers(
    conversion: &Conversion,
    jobs: &[&LayerJob],
    supply: Option<&Supply>,
    stop: &AtomicBool,
    output: &Output,
    interrupt: &Interrupt,
) -> Result<Layers, ConvertError> {
    let request = conversion.request;
    let expert = |job: &LayerJob| conversion.source.expert_bytes(job.layer.into());
    let run = Run {
        conversion,
        supply,
        stop,
        queue: Mutex::new(jobs.iter().map(|job| job.layer).collect()),
        active: Mutex::default(),
        failure: Mutex::default(),
        expert_bytes: jobs.iter().map(|job| (job.layer, expert(job))).collect(),
        tracker: Tracker::new(
            output,
            jobs.len(),
            jobs.iter().map(|job| job.experts as u64 * expert(job)).sum(),
            jobs.iter().map(|job| job.experts as u64).sum(),
        ),
        finished: Mutex::default(),
        output,
    };
    let workers = request.jobs.clamp(1, jobs.len().max(1));
    let begin = Begin {
        checkpoint: request.checkpoint.clone(),
        container: request.container.clone(),
        options: request.options,
        importance: request.importance.clone(),
        threads: (request.threads / workers).max(1),
        some: supply.is_some(),
    };
    let crew = request.program.clone().filter(|_| !jobs.is_empty()).map(|program| Crew {
        program,
        begin,
        workers,
        output,
        interrupt,
    });
    let crew = crew.filter(|crew| match crew.can_start() {
        Ok(()) => true,
        Err(error) => {
            output.warn(format_args!(
                "no worker can be started ({error}): layers are converted in this process"
            ));
            false
        }
    });
    match crew {
        Some(crew) => crew.work(&run)?,
        None => in_this_process(jobs, &run, interrupt)?,
    }
    if let Some(failure) = lock(&run.failure).take() {
        return Err(failure);
    }
    Ok(run.finished.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn in_this_process(jobs: &[&LayerJob], run: &Run, interrupt: &Interrupt) -> Result<(), ConvertError> {
    let Conversion { request, source, .. } = run.conversion;
    while let Some(layer) = run.next(&|| interrupt.requested()) {
        let Some(job) = jobs.iter().find(|job| job.layer == layer) else { continue };
        let tick = |experts| {
            run.experts(layer, i64::try_from(experts).unwrap_or(i64::MAX));
            if interrupt.requested() { Err(ConvertError::Interrupted) } else { Ok(()) }
        };
        tick(0)?;
        let errors = worker::finish_layer(source, job, &request.options, run.conversion.dir(), &tick)?;
        run.done(layer, errors)?;
    }
    if interrupt.requested() { Err(ConvertError::Interrupted) } else { Ok(()) }
}

/// What the workers are given and what they have done.
struct Run<'a> {
    conversion: &'a Conversion<'a>,
    supply: Option<&'a Supply<'a>>,
    /// Something else has failed.
    stop: &'a AtomicBool,
    queue: Mutex<VecDeque<u16>>,
    /// Layers in work.
    active: Mutex<BTreeSet<u16>>,
    failure: Mutex<Option<ConvertError>>,
    /// Source bytes of an expert of each layer.
    expert_bytes: BTreeMap<u16, u64>,
    tracker: Tracker,
    finished: Mutex<Layers>,
    output: &'a Output,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Run<'_> {
    fn job(&self, layer: u16) -> Option<&LayerJob> {
        self.conversion.jobs.iter().find(|job| job.layer == layer)
    }

    /// A layer whose shards are there, if there is one.
    fn ready(&self) -> Result<Option<u16>, ConvertError> {
        let mut queue = lock(&self.queue);
        let at = match self.supply {
            None => (!queue.is_empty()).then_some(0),
            Some(supply) => {
                let state = supply.state()?;
                queue.iter().position(|layer| supply.has_layer(state.as_ref(), *layer))
            }
        };
        Ok(at.and_then(|at| queue.remove(at)))
    }

    /// Bytes that are missing for a layer, those in work and the reserve.
    fn shortfall(&self, layer: u16) -> u64 {
        let bytes = |layer: &u16| {
            self.job(*layer).map_or(0, |job| job.experts as u64 * job.geometry.record_bytes() as u64)
        };
        let needed = bytes(&layer) + lock(&self.active).iter().map(bytes).sum::<u64>();
        let needed = needed + self.conversion.request.reserve;
        free_bytes(self.conversion.dir()).map_or(0, |free| needed.saturating_sub(free))
    }
}

impl Owner for Run<'_> {
    fn next(&self, stopped: &dyn Fn() -> bool) -> Option<u16> {
        let mut told = false;
        let mut wait = |message: String| {
            if !std::mem::replace(&mut told, true) {
                self.output.note(message);
            }
            std::thread::sleep(PAUSE);
        };
        while !stopped() && !self.stop.load(Ordering::Relaxed) && !lock(&self.queue).is_empty() {
            let layer = match self.ready() {
                Ok(Some(layer)) => layer,
                Ok(None) => {
                    wait(format!("waiting for shards of {} layers", lock(&self.queue).len()));
                    continue;
                }
                Err(error) => {
                    lock(&self.failure).get_or_insert(error);
                    return None;
                }
            };
            let missing = self.shortfall(layer);
            if missing == 0 {
                lock(&self.active).insert(layer);
                return Some(layer);
            }
            lock(&self.queue).push_front(layer);
            wait(format!(
                "paused: {} more must be free for layer {layer} and the reserve of {}; make room and it goes on, or \
                 press Ctrl-C: what is finished is kept",
                ByteSize(missing),
                ByteSize(self.conversion.request.reserve)
            ));
        }
        None
    }

    fn experts(&self, layer: u16, experts: i64) {
        let bytes = self.expert_bytes.get(&layer).map_or(0, |bytes| *bytes as i64);
        self.tracker.experts(experts, experts.saturating_mul(bytes));
    }

    fn done(&self, layer: u16, errors: Errors) -> Result<(), ConvertError> {
        lock(&self.active).remove(&layer);
        lock(&self.finished).insert(layer, errors);
        let (done, of) = self.tracker.layer();
        self.output.note(format_args!("layer {layer}: error {} ({done} of {of} layers)", show(&errors)));
        let conversion = self.conversion;
        if let (Some(supply), Some(job)) = (self.supply, self.job(layer)) {
            if conversion.request.reclaim != Reclaim::Off
                && state::finished(conversion.dir(), job, &conversion.fingerprint)?.is_none()
            {
                let [bank, ..] = state::layer_files(layer);
                return Err(ConvertError::ReadBack { file: conversion.dir().join(bank) });
            }
            supply.layer_used(layer)?;
        }
        Ok(())
    }
}
