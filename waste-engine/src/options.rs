//! How a model is opened, and who is told how far it is.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use waste_common::io::Bypass;
use waste_common::plan::{KvType, PlanOptions};

use crate::error::EngineError;
use crate::experts::Usage;

/// Most reads in flight.
const READERS_MAX: usize = 64;
/// Most sequences that decode together.
pub const PARALLEL_MAX: usize = PlanOptions::PARALLEL_MAX;

/// What happens while one waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// So much of the trunk is loaded.
    Loaded {
        /// Bytes loaded.
        bytes: u64,
        /// Bytes of the whole.
        of: u64,
    },
    /// So many tokens of a prompt have gone through the model.
    Prefilled {
        /// Tokens done.
        tokens: usize,
        /// Tokens of the prompt.
        of: usize,
    },
}

/// Who is told of events, if anybody.
#[derive(Clone, Default)]
pub struct Watch(pub Option<Arc<dyn Fn(Event) + Send + Sync>>);

impl Watch {
    pub(crate) fn tell(&self, event: Event) {
        if let Some(watch) = &self.0 {
            watch(event);
        }
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Watch(on)" } else { "Watch(off)" })
    }
}

/// How decoding computes experts and the trunk's 8- and 4-bit matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arith {
    /// f32 tables and products.
    Exact,
    /// 16-bit whole numbers, summed exactly: tables with one unit for each block of 32 vectors, and the input of Q8G
    /// and Q4G rows with one for each group of 128.
    #[default]
    Fast,
}

impl Arith {
    /// `exact` or `fast`.
    pub fn name(self) -> &'static str {
        match self {
            Arith::Exact => "exact",
            Arith::Fast => "fast",
        }
    }
}

impl std::str::FromStr for Arith {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = [Arith::Exact, Arith::Fast].into_iter().find(|arith| arith.name() == text);
        found.ok_or_else(|| "expected exact or fast".to_owned())
    }
}

/// How a model is opened.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Context length: prompt and generation together.
    pub ctx: usize,
    /// How latents are kept.
    pub kv: KvType,
    /// The arithmetic of decoding.
    pub arith: Arith,
    /// Tokens of a prefill chunk.
    pub chunk: usize,
    /// Sequences that may decode together.
    pub parallel: usize,
    /// Compute threads.
    pub threads: usize,
    /// CPUs to bind them to (Linux).
    pub cpus: Option<Vec<usize>>,
    /// Expert cache slots.
    pub cache_slots: usize,
    /// Reader threads; 0 reads in the compute thread.
    pub readers: usize,
    /// Experts of the next layer read ahead; 0 for none.
    pub lookahead: usize,
    /// What was learned of the model's experts, to warm the cache with.
    pub usage: Option<Arc<Usage>>,
    /// Whether expert reads bypass the page cache.
    pub bypass: Bypass,
    /// Whether every record's payload checksum is checked as it is read.
    pub verify: bool,
    /// Set from outside to stop at the next chunk or token.
    pub cancelled: Arc<AtomicBool>,
    /// Told of progress.
    pub watch: Watch,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            ctx: PlanOptions::CTX,
            kv: KvType::default(),
            arith: Arith::default(),
            chunk: PlanOptions::CHUNK,
            parallel: 1,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            cpus: None,
            cache_slots: 64,
            readers: 4,
            lookahead: 6,
            usage: None,
            bypass: Bypass::On,
            verify: false,
            cancelled: Arc::default(),
            watch: Watch::default(),
        }
    }
}

impl EngineOptions {
    /// Checks every value against its range.
    pub fn check(&self) -> Result<(), EngineError> {
        for (what, found, least, most) in [
            ("the context length", self.ctx, 1, PlanOptions::CTX_MAX),
            ("the prefill chunk", self.chunk, 1, PlanOptions::CHUNK_MAX),
            ("the number of sequences together", self.parallel, 1, PARALLEL_MAX),
            ("the number of threads", self.threads, 1, PlanOptions::THREADS_MAX),
            ("the number of reads in flight", self.readers, 0, READERS_MAX),
        ] {
            if !(least..=most).contains(&found) {
                let why = format!("{found} is not between {least} and {most}");
                return Err(EngineError::Option { what, why });
            }
        }
        Ok(())
    }
}
