//! Routed experts: read from their source when a token needs them, kept in a bounded cache.

pub mod cache;
pub mod reader;
pub mod source;

pub use cache::ExpertId;
pub use reader::{ExpertRef, ExpertStore, ReadStats, StoreOptions};
pub use source::ExpertSource;
