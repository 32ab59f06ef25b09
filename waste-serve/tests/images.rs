//! Images in messages: the small model that sees behind the server.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

#[path = "util/pictures.rs"]
mod pictures;
mod util;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use image::{DynamicImage, ImageFormat, Rgb, RgbImage};
use pictures::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use util::*;
use waste_engine::vision::Reader;
use waste_engine::{Engine, EngineError, EngineOptions, open_source};
use waste_serve::access::Access;
use waste_serve::images::Images;
use waste_serve::job::Job;
use waste_serve::model::{EngineModel, Gallery, Model, Reuse, ScriptModel, Sight, Write};
use waste_serve::{Facts, Settings};
use waste_tests::files::data;
use waste_tests::tool::{Ran, arg, emulated, tool};

const GOLDEN: &str = "golden/tiny-k3/ckpt";
const CONTAINER: &str = "interop/tiny-k3.waste";
const ROOM: u64 = 4 << 20;

/// What the server has.
struct With {
    model: &'static str,
    parallel: usize,
    reuse: Reuse,
    gallery: usize,
    room: u64,
    dirs: Vec<PathBuf>,
    access: Access,
}

impl Default for With {
    fn default() -> With {
        With {
            model: CONTAINER,
            parallel: 1,
            reuse: Reuse::new(2, 1 << 30),
            gallery: 1 << 20,
            room: ROOM,
            dirs: Vec::new(),
            access: Access::default(),
        }
    }
}

fn reader(model: &str) -> Reader {
    let (source, config) = open_source(&data(model)).unwrap();
    Reader::open(&source, &config, None).unwrap()
}

fn sighted(model: &str, dirs: &[PathBuf], room: u64) -> Facts {
    let (_, config) = open_source(&data(model)).unwrap();
    let images = Images::new(reader(model), config.media_placeholder, dirs, room).unwrap();
    Facts { vocab: config.vocab, ctx: 1024, images: Some(images), ..facts(&data(model)) }
}

fn server(with: With) -> Server {
    let With { model, parallel, reuse, gallery, room, dirs, access } = with;
    // A few tokens a chunk: images begin in one and end in another.
    let options =
        EngineOptions { ctx: 1024, chunk: 8, threads: 2, readers: 2, parallel, ..EngineOptions::default() };
    let engine = Engine::open(&data(model), options).unwrap();
    let tower = reader(model).load(&engine).unwrap();
    let sight = Some(Sight::new(tower, Gallery::new(gallery)));
    let model_of = EngineModel::new(engine, reuse, sight, None).unwrap();
    let settings = Settings { effort: None, parallel, queue: 32, ..Settings::default() };
    Server::new(sighted(model, &dirs, room), settings, access, model_of)
}

fn ask(messages: &[Value]) -> Value {
    json!({
        "model": "model", "messages": messages, "temperature": 0, "max_tokens": 8, "logprobs": true,
        "top_logprobs": 5,
    })
}

/// Tokens and the bits of their log probabilities, tokens of the prompt, those that were kept.
fn answer(got: &Got) -> (Value, u64, u64) {
    let json = got.json();
    let usage = &json["usage"];
    let count = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{json}"));
    let said = json!([json["choices"][0]["message"]["content"], json["choices"][0]["logprobs"]]);
    (said, count(&usage["prompt_tokens"]), count(&usage["prompt_tokens_details"]["cached_tokens"]))
}

async fn encoded(server: &Server) -> u64 {
    let metrics = server.get("/metrics").await.text;
    let line = metrics.lines().find(|line| line.starts_with("waste_images_encoded_total ")).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn an_image_gives_the_answer_of_the_command_line() {
    runtime().block_on(async {
        for model in [GOLDEN, CONTAINER] {
            let server = server(With { model, ..With::default() });
            let got = server.chat(&ask(&[user(&[picture(&file(IMAGE)), text("What is it?")])])).await.json();
            let (dir, image) = (data(model), data(IMAGE));
            let args = [
                "chat",
                arg(&dir),
                "--image",
                arg(&image),
                "--no-thinking",
                "-n",
                "8",
                "--temp",
                "0",
                "--json",
                "-q",
            ];
            let ran = Ran::of(tool("waste-run").args(args).write_stdin("What is it?\n")).done();
            let said: Value = serde_json::from_str(ran.stdout.lines().next().unwrap()).unwrap();
            assert_eq!(got["choices"][0]["message"]["content"], said["text"], "{got}");
            assert_eq!(got["usage"]["prompt_tokens"], said["prompt_tokens"]);
            // Another image, other words; and /tokenize counts as the answer does.
            let other = ask(&[user(&[picture(&png(75, 53, Some(90))), text("What is it?")])]);
            let other = server.chat(&other).await.json();
            assert_ne!(got["choices"][0]["logprobs"], other["choices"][0]["logprobs"]);
            let count = ask(&[user(&[picture(&file(IMAGE)), text("What is it?")])]);
            let count = server.post("/tokenize", &count).await.json();
            assert_eq!(count["count"], got["usage"]["prompt_tokens"]);
        }
    });
}

#[test]
fn the_next_turn_neither_encodes_nor_reads_the_image_again() {
    runtime().block_on(async {
        let server = server(With::default());
        let first = user(&[picture(&file(IMAGE)), text("What is it?")]);
        let one = server.chat(&ask(std::slice::from_ref(&first))).await;
        let (_, prompt, cached) = answer(&one);
        assert_eq!((cached, encoded(&server).await), (0, 1));
        let said = json!({"role": "assistant", "content": one.json()["choices"][0]["message"]["content"]});
        let turn = ask(&[first.clone(), said.clone(), user(&[text("Say it again.")])]);
        let two = answer(&server.chat(&turn).await);
        assert_eq!(encoded(&server).await, 1);
        assert!(two.2 >= prompt - 6, "{} of {prompt}", two.2);
        // Where no states are kept it is read again, but not encoded: with the same words.
        let forgetful = self::server(With { reuse: Reuse::new(0, 0), ..With::default() });
        assert_eq!(answer(&forgetful.chat(&ask(std::slice::from_ref(&first))).await).0, answer(&one).0);
        let again = answer(&forgetful.chat(&turn).await);
        assert_eq!((again.1, again.2, encoded(&forgetful).await), (two.1, 0, 1));
        assert_eq!(again.0[0], two.0[0]);
        // Without room for its rows it is.
        let blind = self::server(With { reuse: Reuse::new(0, 0), gallery: 0, ..With::default() });
        for times in 1..3 {
            assert_eq!(answer(&blind.chat(&turn).await).0, again.0);
            assert_eq!(encoded(&blind).await, times);
        }
    });
}

/// Images of one size make prompts of the same tokens.
#[test]
fn nobody_sees_the_image_of_another() {
    if emulated() {
        return;
    }
    runtime().block_on(async {
        let images: Vec<Vec<u8>> = [10, 128, 240].iter().map(|gray| png(75, 53, Some(*gray))).collect();
        let about = |image: &[u8]| ask(&[user(&[text("See: "), picture(image), text("What is it?")])]);
        let mut alone = Vec::new();
        for image in &images {
            let fresh = server(With { reuse: Reuse::new(0, 0), ..With::default() });
            alone.push(answer(&fresh.chat(&about(image)).await).0);
        }
        assert!(alone[0] != alone[1] && alone[1] != alone[2]);
        let keeping = server(With { reuse: Reuse::new(8, 1 << 30), ..With::default() });
        let tokens = |got: &Got| got.json()["tokens"].clone();
        let [one, two] = [0, 1].map(|at| about(&images[at]));
        assert_eq!(
            tokens(&keeping.post("/tokenize", &one).await),
            tokens(&keeping.post("/tokenize", &two).await)
        );
        for round in 0..2 {
            for (image, alone) in images.iter().zip(&alone) {
                let (said, prompt, cached) = answer(&keeping.chat(&about(image)).await);
                assert_eq!(&said, alone);
                // Nothing of another's; the second time, all of its own.
                assert_eq!(cached, if round == 0 { 0 } else { prompt });
            }
        }
        assert_eq!(encoded(&keeping).await, 3);
    });
}

#[test]
fn keys_share_neither_states_nor_images() {
    runtime().block_on(async {
        let access = Access::new(&["one".to_owned(), "two".to_owned()]);
        let server = server(With { access, ..With::default() });
        let body = ask(&[user(&[picture(&file(IMAGE)), text("What is it?")])]);
        for (key, images) in [("one", 1), ("two", 2), ("one", 2)] {
            let mut request = post("/v1/chat/completions", &body);
            request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
            assert_eq!(server.send(request).await.status, 200);
            let mut request = axum::http::Request::get("/metrics").body(axum::body::Body::empty()).unwrap();
            request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
            let metrics = server.send(request).await.text;
            assert!(metrics.contains(&format!("\nwaste_images_encoded_total {images}\n")), "{metrics}");
        }
    });
}

#[test]
fn together_each_is_as_alone() {
    if emulated() {
        return;
    }
    runtime().block_on(async {
        let images: Vec<Vec<u8>> = (0..6)
            .map(|i| if i == 5 { file(IMAGE) } else { png(40 + 30 * i, 53, Some(40 * i as u8)) })
            .collect();
        let about = |i: usize| {
            let more = (0..=i % 3).map(|j| picture(&images[(i + j) % images.len()]));
            ask(&[user(&more.chain([text(&format!("What is number {i}?"))]).collect::<Vec<_>>())])
        };
        let none = || Reuse::new(0, 0);
        let alone = server(With { reuse: none(), ..With::default() });
        let mut expected = Vec::new();
        for i in 0..images.len() {
            expected.push(answer(&alone.chat(&about(i)).await));
        }
        for reuse in [none(), Reuse::new(8, 1 << 30)] {
            let together = Arc::new(server(With { reuse, parallel: 3, ..With::default() }));
            let clients: Vec<_> = (0..images.len())
                .map(|i| {
                    let (server, body) = (Arc::clone(&together), about(i));
                    tokio::spawn(async move { server.chat(&body).await })
                })
                .collect();
            for (client, (said, prompt, _)) in clients.into_iter().zip(&expected) {
                let found = answer(&client.await.unwrap());
                assert_eq!((&found.0, found.1), (said, *prompt));
            }
        }
    });
}

#[test]
fn what_is_no_image_is_named() {
    runtime().block_on(async {
        let server = server(With::default());
        let image = file(IMAGE);
        let at = |part: Value| ask(&[user(&[text("first")]), user(&[text("second"), part])]);
        let of = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
        let whole = url(&image);
        let base64 = whole.split_once(',').unwrap().1;
        let data = |rest: &str| of(&format!("data:image/png;base64,{rest}"));
        let mut bmp = b"BM".to_vec();
        bmp.resize(200, 0);
        let (unsupported, invalid) = ("image_url_not_supported", "image_invalid");
        for (part, code) in [
            (of("http://localhost/x.png"), unsupported),
            (of("HTTPS://localhost/x.png"), unsupported),
            (of("file:///etc/passwd"), unsupported),
            (of("/etc/passwd"), unsupported),
            (of("x.png"), unsupported),
            (of(""), unsupported),
            (json!({"type": "image_url"}), invalid),
            (json!({"type": "image_url", "image_url": 3}), invalid),
            (json!({"type": "image_url", "image_url": {"url": [whole]}}), invalid),
            (of("data:"), invalid),
            (of("data:image/png,abc"), invalid),
            (of(&format!("data:image/bmp;base64,{base64}")), invalid),
            (of(&format!("data:text/plain;base64,{base64}")), invalid),
            (of(&format!("data:image/png;charset=x;base64,{base64}")), invalid),
            (data(""), invalid),
            (data("!!!!"), invalid),
            (data(&format!(" {base64}")), invalid),
            (data(&format!("{base64}\n")), invalid),
            (data(&base64.replacen('A', "A ", 1)), invalid),
            (data(base64.trim_end_matches('=').split_at(401).0), invalid),
            (picture(b"hello, this is no image at all"), invalid),
            (picture(&bmp), invalid),
            (picture(&image[..image.len() / 2]), invalid),
            (picture(&image[..20]), invalid),
            (picture(&png(1_000_000_000, 1_000_000_000, None)), invalid),
            (picture(&png(16_385, 1, None)), invalid),
            (picture(&png(16_384, 16_384, None)), invalid),
            (picture(&png(0, 5, None)), invalid),
            (picture(&png(16, 16, None)), invalid),
        ] {
            let shown: String = part.to_string().chars().take(90).collect();
            for path in ["/v1/chat/completions", "/tokenize"] {
                let got = server.post(path, &at(part.clone())).await;
                assert_eq!(got.code(), (400, code.to_owned()), "{shown}: {}", got.text);
                let error = &got.json()["error"];
                assert_eq!(error["param"], "messages[1].content[1]", "{shown}");
                assert!(
                    error["message"].as_str().unwrap().starts_with("messages[1].content[1]: "),
                    "{error}"
                );
            }
        }
        // More than may be encoded: by its length alone.
        let long = server.chat(&at(data(&"A".repeat(28 << 20)))).await;
        assert_eq!(long.code(), (400, invalid.to_owned()), "{}", long.text);
        let many = vec![picture(&image); 17];
        let got = server.chat(&ask(&[user(&many)])).await;
        assert_eq!(got.code(), (400, "invalid_value".to_owned()));
        assert!(got.text.contains("at most 16"), "{}", got.text);
        let much = vec![picture(&png(250, 250, Some(7))); 16];
        let got = server.chat(&ask(&[user(&much)])).await;
        assert_eq!(got.code(), (400, "context_length_exceeded".to_owned()));
        assert_eq!(encoded(&server).await, 0);
        server.end().unwrap();
    });
}

/// A small image in this format.
fn written(kind: ImageFormat) -> Vec<u8> {
    let mut out = std::io::Cursor::new(Vec::new());
    let image = RgbImage::from_fn(20, 15, |x, y| Rgb([10 * x as u8, 10 * y as u8, 99]));
    DynamicImage::from(image).write_to(&mut out, kind).unwrap();
    out.into_inner()
}

#[test]
fn every_way_to_give_an_image_is_read() {
    runtime().block_on(async {
        let server = server(With::default());
        let whole = url(&file(IMAGE));
        let shouted = whole.replacen("data:image/png;base64,", "DATA:Image/PNG;Base64,", 1);
        // The bytes tell what it is.
        let called = whole.replacen("image/png", "image/webp", 1);
        let mut answers = Vec::new();
        for part in [
            json!({"type": "image_url", "image_url": {"url": whole, "detail": "low"}}),
            json!({"type": "image_url", "image_url": whole}),
            json!({"type": "image", "image": whole}),
            json!({"type": "image", "image": {"url": whole}}),
            json!({"type": "input_image", "image_url": whole}),
            json!({"type": "image_url", "image_url": {"url": shouted}}),
            json!({"type": "image_url", "image_url": {"url": called}}),
        ] {
            let got = server.chat(&ask(&[user(&[part, text("What is it?")])])).await;
            assert_eq!(got.status, 200, "{}", got.text);
            answers.push(answer(&got).0);
        }
        answers.dedup();
        assert_eq!((answers.len(), encoded(&server).await), (1, 1));
        for kind in [ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Gif] {
            let got = server.chat(&ask(&[user(&[picture(&written(kind)), text("What is it?")])])).await;
            assert_eq!(got.status, 200, "{kind:?}: {}", got.text);
        }
        let bmp = server.chat(&ask(&[user(&[picture(&written(ImageFormat::Bmp))])])).await;
        assert_eq!(bmp.code(), (400, "image_invalid".to_owned()));
        // The placeholder of other programs, and the model's own, are text when they are typed.
        for typed in
            ["<|kimi_image_placeholder|>", "<|media_pad|>", "<|media_begin|>image 75x53<|media_content|>"]
        {
            let got = server.post("/tokenize", &ask(&[user(&[text(typed)])])).await.json();
            let special = |id: &&Value| server.service.tokenizer.is_special(id.as_u64().unwrap() as u32);
            let plain = server.post("/tokenize", &ask(&[user(&[text("x")])])).await.json();
            let count = |got: &Value| got["tokens"].as_array().unwrap().iter().filter(special).count();
            assert_eq!(count(&got), count(&plain), "{typed}");
        }
        assert_eq!(server.get("/v1/models").await.json()["data"][0]["vision"], true);
    });
}

#[test]
fn files_come_out_of_their_directory_alone() {
    let home = tempfile::tempdir().unwrap();
    let (inside, outside) = (home.path().join("in side"), home.path().join("outside"));
    for dir in [&inside, &outside] {
        std::fs::create_dir_all(dir.join("deeper")).unwrap();
        std::fs::write(dir.join("deeper/image.png"), file(IMAGE)).unwrap();
    }
    std::fs::write(inside.join("note.txt"), "no image").unwrap();
    let sparse = std::fs::File::create(inside.join("long.png")).unwrap();
    sparse.set_len(1 << 40).unwrap_or_else(|_| sparse.set_len(21 << 20).unwrap());
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(outside.join("deeper"), inside.join("out")).unwrap();
        std::os::unix::fs::symlink(outside.join("deeper/image.png"), inside.join("out.png")).unwrap();
        std::os::unix::fs::symlink(inside.join("deeper/image.png"), inside.join("in.png")).unwrap();
        assert!(
            std::process::Command::new("mkfifo").arg(inside.join("pipe.png")).status().unwrap().success()
        );
    }
    let url = |path: PathBuf| {
        let path = path.to_str().unwrap().replace('\\', "/").replace(' ', "%20");
        format!("file://{}{path}", if path.starts_with('/') { "" } else { "/" })
    };
    runtime().block_on(async {
        let server = server(With { dirs: vec![inside.clone()], ..With::default() });
        let ask_for =
            |url: String| ask(&[user(&[json!({"type": "image", "image": url}), text("What is it?")])]);
        let good = server.chat(&ask_for(url(inside.join("deeper/image.png")))).await;
        let data = server.chat(&ask(&[user(&[picture(&file(IMAGE)), text("What is it?")])])).await;
        assert_eq!(answer(&good).0, answer(&data).0);
        let unsupported = "image_url_not_supported";
        let mut cases = vec![
            (url(outside.join("deeper/image.png")), unsupported),
            (url(inside.join("../outside/deeper/image.png")), unsupported),
            (url(inside.join("deeper")), unsupported),
            (url(inside.join("missing.png")), unsupported),
            ("file:///etc/passwd".to_owned(), unsupported),
            ("file://elsewhere/x.png".to_owned(), unsupported),
            ("file:////elsewhere/x.png".to_owned(), unsupported),
            ("file://".to_owned(), unsupported),
            ("file:///%00".to_owned(), unsupported),
            (inside.join("deeper/image.png").to_str().unwrap().to_owned(), unsupported),
            (url(inside.join("note.txt")), "image_invalid"),
            (url(inside.join("long.png")), "image_invalid"),
        ];
        if cfg!(unix) {
            let host =
                format!("file://localhost{}", inside.join("in.png").to_str().unwrap().replace(' ', "%20"));
            assert_eq!(server.chat(&ask_for(host)).await.status, 200);
            cases.extend(
                ["out/image.png", "out.png", "pipe.png"].map(|name| (url(inside.join(name)), unsupported)),
            );
        }
        for (url, code) in cases {
            let got = server.chat(&ask_for(url.clone())).await;
            assert_eq!(got.code(), (400, code.to_owned()), "{url}: {}", got.text);
            // Nothing of the machine but what the client said itself.
            assert!(!got.text.contains(home.path().to_str().unwrap()), "{}", got.text);
        }
    });
    assert!(Images::new(reader(CONTAINER), None, &[home.path().join("none")], ROOM).is_err());
}

/// Waits for as long as it is wanted.
struct Patient;

impl Model for Patient {
    fn begin(&mut self, _: usize, _: &mut Job) -> Result<usize, EngineError> {
        Ok(0)
    }

    fn prefill(&mut self, _: usize, job: &mut Job, wanted: &dyn Fn() -> bool) -> Result<usize, EngineError> {
        assert_eq!(job.images.len(), 1);
        while wanted() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(EngineError::Interrupted)
    }

    fn next(&mut self, _: &[usize], _: &mut Write<'_>) -> Result<(), EngineError> {
        Ok(())
    }
}

#[test]
fn who_leaves_does_not_keep_the_tower_busy() {
    runtime().block_on(async {
        let model = || sighted(CONTAINER, &[], ROOM);
        let server = Arc::new(Server::new(model(), Settings::default(), Access::default(), Patient));
        let queue = &server.service.queue;
        for left in 1..3 {
            let client = Arc::clone(&server);
            let client =
                tokio::spawn(async move { client.chat(&ask(&[user(&[picture(&file(IMAGE))])])).await });
            until("it to run", || queue.status().running == 1).await;
            client.abort();
            until("its slot to be free", || queue.status().running == 0).await;
            let metrics = server.get("/metrics").await.text;
            let line = format!("waste_cancelled_total{{reason=\"prefill\"}} {left}");
            assert!(metrics.contains(&line), "{metrics}");
        }
        // One that is being looked at when the server ends is cut like any other.
        let last = Arc::clone(&server);
        let last = tokio::spawn(async move { last.chat(&ask(&[user(&[picture(&file(IMAGE))])])).await });
        until("it to run", || queue.status().running == 1).await;
        queue.drain(Duration::ZERO);
        let got = last.await.unwrap().json();
        assert_eq!(got["choices"][0]["finish_reason"], "length");
    });
}

#[test]
fn images_that_wait_have_a_limit_together() {
    runtime().block_on(async {
        // Room for two of 250 x 250 pixels, at a model that never gets to them.
        let facts = sighted(CONTAINER, &[], 400 << 10);
        let server = Arc::new(Server::new(facts, Settings::default(), Access::default(), Patient));
        let body = ask(&[user(&[picture(&png(250, 250, Some(7)))])]);
        let send = || {
            let (server, body) = (Arc::clone(&server), body.clone());
            tokio::spawn(async move { server.chat(&body).await })
        };
        let there = || {
            let status = server.service.queue.status();
            status.running + status.waiting
        };
        let mut clients = vec![send()];
        until("one", || there() == 1).await;
        clients.push(send());
        until("two", || there() == 2).await;
        assert_eq!(server.chat(&body).await.code(), (429, "queue_full".to_owned()));
        // A small one still goes in; what is only counted leaves the room it took.
        let small = ask(&[user(&[picture(&png(16, 16, Some(7)))])]);
        for _ in 0..200 {
            assert_eq!(server.post("/tokenize", &small).await.status, 200);
        }
        clients.iter().for_each(tokio::task::JoinHandle::abort);
    });
}

/// Files that are images, were images, or never were.
fn any_file() -> impl Strategy<Value = Vec<u8>> {
    let kinds = [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Gif];
    let files: Vec<Vec<u8>> = kinds.into_iter().map(written).collect();
    let changes = proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6);
    let damaged =
        (proptest::sample::select(files), changes, proptest::option::of(any::<prop::sample::Index>()))
            .prop_map(|(mut file, changes, end)| {
                for (at, byte) in changes {
                    let at = at.index(file.len());
                    file[at] = byte;
                }
                file.truncate(end.map_or(file.len(), |end| end.index(file.len())));
                file
            });
    let sizes = (any::<u32>(), any::<u32>()).prop_map(|(width, height)| png(width, height, None));
    prop_oneof![4 => damaged, 1 => sizes, 1 => proptest::collection::vec(any::<u8>(), 0..60)]
}

fn any_part() -> impl Strategy<Value = Value> {
    let prefix = "(data:image/(png|jpeg|webp|gif|x);base64,){5}|data:|file://|http://|[a-z:/,;]{0,9}";
    let urls = prop_oneof![
        6 => any_file().prop_map(|file| url(&file)),
        1 => (prefix, "[A-Za-z0-9+/=]{0,16}|\\PC{0,9}").prop_map(|(prefix, rest)| prefix + &rest),
    ];
    let kinds = proptest::sample::select(&["image_url", "image", "input_image", "text", "x"][..]);
    let keys = proptest::sample::select(&["image_url", "image", "url"][..]);
    (kinds, keys, urls, any::<bool>()).prop_map(|(kind, key, url, inner)| {
        let url = if inner { json!({"url": url}) } else { url.into() };
        json!({"type": kind, key: url, "text": "x"})
    })
}

#[test]
fn malformed_images_are_never_the_servers_fault() {
    let runtime = runtime();
    let dirs = [std::env::temp_dir()];
    let facts = sighted(CONTAINER, &dirs, ROOM);
    let script = ScriptModel::read(&data("xtml/streams.json"), &facts.tokenizer).unwrap();
    let settings = Settings { max_tokens: 4, ..Settings::default() };
    let server = Server::new(facts, settings, Access::default(), script);
    let cases = if emulated() { 20 } else { 4000 };
    let roles = proptest::sample::select(&["system", "user", "assistant", "tool"][..]);
    let message = (roles, proptest::collection::vec(any_part(), 0..3))
        .prop_map(|(role, content)| json!({"role": role, "content": content}));
    let messages = proptest::collection::vec(message, 1..3);
    let paths = proptest::sample::select(&["/v1/chat/completions", "/tokenize"][..]);
    let good = std::cell::Cell::new(0);
    proptest!(ProptestConfig::with_cases(cases), |(messages in messages, path in paths)| {
        let got = runtime.block_on(server.post(path, &ask(&messages)));
        good.set(good.get() + usize::from(got.status == 200));
        prop_assert!(got.status.as_u16() < 500, "{}: {}", got.status, got.text);
    });
    assert!(good.get() > 0);
    server.end().unwrap();
}
