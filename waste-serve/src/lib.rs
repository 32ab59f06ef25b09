//! `waste-serve`: a model over HTTP, as clients of the OpenAI API expect it.
//!
//! [`app`] is the whole server without a socket: requests are checked, rendered and tokenized where they come in
//! ([`request`], [`images`]), wait in one line ([`queue`]), and are answered, so many at a time, by the thread that owns the model
//! ([`worker`], [`writing`]); what it says is written as JSON or as events ([`answer`], [`wire`]).
#![forbid(unsafe_code)]

pub mod access;
mod answer;
mod app;
pub mod args;
pub mod error;
mod fields;
pub mod images;
pub mod job;
mod listen;
pub mod metrics;
pub mod model;
mod open;
mod page;
pub mod queue;
pub mod request;
mod run;
pub mod service;
mod wire;
pub mod worker;
pub mod writing;

pub use app::app;
pub use run::run;
pub use service::{Facts, Service, Settings};

use waste_common::cli::Tool;

/// What the tool says about itself.
pub const TOOL: Tool = Tool {
    name: "waste-serve",
    version: env!("CARGO_PKG_VERSION"),
    schema: "waste-serve/1",
    examples: "  Serve this machine:      waste-serve k3.waste\n  \
               Ask it something:        curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n                           \
               -d '{\"model\":\"k3\",\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'\n  \
               Serve others, with keys: waste-serve k3.waste --host 0.0.0.0 --api-key-file keys.txt\n  \
               Four at a time:          waste-serve k3.waste --parallel 4\n  \
               With images:             waste-serve k3.waste --vision\n  \
               From a pipeline:         waste-plan k3.waste --json | waste-serve -\n\n\
               Environment (empty is unset; an option wins):\n  \
               WASTE_BUDGET     as --budget\n  \
               WASTE_THREADS    as --threads\n  \
               WASTE_IO_DEPTH   expert reads in flight, 0 to 64 [default: 4]\n  \
               WASTE_LOOKAHEAD  experts of the next layer to read ahead, 0 to 64 [default: 6]\n  \
               WASTE_API_KEY    keys, one a line",
    details: Vec::new,
};
