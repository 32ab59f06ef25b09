//! Sizes in bytes as people write them. Every suffix is a power of 1024, because memory is sold that way.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A number of bytes, written `46GiB`, `46G` or `46GB` (all powers of 1024), `1.5T` or plain `1048576`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

/// A size that could not be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; expected a size such as 46GiB, 46G (powers of 1024), 1.5T, 512M or plain bytes")]
pub struct ByteSizeError {
    problem: &'static str,
}

impl ByteSize {
    /// The number of bytes.
    pub fn bytes(self) -> u64 {
        self.0
    }
}

/// Powers of 1024 in the order of their letters.
const LETTERS: &str = "kmgtpe";

impl FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<ByteSize, ByteSizeError> {
        let fail = |problem| Err(ByteSizeError { problem });
        let text = text.trim();
        if text.starts_with('-') {
            return fail("a size cannot be negative");
        }
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, suffix) = text.split_at(end);
        let (whole, fraction) = match number.split_once('.') {
            Some((whole, fraction)) if !fraction.is_empty() => (whole, fraction),
            Some(_) => return fail("a digit is missing after the point"),
            None => (number, ""),
        };
        if whole.is_empty() {
            return fail("no number found");
        }
        let Some(power) = power_of(suffix.trim_start()) else { return fail("unknown unit") };
        let Some(whole) = whole
            .bytes()
            .try_fold(0u64, |value, digit| value.checked_mul(10)?.checked_add(u64::from(digit - b'0')))
        else {
            return fail("the size does not fit into 64 bits");
        };
        let Some(part) = fraction_bytes(fraction, power) else {
            return fail("a fraction needs a unit and at most 18 digits");
        };
        let bytes = (u128::from(whole) << (10 * power)) + u128::from(part);
        match u64::try_from(bytes) {
            Ok(bytes) => Ok(ByteSize(bytes)),
            Err(_) => fail("the size does not fit into 64 bits"),
        }
    }
}

/// The power of 1024 a unit such as `""`, `B`, `G`, `Gi`, `GB` or `GiB` stands for.
fn power_of(unit: &str) -> Option<u32> {
    let unit = unit.to_ascii_lowercase();
    let mut rest = unit.chars();
    let Some(letter) = rest.next() else { return Some(0) };
    let Some(index) = LETTERS.find(letter) else { return (unit == "b").then_some(0) };
    matches!(rest.as_str(), "" | "i" | "b" | "ib").then_some(index as u32 + 1)
}

/// `0.fraction` of 1024^power in whole bytes, rounded down. None: not a decimal fraction of a unit.
fn fraction_bytes(fraction: &str, power: u32) -> Option<u64> {
    if fraction.is_empty() {
        return Some(0);
    }
    if power == 0 || fraction.len() > 18 || fraction.contains('.') {
        return None;
    }
    let digits: u128 = fraction.parse().ok()?;
    // digits < 10^18 < 2^60 and the unit is at most 2^60, so the product fits.
    u64::try_from((digits << (10 * power)) / 10u128.pow(fraction.len() as u32)).ok()
}

impl fmt::Display for ByteSize {
    /// GiB, MiB or KiB with two decimals, or plain bytes: `46.24 GiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hundredths = |shift: u32| ((u128::from(self.0) * 100) + (1 << (shift - 1))) >> shift;
        let (shift, unit) = match self.0 {
            0..1024 => return f.pad(&format!("{} B", self.0)),
            _ if hundredths(10) < 102_400 => (10, "KiB"),
            _ if hundredths(20) < 102_400 => (20, "MiB"),
            _ => (30, "GiB"),
        };
        let value = hundredths(shift);
        f.pad(&format!("{}.{:02} {unit}", value / 100, value % 100))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn accepted_forms() {
        for (text, bytes) in [
            ("0", 0),
            ("1048576", 1 << 20),
            ("46GiB", 46 * GIB),
            ("46G", 46 * GIB),
            ("46GB", 46 * GIB),
            ("46gi", 46 * GIB),
            (" 46 GiB ", 46 * GIB),
            ("1.5T", 1536 * GIB),
            ("0.5k", 512),
            ("7B", 7),
            ("46.24G", 49_649_821_941),
            ("15.999E", 18_445_591_152_204_944_769),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn refused_forms_name_the_accepted_one() {
        for text in [
            "",
            " ",
            "-1",
            "-1G",
            "G",
            ".5G",
            "5.G",
            "1.5",
            "1.5B",
            "1.2.3G",
            "46Gx",
            "46GBi",
            "1e9",
            "0x10",
            "16E",
            "18446744073709551616",
            "99999999999999999999999G",
            "1,5G",
            "4６G",
            "46 G B",
            "1.0000000000000000001G",
            "+1",
        ] {
            let error = text.parse::<ByteSize>().expect_err(text).to_string();
            assert!(error.contains("such as 46GiB"), "{error}");
        }
    }

    #[test]
    fn shown_with_two_decimals() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            ((1 << 20) - 1, "1.00 MiB"),
            (659 << 20, "659.00 MiB"),
            (GIB - 1, "1.00 GiB"),
            (49_649_821_941, "46.24 GiB"),
            (u64::MAX, "17179869184.00 GiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>10}", ByteSize(GIB)), "  1.00 GiB");
    }

    proptest! {
        #[test]
        fn never_panics(text in "\\PC{0,24}|[-0-9.]{0,24}[ kKmMgGtTpPeEiIbB]{0,4}") {
            let _ = text.parse::<ByteSize>();
        }

        #[test]
        fn plain_bytes_round_trip(bytes: u64) {
            prop_assert_eq!(bytes.to_string().parse(), Ok(ByteSize(bytes)));
        }

        #[test]
        fn units_multiply(value in 0u64..1 << 14, power in 0usize..5) {
            let letter = &LETTERS[power..=power];
            for unit in [letter.to_owned(), format!("{letter}B"), format!("{}iB", letter.to_uppercase())] {
                prop_assert_eq!(format!("{value}{unit}").parse(), Ok(ByteSize(value << (10 * (power + 1)))));
            }
        }

        #[test]
        fn what_is_shown_can_be_read_back(bytes in 0u64..1 << 50) {
            let back: ByteSize = ByteSize(bytes).to_string().parse().unwrap();
            prop_assert!(back.0.abs_diff(bytes) as f64 <= 0.0051 * bytes as f64);
        }
    }
}
