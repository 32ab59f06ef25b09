//! The threads and the kernels a model computes with.

use std::sync::{Arc, Mutex, PoisonError};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::EngineError;
use crate::kernels::Kernels;
use crate::options::Arith;

/// Kernels and a pool of threads of its own. Work is split by output rows or heads, never inside a sum, so results
/// do not depend on the number of threads.
#[derive(Clone)]
pub struct Compute {
    /// The instruction set's kernels.
    pub kernels: &'static Kernels,
    /// The arithmetic of decoding.
    pub arith: Arith,
    /// Several tokens are of as many sequences that decode together: each gets the bits it would get alone.
    pub together: bool,
    threads: Arc<Threads>,
}

struct Threads {
    pool: ThreadPool,
    /// One buffer a thread.
    scratch: Vec<Mutex<Vec<f32>>>,
}

impl Compute {
    /// A pool of `threads` threads, bound to `cpus` if they are given (Linux only), with `scratch` elements each to
    /// work in.
    pub fn new(
        kernels: &'static Kernels,
        arith: Arith,
        threads: usize,
        cpus: Option<&[usize]>,
        scratch: usize,
    ) -> Result<Self, EngineError> {
        let mut builder =
            ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("waste-compute-{i}"));
        if let Some(cpus) = cpus {
            let cpus = check_cpus(cpus)?;
            builder = builder.start_handler(move |i| bind(cpus[i % cpus.len()]));
        }
        let pool = builder.build().map_err(|error| EngineError::Thread {
            what: "the compute threads",
            source: std::io::Error::other(error),
        })?;
        let scratch = (0..threads).map(|_| Mutex::new(vec![0.0; scratch])).collect();
        Ok(Compute { kernels, arith, together: false, threads: Arc::new(Threads { pool, scratch }) })
    }

    /// The same threads for sequences that decode together.
    pub fn together(&self) -> Self {
        Compute { together: true, ..self.clone() }
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads.pool.current_num_threads()
    }

    /// Runs a whole computation inside the pool, so that its parallel parts need no hand-over.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.threads.pool.install(work)
    }

    /// Calls `work` with `len` elements of this thread's buffer, whatever is in them; a buffer that is too short grows
    /// once. `work` must not start anything parallel: the thread could be handed another piece of work that wants the same buffer.
    pub fn with_scratch<R>(&self, len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
        // Outside of the pool, threads may have to wait for each other.
        let scratch = &self.threads.scratch;
        let thread = rayon::current_thread_index().unwrap_or(0) % scratch.len();
        let mut buffer = scratch[thread].lock().unwrap_or_else(PoisonError::into_inner);
        if buffer.len() < len {
            buffer.resize(len, 0.0);
        }
        work(&mut buffer[..len])
    }

    /// Elements one task gets so that all threads have a few tasks each, in multiples of `unit`.
    pub fn share(&self, elements: usize, unit: usize) -> usize {
        let tasks = if self.threads() == 1 { 1 } else { 4 * self.threads() };
        elements.div_ceil(unit * tasks).max(1) * unit
    }

    /// Calls `work(first row, rows)` on disjoint shares of `out`, one element a row.
    pub fn rows(&self, out: &mut [f32], unit: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
        let share = self.share(out.len(), unit);
        if share >= out.len() {
            return work(0, out);
        }
        out.par_chunks_mut(share).enumerate().for_each(|(i, out)| work(i * share, out));
    }

    /// Calls `work(token, row of out)` for every row of `[tokens, width]`, in parallel.
    pub fn tokens(&self, out: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
        if out.len() == width {
            return work(0, out);
        }
        out.par_chunks_mut(width).enumerate().for_each(|(t, row)| work(t, row));
    }
}

#[cfg(target_os = "linux")]
fn check_cpus(cpus: &[usize]) -> Result<Vec<usize>, EngineError> {
    use rustix::thread::{CpuSet, sched_getaffinity};

    let refuse = |why: String| EngineError::Option { what: "the list of CPUs", why };
    let allowed = sched_getaffinity(None).map_err(|error| refuse(error.to_string()))?;
    if cpus.is_empty() {
        return Err(refuse("names no CPU".to_owned()));
    }
    match cpus.iter().find(|&&cpu| cpu >= CpuSet::MAX_CPU || !allowed.is_set(cpu)) {
        Some(cpu) => Err(refuse(format!("CPU {cpu} does not exist or is not allowed to this process"))),
        None => Ok(cpus.to_vec()),
    }
}

#[cfg(not(target_os = "linux"))]
fn check_cpus(_: &[usize]) -> Result<Vec<usize>, EngineError> {
    Err(EngineError::Option {
        what: "the list of CPUs",
        why: "this system cannot bind threads to CPUs".to_owned(),
    })
}

#[cfg(target_os = "linux")]
fn bind(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    // The CPU was allowed when it was checked; if it has gone since, the thread runs where it may.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

#[cfg(not(target_os = "linux"))]
fn bind(_: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_has_its_scratch_wherever_it_comes_from() {
        let compute = Compute::new(Kernels::detect(), Arith::Exact, 2, None, 8).unwrap();
        compute.with_scratch(20, |buffer| assert_eq!(buffer.len(), 20));
        let sum = |i: usize| {
            compute.with_scratch(100, |buffer| {
                buffer.fill(i as f32);
                buffer.iter().sum::<f32>()
            })
        };
        let expected: Vec<f32> = (0..50).map(|i| 100.0 * i as f32).collect();
        let found: Vec<f32> = compute.run(|| (0..50usize).into_par_iter().map(sum).collect());
        assert_eq!(found, expected);
        let foreign = ThreadPoolBuilder::new().num_threads(5).build().unwrap();
        let found: Vec<f32> = foreign.install(|| (0..50usize).into_par_iter().map(sum).collect());
        assert_eq!(found, expected);
    }
}
