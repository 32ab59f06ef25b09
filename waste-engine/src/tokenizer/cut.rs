//! The cuts made before the pre-tokenizer; they only show in very long runs, but change ids there.

/// Code points in a window.
const WINDOW: usize = 400_000;
/// Code points in a run of one class (white space or not) inside a window.
const RUN: usize = 25_000;

/// The parts of `text` that are tokenized on their own; joined they are `text` again.
pub fn parts(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    let mut window = WINDOW;
    std::iter::from_fn(move || {
        let (part, after) = rest.split_at(part_end(rest, &mut window));
        rest = after;
        (!part.is_empty()).then_some(part)
    })
}

/// Where the first part ends. `window` is what is left of the current window.
fn part_end(text: &str, window: &mut usize) -> usize {
    let mut run = 0;
    let mut run_is_space = false;
    for (at, character) in text.char_indices() {
        let space = is_space(character);
        if *window == 0 {
            *window = WINDOW;
            return at;
        }
        if space != run_is_space {
            (run, run_is_space) = (0, space);
        }
        if run == RUN {
            return at;
        }
        run += 1;
        *window -= 1;
    }
    text.len()
}

/// Python's `str.isspace`: `White_Space` and the four information separators.
fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(text: &str) -> Vec<usize> {
        parts(text).map(|part| part.chars().count()).collect()
    }

    #[test]
    fn python_has_29_white_space_characters() {
        assert_eq!(('\0'..=char::MAX).filter(|character| is_space(*character)).count(), 29);
    }

    #[test]
    fn the_run_starts_anew_with_the_class_and_with_the_window() {
        assert_eq!(parts("").count(), 0);
        assert_eq!(lengths(&("é".repeat(25_000) + " " + &"a".repeat(25_000))), [50_001]);
        assert_eq!(lengths(&" ".repeat(50_002)), [25_000, 25_000, 2]);
        // The second window begins inside a run that was 10000 long: 25000 more go before a cut.
        let words = "a ".repeat(195_000) + &"b".repeat(10_000) + &"b".repeat(25_001);
        assert_eq!(lengths(&words), [400_000, 25_000, 1]);
        // A window that ends where a run does is cut once.
        assert_eq!(lengths(&"x".repeat(400_001)), [[25_000; 16].as_slice(), &[1]].concat());
        assert_eq!(lengths(&"中 ".repeat(400_000)), [400_000, 400_000]);
    }
}
