//! What a text or an answer has to be: JSON of a schema, or what a grammar describes.

use std::cell::OnceCell;
use std::path::PathBuf;

use waste_common::cli::Failure;
use waste_engine::chat::{ChatFormat, Demand, Guide, Json, ResponseFormat, read};
use waste_engine::grammar::{GrammarError, Grammars};
use waste_engine::sampler::TokenConstraint;
use waste_engine::saved;
use waste_engine::tokenizer::Tokenizer;

use crate::args::FormArgs;
use crate::input;

/// A form.
#[derive(Clone, Debug, Default)]
pub struct Form {
    /// What the prompt says of it.
    pub said: ResponseFormat,
    /// What keeps the text to it; `None` for any text.
    pub kept: Option<Box<dyn TokenConstraint>>,
}

impl Form {
    /// What leads an answer in this format to it; `None` if any answer will do.
    pub fn guide(
        &self,
        format: &ChatFormat,
        tokenizer: &Tokenizer,
        vocab: usize,
        stop_ids: &[u32],
    ) -> Option<Guide> {
        let demand = Demand { text: self.kept.clone(), ..Demand::default() };
        Guide::new(format, tokenizer, vocab, stop_ids, demand, usize::MAX)
    }
}

/// The schema or grammar that options name.
///
/// # Errors
/// The file cannot be read.
pub fn given(args: &FormArgs) -> Result<Option<saved::Form>, Failure> {
    let Some(path) = file(args) else { return Ok(None) };
    let content = input::from_file(path)?;
    Ok(Some(match args.json_schema {
        Some(_) => saved::Form::JsonSchema(content),
        None => saved::Form::Grammar(content),
    }))
}

fn file(args: &FormArgs) -> Option<&PathBuf> {
    args.json_schema.as_ref().or(args.grammar.as_ref())
}

/// All forms a model can keep to.
pub struct Forms<'a> {
    tokenizer: &'a Tokenizer,
    vocab: usize,
    /// Built when they are asked for first: that takes a second.
    grammars: OnceCell<Grammars>,
}

impl<'a> Forms<'a> {
    /// Of a model with `vocab` tokens.
    pub fn new(tokenizer: &'a Tokenizer, vocab: usize) -> Forms<'a> {
        Forms { tokenizer, vocab, grammars: OnceCell::new() }
    }

    /// The one that options ask for.
    ///
    /// # Errors
    /// The file cannot be read, or what it says cannot be kept to.
    pub fn by_options(&self, args: &FormArgs) -> Result<Form, Failure> {
        self.given(given(args)?.as_ref(), args)
    }

    /// The one that was given, by `args` or when the answer was begun.
    ///
    /// # Errors
    /// It cannot be kept to.
    pub fn given(&self, form: Option<&saved::Form>, args: &FormArgs) -> Result<Form, Failure> {
        let form = match form {
            None => return Ok(Form::default()),
            Some(saved::Form::JsonSchema(schema)) => self.by_schema(schema),
            Some(saved::Form::Grammar(grammar)) => self.by_grammar(grammar),
        };
        form.map_err(|error| {
            let mut failure = Failure::from(error);
            if let Some(path) = file(args) {
                failure.message = format!("{}: {}", path.display(), failure.message);
            }
            failure
        })
    }

    /// The one that a `response_format` of the OpenAI API asks for.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn by_json(&self, json: &Json) -> Result<Form, String> {
        let schema = json.get("json_schema").and_then(|outer| outer.get("schema"));
        match json.get("type").and_then(Json::as_str) {
            Some("text" | "json_object") => (),
            Some("json_schema") if schema.is_some() => (),
            Some("json_schema") => return Err("json_schema needs json_schema.schema".to_owned()),
            _ => return Err("expected type text, json_object or json_schema".to_owned()),
        }
        self.of(read::response_format(json)).map_err(|error| error.to_string())
    }

    /// The one that a prompt speaks of.
    ///
    /// # Errors
    /// It cannot be kept to.
    pub fn of(&self, said: ResponseFormat) -> Result<Form, GrammarError> {
        let kept = match said {
            ResponseFormat::Text => None,
            _ => self.grammars()?.response_format(&said)?.map(|kept| Box::new(kept) as _),
        };
        Ok(Form { said, kept })
    }

    fn by_schema(&self, schema: &str) -> Result<Form, GrammarError> {
        let kept = self.grammars()?.json_schema_text(schema)?;
        // It was read as JSON just now.
        let said = Json::parse(schema).map_or(ResponseFormat::Text, ResponseFormat::JsonSchema);
        Ok(Form { said, kept: Some(Box::new(kept)) })
    }

    fn by_grammar(&self, grammar: &str) -> Result<Form, GrammarError> {
        let kept = self.grammars()?.lark(grammar)?;
        Ok(Form { said: ResponseFormat::Text, kept: Some(Box::new(kept)) })
    }

    fn grammars(&self) -> Result<&Grammars, GrammarError> {
        if self.grammars.get().is_none() {
            // Nobody else has filled it since.
            let _ = self.grammars.set(Grammars::new(self.tokenizer, self.vocab)?);
        }
        self.grammars.get().ok_or_else(|| GrammarError::Vocabulary { why: "it was not read".to_owned() })
    }
}
