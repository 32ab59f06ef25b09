//! Text out of token bytes that may break anywhere.

/// Assembles UTF-8 from a stream of bytes. Complete characters are released at once, each maximal ill-formed
/// part becomes U+FFFD as soon as it is known to be one, and an incomplete tail of at most three bytes waits.
/// Like the reference decoder, the first two bytes of an encoded surrogate wait for the third, although nothing
/// valid can follow them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TextStream {
    tail: Vec<u8>,
}

impl TextStream {
    /// A stream at its beginning.
    pub fn new() -> TextStream {
        TextStream::default()
    }

    /// Takes the bytes of one token and returns the text that can be shown now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.tail.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.tail.len());
        let mut rest = self.tail.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                }
                Err(error) => {
                    let (valid, bad) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = bad;
                    if let Some(length) = error.error_len()
                        && !is_truncated_surrogate(bad)
                    {
                        text.push(char::REPLACEMENT_CHARACTER);
                        rest = &bad[length..];
                        continue;
                    }
                }
            }
            break;
        }
        let released = self.tail.len() - rest.len();
        self.tail.drain(..released);
        text
    }

    /// Ends the stream: each ill-formed part of an incomplete tail becomes U+FFFD.
    pub fn flush(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.tail).into_owned();
        self.tail.clear();
        text
    }
}

fn is_truncated_surrogate(tail: &[u8]) -> bool {
    matches!(tail, [0xed, 0xa0..=0xbf])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_chunking_gives_the_lossy_text(
            chunks in proptest::collection::vec(
                proptest::collection::vec(
                    proptest::sample::select(b"a\x80\xbf\xc0\xc3\xa9\xe4\xb8\xad\xed\xa0\xf0\x9f\x99\x82\xf4\x90\xff".to_vec()),
                    0..6,
                ),
                0..12,
            ),
        ) {
            let mut stream = TextStream::new();
            let mut text = String::new();
            for chunk in &chunks {
                text += &stream.push(chunk);
                prop_assert!(stream.tail.len() <= 3);
            }
            text += &stream.flush();
            prop_assert_eq!(text, String::from_utf8_lossy(&chunks.concat()).into_owned());
            prop_assert_eq!(stream, TextStream::new());
        }
    }
}
