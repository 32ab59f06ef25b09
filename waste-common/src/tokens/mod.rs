//! The files of a tokenizer: the ordinary tokens by rank, and the special ones after them.
//!
//! The engine encodes with them; the other tools parse them to refuse what the engine could not use.

mod ranks;
mod specials;

pub use ranks::{RANK_FILE_BYTES_MAX, RankError, Ranks};
pub use specials::{SPECIAL_TOKENS, SPECIALS_FILE_BYTES_MAX, SpecialError, Specials};
