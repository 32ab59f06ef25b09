//! The line in front of the engine: first come, first served, so many at most.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderValue, StatusCode, header};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::error::ApiError;
use crate::job::{Event, Job};

/// Failures of the engine in a row that make the server unhealthy.
const FAILURES_MAX: u32 = 3;
/// How much of the average the last request is.
const RECENT: f64 = 0.3;

/// What the server is up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The model is being loaded.
    Loading,
    /// Requests are answered.
    Serving,
    /// It ends: nothing new is taken.
    Draining,
}

/// A job in the line, or at the engine.
pub struct Ticket {
    /// Its number.
    pub id: u64,
    /// What is to be done.
    pub job: Job,
    /// Who is told.
    pub events: UnboundedSender<Event>,
    /// When it came.
    pub queued: Instant,
}

/// The line.
pub struct Queue {
    capacity: usize,
    /// Jobs that are at the engine together.
    slots: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    phase: Phase,
    waiting: VecDeque<Ticket>,
    /// Jobs at the engine, and since when.
    running: Vec<(u64, Instant)>,
    /// After this, what runs is cut.
    deadline: Option<Instant>,
    next_id: u64,
    /// What a request takes, lately.
    seconds: f64,
    failures: u32,
    /// The worker is gone.
    ended: bool,
}

/// How the line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// What the server is up to.
    pub phase: Phase,
    /// Jobs at the engine.
    pub running: usize,
    /// Most of them.
    pub slots: usize,
    /// Jobs in the line.
    pub waiting: usize,
    /// Most of them.
    pub capacity: usize,
    /// The engine failed too often in a row.
    pub failing: bool,
}

/// A client's end of a job. Dropped, it takes the job back: out of the line, or from the engine.
pub struct Handle {
    id: u64,
    queue: Arc<Queue>,
    /// What the worker says.
    pub events: UnboundedReceiver<Event>,
}

impl Handle {
    /// Jobs that come before this one; `None` once it runs.
    pub fn ahead(&self) -> Option<usize> {
        let state = self.queue.lock();
        let at = state.waiting.iter().position(|ticket| ticket.id == self.id)?;
        Some(at + state.running.len())
    }

    /// Takes the job out of the line, if it is still there.
    pub fn withdraw(&self) -> bool {
        let mut state = self.queue.lock();
        let before = state.waiting.len();
        state.waiting.retain(|ticket| ticket.id != self.id);
        state.waiting.len() < before
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.withdraw();
    }
}

impl Queue {
    /// A line of at most `capacity` waiting jobs, in front of so many `slots` of the engine.
    pub fn new(capacity: usize, slots: usize) -> Queue {
        let state = State {
            phase: Phase::Loading,
            waiting: VecDeque::new(),
            running: Vec::new(),
            deadline: None,
            next_id: 0,
            seconds: 1.0,
            failures: 0,
            ended: false,
        };
        Queue { capacity, slots, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How the line is.
    pub fn status(&self) -> Status {
        let state = self.lock();
        Status {
            phase: state.phase,
            running: state.running.len(),
            slots: self.slots,
            waiting: state.waiting.len(),
            capacity: self.capacity,
            failing: state.failures >= FAILURES_MAX,
        }
    }

    /// Puts a job at the end.
    ///
    /// # Errors
    /// The line is full, or nothing is taken now.
    pub fn submit(self: &Arc<Self>, job: Job) -> Result<Handle, ApiError> {
        let mut state = self.lock();
        match state.phase {
            _ if state.ended => return Err(ApiError::shutting_down()),
            Phase::Loading => return Err(ApiError::unavailable("loading", "the model is being loaded")),
            Phase::Draining => return Err(ApiError::shutting_down()),
            Phase::Serving => (),
        }
        // More than wait: those for whom there is a slot are as good as running.
        let taken = state.waiting.len() + state.running.len();
        if taken >= self.capacity.saturating_add(self.slots) {
            let seconds = state.wait_seconds(self.slots);
            let message = format!("{} requests are waiting already; try again in {seconds} s", self.capacity);
            let full = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message);
            return Err(full.with(header::RETRY_AFTER, HeaderValue::from(seconds)));
        }
        let id = state.next_id;
        state.next_id += 1;
        let (sender, events) = unbounded_channel();
        state.waiting.push_back(Ticket { id, job, events: sender, queued: Instant::now() });
        self.changed.notify_all();
        Ok(Handle { id, queue: Arc::clone(self), events })
    }

    /// The model is loaded.
    pub fn open(&self) {
        let mut state = self.lock();
        if state.phase == Phase::Loading {
            state.phase = Phase::Serving;
        }
        self.changed.notify_all();
    }

    /// The next job. `None` if there is none now, or if one is waited for and there will be none.
    pub fn next(&self, wait: bool) -> Option<Ticket> {
        let mut state = self.lock();
        loop {
            if let Some(ticket) = state.waiting.pop_front() {
                // A client that left is no reason to begin.
                if ticket.events.is_closed() {
                    continue;
                }
                state.running.push((ticket.id, Instant::now()));
                return Some(ticket);
            }
            if !wait || state.phase == Phase::Draining {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A job at the engine has ended.
    pub fn finished(&self, id: u64) {
        let mut state = self.lock();
        if let Some(at) = state.running.iter().position(|(running, _)| *running == id) {
            let (_, start) = state.running.remove(at);
            state.seconds += RECENT * (start.elapsed().as_secs_f64() - state.seconds);
        }
        self.changed.notify_all();
    }

    /// Nothing is at the engine any more.
    pub fn none_runs(&self) {
        self.lock().running.clear();
        self.changed.notify_all();
    }

    /// How the engine did of late.
    pub fn engine(&self, well: bool) {
        let mut state = self.lock();
        state.failures = if well { 0 } else { state.failures.saturating_add(1) };
    }

    /// Takes nothing new, sends those who wait away, and gives what runs so much time.
    pub fn drain(&self, time: Duration) {
        let mut state = self.lock();
        state.phase = Phase::Draining;
        state.deadline.get_or_insert(Instant::now() + time);
        for ticket in state.waiting.drain(..) {
            let _ = ticket.events.send(Event::Failed(ApiError::shutting_down()));
        }
        self.changed.notify_all();
    }

    /// Whether what runs is to be cut now.
    pub fn overdue(&self) -> bool {
        self.lock().deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// The worker says that it has ended.
    pub fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        state.waiting.clear();
        state.running.clear();
        self.changed.notify_all();
    }

    /// Whether the worker has ended.
    pub fn ended(&self) -> bool {
        self.lock().ended
    }
}

impl State {
    /// How long a new job would wait, by recent speed: until the first slot is free, and its share of all that wait.
    fn wait_seconds(&self, slots: usize) -> u64 {
        let rest = |(_, start): &(u64, Instant)| (self.seconds - start.elapsed().as_secs_f64()).max(0.0);
        let first = self.running.iter().map(rest).reduce(f64::min).unwrap_or(0.0);
        let seconds = first + self.seconds * self.waiting.len() as f64 / slots.max(1) as f64;
        (seconds.ceil() as u64).clamp(1, 600)
    }
}
