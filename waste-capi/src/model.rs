//! Models: plan, open, look at, close; text to tokens and back.
#![allow(unsafe_code)] // the border: see each function

use std::ffi::c_char;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use waste_common::tensors;
use waste_engine::defaults::Defaults;
use waste_engine::experts::Usage;
use waste_engine::machine::{Machine, Reservation};
use waste_engine::open::{self, Reserved};
use waste_engine::plan::{self, MemoryPlan};
use waste_engine::tokenizer::{Tokenizer, TokenizerError};
use waste_engine::weights::Source;
use waste_engine::{Engine, EngineError, EngineOptions, open_source};

use crate::error::{Fault, Status, guard};
use crate::images::{self, Eyes};
use crate::options::{Options, Request, request};
use crate::raw;

/// What a model needs, in bytes, and what it gets.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// sizeof(waste_plan_info).
    pub size: usize,
    /// Trunk tensors that stay in memory.
    pub trunk_bytes: u64,
    /// The state of a session.
    pub state_bytes: u64,
    /// Working buffers of a session.
    pub scratch_bytes: u64,
    /// Two layers' chosen experts.
    pub min_expert_cache_bytes: u64,
    /// The sum, with vision: the least the model runs with, with one session.
    pub floor_bytes: u64,
    /// What a token reads when nothing is cached.
    pub working_set_bytes: u64,
    /// All experts.
    pub experts_bytes: u64,
    /// RAM this process may count on.
    pub usable_ram_bytes: u64,
    /// What a budget should not exceed.
    pub cap_bytes: u64,
    /// What a run may take.
    pub budget_bytes: u64,
    /// What it will really take: a budget may be more than all experts need.
    pub taken_bytes: u64,
    /// The part of the budget that caches experts.
    pub expert_cache_bytes: u64,
    /// Not 0: the budget stays within the cap.
    pub fits: u64,
    /// The vision tower, and what images take; 0 without vision.
    pub vision_bytes: u64,
}

/// What a model is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ModelInfo {
    /// sizeof(waste_model_info).
    pub size: usize,
    /// "kimi-k3" or "kimi-linear". It belongs to the library, for ever.
    pub arch: *const c_char,
    /// Layers.
    pub layers: u64,
    /// Experts of a layer.
    pub experts: u64,
    /// Experts of a token in a layer.
    pub top_k: u64,
    /// Width of the stream.
    pub hidden: u64,
    /// Logits of a token.
    pub vocab: u64,
    /// Parameters.
    pub params_total: u64,
    /// Parameters that a token uses.
    pub params_active: u64,
    /// Context length it was opened with.
    pub ctx: u64,
    /// The token that begins a text, or -1.
    pub begin_token: i64,
    /// The token that ends a text, or -1; there may be more of them.
    pub end_token: i64,
    /// The token that holds the place of a row of an image, or -1.
    pub media_token: i64,
}

/// What the expert cache has done since the model was opened.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Stats {
    /// sizeof(waste_stats).
    pub size: usize,
    /// Demands met by the cache.
    pub expert_hits: u64,
    /// Demands met by what was read ahead.
    pub expert_ahead_hits: u64,
    /// Demands that had to be read.
    pub expert_misses: u64,
    /// Records read ahead.
    pub expert_ahead_reads: u64,
    /// Records read to warm the cache.
    pub expert_warm_reads: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Nanoseconds spent waiting for reads.
    pub stall_nanos: u64,
    /// Not 0: reads go past the page cache.
    pub direct_io: u64,
}

raw::sized!(Plan, ModelInfo, Stats);

/// An opened model.
pub struct Model(pub(crate) Arc<Opened>);

/// The same, shared with its sessions.
pub struct Opened {
    /// The engine.
    pub engine: Engine,
    /// Its tokenizer, if it came with one.
    pub tokenizer: Option<Tokenizer>,
    /// Ids that end a text.
    pub stop_ids: Vec<u32>,
    /// Stops the generation that runs, or the next one.
    pub cancelled: Arc<AtomicBool>,
    /// How it takes images, if it was opened to.
    pub eyes: Option<Eyes>,
    /// SHA-256 of a container's manifest.
    manifest: Option<String>,
    _reservation: Option<Reservation>,
}

impl Opened {
    /// The tokenizer.
    ///
    /// # Errors
    /// The model came without.
    pub fn tokenizer(&self) -> Result<&Tokenizer, Fault> {
        let missing =
            || Fault::data("no_tokenizer", "the model has no tokenizer: token ids are all it knows");
        self.tokenizer.as_ref().ok_or_else(missing)
    }
}

fn open(dir: &Path, request: Request) -> Result<Opened, Fault> {
    let (source, config) = open_source(dir)?;
    let manifest = match &source {
        Source::Container(container) => Some(container.manifest_sha256().to_owned()),
        Source::Checkpoint(_) => None,
    };
    let tokenizer = match Tokenizer::open(dir) {
        Err(TokenizerError::Missing { .. }) => None,
        outcome => Some(outcome?),
    };
    let stop_ids = Defaults::read(dir, &config, tokenizer.as_ref())?.stop_ids;
    let usage = match (&request.usage, &manifest) {
        (Some(path), Some(manifest)) => Usage::load(path, manifest)?.map(Arc::new),
        (Some(_), None) => {
            return Err(Fault::usage("usage files are for containers, and this is a checkpoint"));
        }
        (None, _) => None,
    };
    let seeing = request.plan.vision && config.vision.is_some();
    let seeing = seeing.then(|| images::reader(&source, &config, request.patches)).transpose()?;
    let what = format!("libwaste_capi {}", dir.display());
    let Reserved { plan, reservation, .. } =
        open::reserve(&open::sizes(dir)?, &request.plan, &Machine::probe()?, &what)?;
    let cancelled = Arc::new(AtomicBool::new(false));
    let watch = request.progress.watch(Arc::clone(&cancelled));
    let options = EngineOptions { usage, cancelled: Arc::clone(&cancelled), watch, ..request.engine };
    let engine = Engine::open(dir, options.within(&plan))?;
    let eyes = seeing.map(|reader| Eyes::load(&engine, reader)).transpose()?;
    if cancelled.load(Ordering::Relaxed) {
        return Err(EngineError::Interrupted.into());
    }
    Ok(Opened { engine, tokenizer, stop_ids, cancelled, eyes, manifest, _reservation: reservation })
}

fn plan_info(plan: &MemoryPlan) -> Plan {
    Plan {
        size: size_of::<Plan>(),
        trunk_bytes: plan.trunk_bytes,
        state_bytes: plan.state_bytes,
        scratch_bytes: plan.scratch_bytes,
        min_expert_cache_bytes: plan.min_expert_cache_bytes,
        floor_bytes: plan.floor_bytes,
        working_set_bytes: plan.working_set_bytes,
        experts_bytes: plan.experts_bytes,
        usable_ram_bytes: plan.usable_ram_bytes,
        cap_bytes: plan.cap_bytes,
        budget_bytes: plan.budget_bytes,
        taken_bytes: plan.taken_bytes(),
        expert_cache_bytes: plan.expert_cache_bytes,
        fits: plan.fits.into(),
        vision_bytes: plan.vision_bytes,
    }
}

/// Says what the model in a directory needs on this machine. No weights are read, nothing is reserved. A budget below
/// the floor, and a floor above the usable RAM, are WASTE_STATUS_SPACE.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_plan(dir: *const c_char, options: *const Options, plan: *mut Plan) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let dir = unsafe { raw::path(dir, "the model's directory")? };
        // SAFETY: as above.
        let request = unsafe { request(options)? };
        let planned = plan::plan(&open::sizes(&dir)?, &request.plan, &Machine::probe()?)?;
        // SAFETY: as above.
        unsafe { raw::fill(plan, &plan_info(&planned), "the plan") }
    })
}

/// Opens the model in a directory, a container or a checkpoint, within its plan, and reserves what it takes, so that
/// other engines on this machine know. On success `*model` is to be ended with waste_close. With `vision`, a model that
/// has no tower is refused.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_open(
    dir: *const c_char,
    options: *const Options,
    model: *mut *mut Model,
) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        unsafe { raw::put(model, std::ptr::null_mut(), "the place for the model")? };
        // SAFETY: as above.
        let dir = unsafe { raw::path(dir, "the model's directory")? };
        // SAFETY: as above.
        let opened = open(&dir, unsafe { request(options)? })?;
        // SAFETY: as above.
        unsafe { raw::give(Model(Arc::new(opened)), model, "the place for the model") }
    })
}

/// Ends a model; NULL does nothing. Its memory goes when its last session has ended too.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_close(model: *mut Model) {
    guard(|| {
        // SAFETY: the caller's promise.
        unsafe { raw::take(model) };
        Ok(())
    });
}

/// Stops the waste_generate, waste_eval or waste_session_attach of this model that runs, at its next token, chunk or
/// layer, or else the next one. May be called from any thread and from a signal handler.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_cancel(model: *const Model) {
    // SAFETY: the caller's promise. Nothing here allocates, locks or panics.
    if let Some(model) = unsafe { model.as_ref() } {
        model.0.cancelled.store(true, Ordering::Relaxed);
    }
}

/// Says what a model is.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_info(model: *const Model, info: *mut ModelInfo) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let Opened { engine, tokenizer, stop_ids, .. } = &*unsafe { raw::handle(model, "the model")? }.0;
        let config = engine.config();
        let (params_total, params_active) = tensors::parameters(config);
        let token = |id: Option<u32>| id.map_or(-1, i64::from);
        let arch = match config.arch {
            "kimi-k3" => c"kimi-k3",
            "kimi-linear" => c"kimi-linear",
            _ => c"",
        };
        let found = ModelInfo {
            size: size_of::<ModelInfo>(),
            arch: arch.as_ptr(),
            layers: config.layers() as u64,
            experts: config.moe.as_ref().map_or(0, |moe| moe.experts as u64),
            top_k: config.moe.as_ref().map_or(0, |moe| moe.top_k as u64),
            hidden: config.hidden as u64,
            vocab: config.vocab as u64,
            params_total,
            params_active,
            ctx: engine.ctx() as u64,
            begin_token: token(tokenizer.as_ref().and_then(Tokenizer::bos)),
            end_token: token(
                tokenizer.as_ref().and_then(Tokenizer::eos).or_else(|| stop_ids.first().copied()),
            ),
            media_token: token(config.media_placeholder),
        };
        // SAFETY: as above.
        unsafe { raw::fill(info, &found, "the model's info") }
    })
}

/// Says what a model's expert cache has done.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_model_stats(model: *const Model, stats: *mut Stats) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let engine = &unsafe { raw::handle(model, "the model")? }.0.engine;
        let reads = engine.read_stats();
        let found = Stats {
            size: size_of::<Stats>(),
            expert_hits: reads.hits,
            expert_ahead_hits: reads.ahead_hits,
            expert_misses: reads.misses,
            expert_ahead_reads: reads.ahead_reads,
            expert_warm_reads: reads.warm_reads,
            bytes_read: reads.bytes_read,
            stall_nanos: reads.stall_nanos,
            direct_io: engine.direct_io().into(),
        };
        // SAFETY: as above.
        unsafe { raw::fill(stats, &found, "the stats") }
    })
}

/// Adds how often the model's experts were used since it was opened to a file, for the `usage_path` of later runs. The
/// file is written whole or not at all. Once before the end: a second call counts the first one's uses again.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_save_usage(model: *const Model, path: *const c_char) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let opened = &unsafe { raw::handle(model, "the model")? }.0;
        // SAFETY: as above.
        let path = unsafe { raw::path(path, "the path of the usage file")? };
        let Some(manifest) = &opened.manifest else {
            return Err(Fault::usage("usage files are for containers, and this is a checkpoint"));
        };
        let mut usage = Usage::load(&path, manifest)?.unwrap_or_default();
        opened.engine.learn(&mut usage);
        Ok(usage.save(&path, manifest)?)
    })
}

/// Encodes a text; all of it is plain text, and nothing in it becomes a control token. Up to `capacity` ids go to
/// `ids`, and `*count` says how many there are.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_tokenize(
    model: *const Model,
    text: *const c_char,
    length: usize,
    ids: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> Status {
    // SAFETY: the caller's promise.
    guard(|| unsafe { encode(Tokenizer::encode, model, text, length, ids, capacity, count) })
}

/// The same of markup: names of control tokens in it become those. Never for what a user wrote.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_tokenize_markup(
    model: *const Model,
    text: *const c_char,
    length: usize,
    ids: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> Status {
    // SAFETY: the caller's promise.
    guard(|| unsafe { encode(Tokenizer::encode_markup, model, text, length, ids, capacity, count) })
}

/// Encodes a text one way or the other.
///
/// # Safety
/// As [`raw::handle`], [`raw::text`] and [`raw::put_all`].
unsafe fn encode(
    encode: fn(&Tokenizer, &str) -> Vec<u32>,
    model: *const Model,
    text: *const c_char,
    length: usize,
    ids: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> Result<(), Fault> {
    // SAFETY: the caller's promise.
    let tokenizer = unsafe { raw::handle(model, "the model")? }.0.tokenizer()?;
    // SAFETY: as above.
    let tokens = encode(tokenizer, unsafe { raw::text(text, length, "the text")? });
    // SAFETY: as above.
    unsafe { raw::put_all(&tokens, ids, capacity, count) }
}

/// Decodes ids: up to `capacity` bytes go to `text`, without a zero at the end, and `*length` says how many there are.
/// Tokens may end within a character, so the bytes need not be UTF-8.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_detokenize(
    model: *const Model,
    ids: *const u32,
    count: usize,
    text: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let tokenizer = unsafe { raw::handle(model, "the model")? }.0.tokenizer()?;
        // SAFETY: as above.
        let bytes = tokenizer.decode(unsafe { raw::slice(ids, count, "the ids")? })?;
        // SAFETY: as above.
        unsafe { raw::put_all(&bytes, text.cast::<u8>(), capacity, length) }
    })
}
