//! The thread that owns the model: takes jobs out of the line, and writes several answers at a time, in turns: a chunk
//! of one of the prompts that are still to be read, then a token of each answer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use waste_common::cli::Failure;
use waste_engine::sampler::Sampler;
use waste_engine::{EngineError, Rota};

use crate::error::ApiError;
use crate::job::Event;
use crate::model::{Model, Reads};
use crate::queue::{Queue, Ticket};
use crate::writing::{Kit, Stage, Writing};

/// Opens the model; once at the start, and once more if it panics.
pub type Open = dyn FnMut() -> Result<Box<dyn Model>, Failure> + Send;

/// What the worker has.
pub struct Worker {
    /// The line.
    pub queue: Arc<Queue>,
    /// What answers are written with.
    pub kit: Kit,
    /// Answers that are written at a time, each in a slot of the model.
    pub parallel: usize,
}

impl Worker {
    /// Works until the line is drained.
    ///
    /// # Errors
    /// The model cannot be opened, or panicked twice.
    pub fn run(self, open: &mut Open) -> Result<(), Failure> {
        let end = Gone(Arc::clone(&self.queue));
        let mut model = open()?;
        self.queue.open();
        let mut desk = Desk::new(self.parallel);
        let mut panicked = false;
        while desk.admit(&self) {
            if catch_unwind(AssertUnwindSafe(|| desk.round(&self, &mut *model))).is_ok() {
                continue;
            }
            desk.break_off(&self);
            if panicked {
                return Err(Failure::internal("the engine panicked again after it was opened anew"));
            }
            panicked = true;
            (self.kit.log)("the engine panicked; it is opened anew");
            // Before the new one: both would not fit.
            drop(model);
            model = open()?;
            desk = Desk::new(self.parallel);
        }
        model.close();
        drop(end);
        Ok(())
    }
}

/// What is being written, by slot, and whose turn it is.
struct Desk {
    slots: Vec<Option<Writing>>,
    rota: Rota,
    /// What was read, as far as it was counted.
    counted: Reads,
}

impl Desk {
    fn new(slots: usize) -> Desk {
        let slots = (0..slots).map(|_| None).collect();
        Desk { slots, rota: Rota::default(), counted: Reads::default() }
    }

    /// Fills free slots from the line; waits there if nothing is being written. False when there is nothing to do, and
    /// will not be.
    fn admit(&mut self, worker: &Worker) -> bool {
        while let Some(slot) = self.slots.iter().position(Option::is_none) {
            let idle = self.slots.iter().all(Option::is_none);
            let Some(ticket) = worker.queue.next(idle) else { return !idle };
            worker.kit.metrics.waited(ticket.queued.elapsed());
            let _ = ticket.events.send(Event::Started);
            match Sampler::new(ticket.job.sampler.clone()) {
                Ok(sampler) => self.slots[slot] = Some(Writing::new(ticket, sampler)),
                Err(error) => tell(worker, &ticket, Some(Event::Failed(worker.kit.failure(error.into())))),
            }
        }
        true
    }

    /// A turn: a chunk of one prompt, then a token of each answer.
    fn round(&mut self, worker: &Worker, model: &mut dyn Model) {
        let kit = &worker.kit;
        self.leave(worker, model);
        for slot in self.at(Stage::New) {
            self.with(slot, |writing| match model.begin(slot, writing.work().0) {
                Ok(reused) => writing.begun(kit, reused),
                Err(error) => writing.fail(kit.failure(error)),
            });
        }
        if let Some(slot) = self.rota.next(self.at(Stage::Prompt).into_iter()) {
            self.with(slot, |writing| {
                let (job, events) = writing.work();
                let wanted = || !events.is_closed() && !worker.queue.overdue();
                match model.prefill(slot, job, &wanted) {
                    Ok(done) => writing.prefilled(kit, done),
                    // Not wanted any more: it is ended below.
                    Err(EngineError::Interrupted) => (),
                    Err(error) => writing.fail(kit.failure(error)),
                }
            });
            self.count(worker, model, &[slot]);
            self.leave(worker, model);
        }
        self.slots.iter_mut().flatten().for_each(|writing| writing.plan(kit));
        let slots = self.at(Stage::Answer);
        if !slots.is_empty() {
            let writings = &mut self.slots;
            let outcome =
                model.next(&slots, &mut |slot, given| writings.get_mut(slot)?.as_mut()?.write(kit, given));
            if let Err(error) = outcome {
                let error = kit.failure(error);
                slots.iter().for_each(|slot| self.with(*slot, |writing| writing.fail(error.clone())));
            }
            self.count(worker, model, &slots);
        }
        self.settle(worker, model);
    }

    fn at(&self, stage: Stage) -> Vec<usize> {
        let at = |slot: &usize| self.slots[*slot].as_ref().is_some_and(|writing| writing.stage() == stage);
        (0..self.slots.len()).filter(at).collect()
    }

    fn with(&mut self, slot: usize, work: impl FnOnce(&mut Writing)) {
        if let Some(writing) = &mut self.slots[slot] {
            work(writing);
        }
    }

    /// Ends what nobody waits for any more, and what has no more time.
    fn leave(&mut self, worker: &Worker, model: &mut dyn Model) {
        let overdue = worker.queue.overdue();
        self.slots.iter_mut().flatten().for_each(|writing| writing.look(&worker.kit, overdue));
        self.settle(worker, model);
    }

    /// Counts what was read for these, in equal parts.
    fn count(&mut self, worker: &Worker, model: &dyn Model, slots: &[usize]) {
        let reads = model.reads();
        let new = reads.since(self.counted);
        self.counted = reads;
        // While it is written, so that it can be watched.
        worker.kit.metrics.reads(new);
        for (i, slot) in slots.iter().enumerate() {
            self.with(*slot, |writing| writing.read(new.part(i as u64, slots.len() as u64)));
        }
    }

    /// Empties the slots of answers that have ended, and tells whoever waits for them.
    fn settle(&mut self, worker: &Worker, model: &mut dyn Model) {
        let mut told = Vec::new();
        for (slot, place) in self.slots.iter_mut().enumerate() {
            let Some(writing) = place.take_if(|writing| writing.stage() == Stage::Over) else { continue };
            if writing.has_state() {
                model.done(slot, writing.job());
            }
            told.push(writing.close(&worker.kit));
        }
        let failed = |event: &Event| matches!(event, Event::Failed(error) if error.status.is_server_error());
        let events: Vec<&Event> = told.iter().filter_map(|(_, event)| event.as_ref()).collect();
        if !events.is_empty() {
            // What several answers failed of is one failure.
            worker.queue.engine(!events.into_iter().any(failed));
        }
        told.into_iter().for_each(|(ticket, event)| tell(worker, &ticket, event));
    }

    /// The model is gone, and with it all that was being written.
    fn break_off(&mut self, worker: &Worker) {
        worker.queue.engine(false);
        for mut writing in self.slots.iter_mut().filter_map(Option::take) {
            writing.fail(ApiError::internal());
            let (ticket, event) = writing.close(&worker.kit);
            tell(worker, &ticket, event);
        }
        worker.queue.none_runs();
    }
}

/// The slot is free: then its client is told.
fn tell(worker: &Worker, ticket: &Ticket, event: Option<Event>) {
    worker.queue.finished(ticket.id);
    if let Some(event) = event {
        let _ = ticket.events.send(event);
    }
}

/// Says that the worker has ended, however that came.
struct Gone(Arc<Queue>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.end();
    }
}
