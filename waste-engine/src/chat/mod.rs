//! Conversations: from messages to a prompt's token ids, and from an answer's token ids to messages.
//!
//! How a server uses it:
//!
//! 1. At start: [`ChatFormat::find`] tells which format the model speaks; an error with code `unsupported_chat_format`
//!    means that only raw completion works.
//! 2. A request's body: [`Json::from_slice`] (it keeps the text of numbers and the order of keys, which the model
//!    sees), [`read::messages`], [`read::response_format`]; the rest of [`Prompt`] from the fields of the request.
//!    `thinking` must be false where [`ChatFormat::thinks`] is. [`ChatError::param`] names the field that is wrong.
//! 3. [`ChatFormat::render`] gives the segments, [`Segments::encode`] their ids, the length of the part that a longer
//!    conversation will share ([`Encoded::conversation`]), and the order in which images are queued; [`places`] says where.
//! 4. The answer: a [`Reply`] from [`ChatFormat::reply`] takes every generated id (the stop id too) and returns what it
//!    added, as [`Delta`]s; [`Reply::end`] says when to stop, [`Reply::cut`] ends it from outside,
//!    [`Reply::finish_reason`], [`Reply::answer`] and [`Reply::counts`] are for the end. [`Reply::place`] tells a
//!    guide where the answer is.
//!    [`Guide`] keeps it to a schema or to a call. [`Turn`] does all this with a sampler: from logits to the next token,
//!    with limits on length and thinking.
//! 5. To go on in the same session without rendering anew: [`ChatFormat::closing`] gives what must follow the
//!    generated tokens; then comes the rendered next message.
//!
//! What users, clients and tools write is content, encoded without special tokens, wherever it stands; markers count
//! in an answer only as their own ids. So nobody forges structure, and nothing is escaped or filtered.

mod conversation;
mod error;
mod file;
mod format;
mod guide;
pub mod json;
pub mod read;
mod reply;
mod segment;
mod turn;
mod turns;
mod xtml;

pub use conversation::{Arguments, Call, Effort, Image, Message, Part, Prompt, ResponseFormat, ToolChoice};
pub use error::ChatError;
pub use file::CHAT_FILE;
pub use format::{ChatFormat, Choice};
pub use guide::{Demand, Guide};
pub use json::{Json, Style};
pub use reply::{Answer, AnswerCall, Delta, End, Place, Reply, TokenCounts};
pub use segment::{Encoded, Kind, Segment, Segments, places};
pub use turn::{Limits, Turn};
