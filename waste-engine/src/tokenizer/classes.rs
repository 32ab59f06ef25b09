//! Unicode character classes of the pre-tokenizer, as one table of bit sets.

use std::collections::HashMap;

use regex_syntax::hir::{Class, HirKind};

/// Script Han.
pub const HAN: u8 = 1;
/// What can stand in the upper-case part of a word: capitals, caseless letters, marks.
pub const UPPER: u8 = 2;
/// What can stand in the lower-case part of a word: small letters, caseless letters, marks.
pub const LOWER: u8 = 4;
/// Any letter.
pub const LETTER: u8 = 8;
/// Any number.
pub const NUMBER: u8 = 16;
/// White space (U+001C to U+001F are not).
pub const SPACE: u8 = 32;
/// Carriage return or line feed.
pub const NEWLINE: u8 = 64;

const DEFINITIONS: [(u8, &str); 7] = [
    (HAN, r"\p{Han}"),
    (UPPER, r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"),
    (LOWER, r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"),
    (LETTER, r"\p{L}"),
    (NUMBER, r"\p{N}"),
    (SPACE, r"\s"),
    (NEWLINE, r"[\r\n]"),
];

const PAGE: usize = 256;

/// Code point → bit set, as an index of pages of which the equal ones are shared.
pub struct Classes {
    index: Vec<u16>,
    pages: Vec<u8>,
}

impl Classes {
    /// Builds the table (a few milliseconds, about 50 kB).
    pub fn new() -> Classes {
        let mut flat = vec![0u8; char::MAX as usize + 1];
        for (flag, definition) in DEFINITIONS {
            for (first, last) in ranges(definition) {
                flat[first as usize..=last as usize].iter_mut().for_each(|set| *set |= flag);
            }
        }
        let mut index = Vec::with_capacity(flat.len() / PAGE);
        let mut pages = Vec::new();
        let mut known: HashMap<&[u8], u16> = HashMap::new();
        for page in flat.chunks(PAGE) {
            let next = known.len() as u16;
            index.push(*known.entry(page).or_insert_with(|| {
                pages.extend_from_slice(page);
                next
            }));
        }
        Classes { index, pages }
    }

    /// The classes a character is in.
    pub fn of(&self, character: char) -> u8 {
        let code = character as usize;
        self.pages[usize::from(self.index[code / PAGE]) * PAGE + code % PAGE]
    }
}

fn ranges(definition: &str) -> Vec<(char, char)> {
    match regex_syntax::parse(definition).map(|hir| hir.into_kind()) {
        Ok(HirKind::Class(Class::Unicode(class))) => {
            class.iter().map(|range| (range.start(), range.end())).collect()
        }
        other => unreachable!("{definition} is a constant class, not {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_point_is_classified_as_the_regex_does() {
        let classes = Classes::new();
        for (flag, definition) in DEFINITIONS {
            let regex = fancy_regex::Regex::new(&format!("^{definition}$")).unwrap();
            let mut buffer = [0; 4];
            for character in '\0'..=char::MAX {
                let found = classes.of(character) & flag != 0;
                assert_eq!(
                    found,
                    regex.is_match(character.encode_utf8(&mut buffer)).unwrap(),
                    "{definition} {character:?}"
                );
            }
        }
    }

    /// The reference ids were made with Unicode 16; a table of another version would change them silently.
    #[test]
    fn the_table_is_that_of_unicode_16() {
        let classes = Classes::new();
        assert_eq!(classes.of('\u{10d50}'), UPPER | LETTER); // Garay capital, new in 16
        assert_eq!(classes.of('\u{10940}'), 0); // Sidetic letter, new in 17
        assert_eq!(classes.of('々'), HAN | LETTER);
        assert_eq!(classes.of('〇'), HAN | NUMBER);
        assert_eq!(classes.of('⺀'), HAN);
        assert_eq!(classes.of('、'), 0);
        assert_eq!((classes.of('\u{1c}'), classes.of('\u{85}')), (0, SPACE));
    }
}
