//! Text to token ids and back.
//!
//! Very long text is cut, text is split into pieces by the pattern of the Kimi models, and each piece is encoded
//! by byte-pair merging. Special tokens are recognised in markup only; the same characters in content are
//! ordinary text, which is what keeps a user from forging structure.

mod bpe;
mod classes;
mod cut;
mod split;
mod stream;

use std::path::{Path, PathBuf};

use waste_common::container::MANIFEST;
use waste_common::error::{Coded, Exit};
use waste_common::json::{self, JsonError};

use classes::Classes;

use crate::sampler::Mask;

pub use stream::TextStream;
pub use waste_common::tokens::{
    RANK_FILE_BYTES_MAX, RankError, Ranks, SPECIAL_TOKENS, SPECIALS_FILE_BYTES_MAX, SpecialError, Specials,
};

/// Why a tokenizer could not be loaded, or ids not decoded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TokenizerError {
    #[error("cannot load the tokenizer: {0}")]
    Read(#[from] JsonError),
    #[error(
        "no tokenizer in {}: expected tokenizer.model (a container), or tiktoken.model and \
         tokenizer_config.json (a checkpoint)", dir.display()
    )]
    Missing { dir: PathBuf },
    #[error("the rank file {} is damaged: {source}; get it again from the checkpoint", path.display())]
    Ranks { path: PathBuf, source: RankError },
    #[error("the special tokens in {} cannot be used: {source}", path.display())]
    Specials { path: PathBuf, source: SpecialError },
    #[error("token id {id} is outside the vocabulary; expected 0 to {}", vocab - 1)]
    UnknownId { id: u32, vocab: u32 },
}

impl Coded for TokenizerError {
    fn exit(&self) -> Exit {
        Exit::Data
    }

    fn code(&self) -> &'static str {
        match self {
            TokenizerError::Read(error) => error.code(),
            TokenizerError::Missing { .. } => "no_tokenizer",
            TokenizerError::Ranks { .. } => "invalid_rank_file",
            TokenizerError::Specials { .. } => "invalid_specials",
            TokenizerError::UnknownId { .. } => "unknown_token_id",
        }
    }
}

/// The names of the media block's tokens.
pub const MEDIA_NAMES: [&str; 4] = ["<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"];

/// The tokenizer of a model: ordinary tokens by rank, then 256 special ones.
pub struct Tokenizer {
    ranks: Ranks,
    specials: Specials,
    classes: Classes,
}

impl Tokenizer {
    /// Opens the tokenizer of a container (`tokenizer.model` and `specials.json`, without which all 256 specials have
    /// their reserved names) or of a checkpoint (`tiktoken.model`, or `tokenizer.model`, and
    /// `tokenizer_config.json`). A directory with `manifest.json` is a container, else one with
    /// `tokenizer_config.json` a checkpoint; a directory with neither is read as a container.
    ///
    /// # Errors
    /// A file is missing, too large or not exactly in its format.
    pub fn open(dir: &Path) -> Result<Tokenizer, TokenizerError> {
        let container = dir.join(MANIFEST).exists() || !dir.join("tokenizer_config.json").exists();
        let (models, list): (&[&str], _) = if container {
            (&["tokenizer.model"], "specials.json")
        } else {
            (&["tiktoken.model", "tokenizer.model"], "tokenizer_config.json")
        };
        let missing = || TokenizerError::Missing { dir: dir.to_owned() };
        let model =
            models.iter().map(|name| dir.join(name)).find(|path| path.exists()).ok_or_else(missing)?;
        let list = dir.join(list);
        let ranks = Ranks::parse(&json::read_bounded(&model, RANK_FILE_BYTES_MAX)?)
            .map_err(|source| TokenizerError::Ranks { path: model, source })?;
        // A link to nowhere is no absent file.
        let specials = if container && list.symlink_metadata().is_err() {
            Specials::new(ranks.len(), [])
        } else {
            let content = json::read_bounded(&list, SPECIALS_FILE_BYTES_MAX)?;
            match container {
                true => Specials::from_container(ranks.len(), &content),
                false => Specials::from_checkpoint(ranks.len(), &content),
            }
        };
        let specials = specials.map_err(|source| TokenizerError::Specials { path: list, source })?;
        Ok(Tokenizer::new(ranks, specials))
    }

    /// From parts already read. `specials` must have been made for the number of `ranks`.
    pub fn new(ranks: Ranks, specials: Specials) -> Tokenizer {
        debug_assert_eq!(ranks.len(), specials.first() as usize);
        Tokenizer { ranks, specials, classes: Classes::new() }
    }

    /// The ids of content: no special token is recognised, whatever the text says.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut encoder = Encoder::new(self);
        for part in cut::parts(text) {
            encoder.content(part);
        }
        encoder.ids
    }

    /// The ids of markup: every special name becomes its id, leftmost first; the text before one is encoded as
    /// if it ended there.
    pub fn encode_markup(&self, text: &str) -> Vec<u32> {
        let mut encoder = Encoder::new(self);
        for mut part in cut::parts(text) {
            while let Some((start, end, id)) = self.specials.find(part) {
                encoder.content(&part[..start]);
                encoder.ids.push(id);
                part = &part[end..];
            }
            encoder.content(part);
        }
        encoder.ids
    }

    /// The pieces that content is split into before byte-pair encoding.
    pub fn pieces<'a>(&'a self, text: &'a str) -> impl Iterator<Item = &'a str> {
        cut::parts(text).flat_map(|part| split::pieces(&self.classes, part))
    }

    /// The parts that long text is cut into before anything else.
    pub fn parts<'a>(&self, text: &'a str) -> impl Iterator<Item = &'a str> {
        cut::parts(text)
    }

    /// The bytes of all `ids`; of a special one, its name.
    ///
    /// # Errors
    /// An id outside the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>, TokenizerError> {
        let mut bytes = Vec::new();
        for id in ids {
            bytes.extend_from_slice(self.token_bytes(*id)?);
        }
        Ok(bytes)
    }

    /// The bytes of one token; of a special one, its name.
    ///
    /// # Errors
    /// An id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Result<&[u8], TokenizerError> {
        self.ranks
            .token(id)
            .or_else(|| self.specials.name(id).map(str::as_bytes))
            .ok_or_else(|| TokenizerError::UnknownId { id, vocab: self.vocab_size() })
    }

    /// The number of ids: the ranks and 256 specials.
    pub fn vocab_size(&self) -> u32 {
        self.specials.first() + SPECIAL_TOKENS
    }

    /// Whether `id` is one of the 256 special ids.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_name(id).is_some()
    }

    /// The id of the special token with exactly this name.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.specials.id(name)
    }

    /// The name of a special id.
    pub fn special_name(&self, id: u32) -> Option<&str> {
        self.specials.name(id)
    }

    /// All special ids with their names, in order.
    pub fn specials(&self) -> impl Iterator<Item = (u32, &str)> {
        self.specials.iter()
    }

    /// The id of `[BOS]`.
    pub fn bos(&self) -> Option<u32> {
        self.special_id("[BOS]")
    }

    /// The id of `[EOS]`.
    pub fn eos(&self) -> Option<u32> {
        self.special_id("[EOS]")
    }

    /// The id of `[PAD]`.
    pub fn pad(&self) -> Option<u32> {
        self.special_id("[PAD]")
    }

    /// The id of `[UNK]`.
    pub fn unk(&self) -> Option<u32> {
        self.special_id("[UNK]")
    }

    /// The ids of the media block's tokens, in the order of [`MEDIA_NAMES`], those that exist.
    pub fn media(&self) -> Vec<u32> {
        MEDIA_NAMES.iter().filter_map(|name| self.special_id(name)).collect()
    }

    /// The ids that never belong in generated text: `[BOS]`, `[PAD]`, `[UNK]`, media tokens, reserved ids;
    /// ascending.
    pub fn banned_in_text(&self) -> Vec<u32> {
        let banned = [self.bos(), self.pad(), self.unk()];
        let media = self.media();
        self.specials()
            .map(|(id, _)| id)
            .filter(|id| banned.contains(&Some(*id)) || media.contains(id) || self.specials.is_reserved(*id))
            .collect()
    }

    /// The ids that may be chosen in a text, of a model with `vocab` of them: those that have a text, but for
    /// [`banned_in_text`](Self::banned_in_text).
    pub fn text_mask(&self, vocab: usize) -> Mask {
        let mut mask = Mask::without(vocab, &self.banned_in_text());
        // Ids beyond the tokenizer have no text.
        (self.vocab_size()..u32::try_from(vocab).unwrap_or(u32::MAX)).for_each(|id| mask.ban(id));
        mask
    }
}

struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    scratch: bpe::Scratch,
    ids: Vec<u32>,
}

impl<'a> Encoder<'a> {
    fn new(tokenizer: &'a Tokenizer) -> Encoder<'a> {
        Encoder { tokenizer, scratch: bpe::Scratch::default(), ids: Vec::new() }
    }

    fn content(&mut self, text: &str) {
        for piece in split::pieces(&self.tokenizer.classes, text) {
            bpe::encode(&self.tokenizer.ranks, piece.as_bytes(), &mut self.scratch, &mut self.ids);
        }
    }
}
