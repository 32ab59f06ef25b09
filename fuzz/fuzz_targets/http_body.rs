//! A request's body, at each of the server's doors. The model never opens: nothing is computed.
#![no_main]

use std::path::Path;
use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use waste_engine::chat::{ChatFormat, Choice, Json, Style};
use waste_engine::open_source;
use waste_engine::tokenizer::Tokenizer;
use waste_engine::vision::Reader;
use waste_serve::access::Access;
use waste_serve::images::Images;
use waste_serve::{Facts, Service, Settings, request};

static SERVICE: LazyLock<Arc<Service>> = LazyLock::new(|| {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/interop/tiny-k3.waste"));
    let tokenizer = Tokenizer::open(dir).expect("the tokenizer of a tiny model");
    let (source, config) = open_source(dir).expect("a tiny model");
    let reader = Reader::open(&source, &config, None).expect("a tiny vision tower");
    let facts = Facts {
        format: ChatFormat::find(dir, &tokenizer, Choice::Auto),
        vocab: config.vocab,
        ctx: 4096,
        stop_ids: tokenizer.eos().into_iter().collect(),
        fingerprint: String::new(),
        tokenizer,
        budget_bytes: None,
        images: Images::new(reader, config.media_placeholder, &[], 64 << 20).ok(),
    };
    let open = Box::new(|| {
        loop {
            std::thread::park();
        }
    });
    let started = Service::start(facts, Settings::default(), Access::default(), Arc::new(|_: &str| ()), open);
    let (service, working) = started.ok().expect("a service");
    std::mem::forget(working);
    service
});

fuzz_target!(|data: &[u8]| {
    let Ok(json) = Json::from_slice(data) else { return };
    // What was read is written as what reads the same.
    let text = json.text(Style::Compact);
    assert_eq!(Json::parse(&text).expect("own JSON").text(Style::Compact), text);
    let _ = request::chat(&SERVICE, &json, 0);
    let _ = request::completion(&SERVICE, &json, 0);
    let _ = request::tokenize(&SERVICE, &json);
    let _ = request::detokenize(&SERVICE, &json);
});
