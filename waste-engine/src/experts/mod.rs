//! Routed experts: read from their source when a token needs them, kept in a bounded cache.

pub mod cache;
pub mod reader;
pub mod source;
pub mod stats;
pub mod usage;

pub use cache::ExpertId;
pub use reader::{ExpertRef, ExpertStore, StoreOptions};
pub use source::ExpertSource;
pub use stats::{Rank, ReadStats};
pub use usage::Usage;
