//! Writing text.

use serde::Serialize;
use waste_common::cli::{Exit, Failure, Output, resolve_model};
use waste_common::machine::{Paging, peak_rss_bytes};
use waste_engine::experts::Rank;
use waste_engine::tokenizer::{Tokenizer, TokenizerError};
use waste_engine::{EngineError, Finish, Listener, Request, Session, SoFar};

use crate::args::{RunArgs, TextArgs};
use crate::form::{Form, Forms};
use crate::images::Given;
use crate::input;
use crate::open::{self, size};
use crate::sampling;
use crate::session::{self, Going, Keeper};

#[derive(Serialize)]
struct Report<'a> {
    text: &'a str,
    ids: &'a [u32],
    prompt_tokens: usize,
    tokens: usize,
    /// Those that an interrupted run had written; their text is written again.
    resumed_tokens: usize,
    finish_reason: &'static str,
    seconds: Seconds,
    tokens_per_second: f64,
    prefill_tokens_per_second: f64,
    expert_hits: u64,
    expert_ahead_hits: u64,
    expert_misses: u64,
    expert_ahead_reads: u64,
    expert_warm_reads: u64,
    lookahead: &'a [Rank],
    stall_seconds: f64,
    bytes_read: u64,
    direct_io: bool,
    kernel: &'static str,
    arith: &'static str,
    kv: String,
    threads: usize,
    seed: u64,
    ctx: usize,
    budget_bytes: u64,
    peak_rss_bytes: Option<u64>,
    paging: Option<Paging>,
}

#[derive(Serialize)]
struct Seconds {
    load: f64,
    prefill: f64,
    decode: f64,
}

/// Streams the text, and keeps the session.
struct Teller<'a> {
    output: &'a Output,
    keeper: Option<Keeper<'a>>,
    /// What standard output said, which an engine error would hide.
    failed: Option<Failure>,
}

impl Listener for Teller<'_> {
    fn text(&mut self, text: &str) -> Result<(), EngineError> {
        if self.output.json() {
            return Ok(());
        }
        let mut stdout = self.output.text();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(|failure| {
            let error = EngineError::Sink(failure.message.clone());
            self.failed = Some(failure);
            error
        })
    }

    fn pause(&mut self, session: &Session, so_far: &SoFar<'_>) -> Result<(), EngineError> {
        self.keeper.as_mut().map_or(Ok(()), |keeper| keeper.pause(session, so_far))
    }
}

/// Runs the model on a prompt and streams what it writes.
pub fn run(args: RunArgs, output: &Output) -> Result<Exit, Failure> {
    let model = args.model.as_deref().ok_or_else(|| Failure::usage("a MODEL is needed; see --help"))?;
    let model = resolve_model(model)?;
    let mut found = open::find(&model, &args.open, output)?;
    let images = Given::look(&args.images, &mut found, model.path())?;
    let tokenizer = match Tokenizer::open(model.path()) {
        Err(TokenizerError::Missing { .. }) if args.ids.is_some() => None,
        outcome => Some(outcome?),
    };
    let _session = session::lock(&args)?;
    let saved = session::open(&args, found.fingerprint())?;
    let text = TextArgs { text: args.prompt.clone(), file: args.file.clone() };
    let prompt = match (&args.ids, &tokenizer) {
        (Some(ids), _) => ids.0.clone(),
        // A session goes on without a prompt too.
        _ if saved.is_some() && text.text.is_none() && text.file.is_none() => Vec::new(),
        (None, None) => return Err(Failure::internal("no tokenizer")),
        (None, Some(tokenizer)) => {
            let text = input::text(&text, model.chained().is_some())?;
            input::encode(tokenizer, &images, &text, !args.no_bos && saved.is_none())?
        }
    };
    let start = saved.as_ref().map_or(0, |saved| saved.text().tokens.len());
    let places = images.places(&prompt, found.config(), start)?;
    let mut going = Going::new(&args, saved, prompt)?;
    let form = match &tokenizer {
        Some(tokenizer) => {
            Forms::new(tokenizer, found.config().vocab).given(going.manner.form.as_ref(), &args.form)?
        }
        None if going.manner.form.is_some() => {
            return Err(Failure::usage("a grammar needs a text, and there is no tokenizer"));
        }
        None => Form::default(),
    };
    let mut request = Request {
        max_tokens: going.max_tokens,
        sampler: going.manner.sampler.clone(),
        stop: going.manner.stop.clone(),
        stop_ids: sampling::stop_ids(found.config(), tokenizer.as_ref(), model.path())?,
        prompt: going.pending.clone(),
        constraint: form.kept,
        begun: going.begun.clone(),
        ..Request::default()
    };
    request.check()?;
    match &tokenizer {
        None if !request.stop.is_empty() => {
            return Err(Failure::usage(format!(
                "--stop needs a text, and there is no tokenizer in {}",
                model.path().display()
            )));
        }
        None => output.note(format_args!(
            "no tokenizer in {}: token ids are written instead of text",
            model.path().display()
        )),
        Some(tokenizer) => request.mask = sampling::mask(going.manner.masked, found.config(), tokenizer),
    }

    let opened = found.plan(&going.tokens, output)?.load(output)?;
    let engine = &opened.engine;
    let mut session = going.start(engine, args.session.is_some())?;
    going.images.extend(images.queue(&places, engine, &mut session, output)?);
    let begun = going.begun_tokens();
    let keeper = args.session.as_deref().map(|path| Keeper::new(path, args.autosave, engine, going, output));
    let mut teller = Teller { output, keeper, failed: None };
    let outcome = waste_engine::generate(engine, &mut session, tokenizer.as_ref(), &request, &mut teller);
    if let Some(failure) = teller.failed {
        return Err(failure);
    }
    let generation = outcome?;

    let reads = engine.read_stats();
    let rate = |tokens: usize, seconds: f64| if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
    // The first token comes out of the prompt's pass.
    let decoded = generation.tokens.len().saturating_sub(1 + begun);
    let report = Report {
        text: &generation.text,
        ids: &generation.tokens,
        prompt_tokens: request.prompt.len(),
        tokens: generation.tokens.len(),
        resumed_tokens: begun,
        finish_reason: generation.finish.reason(),
        seconds: Seconds {
            load: opened.load_seconds,
            prefill: generation.prefill_seconds,
            decode: generation.decode_seconds,
        },
        tokens_per_second: rate(decoded, generation.decode_seconds),
        prefill_tokens_per_second: rate(request.prompt.len(), generation.prefill_seconds),
        expert_hits: reads.hits,
        expert_ahead_hits: reads.ahead_hits,
        expert_misses: reads.misses,
        expert_ahead_reads: reads.ahead_reads,
        expert_warm_reads: reads.warm_reads,
        lookahead: reads.guessed_ranks(),
        stall_seconds: reads.stall_nanos as f64 * 1e-9,
        bytes_read: reads.bytes_read,
        direct_io: engine.direct_io(),
        kernel: engine.kernels(),
        arith: args.open.arith.name(),
        kv: opened.plan.kv.to_string(),
        threads: opened.plan.threads,
        seed: generation.seed,
        ctx: opened.plan.ctx,
        budget_bytes: opened.plan.budget_bytes,
        peak_rss_bytes: peak_rss_bytes(),
        paging: opened.paging(),
    };
    opened.learn()?;
    if output.json() {
        output.result(&report)?;
    } else if tokenizer.is_some() {
        output.text().write_all(b"\n")?;
    } else {
        let ids: Vec<String> = generation.tokens.iter().map(u32::to_string).collect();
        writeln!(output.text(), "{}", ids.join(" "))?;
    }
    say(&report, generation.finish, output);
    Ok(if generation.finish == Finish::Cancelled { Exit::Interrupted } else { Exit::Done })
}

fn say(report: &Report, finish: Finish, output: &Output) {
    let demands = report.expert_hits + report.expert_ahead_hits + report.expert_misses;
    let share = if demands > 0 { 100.0 * report.expert_hits as f64 / demands as f64 } else { 0.0 };
    output.note(format_args!(
        "{} tokens in {:.2} s ({:.2} tok/s), prompt of {} in {:.2} s ({:.2} tok/s), loaded in {:.2} s",
        report.tokens,
        report.seconds.decode,
        report.tokens_per_second,
        report.prompt_tokens,
        report.seconds.prefill,
        report.prefill_tokens_per_second,
        report.seconds.load,
    ));
    output.note(format_args!(
        "experts: {} hits ({share:.1} %), {} read ahead in time, {} misses; {} read, {:.2} s waited; stopped because {}",
        report.expert_hits,
        report.expert_ahead_hits,
        report.expert_misses,
        size(report.bytes_read),
        report.stall_seconds,
        finish.explain(),
    ));
}
