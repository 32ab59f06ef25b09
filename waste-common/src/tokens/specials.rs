//! The 256 special tokens that follow the ranks.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use super::ranks::decimal;
use crate::error::{Coded, Exit};

/// Special ids after the last rank, named or not.
pub const SPECIAL_TOKENS: u32 = 256;

/// Largest `specials.json` or `tokenizer_config.json` that is read.
pub const SPECIALS_FILE_BYTES_MAX: u64 = 16 << 20;

const NAME_BYTES_MAX: usize = 1024;

/// What is wrong with a list of special tokens.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SpecialError {
    #[error("not the expected JSON ({expected}): {source}")]
    Json { expected: &'static str, source: serde_json::Error },
    #[error("`added_tokens_decoder` has the key {key:?}; expected a token id")]
    Key { key: String },
    #[error("special token {name:?} has id {id}; expected {first} to {last}, the 256 ids after the ranks")]
    Range { id: u64, name: String, first: u32, last: u32 },
    #[error("special id {id} is named twice, {first:?} and {second:?}")]
    DuplicateId { id: u32, first: String, second: String },
    #[error("special ids {first} and {second} have the same name {name:?}")]
    DuplicateName { first: u32, second: u32, name: String },
    #[error("the name of special id {id} has {bytes} bytes; expected 1 to {NAME_BYTES_MAX}")]
    NameLength { id: u32, bytes: usize },
    #[error("{ranks} ranks leave no room for 256 special ids")]
    TooManyRanks { ranks: usize },
}

impl Coded for SpecialError {
    fn exit(&self) -> Exit {
        Exit::Data
    }

    fn code(&self) -> &'static str {
        "invalid_specials"
    }
}

/// The special tokens: names by id and ids by name. Ids without a given name are
/// `<|reserved_token_{id}|>`.
pub struct Specials {
    first: u32,
    names: Vec<String>,
    ids: HashMap<String, u32>,
    /// By first byte of a name: the lengths of the names starting with it, longest first.
    lengths: Vec<Vec<usize>>,
}

#[derive(Deserialize)]
struct ContainerEntry {
    id: u64,
    text: String,
}

#[derive(Deserialize)]
struct CheckpointConfig {
    added_tokens_decoder: AddedTokens,
}

/// The map as a list, so that a key given twice is seen.
struct AddedTokens(Vec<(String, String)>);

#[derive(Deserialize)]
struct AddedToken {
    content: String,
}

impl<'de> Deserialize<'de> for AddedTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = AddedTokens;

            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("an object of token ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<AddedTokens, A::Error> {
                let mut entries = Vec::new();
                while let Some((key, token)) = map.next_entry::<String, AddedToken>()? {
                    entries.push((key, token.content));
                }
                Ok(AddedTokens(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

impl Specials {
    /// The specials after `ranks` ordinary tokens, of which some are given as (id, name).
    ///
    /// # Errors
    /// An id outside the 256, an id or name given twice, an empty or overlong name.
    pub fn new(
        ranks: usize,
        named: impl IntoIterator<Item = (u64, String)>,
    ) -> Result<Specials, SpecialError> {
        let too_many = SpecialError::TooManyRanks { ranks };
        let Some((first, end)) =
            u32::try_from(ranks).ok().and_then(|first| Some((first, first.checked_add(SPECIAL_TOKENS)?)))
        else {
            return Err(too_many);
        };
        let mut given: Vec<Option<String>> = vec![None; SPECIAL_TOKENS as usize];
        for (id, name) in named {
            let id = match u32::try_from(id) {
                Ok(id) if (first..end).contains(&id) => id,
                _ => return Err(SpecialError::Range { id, name, first, last: end - 1 }),
            };
            if name.is_empty() || name.len() > NAME_BYTES_MAX {
                return Err(SpecialError::NameLength { id, bytes: name.len() });
            }
            if let Some(earlier) = given[(id - first) as usize].replace(name.clone()) {
                return Err(SpecialError::DuplicateId { id, first: earlier, second: name });
            }
        }
        let names: Vec<String> =
            given.into_iter().zip(first..).map(|(name, id)| name.unwrap_or_else(|| reserved(id))).collect();

        let mut ids = HashMap::with_capacity(names.len());
        let mut lengths = vec![Vec::new(); 256];
        for (name, id) in names.iter().zip(first..) {
            if let Some(earlier) = ids.insert(name.clone(), id) {
                return Err(SpecialError::DuplicateName { first: earlier, second: id, name: name.clone() });
            }
            lengths[usize::from(name.as_bytes()[0])].push(name.len());
        }
        for list in &mut lengths {
            list.sort_unstable_by(|a, b| b.cmp(a));
            list.dedup();
        }
        Ok(Specials { first, names, ids, lengths })
    }

    /// From a container's `specials.json`: `[{"id":n,"text":"…"}]`.
    ///
    /// # Errors
    /// Other JSON, and everything [`Specials::new`] refuses.
    pub fn from_container(ranks: usize, json: &[u8]) -> Result<Specials, SpecialError> {
        let entries: Vec<ContainerEntry> = serde_json::from_slice(json).map_err(|source| {
            SpecialError::Json { expected: r#"a list of {"id": number, "text": string}"#, source }
        })?;
        Specials::new(ranks, entries.into_iter().map(|entry| (entry.id, entry.text)))
    }

    /// From `added_tokens_decoder` of a checkpoint's `tokenizer_config.json`.
    ///
    /// # Errors
    /// Other JSON, a key that is no id, and everything [`Specials::new`] refuses.
    pub fn from_checkpoint(ranks: usize, json: &[u8]) -> Result<Specials, SpecialError> {
        let config: CheckpointConfig = serde_json::from_slice(json).map_err(|source| SpecialError::Json {
            expected: "an object with `added_tokens_decoder`",
            source,
        })?;
        let mut named = Vec::new();
        for (key, name) in config.added_tokens_decoder.0 {
            let id = decimal(key.as_bytes()).ok_or(SpecialError::Key { key })?;
            named.push((u64::from(id), name));
        }
        Specials::new(ranks, named)
    }

    /// The first special id.
    pub fn first(&self) -> u32 {
        self.first
    }

    /// The id with this name.
    pub fn id(&self, name: &str) -> Option<u32> {
        self.ids.get(name).copied()
    }

    /// The name of a special id; `None` for ordinary tokens and ids outside the vocabulary.
    pub fn name(&self, id: u32) -> Option<&str> {
        let index = id.checked_sub(self.first)?;
        self.names.get(index as usize).map(String::as_str)
    }

    /// Whether `id` is a special one that nobody named.
    pub fn is_reserved(&self, id: u32) -> bool {
        self.name(id).is_some_and(|name| name == reserved(id))
    }

    /// Every special id with its name, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &str)> {
        (self.first..).zip(self.names.iter().map(String::as_str))
    }

    /// The leftmost special name in `text`, the longest of those starting there: (start, end, id).
    pub fn find(&self, text: &str) -> Option<(usize, usize, u32)> {
        text.bytes().enumerate().find_map(|(start, byte)| {
            self.lengths[usize::from(byte)].iter().find_map(|length| {
                let end = start.checked_add(*length)?;
                Some((start, end, self.id(text.get(start..end)?)?))
            })
        })
    }
}

fn reserved(id: u32) -> String {
    format!("<|reserved_token_{id}|>")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(list: &[(u64, &str)]) -> Result<Specials, SpecialError> {
        Specials::new(1000, list.iter().map(|(id, name)| (*id, name.to_string())))
    }

    #[test]
    fn unnamed_ids_get_the_reserved_name() {
        let specials = named(&[(1001, "[EOS]")]).unwrap();
        assert_eq!(specials.name(1000), Some("<|reserved_token_1000|>"));
        assert_eq!(specials.id("<|reserved_token_1255|>"), Some(1255));
        assert_eq!((specials.id("[EOS]"), specials.id("<|reserved_token_1001|>")), (Some(1001), None));
        assert_eq!((specials.name(999), specials.name(1256)), (None, None));
        assert!(specials.is_reserved(1000) && !specials.is_reserved(1001) && !specials.is_reserved(999));
        assert_eq!(specials.iter().count(), 256);
    }

    #[test]
    fn bad_lists_are_refused() {
        use SpecialError::*;
        assert!(matches!(named(&[(999, "a")]), Err(Range { id: 999, first: 1000, last: 1255, .. })));
        assert!(matches!(named(&[(1256, "a")]), Err(Range { .. })));
        assert!(matches!(named(&[(1000 + (1 << 32), "a")]), Err(Range { .. })));
        assert!(matches!(named(&[(1000, "a"), (1000, "b")]), Err(DuplicateId { id: 1000, .. })));
        assert!(matches!(named(&[(1000, "a"), (1009, "a")]), Err(DuplicateName { .. })));
        assert!(matches!(named(&[(1000, "<|reserved_token_1001|>")]), Err(DuplicateName { .. })));
        assert!(matches!(named(&[(1000, "")]), Err(NameLength { bytes: 0, .. })));
        assert!(matches!(named(&[(1000, &"x".repeat(1025))]), Err(NameLength { .. })));
        assert!(matches!(Specials::new(u32::MAX as usize - 5, []), Err(TooManyRanks { .. })));
    }

    #[test]
    fn both_file_formats_unescape_and_check() {
        let container = br#"[{"id":1000,"text":"\u003c|a\"\\|>","more":1}]"#;
        assert_eq!(Specials::from_container(1000, container).unwrap().id("<|a\"\\|>"), Some(1000));
        let config = br#"{"x":[1],"added_tokens_decoder":{"1002":{"content":"\u4e2d","special":true}}}"#;
        assert_eq!(Specials::from_checkpoint(1000, config).unwrap().name(1002), Some("中"));
        for bad in
            ["", "{}", "[1]", r#"[{"id":-1,"text":"a"}]"#, r#"[{"id":1000}]"#, r#"[{"id":1e3,"text":"a"}]"#]
        {
            assert!(Specials::from_container(1000, bad.as_bytes()).is_err(), "{bad}");
        }
        for bad in [
            r#"{}"#,
            r#"{"added_tokens_decoder":[]}"#,
            r#"{"added_tokens_decoder":{"01000":{"content":"a"}}}"#,
            r#"{"added_tokens_decoder":{"1000":{"content":7}}}"#,
            r#"{"added_tokens_decoder":{"1000":{"content":"a"},"1000":{"content":"b"}}}"#,
        ] {
            assert!(Specials::from_checkpoint(1000, bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_leftmost_and_there_the_longest_name_is_found() {
        let specials = named(&[(1000, "<a>"), (1001, "<a><b>"), (1002, "é!"), (1003, "<")]).unwrap();
        assert_eq!(specials.find("x<a><b>"), Some((1, 7, 1001)));
        assert_eq!(specials.find("x<a><c>"), Some((1, 4, 1000)));
        assert_eq!(specials.find("ée é!<a>"), Some((4, 7, 1002)));
        assert_eq!(specials.find("é<"), Some((2, 3, 1003)));
        assert_eq!(specials.find("<|reserved_token_1999|>").map(|found| found.2), Some(1003));
        assert_eq!((specials.find("é"), specials.find("")), (None, None));
    }
}
