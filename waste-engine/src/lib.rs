//! The WASTE model engine: opens a container (or, for reference, a checkpoint), streams experts past a bounded
//! cache, and computes Kimi-Linear and Kimi K3.

pub mod compute;
pub mod error;
pub mod experts;
pub mod generate;
pub mod kernels;
pub mod layers;
pub mod matrix;
pub mod model;
pub mod sampler;
pub mod tokenizer;
pub mod weights;

pub use error::EngineError;
pub use generate::{Finish, Generation, Request, generate};
pub use model::{
    Engine, EngineOptions, Event, LayerState, LogitSink, Session, Trace, Wanted, Watch, open_source,
};
