//! A prompt as pieces of text, each tokenized on its own.

use super::conversation::Image;
use super::error::ChatError;
use crate::tokenizer::Tokenizer;

/// What a segment's text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Special tokens are recognised.
    Markup,
    /// None is: what a user, a tool or a client wrote.
    Content,
    /// The markup of an image; its placeholder stands for so many embeddings.
    Media {
        /// Which one, of [`Prompt::images`](super::Prompt::images).
        image: usize,
        /// How many.
        rows: usize,
    },
}

/// A piece of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its text; not empty.
    pub text: String,
    /// How it is tokenized.
    pub kind: Kind,
}

/// A prompt, or what follows one, as segments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segments {
    list: Vec<Segment>,
    conversation: usize,
}

/// A prompt as token ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// The ids.
    pub ids: Vec<u32>,
    /// How many of them the conversation is, before the notes for this answer and its opening: a longer conversation
    /// begins with the same ones.
    pub conversation: usize,
    /// The images in the order their placeholders come in, by their place in [`Prompt::images`](super::Prompt::images).
    pub images: Vec<usize>,
}

/// Where images' rows stand in a prompt, which has them in this order.
///
/// # Errors
/// They stand nowhere: the tokenizer has no placeholder for them.
pub fn places<'a>(
    images: impl IntoIterator<Item = &'a Image>,
    ids: &[u32],
    placeholder: Option<u32>,
) -> Result<Vec<usize>, ChatError> {
    let mut end = 0;
    let place = |image: &Image| {
        let rest = ids.get(end..).unwrap_or_default();
        let at = rest.iter().position(|id| Some(*id) == placeholder).ok_or(ChatError::NoPlaceholder)?;
        let rows = rest.get(at..at + image.rows).unwrap_or_default();
        if rows.len() < image.rows || rows.iter().any(|id| Some(*id) != placeholder) {
            return Err(ChatError::NoPlaceholder);
        }
        let place = end + at;
        end = place + image.rows;
        Ok(place)
    };
    images.into_iter().map(place).collect()
}

impl Segments {
    /// The segments.
    pub fn list(&self) -> &[Segment] {
        &self.list
    }

    /// Adds text with special tokens; empty text is nothing.
    pub fn markup(&mut self, text: &str) {
        self.push(text, Kind::Markup);
    }

    /// Adds text without.
    pub fn content(&mut self, text: &str) {
        self.push(text, Kind::Content);
    }

    /// Adds the markup of an image, the `index`th of those that go with the text.
    pub fn image(&mut self, index: usize, image: &Image) {
        let Image { width, height, rows } = *image;
        let text =
            format!("<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>");
        self.push(&text, Kind::Media { image: index, rows });
    }

    pub(super) fn push(&mut self, text: &str, kind: Kind) {
        if !text.is_empty() {
            self.list.push(Segment { text: text.to_owned(), kind });
        }
    }

    /// Marks that the conversation ends here.
    pub(super) fn end_conversation(&mut self) {
        self.conversation = self.list.len();
    }

    /// The token ids: each segment on its own, one after the other.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Encoded {
        let mut encoded = Encoded::default();
        let pad = tokenizer.special_id("<|media_pad|>");
        for (i, segment) in self.list.iter().enumerate() {
            match segment.kind {
                Kind::Content => encoded.ids.extend(tokenizer.encode(&segment.text)),
                Kind::Markup => encoded.ids.extend(tokenizer.encode_markup(&segment.text)),
                Kind::Media { image, rows } => {
                    encoded.images.push(image);
                    for id in tokenizer.encode_markup(&segment.text) {
                        let times = if Some(id) == pad { rows } else { 1 };
                        encoded.ids.extend(std::iter::repeat_n(id, times));
                    }
                }
            }
            if i + 1 == self.conversation {
                encoded.conversation = encoded.ids.len();
            }
        }
        encoded
    }
}
