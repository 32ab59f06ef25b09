//! The pre-tokenizer: text into the pieces that byte-pair encoding works on.
//!
//! A matcher for exactly this pattern, leftmost alternative first (the tests compare it with a regex engine):
//! ```text
//! [\p{Han}]+
//! [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?
//! [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?
//! \p{N}{1,3}
//!  ?[^\s\p{L}\p{N}]+[\r\n]*
//! \s*[\r\n]+
//! \s+(?!\S)
//! \s+
//! ```
//! Unlike a backtracking engine it takes linear time and has no limit to run into.

use super::classes::{Classes, HAN, LETTER, LOWER, NEWLINE, NUMBER, SPACE, UPPER};

/// The pieces of `text`; joined they are `text` again.
pub fn pieces<'a>(classes: &'a Classes, text: &'a str) -> impl Iterator<Item = &'a str> {
    let matcher = Matcher { classes, text };
    let mut start = 0;
    std::iter::from_fn(move || {
        let end = matcher.piece(start)?;
        let piece = &text[start..end];
        start = end;
        Some(piece)
    })
}

struct Matcher<'a> {
    classes: &'a Classes,
    text: &'a str,
}

/// All positions are byte offsets at character boundaries.
impl Matcher<'_> {
    /// The classes of the character at `at`, and the position after it; `None` at the end.
    #[inline]
    fn next(&self, at: usize) -> Option<(u8, usize)> {
        let character = self.text[at..].chars().next()?;
        Some((self.classes.of(character), at + character.len_utf8()))
    }

    /// The end of the run of characters that are in one of `classes`.
    #[inline]
    fn run(&self, mut at: usize, classes: u8) -> usize {
        while let Some((class, end)) = self.next(at) {
            if class & classes == 0 {
                break;
            }
            at = end;
        }
        at
    }

    fn piece(&self, start: usize) -> Option<usize> {
        let (class, end) = self.next(start)?;
        if class & HAN != 0 {
            return Some(self.run(end, HAN));
        }
        Some(
            self.word(start, class, end)
                .or_else(|| self.number(start))
                .or_else(|| self.symbols(start))
                .unwrap_or_else(|| self.space(start)),
        )
    }

    /// Alternatives two and three. The optional first character is taken if the rest then matches.
    fn word(&self, start: usize, class: u8, end: usize) -> Option<usize> {
        let prefixed = (class & (NEWLINE | LETTER | NUMBER) == 0).then_some(end);
        prefixed
            .and_then(|letters| self.lower_word(letters))
            .or_else(|| self.lower_word(start))
            .or_else(|| prefixed.and_then(|letters| self.upper_word(letters)))
            .or_else(|| self.upper_word(start))
            .map(|end| self.contraction(end))
    }

    /// `UPPER* LOWER+`
    fn lower_word(&self, start: usize) -> Option<usize> {
        let mut upper = start;
        let mut last_lower = None;
        while let Some((class, end)) = self.next(upper) {
            if class & UPPER == 0 {
                if class & LOWER != 0 {
                    return Some(self.run(end, LOWER));
                }
                break;
            }
            if class & LOWER != 0 {
                last_lower = Some(end);
            }
            upper = end;
        }
        // Nothing small follows the run, so it gives back characters up to its last one that is in both.
        last_lower
    }

    /// `UPPER+ LOWER*`
    fn upper_word(&self, start: usize) -> Option<usize> {
        let upper = self.run(start, UPPER);
        (upper > start).then(|| self.run(upper, LOWER))
    }

    fn contraction(&self, at: usize) -> usize {
        let mut rest = self.text[at..].chars();
        if rest.next() != Some('\'') {
            return at;
        }
        let first = rest.next().map(|character| character.to_ascii_lowercase());
        match first {
            Some('s' | 't' | 'm' | 'd') => at + 2,
            Some('ſ') => at + 1 + 'ſ'.len_utf8(),
            Some('r' | 'v' | 'l') => {
                let second = rest.next().map(|character| character.to_ascii_lowercase());
                match (first, second) {
                    (Some('r' | 'v'), Some('e')) | (Some('l'), Some('l')) => at + 3,
                    _ => at,
                }
            }
            _ => at,
        }
    }

    fn number(&self, start: usize) -> Option<usize> {
        let mut at = start;
        for _ in 0..3 {
            match self.next(at) {
                Some((class, end)) if class & NUMBER != 0 => at = end,
                _ => break,
            }
        }
        (at > start).then_some(at)
    }

    fn symbols(&self, start: usize) -> Option<usize> {
        let first = start + usize::from(self.text.as_bytes().get(start) == Some(&b' '));
        let mut at = first;
        while let Some((class, end)) = self.next(at) {
            if class & (SPACE | LETTER | NUMBER) != 0 {
                break;
            }
            at = end;
        }
        (at > first).then(|| self.run(at, NEWLINE))
    }

    /// The last three alternatives: to the last line end of the run; else all but the last character if
    /// something follows; else all.
    fn space(&self, start: usize) -> usize {
        let (mut at, mut last, mut line_end) = (start, start, None);
        while let Some((class, end)) = self.next(at) {
            if class & SPACE == 0 {
                break;
            }
            if class & NEWLINE != 0 {
                line_end = Some(end);
            }
            (last, at) = (at, end);
        }
        match line_end {
            Some(end) => end,
            None if at == self.text.len() || last == start => at,
            None => last,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATTERN: &str = concat!(
        r"[\p{Han}]+|",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    );

    /// Characters of every combination of classes, and the letters of the contractions.
    const ALPHABET: &str = concat!(
        "aZsSſtTrEvemMlLdD''’éÉßKǅʰªـאहि\u{301}\u{20dd}\u{903}中々〇〡⺀\u{16ff0}𠀀、ーカ한1½²Ⅷ٣",
        "   \t\n\r\u{b}\u{1c}\u{85}\u{a0}\u{3000}\u{2028}!-.\"_\0\u{200d}🙂🏽\u{e000}\u{378}\u{10ffff}€",
    );

    /// Deterministic (SplitMix64).
    fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn compare(regex: &fancy_regex::Regex, classes: &Classes, text: &str) {
        let expected: Vec<&str> = regex.find_iter(text).map(|found| found.unwrap().as_str()).collect();
        assert_eq!(pieces(classes, text).collect::<Vec<_>>(), expected, "{text:?}");
    }

    #[test]
    fn random_text_splits_as_the_regex_splits_it() {
        let regex = fancy_regex::Regex::new(PATTERN).unwrap();
        let classes = Classes::new();
        let alphabet: Vec<char> = ALPHABET.chars().collect();
        let mut state = 1;
        for case in 0..40_000 {
            // Few different characters per text, so that runs and near misses are common.
            let few: Vec<char> =
                (0..2 + case % 7).map(|_| alphabet[next(&mut state) as usize % alphabet.len()]).collect();
            let length = next(&mut state) % 16;
            let text: String = (0..length).map(|_| few[next(&mut state) as usize % few.len()]).collect();
            compare(&regex, &classes, &text);
        }
        for _ in 0..4_000 {
            let text: String = (0..12)
                .filter_map(|_| {
                    // A third from ASCII, a third from the lower planes, a third from anywhere.
                    let bits = next(&mut state);
                    char::from_u32((bits >> 8) as u32 % [128, 0x3100, 0x11_0000][bits as usize % 3])
                })
                .collect();
            compare(&regex, &classes, &text);
        }
    }

    #[test]
    fn every_triple_of_the_awkward_characters_splits_as_the_regex_splits_it() {
        let regex = fancy_regex::Regex::new(PATTERN).unwrap();
        let classes = Classes::new();
        let awkward = ['a', 'Z', 's', '\'', 'א', '\u{301}', '中', '⺀', '〇', '1', ' ', '\n', '\u{a0}', '!'];
        for a in awkward {
            for b in awkward {
                for c in awkward {
                    compare(&regex, &classes, &String::from_iter([a, b, c]));
                    compare(&regex, &classes, &String::from_iter([b, c, a, a, b]));
                }
            }
        }
    }

    #[test]
    fn long_runs_of_every_class_stay_whole() {
        let classes = Classes::new();
        for character in ["a", "Z", "א", "中", "\u{301}", "-", " ", "\n"] {
            let text = character.repeat(100_000);
            assert_eq!(pieces(&classes, &text).count(), 1, "{character:?}");
        }
        assert_eq!(pieces(&classes, &"7".repeat(3000)).count(), 1000);
    }
}
