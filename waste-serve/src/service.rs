//! What all requests share.

use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::Semaphore;
use waste_common::cli::Failure;
use waste_engine::chat::{ChatError, ChatFormat, Effort};
use waste_engine::grammar::{GrammarError, Grammars};
use waste_engine::sampler::SamplerOptions;
use waste_engine::tokenizer::Tokenizer;

use crate::access::Access;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::images::Images;
use crate::metrics::Metrics;
use crate::queue::Queue;
use crate::worker::{Open, Worker};
use crate::writing::Kit;

/// Bodies read at a time.
pub const READERS: usize = 2;

/// What can be set.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model's name to clients.
    pub model_id: String,
    /// Whether other names are accepted too.
    pub any_model: bool,
    /// Most tokens of an answer, if the request says nothing.
    pub max_tokens: usize,
    /// How much the model thinks, if the request says nothing; `None` not at all.
    pub effort: Option<Effort>,
    /// Whether efforts that the model does not know are refused.
    pub strict_effort: bool,
    /// How tokens are chosen, if the request says nothing.
    pub sampler: SamplerOptions,
    /// Whether prompts of completions may hold special tokens.
    pub completions_markup: bool,
    /// Whether answers carry `waste`.
    pub extra: bool,
    /// Answers that are written at a time.
    pub parallel: usize,
    /// Jobs that may wait.
    pub queue: usize,
    /// How long.
    pub queue_timeout: std::time::Duration,
    /// Longest body.
    pub max_body: usize,
    /// How often something is sent while a whole answer is waited for; `None` for never.
    pub blocking_keepalive: Option<std::time::Duration>,
    /// Whether contents are logged.
    pub log_content: bool,
    /// Whether there is a web page.
    pub ui: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            model_id: "model".to_owned(),
            any_model: false,
            max_tokens: 4096,
            effort: Some(Effort::Low),
            strict_effort: false,
            sampler: SamplerOptions { temperature: 1.0, top_p: 0.95, ..SamplerOptions::default() },
            completions_markup: false,
            extra: true,
            parallel: 1,
            queue: 8,
            queue_timeout: std::time::Duration::from_secs(1800),
            max_body: 64 << 20,
            blocking_keepalive: None,
            log_content: false,
            ui: true,
        }
    }
}

/// What is known of the model before it is loaded.
pub struct Facts {
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat format, if it has one.
    pub format: Result<ChatFormat, ChatError>,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Context length.
    pub ctx: usize,
    /// Ids that end a text.
    pub stop_ids: Vec<u32>,
    /// Which model it is; its beginning is shown to clients.
    pub fingerprint: String,
    /// RAM it may take, if it is an engine's.
    pub budget_bytes: Option<u64>,
    /// How images come in, if they do.
    pub images: Option<Images>,
}

/// Everything requests share. The worker has the model.
pub struct Service {
    /// What can be set.
    pub settings: Settings,
    /// Who may come in.
    pub access: Access,
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    format: Result<ChatFormat, ApiError>,
    /// Made when first asked for: it takes about a second.
    grammars: OnceLock<Result<Grammars, GrammarError>>,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Context length.
    pub ctx: usize,
    /// Ids that end a text.
    pub stop_ids: Vec<u32>,
    /// RAM the model may take.
    pub budget_bytes: Option<u64>,
    /// How images come in, if they do.
    pub images: Option<Images>,
    /// The line.
    pub queue: Arc<Queue>,
    /// Room for bodies, in KiB: two of the longest.
    pub bodies: Arc<Semaphore>,
    /// Bodies that are read as JSON at a time, which takes many times their memory.
    pub readers: Arc<Semaphore>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// `system_fingerprint`.
    pub fingerprint: String,
    /// Seconds since 1970 at the start.
    pub created: u64,
    /// When it started.
    pub started: Instant,
    /// Told of each request, and of what clients are not told.
    pub log: Arc<dyn Fn(&str) + Send + Sync>,
}

/// The worker's thread; it ends with the service's line.
pub type Working = JoinHandle<Result<(), Failure>>;

impl Service {
    /// Starts a service: the worker opens the model, meanwhile requests are told that it is being loaded.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        facts: Facts,
        settings: Settings,
        access: Access,
        log: Arc<dyn Fn(&str) + Send + Sync>,
        mut open: Box<Open>,
    ) -> Result<(Arc<Service>, Working), Failure> {
        let Facts { tokenizer, format, vocab, ctx, stop_ids, fingerprint, budget_bytes, images } = facts;
        let tokenizer = Arc::new(tokenizer);
        let mask = tokenizer.text_mask(vocab);
        let closed_mask = tokenizer.special_id("<|open|>").map(|open| {
            let mut mask = mask.clone();
            mask.ban(open);
            mask
        });
        let queue = Arc::new(Queue::new(settings.queue, settings.parallel));
        let metrics = Arc::new(Metrics::default());
        let kit = Kit {
            tokenizer: Arc::clone(&tokenizer),
            mask,
            closed_mask,
            metrics: Arc::clone(&metrics),
            log: Arc::clone(&log),
        };
        let worker = Worker { queue: Arc::clone(&queue), kit, parallel: settings.parallel };
        let working =
            std::thread::Builder::new().name("model".to_owned()).spawn(move || worker.run(&mut *open));
        let working = working
            .map_err(|error| Failure::internal(format!("cannot start the worker's thread: {error}")))?;
        let version = env!("CARGO_PKG_VERSION");
        let short: String = fingerprint.chars().take(8).collect();
        let room = settings.max_body.div_ceil(1024).saturating_mul(2).min(Semaphore::MAX_PERMITS);
        let service = Service {
            bodies: Arc::new(Semaphore::new(room)),
            readers: Arc::new(Semaphore::new(READERS)),
            settings,
            access,
            tokenizer,
            format: format.map_err(ApiError::from),
            grammars: OnceLock::new(),
            vocab,
            ctx,
            stop_ids,
            budget_bytes,
            images,
            queue,
            metrics,
            fingerprint: format!("waste-{version}-{short}"),
            created: unix_seconds(),
            started: Instant::now(),
            log,
        };
        Ok((Arc::new(service), working))
    }

    /// The chat format.
    ///
    /// # Errors
    /// The model has none.
    pub fn format(&self) -> Result<&ChatFormat, ApiError> {
        self.format.as_ref().map_err(Clone::clone)
    }

    /// What keeps texts to grammars.
    ///
    /// # Errors
    /// The model's vocabulary cannot be used for that.
    pub fn grammars(&self) -> Result<&Grammars, ApiError> {
        let grammars = self.grammars.get_or_init(|| Grammars::new(&self.tokenizer, self.vocab));
        grammars.as_ref().map_err(|error| ApiError::unsupported("response_format", error.to_string()))
    }

    /// Refuses requests for another model.
    ///
    /// # Errors
    /// The name is missing, or another one.
    pub fn check_model(&self, fields: Fields<'_>) -> Result<(), ApiError> {
        let Some(name) = fields.text("model")? else {
            return Err(ApiError::bad("missing_field", "model", "the field model is needed"));
        };
        if name == self.settings.model_id || self.settings.any_model {
            return Ok(());
        }
        Err(self.no_such_model(name))
    }

    /// 404 for a model's name.
    pub fn no_such_model(&self, name: &str) -> ApiError {
        let message = format!("there is no model {name:?} here, only {:?}", self.settings.model_id);
        let error = ApiError::bad("model_not_found", "model", message);
        ApiError { status: axum::http::StatusCode::NOT_FOUND, ..error }
    }

    /// Most tokens of an answer to a prompt of this length.
    ///
    /// # Errors
    /// There is no room for any.
    pub fn room(&self, param: &str, prompt: usize, limit: Option<i64>) -> Result<usize, ApiError> {
        let room = self.ctx.saturating_sub(prompt);
        if room == 0 {
            let message = format!(
                "the prompt has {prompt} tokens, and the context length is {}: there is no room for an answer",
                self.ctx
            );
            return Err(ApiError::bad("context_length_exceeded", param, message));
        }
        let limit =
            limit.map_or(self.settings.max_tokens, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        Ok(limit.clamp(1, room))
    }
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
