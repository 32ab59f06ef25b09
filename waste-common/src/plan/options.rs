//! What a plan is asked for: context, KV type, budget, share of the RAM.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::size::ByteSize;

/// How the latents of a cached token are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// Four bytes a number.
    F32,
    /// Two bytes a number.
    #[default]
    F16,
    /// A byte a number, and an f16 scale for each group of up to 128.
    Q8,
}

impl KvType {
    /// All of them.
    pub const ALL: [KvType; 3] = [KvType::F32, KvType::F16, KvType::Q8];

    /// `f32`, `f16` or `q8`.
    pub fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Q8 => "q8",
        }
    }

    /// Bytes of one layer's entry for a token, `numbers` wide.
    pub fn row_bytes(self, numbers: usize) -> u64 {
        let numbers = numbers as u64;
        match self {
            KvType::F32 => 4 * numbers,
            KvType::F16 => 2 * numbers,
            KvType::Q8 => numbers + 2 * numbers.div_ceil(crate::quant::GROUP as u64),
        }
    }
}

impl FromStr for KvType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = KvType::ALL.into_iter().find(|kv| kv.name() == text);
        found.ok_or_else(|| "expected f32, f16 or q8".to_owned())
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for KvType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// How the budget is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Budget {
    /// The floor and up to three working sets, within the cap.
    #[default]
    Auto,
    /// All experts if they go below the cap, else as many working sets as do.
    Max,
    /// So many bytes.
    Bytes(u64),
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Budget::Auto),
            "max" => Ok(Budget::Max),
            _ => match text.parse::<ByteSize>() {
                Ok(size) => Ok(Budget::Bytes(size.bytes())),
                Err(error) => Err(format!("{error}, or auto, or max")),
            },
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Budget::Auto => f.pad("auto"),
            Budget::Max => f.pad("max"),
            Budget::Bytes(bytes) => ByteSize(*bytes).fmt(f),
        }
    }
}

/// The exact share of the usable RAM that a budget may take: a fraction above 0 and at most 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamShare {
    numerator: u32,
    denominator: u32,
}

impl RamShare {
    /// The share `numerator/denominator`, if it is above 0 and at most 1.
    pub fn new(numerator: u32, denominator: u32) -> Option<Self> {
        (numerator >= 1 && numerator <= denominator).then_some(RamShare { numerator, denominator })
    }

    /// What may be taken of `usable` bytes: all but the rest, the rest rounded down.
    pub fn of(self, usable: u64) -> u64 {
        let rest = u128::from(self.denominator - self.numerator) * u128::from(usable);
        // The rest is at most `usable`.
        usable - (rest / u128::from(self.denominator)) as u64
    }

    /// The least usable RAM of which `bytes` may be taken, rounded up; in u128 because it may be more than any RAM.
    pub fn needed_for(self, bytes: u128) -> u128 {
        (bytes * u128::from(self.denominator)).div_ceil(u128::from(self.numerator))
    }
}

impl Default for RamShare {
    /// 7/8.
    fn default() -> Self {
        RamShare { numerator: 7, denominator: 8 }
    }
}

impl FromStr for RamShare {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (numerator, denominator) = text.split_once('/')?;
            RamShare::new(numerator.trim().parse().ok()?, denominator.trim().parse().ok()?)
        };
        parse().ok_or_else(|| "expected a fraction above 0 and at most 1, such as 7/8 or 3/4".to_owned())
    }
}

impl fmt::Display for RamShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.numerator, self.denominator)
    }
}

/// What a plan is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanOptions {
    /// Context length in tokens: prompt and generation together.
    pub ctx: usize,
    /// How latents are kept.
    pub kv: KvType,
    /// Tokens of a prefill chunk.
    pub chunk: usize,
    /// Sequences that may decode together.
    pub parallel: usize,
    /// Compute threads.
    pub threads: usize,
    /// Whether images are accepted.
    pub vision: bool,
    /// How the budget is chosen.
    pub budget: Budget,
    /// The share of the usable RAM that makes the cap.
    pub ram_share: RamShare,
    /// Plan also where even the floor is above the usable RAM.
    pub allow_swap: bool,
}

impl PlanOptions {
    /// Default context length.
    pub const CTX: usize = 4096;
    /// Longest context that is planned.
    pub const CTX_MAX: usize = 1 << 24;
    /// Default tokens of a prefill chunk.
    pub const CHUNK: usize = 256;
    /// Longest prefill chunk that is planned.
    pub const CHUNK_MAX: usize = 1024;
    /// Most sequences that are planned to decode together.
    pub const PARALLEL_MAX: usize = 16;
    /// Most threads that are planned.
    pub const THREADS_MAX: usize = 1024;
}

impl Default for PlanOptions {
    /// 4096 tokens of f16 latents, chunks of 256, one sequence, a thread for each CPU, text only, automatic budget.
    fn default() -> Self {
        PlanOptions {
            ctx: Self::CTX,
            kv: KvType::default(),
            chunk: Self::CHUNK,
            parallel: 1,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            vision: false,
            budget: Budget::default(),
            ram_share: RamShare::default(),
            allow_swap: false,
        }
    }
}
