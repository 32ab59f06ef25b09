//! Text to tokens and back; needs only the tokenizer's files.

use serde::Serialize;
use waste_common::cli::{Exit, Failure, Output, resolve_model};
use waste_engine::tokenizer::Tokenizer;

use crate::args::{DetokenizeArgs, TokenizeArgs, id_list};
use crate::input;

#[derive(Serialize)]
struct Tokens<'a> {
    n: usize,
    ids: &'a [u32],
}

#[derive(Serialize)]
struct Text<'a> {
    n: usize,
    text: &'a str,
}

/// Prints a text's token ids.
pub fn tokenize(args: TokenizeArgs, output: &Output) -> Result<Exit, Failure> {
    let model = resolve_model(&args.model)?;
    let tokenizer = Tokenizer::open(model.path())?;
    let text = input::text(&args.text, model.chained().is_some())?;
    let ids = if args.markup { tokenizer.encode_markup(&text) } else { tokenizer.encode(&text) };
    if output.json() {
        output.result(&Tokens { n: ids.len(), ids: &ids })?;
    } else {
        let words: Vec<String> = ids.iter().map(u32::to_string).collect();
        writeln!(output.text(), "{}", words.join(" "))?;
    }
    Ok(Exit::Done)
}

/// Prints the text of token ids, byte for byte.
pub fn detokenize(args: DetokenizeArgs, output: &Output) -> Result<Exit, Failure> {
    let model = resolve_model(&args.model)?;
    let tokenizer = Tokenizer::open(model.path())?;
    let ids = match args.ids {
        Some(ids) => ids.0,
        None if model.chained().is_some() => {
            return Err(Failure::usage("with MODEL `-` the ids come from --ids"));
        }
        None => id_list(&input::from_stdin()?).map_err(|error| Failure::data("invalid_ids", error))?.0,
    };
    let bytes = tokenizer.decode(&ids)?;
    if output.json() {
        output.result(&Text { n: ids.len(), text: &String::from_utf8_lossy(&bytes) })?;
    } else {
        output.text().write_all(&bytes)?;
    }
    Ok(Exit::Done)
}
