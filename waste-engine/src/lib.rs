//! The WASTE model engine: opens a container (or, for reference, a checkpoint), streams experts past a bounded
//! cache, and computes Kimi-Linear and Kimi K3.
//!
//! [`open::reserve`] plans a model's memory on this machine, [`Engine::open`] opens it within the plan,
//! [`tokenizer::Tokenizer`] turns text into tokens, [`generate()`] writes, [`Engine::forward`] gives logits,
//! [`saved`] keeps a session in a file. `examples/embed.rs` does all of it.
//!
//! Everything belongs to an [`Engine`] or a [`Session`]: several of them live in one process. Nothing is printed, no
//! signal is taken, and the process is never ended. What the environment decides is `WASTE_KERNELS` alone, and only
//! in [`Engine::open`].

pub mod chat;
#[doc(hidden)] // internals, for tests that compare them with golden vectors
pub mod compute;
mod decoding;
pub mod defaults;
mod error;
pub mod experts;
mod generate;
#[cfg(feature = "grammar")]
pub mod grammar;
pub mod kernels;
mod lanes;
#[doc(hidden)]
pub mod layers;
#[doc(hidden)]
pub mod matrix;
mod model;
pub mod open;
mod options;
mod profile;
mod resident;
pub mod sampler;
pub mod saved;
mod session;
pub mod tokenizer;
#[cfg(feature = "vision")]
pub mod vision;
pub mod weights;

pub use decoding::Decoding;
pub use error::EngineError;
pub use generate::{Begun, Finish, Generation, Listener, Request, SoFar, generate};
pub use lanes::{Lanes, Rota};
pub use model::{Engine, LogitSink, TogetherSink, Trace, Wanted, open_source};
pub use open::{OpenError, Reserved};
pub use options::{Arith, EngineOptions, Event, Watch};
pub use profile::{Part, Profile};
pub use saved::{Saved, SavedError};
pub use session::{LayerState, Sequence, Session, Snapshot};
pub use waste_common::error::{Coded, Exit};
pub use waste_common::{machine, plan};
