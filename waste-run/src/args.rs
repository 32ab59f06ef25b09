//! The command line, as clap sees it.

use std::num::ParseIntError;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Parser, Subcommand};
use waste_common::cli::{CommonArgs, whole};
use waste_common::machine::CpuList;
use waste_common::plan::{Budget, KvType, PlanOptions, RamShare};
use waste_engine::Arith;
use waste_engine::chat::{Choice, Effort};

/// Run a model that is larger than RAM: the trunk stays in memory, experts are read as tokens need them.
///
/// MODEL is a container made by waste-convert, or a checkpoint directory (slow and exact).
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    /// What to do instead of writing text
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Writing text
    #[command(flatten)]
    pub run: RunArgs,
    /// Output options
    #[command(flatten)]
    pub common: CommonArgs,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Talk with the model, on a terminal or one message a line from standard input (with --json, one object an answer)
    Chat(ChatArgs),
    /// Answer a file of questions into another file, over kills and crashes: what has an answer is not asked again
    Batch(BatchArgs),
    /// Print the distribution of the next token
    Eval(EvalArgs),
    /// Measure how well the model predicts a text
    Perplexity(PerplexityArgs),
    /// Turn text into token ids
    Tokenize(TokenizeArgs),
    /// Turn token ids into text
    Detokenize(DetokenizeArgs),
    /// Say what a container or checkpoint is
    Info(InfoArgs),
}

/// Opening a model.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelArgs {
    /// RAM the run may take: auto, max (all experts if they fit), or a size [env: WASTE_BUDGET]
    #[arg(long, value_name = "SIZE", value_parser = budget, allow_negative_numbers = true, help_heading = "Memory")]
    pub budget: Option<Budget>,
    /// Share of the usable RAM that an automatic budget stays within
    #[arg(long, value_name = "N/D", help_heading = "Memory", default_value = "7/8")]
    pub ram_share: RamShare,
    /// Run even if the floor is above the usable RAM
    #[arg(long, help_heading = "Memory")]
    pub allow_swap: bool,
    /// Context length: prompt and generation together [default: 4096]
    #[arg(long, value_name = "TOKENS", value_parser = ctx, allow_negative_numbers = true, help_heading = "Memory")]
    pub ctx: Option<usize>,
    /// How the latent KV cache is kept [default: f16]
    #[arg(long, value_name = "TYPE", help_heading = "Memory")]
    pub kv: Option<KvType>,
    /// Tokens of a prompt that go through the model together [default: 256]
    #[arg(long, value_name = "TOKENS", value_parser = chunk, allow_negative_numbers = true, help_heading = "Memory")]
    pub prefill_chunk: Option<usize>,
    /// Take budget, context and KV type from the JSON of waste-plan
    #[arg(long, value_name = "FILE", help_heading = "Memory")]
    pub plan: Option<PathBuf>,
    /// Compute threads [default: one a CPU] [env: WASTE_THREADS]
    #[arg(long, value_name = "N", value_parser = threads, allow_negative_numbers = true, help_heading = "Compute and I/O")]
    pub threads: Option<usize>,
    /// Bind the compute threads to these CPUs, such as 0-2,6-8 (Linux)
    #[arg(long, value_name = "LIST", help_heading = "Compute and I/O")]
    pub cpus: Option<CpuList>,
    /// The arithmetic of decoding: exact (f32 tables and products) or fast (whole numbers)
    #[arg(long, value_name = "KIND", default_value = "fast", help_heading = "Compute and I/O")]
    pub arith: Arith,
    /// Check the checksum of every expert record as it is read (containers)
    #[arg(long, help_heading = "Compute and I/O")]
    pub verify: bool,
    /// Learn which experts the run uses, so that later runs begin with them (containers)
    #[arg(long, help_heading = "Compute and I/O")]
    pub learn: bool,
    /// Where that is kept [default: usage.waste in the container]
    #[arg(long, value_name = "FILE", help_heading = "Compute and I/O")]
    pub usage: Option<PathBuf>,
    /// Read experts through the page cache
    #[arg(long, help_heading = "Compute and I/O")]
    pub no_direct_io: bool,
}

/// Where a text comes from.
#[derive(Clone, Debug, clap::Args)]
pub struct TextArgs {
    /// The text; `-` reads it from standard input, as leaving it out does unless that is a terminal
    #[arg(value_name = "TEXT", conflicts_with = "file", allow_hyphen_values = false)]
    pub text: Option<String>,
    /// Read the text from a file, exactly as it is
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
}

/// Writing text.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// A container, a checkpoint directory, or `-` for the JSON of the previous tool
    #[arg(value_name = "MODEL", required = true)]
    pub model: Option<PathBuf>,
    /// The prompt; `-` reads it from standard input, as leaving it out does unless that is a terminal
    #[arg(value_name = "PROMPT", conflicts_with = "file")]
    pub prompt: Option<String>,
    /// Read the prompt from a file, exactly as it is
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Go on from these token ids, exactly as given, instead of a text; without a tokenizer ids are written too
    #[arg(long, value_name = "1,2,3", allow_negative_numbers = true, conflicts_with_all = ["prompt", "file"], value_parser = id_list)]
    pub ids: Option<IdList>,
    /// Continue the text as it stands, without a chat format, as is done without `chat` anyway
    #[arg(long)]
    pub raw: bool,
    /// Do not put [BOS] before the text
    #[arg(long)]
    pub no_bos: bool,
    /// Most tokens to write [default: 128, or with --session what an interrupted answer lacks]
    #[arg(short = 'n', long = "tokens", value_name = "N", value_parser = number::<usize>, allow_negative_numbers = true, help_heading = "Sampling")]
    pub tokens: Option<usize>,
    /// Go on from the state in this file, if there is one, and leave the new state there: at the end, and on Ctrl-C. An
    /// interrupted answer goes on with the sampling options it was begun with, where none are given
    #[arg(long, value_name = "FILE", help_heading = "Sessions")]
    pub session: Option<PathBuf>,
    /// Also save it while writing, every so many minutes (0.5 is half a minute; 0 after each token)
    #[arg(long, value_name = "MINUTES", requires = "session", value_parser = minutes, allow_negative_numbers = true, help_heading = "Sessions")]
    pub autosave: Option<Duration>,
    /// Form
    #[command(flatten)]
    pub form: FormArgs,
    /// Images
    #[command(flatten)]
    pub images: ImageArgs,
    /// Sampling
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Opening the model
    #[command(flatten)]
    pub open: ModelArgs,
}

/// Images.
#[derive(Clone, Debug, clap::Args)]
pub struct ImageArgs {
    /// Put an image before the text: PNG, JPEG, GIF, BMP, TGA, WebP, PSD (repeatable, at most 16)
    #[arg(long = "image", value_name = "FILE", help_heading = "Images")]
    pub images: Vec<PathBuf>,
    /// Patches of 14 x 14 pixels an image is shrunk to; four of them take one token [default: 1024]
    #[arg(long, value_name = "N", value_parser = patches, allow_negative_numbers = true, help_heading = "Images")]
    pub max_patches: Option<usize>,
}

/// What a text or an answer has to be; thinking is free.
#[derive(Clone, Debug, clap::Args)]
pub struct FormArgs {
    /// Write JSON that this schema describes, and nothing else
    #[arg(long, value_name = "FILE", help_heading = "Sampling")]
    pub json_schema: Option<PathBuf>,
    /// Write text that this grammar describes (Lark's syntax, from `start`), and nothing else
    #[arg(long, value_name = "FILE", conflicts_with = "json_schema", help_heading = "Sampling")]
    pub grammar: Option<PathBuf>,
}

/// How tokens are chosen.
#[derive(Clone, Debug, clap::Args)]
pub struct SamplingArgs {
    /// Temperature; 0 always takes the most likely token [default: 0]
    #[arg(long, value_name = "T", allow_negative_numbers = true, help_heading = "Sampling")]
    pub temp: Option<f64>,
    /// Sample among the most likely tokens that make up this probability [default: 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    pub top_p: Option<f64>,
    /// Sample among this many most likely tokens; 0 for all [default: 0]
    #[arg(long, value_name = "K", value_parser = number::<u32>, allow_negative_numbers = true, help_heading = "Sampling")]
    pub top_k: Option<u32>,
    /// Drop tokens less likely than this share of the most likely one [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    pub min_p: Option<f64>,
    /// Lower the logits of tokens that were written already [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Sampling")]
    pub presence_penalty: Option<f64>,
    /// Lower the logits of tokens for each time they were written [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Sampling")]
    pub frequency_penalty: Option<f64>,
    /// Seed of the random numbers; the same seed gives the same text [default: from the system]
    #[arg(long, value_name = "N", value_parser = number::<u64>, allow_negative_numbers = true, help_heading = "Sampling")]
    pub seed: Option<u64>,
    /// End the text before this string (repeatable)
    #[arg(long, value_name = "STRING", help_heading = "Sampling")]
    pub stop: Vec<String>,
    /// Allow tokens that have no place in a text, such as [PAD] and reserved ids
    #[arg(long, help_heading = "Sampling")]
    pub no_mask: bool,
}

/// A conversation.
#[derive(Debug, clap::Args)]
pub struct ChatArgs {
    /// A container or a checkpoint directory
    pub model: PathBuf,
    /// What the model is told before the first message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// How much the model is to think: none, low, high or max [default: low]
    #[arg(long, value_name = "LEVEL")]
    pub effort: Option<EffortArg>,
    /// Answer without thinking; as --effort none
    #[arg(long, conflicts_with = "effort")]
    pub no_thinking: bool,
    /// Most tokens of thinking; then the answer must begin
    #[arg(long, value_name = "N", value_parser = number::<usize>, allow_negative_numbers = true)]
    pub max_think: Option<usize>,
    /// No chat format: the model continues the messages as they stand
    #[arg(long, conflicts_with_all = ["effort", "no_thinking", "max_think", "chat_format"])]
    pub raw: bool,
    /// Where the chat format comes from: auto (the tokenizer's markers, then chat.json) or file (chat.json)
    #[arg(long, value_name = "KIND", default_value = "auto")]
    pub chat_format: Choice,
    /// Keep no history of what is typed
    #[arg(long)]
    pub no_history: bool,
    /// Accept images later, with /image, if none is given now: takes more memory
    #[arg(long, help_heading = "Images")]
    pub vision: bool,
    /// Images
    #[command(flatten)]
    pub images: ImageArgs,
    /// Most tokens of an answer, its thinking included [default: as the context allows]
    #[arg(short = 'n', long = "tokens", value_name = "N", value_parser = number::<usize>, allow_negative_numbers = true, help_heading = "Sampling")]
    pub tokens: Option<usize>,
    /// Form
    #[command(flatten)]
    pub form: FormArgs,
    /// Sampling
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Opening the model
    #[command(flatten)]
    pub open: ModelArgs,
}

/// A queue of questions.
#[derive(Debug, clap::Args)]
pub struct BatchArgs {
    /// A container or a checkpoint directory
    pub model: PathBuf,
    /// The questions, a JSON object a line: `id`, and `messages` (as the OpenAI API has them) or `prompt`; `max_tokens`,
    /// `effort`, `temperature`, `seed`, `response_format` and the like take the place of the options
    #[arg(value_name = "IN.jsonl")]
    pub input: PathBuf,
    /// Where answers go, a line each, as soon as they are complete; those that are there are kept
    #[arg(long, value_name = "OUT.jsonl")]
    pub out: PathBuf,
    /// Questions that are answered at a time, together: each answer is the one it would be alone, and takes a context's
    /// memory; lines come in the order in which answers are complete
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parallel, allow_negative_numbers = true)]
    pub parallel: usize,
    /// How much the model is to think: none, low, high or max [default: low]
    #[arg(long, value_name = "LEVEL")]
    pub effort: Option<EffortArg>,
    /// Where the chat format comes from: auto (the tokenizer's markers, then chat.json) or file (chat.json)
    #[arg(long, value_name = "KIND", default_value = "auto")]
    pub chat_format: Choice,
    /// Most tokens of an answer, its thinking included [default: as the context allows]
    #[arg(short = 'n', long = "tokens", value_name = "N", value_parser = number::<usize>, allow_negative_numbers = true, help_heading = "Sampling")]
    pub tokens: Option<usize>,
    /// Form
    #[command(flatten)]
    pub form: FormArgs,
    /// Sampling
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Opening the model
    #[command(flatten)]
    pub open: ModelArgs,
}

/// The distribution of the next token.
#[derive(Debug, clap::Args)]
pub struct EvalArgs {
    /// A container, a checkpoint directory, or `-` for the JSON of the previous tool
    pub model: PathBuf,
    /// The text
    #[command(flatten)]
    pub text: TextArgs,
    /// Token ids, exactly as given, instead of a text
    #[arg(long, value_name = "1,2,3", allow_negative_numbers = true, conflicts_with_all = ["text", "file"], value_parser = id_list)]
    pub ids: Option<IdList>,
    /// Do not put [BOS] before the text
    #[arg(long)]
    pub no_bos: bool,
    /// Tokens to list
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = number::<usize>, allow_negative_numbers = true)]
    pub top: usize,
    /// Write `logits` [positions, vocabulary] and `ids` [positions] to a safetensors file
    #[arg(long, value_name = "FILE")]
    pub save_logits: Option<PathBuf>,
    /// Images
    #[command(flatten)]
    pub images: ImageArgs,
    /// Opening the model
    #[command(flatten)]
    pub open: ModelArgs,
}

/// How well the model predicts a text.
#[derive(Debug, clap::Args)]
pub struct PerplexityArgs {
    /// A container, a checkpoint directory, or `-` for the JSON of the previous tool
    pub model: PathBuf,
    /// The text
    #[arg(long, value_name = "FILE")]
    pub file: PathBuf,
    /// Cut the text into runs of this many tokens, each from an empty state [default: as the context allows]
    #[arg(long, value_name = "TOKENS", value_parser = number::<usize>, allow_negative_numbers = true)]
    pub run: Option<usize>,
    /// Put [BOS] before each run, so that its first token is predicted too
    #[arg(long)]
    pub bos: bool,
    /// Also measure how far the predictions are from those of another model, such as the checkpoint of the container,
    /// computed in exact arithmetic with an f32 KV cache
    #[arg(long, value_name = "MODEL")]
    pub against: Option<PathBuf>,
    /// Write what each routed expert was given, for waste-convert --importance: the mean square of each input column.
    /// Takes memory beyond the budget, 4 bytes for each column of each expert (2.2 GiB for K3)
    #[arg(long, value_name = "FILE")]
    pub save_importance: Option<PathBuf>,
    /// Opening the model
    #[command(flatten)]
    pub open: ModelArgs,
}

/// Text to tokens.
#[derive(Debug, clap::Args)]
pub struct TokenizeArgs {
    /// A directory with a tokenizer, or `-` for the JSON of the previous tool
    pub model: PathBuf,
    /// The text
    #[command(flatten)]
    pub text: TextArgs,
    /// Recognise special tokens such as <|open|>
    #[arg(long)]
    pub markup: bool,
}

/// Tokens to text.
#[derive(Debug, clap::Args)]
pub struct DetokenizeArgs {
    /// A directory with a tokenizer, or `-` for the JSON of the previous tool
    pub model: PathBuf,
    /// Token ids; without it they are read from standard input
    #[arg(long, value_name = "1,2,3", allow_negative_numbers = true, value_parser = id_list)]
    pub ids: Option<IdList>,
}

/// What a model is.
#[derive(Debug, clap::Args)]
pub struct InfoArgs {
    /// A container, a checkpoint directory, or `-` for the JSON of the previous tool
    pub model: PathBuf,
}

/// How much to think; `None` for not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EffortArg(pub Option<Effort>);

impl FromStr for EffortArg {
    type Err = String;

    fn from_str(text: &str) -> Result<EffortArg, String> {
        match text {
            "none" => Ok(EffortArg(None)),
            level => level
                .parse()
                .map(|effort| EffortArg(Some(effort)))
                .map_err(|_| "expected none, low, high or max".to_owned()),
        }
    }
}

/// A list of token ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdList(pub Vec<u32>);

/// A whole number; the message of the standard library would only say that a digit is invalid.
fn number<N: FromStr>(text: &str) -> Result<N, String> {
    let bits = 8 * size_of::<N>();
    text.parse().map_err(|_| format!("expected a whole number from 0 to 2^{bits} - 1"))
}

/// A number of threads.
pub fn threads(text: &str) -> Result<usize, String> {
    whole(text, 1, PlanOptions::THREADS_MAX)
}

fn ctx(text: &str) -> Result<usize, String> {
    whole(text, 1, PlanOptions::CTX_MAX)
}

fn parallel(text: &str) -> Result<usize, String> {
    whole(text, 1, PlanOptions::PARALLEL_MAX)
}

fn chunk(text: &str) -> Result<usize, String> {
    whole(text, 1, PlanOptions::CHUNK_MAX)
}

/// What [`waste_common::plan`] has memory for.
fn patches(text: &str) -> Result<usize, String> {
    whole(text, 4, waste_engine::vision::PATCHES_DEFAULT)
}

fn budget(text: &str) -> Result<Budget, String> {
    text.parse()
}

/// A time in minutes, at most a year.
fn minutes(text: &str) -> Result<Duration, String> {
    let minutes = text.parse().ok().filter(|minutes| (0.0..=525_600.0).contains(minutes));
    let minutes: f64 =
        minutes.ok_or_else(|| "expected minutes from 0 to 525600, such as 10 or 0.5".to_owned())?;
    Ok(Duration::from_secs_f64(60.0 * minutes))
}

/// Token ids, separated by commas or white space.
pub fn id_list(text: &str) -> Result<IdList, String> {
    let ids: Result<Vec<u32>, ParseIntError> = text
        .split(|c: char| c == ',' || c.is_whitespace())
        .filter(|id| !id.is_empty())
        .map(str::parse)
        .collect();
    match ids {
        Ok(ids) => Ok(IdList(ids)),
        Err(error) => Err(format!("expected token ids such as 1,2,3: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn lists_are_strict() {
        assert_eq!(id_list("1, 2\n3"), Ok(IdList(vec![1, 2, 3])));
        for wrong in ["x", "1,-2", "1.5", "4294967296"] {
            assert!(id_list(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_prompt_may_be_called_like_a_subcommand() {
        let args = Args::parse_from(["waste-run", "model", "eval"]);
        assert_eq!(args.run.prompt.unwrap(), "eval");
        let args = Args::parse_from(["waste-run", "eval", "model", "text"]);
        assert!(matches!(args.command, Some(Command::Eval(_))));
    }
}
