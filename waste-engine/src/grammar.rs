//! Text that keeps to a grammar: which tokens may come next, by llguidance.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use waste_common::error::{Coded, Exit};

use crate::chat::{ResponseFormat, Style};
use crate::sampler::{Mask, SamplerError, TokenConstraint};
use crate::tokenizer::Tokenizer;

/// Longest grammar or schema, in bytes.
pub const GRAMMAR_BYTES_MAX: usize = 256 << 10;
/// Deepest nesting of a schema.
pub const SCHEMA_DEPTH_MAX: usize = 64;
/// White space between two tokens of JSON: one run of so much, or a model could go on with it forever.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,20}";

/// Why a grammar cannot be kept to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum GrammarError {
    #[error("the vocabulary cannot be used with grammars: {why}")]
    Vocabulary { why: String },
    #[error("the {what} cannot be used: {why}")]
    Unsupported { what: &'static str, why: String },
}

impl Coded for GrammarError {
    fn exit(&self) -> Exit {
        Exit::Data
    }

    fn code(&self) -> &'static str {
        match self {
            GrammarError::Vocabulary { .. } => "grammar_vocabulary",
            GrammarError::Unsupported { .. } => "unsupported_schema",
        }
    }
}

/// A vocabulary, ready for grammars. Takes about a second for a large one.
pub struct Grammars {
    factory: ParserFactory,
    vocab: usize,
    end: u32,
}

struct Words {
    trie: TokTrie,
}

impl TokenizerEnv for Words {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.greedy_tokenize(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

impl Grammars {
    /// For the tokens of a model with `vocab` of them. Special tokens are never text.
    ///
    /// # Errors
    /// The model has not all of the tokenizer's tokens, or the grammar engine refuses them.
    pub fn new(tokenizer: &Tokenizer, vocab: usize) -> Result<Grammars, GrammarError> {
        let refused = |why: String| GrammarError::Vocabulary { why };
        let end = tokenizer.specials().last().map(|(id, _)| id);
        let end = end.filter(|id| (*id as usize) < vocab);
        let end = end.ok_or_else(|| refused("its special tokens are not all in the model".to_owned()))?;
        let words: Vec<Vec<u8>> = (0..vocab as u32)
            .map(|id| match tokenizer.token_bytes(id) {
                Ok(bytes) if !tokenizer.is_special(id) => bytes.to_vec(),
                // The marker byte keeps them out of every text; each has another name.
                _ => [&[TokTrie::SPECIAL_TOKEN_MARKER][..], format!("<{id}>").as_bytes()].concat(),
            })
            .collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, end), &words);
        let env: TokEnv = Arc::new(Words { trie });
        let mut factory = ParserFactory::new_simple(&env).map_err(|error| refused(error.to_string()))?;
        factory.quiet().limits_mut().verbose_errors = false;
        Ok(Grammars { factory, vocab, end })
    }

    /// Any JSON object.
    ///
    /// # Errors
    /// None that is known.
    pub fn json_object(&self) -> Result<Constraint, GrammarError> {
        self.json_schema(&json!({"type": "object"}))
    }

    /// JSON that a schema describes. References within it are followed, others are not.
    ///
    /// # Errors
    /// The schema is too large or too deep, no schema, or one with a keyword that cannot be kept to.
    pub fn json_schema(&self, schema: &Value) -> Result<Constraint, GrammarError> {
        let refused = |why: String| GrammarError::Unsupported { what: "JSON schema", why };
        if depth(schema) > SCHEMA_DEPTH_MAX {
            return Err(refused(format!("it is nested more than {SCHEMA_DEPTH_MAX} deep")));
        }
        let mut schema = match schema {
            Value::Object(fields) => fields.clone(),
            // A schema that allows everything, or nothing.
            Value::Bool(allows) => json!({"allOf": [allows]}).as_object().cloned().unwrap_or_default(),
            _ => return Err(refused("a schema is an object, true or false".to_owned())),
        };
        // Options of the grammar engine; a client's own do not count.
        schema.insert("x-guidance".to_owned(), json!({"whitespace_pattern": WHITE_SPACE}));
        self.constraint(TopLevelGrammar::from_json_schema(Value::Object(schema)), "JSON schema")
    }

    /// [`json_schema`](Self::json_schema) of a schema's text.
    ///
    /// # Errors
    /// As there, and the text is no JSON, or too long.
    pub fn json_schema_text(&self, schema: &str) -> Result<Constraint, GrammarError> {
        let refused = |why: String| GrammarError::Unsupported { what: "JSON schema", why };
        if schema.len() > GRAMMAR_BYTES_MAX {
            return Err(refused(format!("it has more than {} KiB", GRAMMAR_BYTES_MAX >> 10)));
        }
        let schema = serde_json::from_str(schema).map_err(|error| refused(error.to_string()))?;
        self.json_schema(&schema)
    }

    /// The form of an answer, if it has one.
    ///
    /// # Errors
    /// As of [`json_schema_text`](Self::json_schema_text).
    pub fn response_format(&self, format: &ResponseFormat) -> Result<Option<Constraint>, GrammarError> {
        match format {
            ResponseFormat::Text => Ok(None),
            ResponseFormat::JsonObject => self.json_object().map(Some),
            ResponseFormat::JsonSchema(schema) => {
                self.json_schema_text(&schema.text(Style::Compact)).map(Some)
            }
        }
    }

    /// Text that a grammar in a variant of Lark's syntax describes; it begins at `start`.
    ///
    /// # Errors
    /// The grammar is too long, has a mistake, or is too large.
    pub fn lark(&self, grammar: &str) -> Result<Constraint, GrammarError> {
        if grammar.len() > GRAMMAR_BYTES_MAX {
            let why = format!("it has more than {} KiB", GRAMMAR_BYTES_MAX >> 10);
            return Err(GrammarError::Unsupported { what: "grammar", why });
        }
        self.constraint(TopLevelGrammar::from_lark(grammar.to_owned()), "grammar")
    }

    fn constraint(&self, grammar: TopLevelGrammar, what: &'static str) -> Result<Constraint, GrammarError> {
        let refused = |error: String| GrammarError::Unsupported { what, why: error };
        // Backtracking and forced tokens are for engines that ask for them.
        let caps = InferenceCapabilities::default();
        let limits = self.factory.limits().clone();
        let init = llguidance::api::GrammarInit::Serialized(grammar);
        let compile =
            || self.factory.create_parser_from_init_ext(init, llguidance::Logger::new(0, 0), caps, limits);
        // A panic over something odd is no more than a refusal.
        let parser = catch_unwind(AssertUnwindSafe(compile))
            .map_err(|_| refused("the grammar engine does not understand it".to_owned()))?
            .map_err(|error| refused(error.to_string()))?;
        let mut matcher = Matcher::new(Ok(parser));
        if let Some(warning) = matcher.grammar_warnings().first() {
            return Err(refused(warning.clone()));
        }
        match matcher.get_error() {
            Some(error) => Err(refused(error)),
            None => Ok(Constraint { matcher, vocab: self.vocab, end: self.end }),
        }
    }
}

fn depth(value: &Value) -> usize {
    let inner = match value {
        Value::Array(list) => list.iter().map(depth).max(),
        Value::Object(fields) => fields.values().map(depth).max(),
        _ => return 0,
    };
    1 + inner.unwrap_or(0)
}

/// A text on its way through a grammar.
#[derive(Clone)]
pub struct Constraint {
    matcher: Matcher,
    vocab: usize,
    end: u32,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").finish_non_exhaustive()
    }
}

impl TokenConstraint for Constraint {
    fn mask(&mut self) -> Result<Mask, SamplerError> {
        let mut mask = Mask::none(self.vocab);
        if self.ended() {
            return Ok(mask);
        }
        let allowed: SimpleVob = self.matcher.compute_mask().map_err(stuck)?;
        for (word, allowed) in mask.words_mut().iter_mut().zip(allowed.as_slice()) {
            *word = *allowed;
        }
        // What the grammar engine takes for the end is a special token; the caller has its own.
        mask.ban(self.end);
        if mask.is_empty() && !self.may_end()? {
            return Err(stuck("no token leads on"));
        }
        Ok(mask)
    }

    fn accept(&mut self, token: u32) -> Result<(), SamplerError> {
        self.matcher.consume_token(token).map_err(stuck)
    }

    fn may_end(&mut self) -> Result<bool, SamplerError> {
        Ok(self.ended() || self.matcher.is_accepting().map_err(stuck)?)
    }

    fn copy(&self) -> Box<dyn TokenConstraint> {
        Box::new(self.clone())
    }
}

impl Constraint {
    /// Nothing can follow.
    fn ended(&self) -> bool {
        self.matcher.is_stopped() && !self.matcher.is_error()
    }
}

fn stuck(error: impl fmt::Display) -> SamplerError {
    SamplerError::Constraint { why: error.to_string() }
}
