//! The WASTE model engine: opens a container (or, for reference, a checkpoint), streams experts past a bounded
//! cache, and computes Kimi-Linear and Kimi K3.

pub mod chat;
pub mod compute;
pub mod decoding;
pub mod defaults;
pub mod error;
pub mod experts;
pub mod generate;
#[cfg(feature = "grammar")]
pub mod grammar;
pub mod kernels;
pub mod lanes;
pub mod layers;
pub mod matrix;
pub mod model;
pub mod open;
pub mod options;
pub mod profile;
pub mod resident;
pub mod sampler;
pub mod saved;
pub mod session;
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
