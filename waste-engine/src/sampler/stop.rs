//! Stop strings in streamed text.

use waste_common::error::{Coded, Exit};

/// Most stop strings at a time.
pub const STOP_STRINGS_MAX: usize = 16;
/// Longest stop string, in bytes.
pub const STOP_BYTES_MAX: usize = 1024;

/// Why stop strings were refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum StopError {
    #[error("{count} stop strings; at most {STOP_STRINGS_MAX} are accepted")]
    Count { count: usize },
    #[error("stop string {index} has {bytes} bytes; expected 1 to {STOP_BYTES_MAX}")]
    Length { index: usize, bytes: usize },
}

impl Coded for StopError {
    fn exit(&self) -> Exit {
        Exit::Usage
    }

    fn code(&self) -> &'static str {
        "invalid_stop_string"
    }
}

/// Finds stop strings in visible text that comes piece by piece, and holds back what could begin one.
///
/// The text stops at the first byte with which a stop string is complete, however the text was divided; if
/// several are, the longest counts. Neither it nor anything after it is shown.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    /// The text not shown yet: the longest suffix that begins a stop string.
    held: String,
    stopped: Option<usize>,
}

#[derive(Debug, Clone)]
struct Pattern {
    bytes: Vec<u8>,
    /// For each prefix: the length of its longest proper suffix that is a prefix too (Knuth-Morris-Pratt).
    borders: Vec<usize>,
    /// How much of the pattern the text ends with.
    matched: usize,
}

impl StopMatcher {
    /// A matcher for up to 16 strings of 1 to 1024 bytes; without strings, all text passes.
    ///
    /// # Errors
    /// Too many strings, an empty or an overlong one (counted from 0).
    pub fn new<S: AsRef<str>>(strings: &[S]) -> Result<StopMatcher, StopError> {
        if strings.len() > STOP_STRINGS_MAX {
            return Err(StopError::Count { count: strings.len() });
        }
        let pattern = |(index, string): (usize, &S)| match string.as_ref().len() {
            1..=STOP_BYTES_MAX => Ok(Pattern::new(string.as_ref().as_bytes())),
            bytes => Err(StopError::Length { index, bytes }),
        };
        let patterns = strings.iter().enumerate().map(pattern).collect::<Result<_, _>>()?;
        Ok(StopMatcher { patterns, held: String::new(), stopped: None })
    }

    /// Takes the next visible text and returns what can be shown now. After a stop nothing more comes out.
    pub fn push(&mut self, text: &str) -> String {
        if self.stopped.is_some() {
            return String::new();
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            for pattern in &mut self.patterns {
                pattern.step(byte);
            }
            let complete = self.patterns.iter().enumerate().filter(|(_, pattern)| pattern.is_complete());
            // Of equal strings the first.
            if let Some((index, pattern)) = complete.rev().max_by_key(|(_, pattern)| pattern.bytes.len()) {
                self.stopped = Some(index);
                let mut shown = std::mem::take(&mut self.held);
                shown.truncate(before + at + 1 - pattern.bytes.len());
                return shown;
            }
        }
        let hold = self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - hold);
        std::mem::replace(&mut self.held, rest)
    }

    /// The index of the stop string that ended the text.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Ends the text: returns what was held back, which no stop string completed.
    pub fn flush(&mut self) -> String {
        self.patterns.iter_mut().for_each(|pattern| pattern.matched = 0);
        std::mem::take(&mut self.held)
    }
}

impl Pattern {
    fn new(bytes: &[u8]) -> Pattern {
        let mut pattern = Pattern { bytes: bytes.to_vec(), borders: vec![0], matched: 0 };
        for byte in &bytes[1..] {
            pattern.step(*byte);
            pattern.borders.push(pattern.matched);
        }
        pattern.matched = 0;
        pattern
    }

    fn is_complete(&self) -> bool {
        self.matched == self.bytes.len()
    }

    fn step(&mut self, byte: u8) {
        while self.matched > 0 && self.bytes.get(self.matched) != Some(&byte) {
            self.matched = self.borders[self.matched - 1];
        }
        if self.bytes[self.matched] == byte {
            self.matched += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What is shown after `text` by the definition, and the string that stopped it.
    fn naive(strings: &[String], text: &str) -> (String, Option<usize>) {
        for end in 1..=text.len() {
            let head = &text.as_bytes()[..end];
            let complete = strings.iter().enumerate().filter(|(_, stop)| head.ends_with(stop.as_bytes()));
            if let Some((index, stop)) = complete.rev().max_by_key(|(_, stop)| stop.len()) {
                return (text[..end - stop.len()].to_owned(), Some(index));
            }
        }
        let begins = |start: usize| {
            text.is_char_boundary(start) && strings.iter().any(|stop| stop.starts_with(&text[start..]))
        };
        let hold = (0..text.len()).find(|start| begins(*start)).unwrap_or(text.len());
        (text[..hold].to_owned(), None)
    }

    fn text(length: std::ops::Range<usize>) -> impl Strategy<Value = String> {
        proptest::collection::vec(proptest::sample::select(vec!['a', 'b', 'é', '中', '🙂']), length)
            .prop_map(String::from_iter)
    }

    proptest! {
        #[test]
        fn any_division_shows_what_the_definition_shows(
            strings in proptest::collection::vec(text(1..6), 0..5),
            pieces in proptest::collection::vec(text(0..5), 0..12),
        ) {
            let mut matcher = StopMatcher::new(&strings).unwrap();
            let (mut whole, mut shown) = (String::new(), String::new());
            for piece in pieces {
                whole += &piece;
                shown += &matcher.push(&piece);
                let (expected, stopped) = naive(&strings, &whole);
                prop_assert_eq!((&shown, matcher.stopped()), (&expected, stopped));
            }
            if matcher.stopped().is_none() {
                shown += &matcher.flush();
                prop_assert_eq!(shown, whole);
            } else {
                prop_assert_eq!(matcher.flush(), "");
            }
        }
    }

    /// Regression: a stop string divided over pieces was missed or partly shown.
    #[test]
    fn one_byte_at_a_time() {
        let mut matcher = StopMatcher::new(&["\n\nUser:", "###"]).unwrap();
        let shown: Vec<String> =
            "a\n\n\nUs\n\nUser: b".split("").map(|character| matcher.push(character)).collect();
        assert_eq!(shown.concat(), "a\n\n\nUs");
        assert_eq!(matcher.stopped(), Some(0));
        assert_eq!(shown[4..7], ["\n", "", ""]);
        assert_eq!(matcher.push("more"), "");
        assert_eq!(matcher.flush(), "");
    }

    #[test]
    fn the_first_to_be_complete_wins_and_of_those_the_longest() {
        for (strings, text, shown, index) in [
            (["abc", "b"], "xabc", "xa", 1),
            (["c", "abc"], "xabc", "x", 1),
            (["ab", "ab"], "xab", "x", 0),
            (["aab", "zz"], "aaab", "a", 0),
        ] {
            let mut matcher = StopMatcher::new(&strings).unwrap();
            assert_eq!(matcher.push(text), shown);
            assert_eq!(matcher.stopped(), Some(index));
        }
        let mut matcher = StopMatcher::new(&["中文"]).unwrap();
        assert_eq!(
            (matcher.push("x中"), matcher.push("国"), matcher.flush()),
            ("x".into(), "中国".into(), "".into())
        );
    }

    #[test]
    fn limits() {
        assert!(StopMatcher::new(&["x"; 16]).is_ok());
        assert_eq!(StopMatcher::new(&["x"; 17]).unwrap_err(), StopError::Count { count: 17 });
        assert_eq!(StopMatcher::new(&["x", ""]).unwrap_err(), StopError::Length { index: 1, bytes: 0 });
        assert!(StopMatcher::new(&["x".repeat(1024)]).is_ok());
        assert!(StopMatcher::new(&["x".repeat(1025)]).is_err());
        let mut none = StopMatcher::new::<&str>(&[]).unwrap();
        assert_eq!(none.push("all"), "all");
    }

    /// A stop string that almost repeats costs linear time and holds no more than its length.
    #[test]
    fn repetitive_text_is_cheap() {
        let mut matcher = StopMatcher::new(&["a".repeat(1023) + "b"]).unwrap();
        let shown: usize = (0..100_000).map(|_| matcher.push("a").len()).sum();
        assert_eq!(shown, 100_000 - 1023);
        assert_eq!(matcher.flush().len(), 1023);
    }
}
