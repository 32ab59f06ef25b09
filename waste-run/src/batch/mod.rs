//! A queue of questions in a file, answered into another file, one after the other or several at a time: over nights,
//! kills and crashes.

mod item;
mod results;
mod work;

use std::collections::HashSet;
use std::time::Instant;

use serde::Serialize;
use waste_common::cli::{Exit, Failure, Output, resolve_model};
use waste_engine::chat::{AnswerCall, ChatFormat, Effort, Limits, Turn};
use waste_engine::sampler::SamplerOptions;
use waste_engine::tokenizer::Tokenizer;
use waste_engine::{Engine, EngineError};

use crate::args::{BatchArgs, EffortArg};
use crate::form::{Form, Forms};
use crate::{input, open, sampling};
use item::{Defaults, Item};
use results::Results;
use work::{Answering, Work};

/// An answer in the file.
#[derive(Serialize)]
struct Line<'a> {
    id: &'a str,
    text: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    reasoning: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
    finish_reason: &'static str,
    prompt_tokens: usize,
    tokens: usize,
    seed: u64,
    seconds: f64,
}

#[derive(Serialize)]
struct Call<'a> {
    name: &'a str,
    arguments: &'a str,
}

/// A question that cannot be answered, in the file.
#[derive(Serialize)]
struct Refused<'a> {
    id: &'a str,
    error: Why,
}

#[derive(Serialize)]
struct Why {
    code: &'static str,
    message: String,
}

#[derive(Default, Serialize)]
struct Report {
    /// Lines of the input.
    items: usize,
    /// Those that had an answer before.
    skipped: usize,
    answered: usize,
    /// Those that cannot be answered.
    refused: usize,
    tokens: usize,
    seconds: f64,
}

/// Answers what has no answer yet.
pub fn run(args: BatchArgs, output: &Output) -> Result<Exit, Failure> {
    let model = resolve_model(&args.model)?;
    let found = open::find(&model, &args.open, output)?;
    let tokenizer = Tokenizer::open(model.path())?;
    let format = ChatFormat::find(model.path(), &tokenizer, args.chat_format);
    let raw = ChatFormat::raw(&tokenizer);
    let stop_ids = sampling::stop_ids(found.config(), Some(&tokenizer), model.path())?;
    let mask = sampling::mask(!args.sampling.no_mask, found.config(), &tokenizer);
    let forms = Forms::new(&tokenizer, found.config().vocab);
    let form = forms.by_options(&args.form)?;
    let items = read_items(&args, &tokenizer, &format, &form, &forms)?;
    let mut results = Results::open(&args.out)?;

    let mut report = Report { items: items.len(), ..Report::default() };
    let owed: Vec<&Item> = items.iter().filter(|item| !results.finished.contains(&item.id)).collect();
    report.skipped = items.len() - owed.len();
    if owed.is_empty() {
        output.note(format_args!("all {} have an answer in {}", items.len(), args.out.display()));
        return end(&report, output);
    }
    let opened = found.together(args.parallel).plan(&[], output)?.load(output)?;
    let mut work = Work::new(&opened.engine, &tokenizer, mask.as_ref())?;
    let start = Instant::now();
    let mut waiting = owed.iter().copied();
    loop {
        while let Some(lane) = work.free()
            && let Some(item) = waiting.next()
        {
            let format = if item.raw { &raw } else { format.as_ref().unwrap_or(&raw) };
            let own = item.form.clone().map(|form| forms.of(form)).transpose()?;
            let form = own.as_ref().unwrap_or(&form);
            match turn(item, format, form, &tokenizer, &stop_ids, &opened.engine)? {
                Some(turn) => work.begin(lane, item, turn),
                None => {
                    let message = format!(
                        "{} tokens do not fit into the context of {} with an answer (see --ctx)",
                        item.ids.len(),
                        opened.engine.ctx()
                    );
                    results
                        .append(&Refused { id: &item.id, error: Why { code: "context_full", message } })?;
                    report.refused += 1;
                }
            }
        }
        if work.idle() {
            break;
        }
        let ended = match work.round() {
            Err(EngineError::Interrupted) => {
                let left = owed.len() - report.answered - report.refused;
                output.note(format_args!("stopped; the same command goes on with the other {left}"));
                opened.learn()?;
                return Ok(Exit::Interrupted);
            }
            outcome => outcome?,
        };
        for Answering { item, turn, began, .. } in ended {
            let answer = turn.reply().answer();
            results.append(&Line {
                id: &item.id,
                text: &answer.content,
                reasoning: &answer.reasoning,
                tool_calls: answer.calls.iter().map(call).collect(),
                finish_reason: turn.reply().finish_reason(),
                prompt_tokens: item.ids.len(),
                tokens: turn.tokens().len(),
                seed: turn.seed(),
                seconds: began.elapsed().as_secs_f64(),
            })?;
            report.answered += 1;
            report.tokens += turn.tokens().len();
            report.seconds = start.elapsed().as_secs_f64();
            progress(&report, owed.len(), output);
        }
    }
    opened.learn()?;
    end(&report, output)
}

/// The answer to an item before its first token; `None` if the context has no room for any.
fn turn(
    item: &Item,
    format: &ChatFormat,
    form: &Form,
    tokenizer: &Tokenizer,
    stop_ids: &[u32],
    engine: &Engine,
) -> Result<Option<Turn>, EngineError> {
    let Some(room) = engine.ctx().checked_sub(item.ids.len()).filter(|room| *room > 0) else {
        return Ok(None);
    };
    let limits = Limits {
        tokens: item.tokens.min(room),
        think: None,
        stop: item.stop.clone(),
        stop_ids: stop_ids.to_vec(),
    };
    let guide = form.guide(format, tokenizer, engine.config().vocab, stop_ids);
    Turn::new(format, tokenizer, &item.prompt, item.seeded()?, limits)?.guided(guide).map(Some)
}

/// Says what was done.
fn end(report: &Report, output: &Output) -> Result<Exit, Failure> {
    let Report { skipped, answered, refused, .. } = report;
    if output.json() {
        output.result(report)?;
    } else {
        writeln!(output.text(), "{answered} answered, {refused} refused, {skipped} done before")?;
    }
    Ok(if *refused > 0 { Exit::No } else { Exit::Done })
}

fn call(call: &AnswerCall) -> Call<'_> {
    Call { name: &call.name, arguments: &call.arguments }
}

fn progress(report: &Report, owed: usize, output: &Output) {
    let done = report.answered + report.refused;
    let left = report.seconds / done as f64 * (owed - done) as f64;
    output.note(format_args!(
        "{} of {} done, {:.2} tok/s, about {} left",
        report.skipped + done,
        report.items,
        report.tokens as f64 / report.seconds.max(1e-9),
        if left < 90.0 { format!("{left:.0} s") } else { format!("{:.0} min", left / 60.0) },
    ));
}

/// All lines; what is wrong with any of them is said before a model is loaded.
fn read_items(
    args: &BatchArgs,
    tokenizer: &Tokenizer,
    format: &Result<ChatFormat, waste_engine::chat::ChatError>,
    form: &Form,
    forms: &Forms<'_>,
) -> Result<Vec<Item>, Failure> {
    let text = input::from_file(&args.input)?;
    let effort = match args.effort {
        None => Some(Effort::Low),
        Some(EffortArg(effort)) => effort,
    };
    let defaults = Defaults {
        tokenizer,
        format: format.as_ref().map_err(ToString::to_string),
        sampler: sampling::options(&args.sampling, SamplerOptions::default()),
        stop: args.sampling.stop.clone(),
        tokens: args.tokens.unwrap_or(usize::MAX),
        effort,
        form,
        forms,
    };
    let mut items = Vec::new();
    let mut ids = HashSet::new();
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    for (number, line) in lines {
        let wrong = |why: String| {
            Failure::data("invalid_batch", format!("{}, line {number}: {why}", args.input.display()))
                .with("line", number)
        };
        let item = Item::read(line, &defaults).map_err(wrong)?;
        if !ids.insert(item.id.clone()) {
            return Err(wrong(format!("the id {:?} was there before", item.id)));
        }
        items.push(item);
    }
    Ok(items)
}
