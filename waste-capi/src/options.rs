//! How a model is planned and opened.
#![allow(unsafe_code)] // the border: see each function

use std::ffi::{c_char, c_void};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use waste_common::io::Bypass;
use waste_engine::plan::{Budget, KvType, PlanOptions};
use waste_engine::{Arith, EngineOptions, Event, Watch};

use crate::error::Fault;
use crate::raw;

/// How the latents of a cached token are kept.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum Kv {
    /// f16.
    Default = 0,
    /// Four bytes a number.
    F32 = 1,
    /// Two bytes a number.
    F16 = 2,
    /// A byte a number.
    Q8 = 3,
}

/// The arithmetic of decoding.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum Arithmetic {
    /// 16-bit whole numbers, summed exactly.
    Fast = 0,
    /// f32 throughout.
    Exact = 1,
}

/// How a model is planned and opened.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// sizeof(waste_options).
    pub size: usize,
    /// The RAM the model may take; 0 for its floor and up to three working sets of expert cache.
    pub budget_bytes: u64,
    /// Context length, prompt and answer together; 0 for 4096.
    pub ctx: u64,
    /// Compute threads; 0 for one a CPU.
    pub threads: u64,
    /// CPUs to bind them to (Linux), `cpu_count` of them, or NULL.
    pub cpus: *const u64,
    /// How many they are; then also the number of threads, unless that is given.
    pub cpu_count: usize,
    /// Tokens of a prompt that go through the model together; 0 for 256.
    pub prefill_chunk: u64,
    /// What earlier runs have learned of the model's experts (see waste_save_usage): a file to warm the cache with, or
    /// NULL. One that is not there is no error.
    pub usage_path: *const c_char,
    /// A waste_kv.
    pub kv: u32,
    /// A waste_arith.
    pub arith: u32,
    /// Not 0: read experts through the page cache.
    pub buffered_reads: u32,
    /// Not 0: check the checksum of every record that is read.
    pub verify: u32,
    /// Not 0: open even where the floor is above the usable RAM.
    pub allow_swap: u32,
    /// Not 0: load the model's vision tower and count it, so that sessions take images.
    pub vision: u32,
    /// Patches that an image is shrunk to, at least 4; a quarter of them are positions. 0 for what the model says, at
    /// most 1024.
    pub max_patches: u64,
    /// Told by waste_open how far it is, or NULL.
    pub on_load: OnLoad,
    /// What it is called with.
    pub user: *mut c_void,
}

/// Told how far waste_open is: `bytes` of `of` that stay in memory are loaded. What it returns stops it if it is not 0:
/// it ends with WASTE_STATUS_INTERRUPTED. Called while waste_open runs, by one thread at a time, which may be another.
pub type OnLoad = Option<unsafe extern "C" fn(user: *mut c_void, bytes: u64, of: u64) -> i32>;

raw::sized!(Options);

/// Options that were looked at.
pub struct Request {
    /// What memory is planned.
    pub plan: PlanOptions,
    /// How the engine is opened within it.
    pub engine: EngineOptions,
    /// The usage file.
    pub usage: Option<PathBuf>,
    /// Patches that an image is shrunk to.
    pub patches: Option<usize>,
    /// Who is told how far loading is.
    pub progress: Progress,
}

/// Who is told how far loading is.
#[derive(Clone, Copy)]
pub struct Progress {
    on_load: OnLoad,
    user: *mut c_void,
}

// SAFETY: the header says that it is called from other threads too.
unsafe impl Send for Progress {}
// SAFETY: as above; the engine tells under a lock.
unsafe impl Sync for Progress {}

impl Progress {
    /// Tells of loading, and whether to stop; other events come later, when nobody is to be told any more.
    fn tell(self, event: Event) -> bool {
        match (self.on_load, event) {
            // SAFETY: a function of this type, with the pointer that goes with it, as the caller promises; nothing is
            // loaded any more when the model is open.
            (Some(on_load), Event::Loaded { bytes, of }) => unsafe { on_load(self.user, bytes, of) != 0 },
            _ => false,
        }
    }

    /// Watches an engine that is opened; `cancelled` stops it.
    pub fn watch(self, cancelled: Arc<AtomicBool>) -> Watch {
        let tell = move |event| {
            if self.tell(event) {
                cancelled.store(true, Ordering::Relaxed);
            }
        };
        Watch(self.on_load.is_some().then(|| Arc::new(tell) as _))
    }
}

/// Reads options.
///
/// # Errors
/// One is out of its range.
///
/// # Safety
/// As [`raw::read`]; pointers within are null or what the header says.
pub unsafe fn request(options: *const Options) -> Result<Request, Fault> {
    // SAFETY: the caller's promise.
    let options = unsafe { raw::read(options, "the options")? };
    // SAFETY: as above.
    let cpus = unsafe { raw::slice(options.cpus, options.cpu_count, "the list of CPUs")? };
    // SAFETY: as above.
    let usage = unsafe { raw::optional_string(options.usage_path, "the path of the usage file")? };
    let count = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
    let or = |value: u64, default: usize| if value == 0 { default } else { count(value) };
    let kv = match options.kv {
        0 => KvType::default(),
        1 => KvType::F32,
        2 => KvType::F16,
        3 => KvType::Q8,
        other => return Err(Fault::usage(format!("{other} is no waste_kv"))),
    };
    let arith = match options.arith {
        0 => Arith::Fast,
        1 => Arith::Exact,
        other => return Err(Fault::usage(format!("{other} is no waste_arith"))),
    };
    let defaults = PlanOptions::default();
    let threads = if cpus.is_empty() { defaults.threads } else { cpus.len() };
    let plan = PlanOptions {
        ctx: or(options.ctx, defaults.ctx),
        kv,
        chunk: or(options.prefill_chunk, defaults.chunk),
        threads: or(options.threads, threads),
        budget: if options.budget_bytes == 0 { Budget::Auto } else { Budget::Bytes(options.budget_bytes) },
        vision: options.vision != 0,
        allow_swap: options.allow_swap != 0,
        ..defaults
    };
    let engine = EngineOptions {
        arith,
        cpus: (!cpus.is_empty()).then(|| cpus.iter().map(|cpu| count(*cpu)).collect()),
        bypass: if options.buffered_reads != 0 { Bypass::Off } else { Bypass::On },
        verify: options.verify != 0,
        ..EngineOptions::default()
    };
    let patches = (options.max_patches != 0).then(|| count(options.max_patches));
    if patches.is_some() && !plan.vision {
        return Err(Fault::usage("`max_patches` goes with `vision`"));
    }
    let progress = Progress { on_load: options.on_load, user: options.user };
    Ok(Request { plan, engine, usage: usage.map(PathBuf::from), patches, progress })
}
