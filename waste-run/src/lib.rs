//! `waste-run`: text from a model, and what is needed to judge it: next-token distributions, perplexity, tokens.
#![forbid(unsafe_code)]

mod against;
pub mod args;
mod batch;
mod chat;
mod eval;
mod form;
mod generate;
mod images;
mod info;
mod input;
mod learn;
mod open;
mod perplexity;
mod sampling;
mod session;
mod tokens;

use waste_common::cli::{Exit, Failure, Output, Tool};
use waste_engine::kernels::Kernels;

use args::{Args, Command};

/// What the tool says about itself.
pub const TOOL: Tool = Tool {
    name: "waste-run",
    version: env!("CARGO_PKG_VERSION"),
    schema: "waste-run/1",
    examples: "  Continue a text:         waste-run k3.waste \"Once upon a time\" -n 200\n  \
               Talk with the model:     waste-run chat k3.waste --system \"Be brief.\" --max-think 400\n  \
               About a picture:         waste-run k3.waste \"The picture shows\" --image cat.png\n  \
               Many turns:              waste-run chat k3.waste --no-thinking --json < questions.txt\n  \
               Questions overnight:     waste-run batch k3.waste questions.jsonl --out answers.jsonl\n  \
               JSON and nothing else:   waste-run k3.waste \"The king's name, as JSON:\" --json-schema name.json\n  \
               From a pipeline:         waste-plan k3.waste --json | waste-run - \"hello\"\n  \
               Sample, reproducibly:    waste-run k3.waste --file prompt.txt --temp 0.8 --top-p 0.95 --seed 7\n  \
               The next token:          waste-run eval k3.waste \"The capital of France is\" --top 5\n  \
               Begin warm next time:    waste-run k3.waste \"Once upon a time\" --learn\n  \
               Over hours and crashes:  waste-run k3.waste --file prompt.txt --session s.waste-session --autosave 10\n  \
               And go on later:         waste-run k3.waste --session s.waste-session\n  \
               What 3 bits cost:        waste-run perplexity k3.waste --file text.txt --run 255 --bos\n  \
               And against the source:  waste-run perplexity k3.waste --against Kimi-K3 --file text.txt --run 255 --bos\n  \
               Count a prompt:          waste-run tokenize k3.waste --file prompt.txt --json\n  \
               What is in a container:  waste-run info k3.waste\n\n\
               Environment (empty is unset; an option wins):\n  \
               WASTE_BUDGET     as --budget\n  \
               WASTE_THREADS    as --threads\n  \
               WASTE_KERNELS    kernel set to use; --version -v lists those of this build [default: the fastest]\n  \
               WASTE_IO_DEPTH   expert reads in flight, 0 to 64 [default: 4]\n  \
               WASTE_LOOKAHEAD  experts of the next layer to read ahead, 0 to 64 [default: 6]",
    details,
};

fn details() -> Vec<(&'static str, String)> {
    let kernels =
        Kernels::from_env().map_or_else(|error| error.to_string(), |kernels| kernels.name.to_owned());
    vec![
        ("container format", "0".to_owned()),
        ("kernels", kernels),
        ("kernels in this build", Kernels::NAMES.join(", ")),
    ]
}

/// Runs the tool.
///
/// # Errors
/// Whatever the subcommand meets, with its exit code.
pub fn run(args: Args, output: &Output) -> Result<Exit, Failure> {
    match args.command {
        None => generate::run(args.run, output),
        Some(Command::Chat(args)) => {
            output.set_schema("waste-run-chat/1");
            chat::run(args, output)
        }
        Some(Command::Batch(args)) => {
            output.set_schema("waste-run-batch/1");
            batch::run(args, output)
        }
        Some(Command::Eval(args)) => {
            output.set_schema("waste-run-eval/1");
            eval::run(args, output)
        }
        Some(Command::Perplexity(args)) => {
            output.set_schema("waste-run-perplexity/1");
            perplexity::run(args, output)
        }
        Some(Command::Tokenize(args)) => {
            output.set_schema("waste-run-tokenize/1");
            tokens::tokenize(args, output)
        }
        Some(Command::Detokenize(args)) => {
            output.set_schema("waste-run-detokenize/1");
            tokens::detokenize(args, output)
        }
        Some(Command::Info(args)) => {
            output.set_schema("waste-run-info/1");
            info::run(args, output)
        }
    }
}
