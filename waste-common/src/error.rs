//! The exit codes of all tools, and the trait by which a library error names its own.

use serde_json::{Map, Value};

/// Exit codes, the same for every tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Yes, or done.
    Done = 0,
    /// The answer is no: corrupt, or does not fit.
    No = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The input data is bad.
    Data = 3,
    /// Not enough RAM or disk.
    Space = 4,
    /// The network failed.
    Network = 5,
    /// Locked by another process.
    Locked = 6,
    /// A bug of ours.
    Internal = 70,
    /// Interrupted by a signal.
    Interrupted = 130,
}

impl Exit {
    /// Every code with its meaning: the table that `--help` prints.
    pub const TABLE: [(Exit, &'static str); 9] = [
        (Exit::Done, "yes / done"),
        (Exit::No, "the answer is no (corrupt, does not fit)"),
        (Exit::Usage, "usage"),
        (Exit::Data, "bad input data"),
        (Exit::Space, "not enough RAM or disk"),
        (Exit::Network, "network"),
        (Exit::Locked, "locked by another process"),
        (Exit::Internal, "internal error (a bug)"),
        (Exit::Interrupted, "interrupted"),
    ];

    /// The number the process ends with.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The exit with this number, if there is one.
    pub fn from_code(code: u64) -> Option<Exit> {
        Self::TABLE.iter().map(|(exit, _)| *exit).find(|exit| u64::from(exit.code()) == code)
    }
}

/// A library error that knows how a tool reports it.
pub trait Coded: std::error::Error {
    /// The exit code it means.
    fn exit(&self) -> Exit;

    /// A stable name for scripts, such as `budget_below_floor`.
    fn code(&self) -> &'static str;

    /// Further keys of the JSON error object, such as `file`, `layer` or `shortfall_bytes`.
    fn fields(&self) -> Map<String, Value> {
        Map::new()
    }
}
