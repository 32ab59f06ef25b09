//! How well a model predicts a text.

use serde::Serialize;
use waste_common::cli::{Exit, Failure, Output, Progress, Unit, resolve_model};
use waste_common::files::AtomicFile;
use waste_common::importance;
use waste_common::machine::{Paging, peak_rss_bytes};
use waste_engine::tokenizer::Tokenizer;
use waste_engine::{EngineError, Wanted};

use crate::against::{Against, Divergence};
use crate::args::PerplexityArgs;
use crate::eval::log_sum_exp;
use crate::{input, open};

#[derive(Serialize)]
struct Report {
    tokens: usize,
    bytes: usize,
    nll: f64,
    ppl: f64,
    bits_per_byte: f64,
    /// Keys `kl`, `kl_standard_error` and `same_top`, with `--against`.
    #[serde(flatten)]
    against: Option<Divergence>,
    runs: usize,
    run: usize,
    bos: bool,
    seconds: f64,
    budget_bytes: u64,
    peak_rss_bytes: Option<u64>,
    paging: Option<Paging>,
}

/// Measures a text: cut into runs, each from an empty state, the loss of every predicted token summed.
pub fn run(args: PerplexityArgs, output: &Output) -> Result<Exit, Failure> {
    let model = resolve_model(&args.model)?;
    let found = open::find(&model, &args.open, output)?;
    let tokenizer = Tokenizer::open(model.path())?;
    let text = input::from_file(&args.file)?;
    let ids = tokenizer.encode(&text);
    let bos = if args.bos { Some(input::bos(&tokenizer)?) } else { None };
    // Every id is looked up among the logits, the last one too; the context holds one run at a time.
    EngineError::check_tokens(&ids, 0, usize::MAX, found.config().vocab)?;
    EngineError::check_tokens(bos.as_slice(), 0, usize::MAX, found.config().vocab)?;
    let ctx = found.ctx();
    let room = ctx.saturating_sub(usize::from(args.bos));
    let run = args.run.unwrap_or(room);
    if run == 0 || run > room {
        let bos = if args.bos { " after [BOS]" } else { "" };
        return Err(Failure::usage(format!(
            "runs of {run} tokens: a run must hold at least 1, and --ctx {ctx} leaves room for {room}{bos}"
        )));
    }
    let vocab = found.config().vocab;
    if let Some(path) = &args.save_importance {
        if found.config().moe.is_none() {
            return Err(Failure::usage("--save-importance: this model has no routed experts"));
        }
        // Dropped again: a place that cannot be written is refused before the run, not after it.
        drop(AtomicFile::create(path)?);
    }
    let opened = found.plan(&[], output)?.load(output)?;
    let mut against = match &args.against {
        Some(path) => Some(Against::open(path, &args.open, vocab, output)?),
        None => None,
    };
    let engine = &opened.engine;
    let mut session = engine.session()?;
    if args.save_importance.is_some() {
        session.measure_inputs();
    }
    let progress = Progress::new(output, "measuring", ids.len() as u64, Unit::Count);
    let start = std::time::Instant::now();
    let (mut loss, mut tokens, mut runs) = (0.0, 0, 0);
    for part in ids.chunks(run) {
        let sequence: Vec<u32> = bos.into_iter().chain(part.iter().copied()).collect();
        // Each token is predicted from those before it; what the last one leads to is not measured.
        let (Some((_, input)), targets) = (sequence.split_last(), &sequence[1..]) else { continue };
        if input.is_empty() {
            continue;
        }
        session.reset();
        if let Some(against) = &mut against {
            against.reset();
        }
        // Chunk by chunk as the engine takes them anyway: no more of the other model's logits is ever held.
        for (number, piece) in input.chunks(opened.plan.chunk).enumerate() {
            let first = number * opened.plan.chunk;
            if let Some(against) = &mut against {
                against.forward(piece)?;
            }
            engine.forward(&mut session, piece, Wanted::All, &mut |position, logits| {
                loss += log_sum_exp(logits) - f64::from(logits[targets[position] as usize]);
                tokens += 1;
                if let Some(against) = &mut against {
                    against.compare(position - first, logits);
                }
                Ok(())
            })?;
        }
        runs += 1;
        progress.add(part.len() as u64);
        opened.interrupt.check()?;
    }
    progress.finish();
    if tokens == 0 {
        return Err(Failure::data(
            "text_too_short",
            "the text holds no token to predict; --bos makes the first one count",
        ));
    }
    if let Some(path) = &args.save_importance {
        importance::write(path, &session.take_inputs())?;
        output.note(format_args!("what the experts were given is in {}", path.display()));
    }
    let nll = loss / tokens as f64;
    let report = Report {
        tokens,
        bytes: text.len(),
        nll,
        ppl: nll.exp(),
        bits_per_byte: loss / std::f64::consts::LN_2 / text.len() as f64,
        against: against.map(|against| against.divergence()),
        runs,
        run,
        bos: args.bos,
        seconds: start.elapsed().as_secs_f64(),
        budget_bytes: opened.plan.budget_bytes,
        peak_rss_bytes: peak_rss_bytes(),
        paging: opened.paging(),
    };
    opened.learn()?;
    if output.json() {
        output.result(&report)?;
        return Ok(Exit::Done);
    }
    let Report { tokens, bytes, nll, ppl, bits_per_byte, against, seconds, .. } = report;
    writeln!(
        output.text(),
        "{tokens} tokens, {bytes} bytes: nll {nll:.5}, ppl {ppl:.4}, bits per byte {bits_per_byte:.5}"
    )?;
    if let Some(Divergence { kl, kl_standard_error, same_top }) = against {
        writeln!(
            output.text(),
            "KL divergence {kl:.5} ± {kl_standard_error:.5} nats per token, the same most likely token at {:.2} %",
            100.0 * same_top
        )?;
    }
    output.note(format_args!("{seconds:.1} s, {:.1} tokens per second", tokens as f64 / seconds));
    Ok(Exit::Done)
}
