//! Values of options, given on the command line or in the environment.

use std::env::VarError;

use super::Failure;

/// A whole number of a range; the message of the standard library would only say that a digit is invalid.
///
/// # Errors
/// What was expected.
pub fn whole(text: &str, min: usize, max: usize) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (min..=max).contains(number));
    number.ok_or_else(|| format!("expected a whole number from {min} to {max}"))
}

/// A value from the environment; empty is unset.
///
/// # Errors
/// It cannot be read as one (exit 2).
pub fn from_env<T>(name: &str, parse: impl FnOnce(&str) -> Result<T, String>) -> Result<Option<T>, Failure> {
    match std::env::var(name) {
        Err(VarError::NotPresent) => Ok(None),
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) => match parse(&text) {
            Ok(value) => Ok(Some(value)),
            Err(error) => Err(Failure::usage(format!("{name} is `{text}`: {error}"))),
        },
        Err(VarError::NotUnicode(_)) => Err(Failure::usage(format!("{name} is no text"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_are_of_their_range() {
        assert_eq!((whole("1", 1, 16), whole("16", 1, 16)), (Ok(1), Ok(16)));
        for wrong in ["", "0", "17", "-1", "1.0", "1e1", "99999999999999999999999"] {
            assert_eq!(
                whole(wrong, 1, 16),
                Err("expected a whole number from 1 to 16".to_owned()),
                "{wrong}"
            );
        }
        assert_eq!(from_env("WASTE_NO_SUCH_VARIABLE", |text| whole(text, 1, 2)), Ok(None));
    }
}
