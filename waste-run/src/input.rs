//! Texts and token ids from arguments, files and standard input.

use std::io::{IsTerminal, Read};
use std::path::Path;

use waste_common::cli::Failure;
use waste_engine::tokenizer::Tokenizer;

use crate::args::TextArgs;
use crate::images::Given;

/// Longest text that is read.
const TEXT_BYTES_MAX: u64 = 1 << 30;

/// A text as it was given. `stdin_taken`: the model came from standard input, so the text cannot.
pub fn text(args: &TextArgs, stdin_taken: bool) -> Result<String, Failure> {
    let TextArgs { text, file } = args;
    match (text.as_deref(), file) {
        (_, Some(path)) => from_file(path),
        (Some("-") | None, None) if stdin_taken => {
            Err(Failure::usage("with MODEL `-` the text comes from the argument or from --file"))
        }
        (None, None) if std::io::stdin().is_terminal() => {
            Err(Failure::usage("a text is needed: as an argument, with --file, or on standard input"))
        }
        (Some("-") | None, None) => read(std::io::stdin().lock(), "standard input"),
        (Some(text), None) => Ok(text.to_owned()),
    }
}

/// A file's text.
pub fn from_file(path: &Path) -> Result<String, Failure> {
    let file = std::fs::File::open(path).map_err(|error| {
        Failure::data("unreadable_file", format!("cannot read {}: {error}", path.display()))
    })?;
    read(file, &path.display().to_string())
}

/// All of standard input.
pub fn from_stdin() -> Result<String, Failure> {
    if std::io::stdin().is_terminal() {
        return Err(Failure::usage("token ids are needed: with --ids, or on standard input"));
    }
    read(std::io::stdin().lock(), "standard input")
}

fn read(source: impl Read, name: &str) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    source
        .take(TEXT_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| Failure::data("unreadable_file", format!("cannot read {name}: {error}")))?;
    if bytes.len() as u64 > TEXT_BYTES_MAX {
        return Err(Failure::data(
            "text_too_large",
            format!("{name} holds more than {TEXT_BYTES_MAX} bytes"),
        ));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::data("invalid_utf8", format!("{name} is not valid UTF-8: byte {at} is the first wrong one"))
    })
}

/// The tokens of images and a text, after [BOS] if wanted.
pub fn encode(tokenizer: &Tokenizer, images: &Given, text: &str, bos: bool) -> Result<Vec<u32>, Failure> {
    let mut ids = Vec::new();
    if bos {
        ids.push(self::bos(tokenizer)?);
    }
    ids.extend(images.markup(tokenizer));
    ids.extend(tokenizer.encode(text));
    Ok(ids)
}

/// The id of [BOS].
pub fn bos(tokenizer: &Tokenizer) -> Result<u32, Failure> {
    tokenizer
        .bos()
        .ok_or_else(|| Failure::data("no_bos", "the tokenizer names no [BOS]; use --no-bos or --ids"))
}
