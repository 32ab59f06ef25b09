//! Calls as C makes them, wrong ones too, on every platform.
#![allow(clippy::unwrap_used, unsafe_code, clippy::undocumented_unsafe_blocks)] // the calls of a C program

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use waste_capi::error::{Status, waste_last_error, waste_last_error_code};
use waste_capi::images::{ImageInfo, waste_image_measure, waste_image_tokens, waste_session_attach};
use waste_capi::info::{MachineInfo, waste_build_info, waste_machine, waste_version, waste_version_number};
use waste_capi::model::*;
use waste_capi::options::*;
use waste_capi::params::{Ending, Outcome, Params};
use waste_capi::raw::Text;
use waste_capi::session::*;

fn string(at: *const c_char) -> String {
    unsafe { CStr::from_ptr(at) }.to_str().unwrap().to_owned()
}

fn code() -> String {
    string(waste_last_error_code())
}

fn path(path: &Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}

/// A file or directory of the tests.
fn data(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests").join(relative)
}

/// A struct of zeros that says its size.
fn zeroed<T: waste_capi::raw::Sized0>() -> T {
    let mut value = unsafe { std::mem::zeroed::<T>() };
    unsafe { std::ptr::from_mut(&mut value).cast::<usize>().write(size_of::<T>()) };
    value
}

struct Open(*mut Model);

impl Open {
    fn model(relative: &str) -> Open {
        Open::with(relative, Options { ctx: 64, threads: 1, ..zeroed() })
    }

    fn with(relative: &str, options: Options) -> Open {
        let dir = path(&data(relative));
        let mut model = null_mut();
        let status = unsafe { waste_open(dir.as_ptr(), &options, &mut model) };
        assert_eq!(status, Status::Ok, "{}", string(waste_last_error()));
        Open(model)
    }

    fn session(&self) -> *mut Session {
        let mut session = null_mut();
        assert_eq!(unsafe { waste_session_open(self.0, &mut session) }, Status::Ok);
        session
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        unsafe { waste_close(self.0) }
    }
}

const LINEAR: &str = "interop/tiny-linear.waste";

#[test]
fn it_says_what_it_is() {
    assert_eq!(string(waste_version()), env!("CARGO_PKG_VERSION"));
    assert!(waste_version_number() >= 100);
    assert!(string(waste_build_info()).contains("portable"));
    let mut machine: MachineInfo = zeroed();
    assert_eq!(unsafe { waste_machine(&mut machine) }, Status::Ok);
    assert!(machine.physical_ram_bytes >= machine.usable_ram_bytes && machine.cpus > 0);
}

#[test]
fn null_is_refused_everywhere() {
    let model = Open::model(LINEAR);
    let session = model.session();
    let (mut count, mut other) = (0, null_mut());
    let usage = Status::Usage;
    unsafe {
        assert_eq!(waste_plan(null(), null(), &mut zeroed()), usage);
        assert_eq!(waste_plan(c"x".as_ptr(), null(), null_mut()), Status::Data); // there is no x
        assert_eq!(waste_open(null(), null(), &mut other), usage);
        assert_eq!(waste_open(c"".as_ptr(), null(), &mut other), usage);
        assert_eq!(waste_open(c"x".as_ptr(), null(), null_mut()), usage);
        waste_close(null_mut());
        waste_cancel(null());
        assert_eq!(waste_info(null(), &mut zeroed()), usage);
        assert_eq!(waste_info(model.0, null_mut()), usage);
        assert_eq!(waste_model_stats(null(), &mut zeroed()), usage);
        assert_eq!(waste_model_stats(model.0, null_mut()), usage);
        assert_eq!(waste_save_usage(null(), c"x".as_ptr()), usage);
        assert_eq!(waste_save_usage(model.0, null()), usage);
        for tokenize in [waste_tokenize, waste_tokenize_markup] {
            assert_eq!(tokenize(null(), c"x".as_ptr(), 1, null_mut(), 0, &mut count), usage);
            assert_eq!(tokenize(model.0, null(), 1, null_mut(), 0, &mut count), usage);
            assert_eq!(tokenize(model.0, c"x".as_ptr(), 1, null_mut(), 1, &mut count), usage);
            assert_eq!(tokenize(model.0, c"x".as_ptr(), 1, null_mut(), 0, null_mut()), usage);
            assert_eq!(tokenize(model.0, c"x".as_ptr(), usize::MAX, null_mut(), 0, &mut count), usage);
            // No text, and no room: there are none.
            assert_eq!(tokenize(model.0, null(), 0, null_mut(), 0, &mut count), Status::Ok);
            assert_eq!(count, 0);
        }
        assert_eq!(waste_detokenize(model.0, null(), 1, null_mut(), 0, &mut count), usage);
        let mut none = null_mut();
        assert_eq!(waste_session_open(null(), &mut none), usage);
        assert_eq!(waste_session_open(model.0, null_mut()), usage);
        waste_session_close(null_mut());
        assert_eq!(waste_session_reset(null_mut()), usage);
        assert_eq!(waste_session_tokens(null(), null_mut(), 0, &mut count), usage);
        assert_eq!(waste_session_save(session, null()), usage);
        assert_eq!(waste_session_load(session, null()), usage);
        assert_eq!(waste_session_load(session, c"no/such/file".as_ptr()), Status::Data);
        let mut logits = [0.0; 8];
        assert_eq!(waste_eval(null_mut(), null(), 0, logits.as_mut_ptr(), 8), usage);
        assert_eq!(waste_eval(session, null(), 0, logits.as_mut_ptr(), 8), usage);
        assert_eq!(waste_generate(session, null(), 0, null(), None, null_mut(), null_mut()), usage);
        assert_eq!(waste_generate(session, null(), 1, null(), None, null_mut(), null_mut()), usage);
        assert!(string(waste_last_error()).contains("NULL"));
        let mut info: ImageInfo = zeroed();
        assert_eq!(waste_image_measure(null(), null(), 0, &mut info), usage);
        assert_eq!(waste_image_tokens(null(), &info, null_mut(), 0, &mut count), usage);
        assert_eq!(waste_session_attach(null_mut(), null(), 0, &mut info), usage);
        waste_session_close(session);
    }
}

#[test]
fn sizes_of_structs_are_understood() {
    let dir = path(&data(LINEAR));
    let plan = |options: *const Options| {
        let mut plan: Plan = zeroed();
        let status = unsafe { waste_plan(dir.as_ptr(), options, &mut plan) };
        (status, plan)
    };
    let long = Options { ctx: 8192, ..zeroed() };
    let (status, with) = plan(&long);
    let (_, without) = plan(null());
    assert_eq!(status, Status::Ok);
    assert!(with.floor_bytes > without.floor_bytes && without.floor_bytes > 0);
    // A program of an earlier version has fewer fields: what it does not have is the default.
    let early = Options { size: 16, ctx: 8192, ..zeroed() };
    assert_eq!(plan(&early).1.floor_bytes, without.floor_bytes);
    // One of a later version may say what is not known here, but only if it says nothing.
    #[repr(C)]
    struct Later(Options, u64);
    for (more, expected) in [(0, Status::Ok), (1, Status::Usage)] {
        let later = Later(Options { size: size_of::<Later>(), ..zeroed() }, more);
        assert_eq!(plan(std::ptr::from_ref(&later).cast()).0, expected);
    }
    for size in [0, 7, 5000, usize::MAX] {
        assert_eq!(plan(&Options { size, ..zeroed() }).0, Status::Usage, "{size}");
    }
    // What is filled ends where the caller's struct does.
    let mut short = Plan { size: 16, state_bytes: 77, ..zeroed() };
    assert_eq!(unsafe { waste_plan(dir.as_ptr(), null(), &mut short) }, Status::Ok);
    assert_eq!((short.size, short.trunk_bytes, short.state_bytes), (16, without.trunk_bytes, 77));
    // Values that are none.
    for wrong in [
        Options { kv: 4, ..zeroed() },
        Options { arith: 2, ..zeroed() },
        Options { ctx: u64::MAX, ..zeroed() },
    ] {
        assert_eq!(plan(&wrong).0, Status::Usage);
    }
    assert_eq!(plan(&Options { budget_bytes: 1, ..zeroed() }).0, Status::Space);
    assert_eq!(code(), "budget_below_floor");
}

#[test]
fn buffers_are_filled_as_far_as_they_go() {
    let model = Open::model(LINEAR);
    let text = "ab ab ab";
    let mut count = 0;
    let mut ids = [u32::MAX; 64];
    let tokenize = |ids: &mut [u32], count: &mut usize| unsafe {
        waste_tokenize(model.0, text.as_ptr().cast(), text.len(), ids.as_mut_ptr(), ids.len(), count)
    };
    assert_eq!(tokenize(&mut ids, &mut count), Status::Ok);
    let all = count;
    assert!(all > 2 && all < 64 && ids[all] == u32::MAX && ids[all - 1] != u32::MAX);
    let mut few = [u32::MAX; 2];
    assert_eq!(tokenize(&mut few, &mut count), Status::Ok);
    assert_eq!((count, few), (all, [ids[0], ids[1]]));
    let mut bytes = [0u8; 4];
    let mut length = 0;
    let status = unsafe {
        waste_detokenize(model.0, ids.as_ptr(), all, bytes.as_mut_ptr().cast(), bytes.len(), &mut length)
    };
    assert_eq!((status, length, &bytes), (Status::Ok, text.len(), b"ab a"));
    let wrong = b"\xff";
    let status = unsafe { waste_tokenize(model.0, wrong.as_ptr().cast(), 1, null_mut(), 0, &mut count) };
    assert_eq!((status, code().as_str()), (Status::Data, "invalid_utf8"));
}

/// What a callback of these tests does.
struct Calls {
    texts: Vec<String>,
    stop: bool,
    session: *mut Session,
    inside: Vec<Status>,
}

unsafe extern "C" fn collect(user: *mut c_void, text: *const c_char, length: usize) -> i32 {
    let calls = unsafe { &mut *user.cast::<Calls>() };
    let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
    calls.texts.push(std::str::from_utf8(text).unwrap().to_owned());
    calls.inside.push(unsafe { waste_session_reset(calls.session) });
    calls.stop.into()
}

#[test]
fn answers_are_written_stopped_and_gone_on_with() {
    let model = Open::model("models/k3-tales");
    let session = model.session();
    let mut ids = [0; 16];
    let mut count = 0;
    let prompt = "The king";
    let (at, length) = (prompt.as_ptr().cast(), prompt.len());
    assert_eq!(unsafe { waste_tokenize(model.0, at, length, ids.as_mut_ptr(), 16, &mut count) }, Status::Ok);
    let generate = |ids: &[u32], params: Params, calls: &mut Calls| {
        let mut outcome: Outcome = zeroed();
        let user = std::ptr::from_mut(calls).cast();
        let status = unsafe {
            waste_generate(session, ids.as_ptr(), ids.len(), &params, Some(collect), user, &mut outcome)
        };
        (status, outcome)
    };
    let calls = |stop| Calls { texts: Vec::new(), stop, session, inside: Vec::new() };
    let params = Params { max_tokens: 6, ..zeroed() };

    let mut whole = calls(false);
    let (status, outcome) = generate(&ids[..count], params, &mut whole);
    assert_eq!((status, outcome.tokens, outcome.finish), (Status::Ok, 6, Ending::Length as u64));
    // A call on a session in use is refused, and does no harm.
    assert!(!whole.inside.is_empty() && whole.inside.iter().all(|status| *status == Status::Usage));
    let mut tokens = [0; 64];
    let mut n = 0;
    assert_eq!(unsafe { waste_session_tokens(session, tokens.as_mut_ptr(), 64, &mut n) }, Status::Ok);
    assert_eq!((n, &tokens[..count]), (count + 6, &ids[..count]));

    // Stopped by the callback; without new tokens it goes on.
    assert_eq!(unsafe { waste_session_reset(session) }, Status::Ok);
    let mut parts = calls(true);
    let (status, outcome) = generate(&ids[..count], params, &mut parts);
    assert_eq!((status, outcome.finish), (Status::Ok, Ending::Cancelled as u64));
    parts.stop = false;
    let rest = Params { max_tokens: 6 - outcome.tokens, ..params };
    assert_eq!(generate(&[], rest, &mut parts).0, Status::Ok);
    assert_eq!(parts.texts.concat(), whole.texts.concat());

    // Cancelled before it began: the next one is not.
    assert_eq!(unsafe { waste_session_reset(session) }, Status::Ok);
    unsafe { waste_cancel(model.0) };
    let (status, outcome) = generate(&ids[..count], params, &mut calls(false));
    assert_eq!((status, outcome.tokens, outcome.finish), (Status::Ok, 0, Ending::Cancelled as u64));
    let mut later = calls(false);
    assert_eq!(generate(&[], params, &mut later).1.finish, Ending::Length as u64);
    assert_eq!(later.texts.concat(), whole.texts.concat());

    // A stop text, and one that is none.
    assert_eq!(unsafe { waste_session_reset(session) }, Status::Ok);
    let all = whole.texts.concat();
    let word = &all[3..6];
    let stop = Text { bytes: word.as_ptr().cast(), length: word.len() };
    let mut stopped = calls(false);
    let (_, outcome) =
        generate(&ids[..count], Params { stops: &stop, stop_count: 1, ..params }, &mut stopped);
    assert_eq!(outcome.finish, Ending::StopText as u64);
    assert!(all.starts_with(&stopped.texts.concat()) && !stopped.texts.concat().contains(word));
    let (status, _) = generate(&ids[..count], Params { temperature: 3.0, ..params }, &mut calls(false));
    assert_eq!((status, code().as_str()), (Status::Usage, "invalid_sampling_option"));

    // JSON.
    assert_eq!(unsafe { waste_session_reset(session) }, Status::Ok);
    let schema = r#"{"enum": ["yes", "no"]}"#;
    let json_schema = Text { bytes: schema.as_ptr().cast(), length: schema.len() };
    let mut json = calls(false);
    let (status, outcome) = generate(&ids[..count], Params { json_schema, ..params }, &mut json);
    assert_eq!(
        (status, outcome.finish),
        (Status::Ok, Ending::Complete as u64),
        "{}",
        string(waste_last_error())
    );
    assert!(["\"yes\"", "\"no\""].contains(&json.texts.concat().as_str()), "{:?}", json.texts);
    unsafe { waste_session_close(session) };
}

#[test]
fn what_was_learned_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let file = path(&dir.path().join("usage"));
    let model = Open::model(LINEAR);
    let session = model.session();
    let mut logits = vec![0.0; 4096];
    assert_eq!(unsafe { waste_eval(session, [3u32, 4].as_ptr(), 2, logits.as_mut_ptr(), 4096) }, Status::Ok);
    unsafe { waste_session_close(session) };
    assert_eq!(unsafe { waste_save_usage(model.0, file.as_ptr()) }, Status::Ok);
    let mut stats: Stats = zeroed();
    assert_eq!(unsafe { waste_model_stats(model.0, &mut stats) }, Status::Ok);
    assert!(stats.expert_misses > 0 && stats.bytes_read > 0);
    let container = path(&data(LINEAR));
    let options = Options { usage_path: file.as_ptr(), ..zeroed() };
    let mut warm = null_mut();
    assert_eq!(unsafe { waste_open(container.as_ptr(), &options, &mut warm) }, Status::Ok);
    unsafe { waste_close(warm) };
    // Of another model: refused.
    let other = path(&data("interop/tiny-k3.waste"));
    assert_eq!(unsafe { waste_open(other.as_ptr(), &options, &mut warm) }, Status::Data);
    assert!(warm.is_null());
}

const GOLDEN: &str = "golden/tiny-k3/ckpt";

/// The golden prompt with an image: its ids, and the logits of its last token.
fn golden() -> (Vec<u32>, Vec<f64>) {
    let bytes = std::fs::read(data("golden/tiny-k3/image.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (ids, logits) = (tensors.tensor("ids").unwrap(), tensors.tensor("logits_f64").unwrap());
    let vocab = *logits.shape().last().unwrap();
    let ids = ids.data().chunks_exact(4).map(|x| u32::from_le_bytes(x.try_into().unwrap())).collect();
    let logits: Vec<f64> =
        logits.data().chunks_exact(8).map(|x| f64::from_le_bytes(x.try_into().unwrap())).collect();
    (ids, logits[logits.len() - vocab..].to_vec())
}

fn seeing() -> Options {
    Options {
        ctx: 64,
        threads: 1,
        vision: 1,
        kv: Kv::F32 as u32,
        arith: Arithmetic::Exact as u32,
        ..zeroed()
    }
}

fn attach(session: *mut Session, file: &[u8]) -> (Status, ImageInfo) {
    let mut info: ImageInfo = zeroed();
    (unsafe { waste_session_attach(session, file.as_ptr(), file.len(), &mut info) }, info)
}

fn eval(session: *mut Session, ids: &[u32], logits: &mut [f32]) -> Status {
    unsafe { waste_eval(session, ids.as_ptr(), ids.len(), logits.as_mut_ptr(), logits.len()) }
}

#[test]
fn an_image_takes_the_place_of_its_placeholders() {
    let model = Open::with(GOLDEN, seeing());
    let image = std::fs::read(data("golden/tiny-k3/image.png")).unwrap();
    let (ids, expected) = golden();
    let mut info: ModelInfo = zeroed();
    assert_eq!(unsafe { waste_info(model.0, &mut info) }, Status::Ok);
    let media = u32::try_from(info.media_token).unwrap();
    let mut measured: ImageInfo = zeroed();
    assert_eq!(
        unsafe { waste_image_measure(model.0, image.as_ptr(), image.len(), &mut measured) },
        Status::Ok
    );
    assert_eq!((measured.width, measured.height, measured.positions), (75, 53, 6));

    // Its tokens: markup, and the placeholder as often as it takes positions.
    let mut tokens = [0; 64];
    let mut count = 0;
    assert_eq!(
        unsafe { waste_image_tokens(model.0, &measured, tokens.as_mut_ptr(), 64, &mut count) },
        Status::Ok
    );
    let tokens = &tokens[..count];
    assert_eq!(tokens.iter().filter(|id| **id == media).count(), 6);
    assert!(count > 8 && tokens[0] != media && tokens[count - 1] != media);

    let session = model.session();
    let mut logits = vec![0.0; expected.len()];
    let close = |found: &[f32]| {
        let error: f64 = found.iter().zip(&expected).map(|(f, e)| (f64::from(*f) - e).powi(2)).sum();
        (error / expected.iter().map(|e| e * e).sum::<f64>()).sqrt()
    };
    for _ in 0..2 {
        let (status, info) = attach(session, &image);
        assert_eq!((status, info.positions), (Status::Ok, 6), "{}", string(waste_last_error()));
        assert_eq!(eval(session, &ids, &mut logits), Status::Ok, "{}", string(waste_last_error()));
        assert!(close(&logits) < 1e-4, "{}", close(&logits));
        assert_eq!(unsafe { waste_session_reset(session) }, Status::Ok);
    }

    // The wrong number of placeholders, or some apart: refused, and nothing has changed.
    let refused = |ids: &[u32], logits: &mut [f32]| {
        assert_eq!(eval(session, ids, logits), Status::Data);
        assert_eq!(code(), "image_placeholders");
        let mut outcome: Outcome = zeroed();
        let status = unsafe {
            waste_generate(session, ids.as_ptr(), ids.len(), null(), None, null_mut(), &mut outcome)
        };
        assert_eq!((status, code().as_str()), (Status::Data, "image_placeholders"));
    };
    refused(&ids, &mut logits);
    assert_eq!(attach(session, &image).0, Status::Ok);
    refused(&[3, 4], &mut logits);
    refused(&[&ids[..], &[media]].concat(), &mut logits);
    let last = ids.iter().rposition(|id| *id == media).unwrap();
    refused(&[&ids[..last], &[3, media]].concat(), &mut logits);
    // Dropped with the rest of the session.
    assert_eq!(unsafe { waste_session_reset(session) }, Status::Ok);
    refused(&ids, &mut logits);

    // Two images, and a text that goes on from them in a file.
    for _ in 0..2 {
        assert_eq!(attach(session, &image).0, Status::Ok);
    }
    let params = Params { max_tokens: 2, ignore_end: 1, ..zeroed() };
    let generate = |session, ids: &[u32]| {
        let mut outcome: Outcome = zeroed();
        let status = unsafe {
            waste_generate(session, ids.as_ptr(), ids.len(), &params, None, null_mut(), &mut outcome)
        };
        assert_eq!(status, Status::Ok, "{}", string(waste_last_error()));
    };
    generate(session, &[tokens, tokens].concat());
    let dir = tempfile::tempdir().unwrap();
    let saved = path(&dir.path().join("saved"));
    let other = model.session();
    unsafe {
        assert_eq!(waste_session_save(session, saved.as_ptr()), Status::Ok);
        assert_eq!(waste_session_load(other, saved.as_ptr()), Status::Ok, "{}", string(waste_last_error()));
    }
    let told = [session, other].map(|session| {
        generate(session, &[5]);
        let mut all = [0; 64];
        let mut n = 0;
        assert_eq!(unsafe { waste_session_tokens(session, all.as_mut_ptr(), 64, &mut n) }, Status::Ok);
        all[..n].to_vec()
    });
    assert_eq!(told[0], told[1]);
    assert_eq!(told[0].len(), 2 * count + 2 + 1 + 2);

    // Cancelled while it is encoded, it is not attached; the next one is not stopped.
    unsafe { waste_cancel(model.0) };
    assert_eq!(attach(other, &image).0, Status::Interrupted);
    let mut waiting = 0;
    while attach(other, &image).0 == Status::Ok {
        waiting += 1;
    }
    assert_eq!((waiting, code().as_str()), (16, "usage"));
    unsafe {
        waste_session_close(session);
        waste_session_close(other);
    }
}

#[test]
fn images_are_refused_with_a_reason() {
    let image = std::fs::read(data("golden/tiny-k3/image.png")).unwrap();
    // Opened without.
    let blind = Open::model(GOLDEN);
    let session = blind.session();
    let mut info: ImageInfo = zeroed();
    assert_eq!(attach(session, &image).0, Status::Data);
    assert_eq!(code(), "vision_disabled");
    assert_eq!(unsafe { waste_image_measure(blind.0, image.as_ptr(), image.len(), &mut info) }, Status::Data);
    // What was before there were images: a placeholder is a token like others.
    let (ids, expected) = golden();
    assert_eq!(eval(session, &ids, &mut vec![0.0; expected.len()]), Status::Ok);
    unsafe { waste_session_close(session) };

    // A model without.
    let dir = path(&data(LINEAR));
    let mut none = null_mut();
    assert_eq!(unsafe { waste_open(dir.as_ptr(), &seeing(), &mut none) }, Status::Usage);
    assert_eq!(code(), "no_vision");
    assert!(none.is_null());
    let mut plan: Plan = zeroed();
    assert_eq!(unsafe { waste_plan(dir.as_ptr(), &seeing(), &mut plan) }, Status::Usage);
    let dir = path(&data(GOLDEN));
    assert_eq!(unsafe { waste_plan(dir.as_ptr(), &seeing(), &mut plan) }, Status::Ok);
    assert!(plan.vision_bytes > 0 && plan.floor_bytes > plan.vision_bytes);
    for wrong in [Options { max_patches: 3, ..seeing() }, Options { max_patches: 1025, ..seeing() }] {
        assert_eq!(unsafe { waste_open(dir.as_ptr(), &wrong, &mut none) }, Status::Usage);
    }
    assert_eq!(
        unsafe { waste_open(dir.as_ptr(), &Options { max_patches: 8, ..zeroed() }, &mut none) },
        Status::Usage
    );

    // No image, and fewer patches.
    let model = Open::with(GOLDEN, Options { max_patches: 8, ..seeing() });
    let session = model.session();
    for bad in [&b""[..], b"GIF", &image[..60], &image[..image.len() - 20]] {
        assert_eq!(attach(session, bad).0, Status::Data);
        assert_eq!(code(), "image_invalid");
    }
    let (status, info) = attach(session, &image);
    assert!(status == Status::Ok && info.positions < 6);
    for positions in [0, 65, u64::MAX] {
        let wrong = ImageInfo { positions, ..info };
        let status = unsafe { waste_image_tokens(model.0, &wrong, null_mut(), 0, &mut 0) };
        assert!(matches!(status, Status::Data | Status::Usage), "{positions}");
    }
    unsafe { waste_session_close(session) };
}

/// How far loading was, and when it is to stop.
#[derive(Default)]
struct Loading {
    told: Vec<(u64, u64)>,
    stop: bool,
}

unsafe extern "C" fn load(user: *mut c_void, bytes: u64, of: u64) -> i32 {
    let loading = unsafe { &mut *user.cast::<Loading>() };
    loading.told.push((bytes, of));
    loading.stop.into()
}

#[test]
fn loading_tells_how_far_it_is() {
    for model in [LINEAR, GOLDEN] {
        let mut loading = Loading::default();
        let user = std::ptr::from_mut(&mut loading).cast();
        let opened = Open::with(model, Options { on_load: Some(load), user, ..zeroed() });
        // Later nobody is told.
        let session = opened.session();
        let mut logits = vec![0.0; 4096];
        assert_eq!(eval(session, &[3, 4], &mut logits), Status::Ok);
        unsafe { waste_session_close(session) };
        drop(opened);
        let told = std::mem::take(&mut loading.told);
        let (last, of) = *told.last().unwrap();
        assert!(last > 0 && last <= of, "{told:?}");
        assert!(told.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 == pair[1].1), "{told:?}");

        loading.stop = true;
        let dir = path(&data(model));
        let mut none = null_mut();
        let user = std::ptr::from_mut(&mut loading).cast();
        let options = Options { on_load: Some(load), user, ..zeroed() };
        assert_eq!(unsafe { waste_open(dir.as_ptr(), &options, &mut none) }, Status::Interrupted);
        assert!(none.is_null() && loading.told.len() <= told.len());
    }
}
