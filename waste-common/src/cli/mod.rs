//! The manners of a command line, the same for every tool: exit codes, sizes, the output envelope, progress,
//! signals and the JSON that one stage hands to the next.
//!
//! A tool is a `clap` struct flattening [`CommonArgs`], a [`Tool`] and a function
//! `run(args, &Output) -> Result<Exit, Failure>`; its `main` is one call of [`main`](fn@main).

mod app;
mod args;
pub mod chain;
mod failure;
mod output;
pub mod progress;
pub mod signals;
mod values;

pub use crate::error::{Coded, Exit};
pub use crate::size::{ByteSize, ByteSizeError};
pub use app::{Captured, Tool, after_help, main, run_captured};
pub use args::CommonArgs;
pub use chain::{Chained, Kind, Model, resolve_model};
pub use failure::{Details, Failure};
pub use output::{Output, Text, printable};
pub use progress::{Progress, Unit};
pub use signals::Interrupt;
pub use values::{from_env, whole};
