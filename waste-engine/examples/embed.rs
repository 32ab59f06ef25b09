//! A program with a model inside: plan, open, tokenize, generate, evaluate, save, load, statistics, close.
//!
//! ```sh
//! cargo run --release --example embed -- tests/models/k3-tales "Once upon a time"
//! ```

use std::error::Error;
use std::io::Write;
use std::path::Path;

use waste_engine::defaults::Defaults;
use waste_engine::machine::Machine;
use waste_engine::open::{self, Reserved};
use waste_engine::plan::{Budget, PlanOptions};
use waste_engine::sampler::{SamplerOptions, SamplerState};
use waste_engine::saved::{self, Text};
use waste_engine::tokenizer::Tokenizer;
use waste_engine::{
    Engine, EngineError, EngineOptions, Generation, Listener, Request, Saved, Session, SoFar, Wanted,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("usage: embed MODEL [PROMPT]")?;
    let prompt = args.next().unwrap_or_else(|| "Once upon a time".to_owned());
    let file = std::env::temp_dir().join(format!("embed-{}.session", std::process::id()));
    let outcome = run(Path::new(&model), &prompt, &file, &mut std::io::stdout());
    let _ = std::fs::remove_file(&file);
    outcome
}

/// Writes a text in two parts, the second one from a session file.
pub fn run(model: &Path, prompt: &str, file: &Path, out: &mut dyn Write) -> Result<(), Box<dyn Error>> {
    // Plan: what does the model need, and does the machine have it? Nothing of the weights is read for that.
    let options = PlanOptions { ctx: 512, budget: Budget::Auto, ..PlanOptions::default() };
    let reserved: Reserved = open::reserve(&open::sizes(model)?, &options, &Machine::probe()?, "embed")?;
    let plan = &reserved.plan;
    writeln!(out, "plan: {}", plan.explanation)?;

    // Open: threads, buffers and cache are the engine's own, so that several of them live in one process.
    let engine = Engine::open(model, EngineOptions::default().within(plan))?;
    let tokenizer = Tokenizer::open(model)?;
    writeln!(out, "opened: {} layers, {} kernels", engine.config().layers(), engine.kernels())?;

    // Tokenize. Names of control tokens in the text are plain text here; `encode_markup` makes tokens of them.
    let mut tokens: Vec<u32> = tokenizer.bos().into_iter().collect();
    tokens.extend(tokenizer.encode(prompt));
    writeln!(out, "prompt: {tokens:?}")?;

    // Evaluate: the logits of the last token, or of all of them.
    let mut session = engine.session()?;
    let mut likely = (0, f32::NEG_INFINITY);
    engine.forward(&mut session, &tokens, Wanted::Last, &mut |_, logits| {
        for (id, &logit) in (0..).zip(logits) {
            if logit > likely.1 {
                likely = (id, logit);
            }
        }
        Ok(())
    })?;
    let word = tokenizer.decode(&[likely.0])?;
    writeln!(out, "likely: {:?}", String::from_utf8_lossy(&word))?;

    // Generate, with a callback for text as it becomes certain. Sessions are cheap, and independent of each other.
    session.reset();
    let stop_ids = Defaults::read(model, engine.config(), Some(&tokenizer))?.stop_ids;
    let request = Request {
        prompt: tokens.clone(),
        max_tokens: 24,
        sampler: SamplerOptions { temperature: 0.8, seed: Some(7), ..SamplerOptions::default() },
        mask: Some(tokenizer.text_mask(engine.config().vocab)),
        stop_ids: stop_ids.clone(),
        ..Request::default()
    };
    write!(out, "text: ")?;
    let first = write_on(&engine, &mut session, &tokenizer, &request, out)?;

    // Save: the state, exactly, and what goes with it; whole or not at all.
    let answer = tokens.len();
    tokens.extend(&first.generation.tokens);
    let ended = false;
    let images = Vec::new();
    let text = Text { tokens, images, sampler: first.sampler, answer, left: 0, ended, manner: None };
    saved::save(&engine, &session, &text, file)?;
    drop(session);

    // Load, in another session, and go on: the tokens that have not gone through the model are the prompt.
    let mut saved = Saved::open(file)?.ok_or("the session file has gone")?;
    let mut session = engine.session()?;
    saved.restore(&engine, &mut session)?;
    let request = Request { prompt: saved.pending().to_vec(), ..request };
    write!(out, "and on: ")?;
    write_on(&engine, &mut session, &tokenizer, &request, out)?;

    // Statistics.
    let stats = engine.read_stats();
    writeln!(
        out,
        "experts: {} hits, {} read ahead, {} misses, {} bytes; direct I/O {}",
        stats.hits,
        stats.ahead_hits,
        stats.misses,
        stats.bytes_read,
        engine.direct_io()
    )?;

    // Close: threads and memory end with the engine, and the reservation lets other engines have its share.
    drop((session, engine, reserved));
    Ok(())
}

struct Written {
    generation: Generation,
    sampler: SamplerState,
}

/// Generates, and shows the text as it comes.
fn write_on(
    engine: &Engine,
    session: &mut Session,
    tokenizer: &Tokenizer,
    request: &Request,
    out: &mut dyn Write,
) -> Result<Written, Box<dyn Error>> {
    let mut teller = Teller { out, sampler: None };
    let generation = waste_engine::generate(engine, session, Some(tokenizer), request, &mut teller)?;
    let sampler = teller.sampler.ok_or("nothing was generated")?;
    writeln!(out)?;
    writeln!(out, "stopped because {}", generation.finish.explain())?;
    Ok(Written { generation, sampler })
}

/// Who is told what a generation does. A closure that takes a `&str` will do where nothing is saved.
struct Teller<'a> {
    out: &'a mut dyn Write,
    sampler: Option<SamplerState>,
}

impl Listener for Teller<'_> {
    fn text(&mut self, text: &str) -> Result<(), EngineError> {
        self.out.write_all(text.as_bytes()).map_err(|error| EngineError::Sink(error.to_string()))
    }

    fn pause(&mut self, _session: &Session, so_far: &SoFar<'_>) -> Result<(), EngineError> {
        self.sampler = Some(so_far.sampler.clone());
        Ok(())
    }
}
