//! The command line, as clap sees it.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use waste_common::cli::{ByteSize, CommonArgs, whole};
use waste_common::machine::CpuList;
use waste_common::plan::{Budget, KvType, PlanOptions};
use waste_engine::Arith;
use waste_engine::vision::PATCHES_DEFAULT;

/// Serve a model over HTTP, as clients of the OpenAI API expect it.
///
/// MODEL is a container made by waste-convert, or a checkpoint directory (slow and exact).
#[derive(Clone, Debug, Parser)]
pub struct Args {
    /// A container, a checkpoint directory, or `-` for the JSON of the previous tool
    pub model: PathBuf,
    /// The address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = "Network")]
    pub host: String,
    /// The port; 0 for any, which is printed
    #[arg(long, value_name = "PORT", default_value_t = 8000, help_heading = "Network")]
    pub port: u16,
    /// Listen on a socket in the file system instead (not on Windows)
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "port"], help_heading = "Network")]
    pub unix: Option<PathBuf>,
    /// Listen beyond this machine without a key
    #[arg(long, help_heading = "Network")]
    pub insecure: bool,
    /// A file with API keys, one a line [env: WASTE_API_KEY]
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    pub api_key_file: Option<PathBuf>,
    /// An API key; every user of this machine can see it in the list of processes
    #[arg(long, value_name = "KEY", help_heading = "Network")]
    pub api_key: Vec<String>,
    /// A further name for this server in `Host` (repeatable)
    #[arg(long, value_name = "NAME", help_heading = "Network")]
    pub allowed_host: Vec<String>,
    /// Web pages of this origin may call (repeatable; `*` for all, with a key)
    #[arg(long, value_name = "ORIGIN", help_heading = "Network")]
    pub cors_origin: Vec<String>,
    /// /metrics needs no key
    #[arg(long, help_heading = "Network")]
    pub metrics_open: bool,
    /// No web page at /
    #[arg(long, help_heading = "Network")]
    pub no_ui: bool,
    /// Longest body
    #[arg(long, value_name = "SIZE", default_value = "64MiB", help_heading = "Network")]
    pub max_body: ByteSize,
    /// The model's name to clients [default: the directory's, without its ending]
    #[arg(long, value_name = "NAME", help_heading = "Answers")]
    pub model_id: Option<String>,
    /// Answer requests for any other model too
    #[arg(long, help_heading = "Answers")]
    pub any_model: bool,
    /// Most tokens of an answer, if the request does not say
    #[arg(long, value_name = "N", default_value_t = 4096, help_heading = "Answers")]
    pub max_tokens: usize,
    /// How much the model thinks, if the request does not say: none, low, high or max
    #[arg(long, value_name = "EFFORT", default_value = "low", value_parser = ["none", "low", "high", "max"], help_heading = "Answers")]
    pub effort: String,
    /// The same as --effort none
    #[arg(long, help_heading = "Answers")]
    pub no_thinking: bool,
    /// Refuse efforts that the model does not know, such as medium
    #[arg(long, help_heading = "Answers")]
    pub strict_effort: bool,
    /// Special tokens in prompts of /v1/completions are special
    #[arg(long, help_heading = "Answers")]
    pub completions_markup: bool,
    /// Leave out what only this server's answers have
    #[arg(long, help_heading = "Answers")]
    pub no_extra: bool,
    /// Write what is asked into the log
    #[arg(long, help_heading = "Answers")]
    pub log_content: bool,
    /// Take images: loads the vision tower, and plans the memory for it
    #[arg(long, help_heading = "Images")]
    pub vision: bool,
    /// Patches of 14 x 14 pixels an image is shrunk to; four of them take one token [default: 1024]
    #[arg(long, value_name = "N", value_parser = patches, help_heading = "Images")]
    pub max_patches: Option<usize>,
    /// Let requests name image files in this directory and below, as file:// URLs (repeatable). Regular files alone, and no
    /// links that lead out of it
    #[arg(long, value_name = "DIR", help_heading = "Images")]
    pub allow_image_dir: Vec<PathBuf>,
    /// Answers that are written at a time, together: each is the one it would be alone, and takes a context's memory
    /// [default: 1]
    #[arg(long, value_name = "N", value_parser = parallel, help_heading = "Queue")]
    pub parallel: Option<usize>,
    /// Send white space every 15 s while a whole answer (no stream) is waited for, so that nothing on the way takes the
    /// connection for dead; what goes wrong then comes with status 200
    #[arg(long, help_heading = "Queue")]
    pub blocking_keepalive: bool,
    /// Requests that may wait beside them
    #[arg(long, value_name = "N", default_value_t = 8, help_heading = "Queue")]
    pub queue: usize,
    /// How long one may, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1800", value_parser = seconds, help_heading = "Queue")]
    pub queue_timeout: Duration,
    /// How long the running requests have when the server ends, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds, help_heading = "Queue")]
    pub drain_timeout: Duration,
    /// Conversations whose states are kept, so that their next turn begins where the last one ended [default: 2, or as
    /// many as --parallel]
    #[arg(long, value_name = "N", help_heading = "Queue")]
    pub reuse_slots: Option<usize>,
    /// Memory for that, within the budget [default: what they take, up to a sixteenth of the usable RAM]
    #[arg(long, value_name = "SIZE", help_heading = "Queue")]
    pub reuse_bytes: Option<ByteSize>,
    /// Keep none
    #[arg(long, help_heading = "Queue")]
    pub no_reuse: bool,
    /// RAM the server may take: auto, max, or a size [env: WASTE_BUDGET]
    #[arg(long, value_name = "SIZE", help_heading = "Memory")]
    pub budget: Option<Budget>,
    /// Context length: prompt and answer together [default: 4096]
    #[arg(long, value_name = "TOKENS", help_heading = "Memory")]
    pub ctx: Option<usize>,
    /// Take budget, context, KV type, --parallel and --vision from the JSON of waste-plan
    #[arg(long, value_name = "FILE", help_heading = "Memory")]
    pub plan: Option<PathBuf>,
    /// How the latent KV cache is kept [default: f16]
    #[arg(long, value_name = "TYPE", help_heading = "Memory")]
    pub kv: Option<KvType>,
    /// Tokens of a prompt that go through the model together [default: 256]
    #[arg(long, value_name = "TOKENS", help_heading = "Memory")]
    pub prefill_chunk: Option<usize>,
    /// Compute threads [default: one a CPU] [env: WASTE_THREADS]
    #[arg(long, value_name = "N", help_heading = "Compute and I/O")]
    pub threads: Option<usize>,
    /// Bind the compute threads to these CPUs, such as 0-2,6-8 (Linux)
    #[arg(long, value_name = "LIST", help_heading = "Compute and I/O")]
    pub cpus: Option<CpuList>,
    /// The arithmetic of decoding: exact (f32 tables and products) or fast (whole numbers)
    #[arg(long, value_name = "KIND", default_value = "fast", help_heading = "Compute and I/O")]
    pub arith: Arith,
    /// Check the checksum of every expert record as it is read
    #[arg(long, help_heading = "Compute and I/O")]
    pub verify: bool,
    /// Leave what is learned of the experts to later runs (containers)
    #[arg(long, help_heading = "Compute and I/O")]
    pub learn: bool,
    /// Read experts through the page cache
    #[arg(long, help_heading = "Compute and I/O")]
    pub no_direct_io: bool,
    /// Answer from a script in place of the model, whose tokenizer is all that is read: for tests
    #[arg(long, value_name = "FILE", hide = true)]
    pub script: Option<PathBuf>,
    /// Output options
    #[command(flatten)]
    pub common: CommonArgs,
}

/// A number of answers at a time.
fn parallel(text: &str) -> Result<usize, String> {
    whole(text, 1, PlanOptions::PARALLEL_MAX)
}

/// Patches of an image, as many as the memory is planned for.
fn patches(text: &str) -> Result<usize, String> {
    whole(text, 4, PATCHES_DEFAULT)
}

/// A time in seconds, at most a year.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.parse().ok().filter(|seconds| (0.0..=31_536_000.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "expected seconds from 0 to 31536000".to_owned())
}
