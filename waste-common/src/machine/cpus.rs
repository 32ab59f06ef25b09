//! Lists of CPUs as people write them.

use std::str::FromStr;

/// CPU numbers, ascending. Written as numbers and ranges: `0-2,6-8`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(pub Vec<usize>);

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<CpuList, String> {
        let wrong = || format!("expected CPU numbers such as 0-2,6-8, found `{text}`");
        let number = |text: &str| text.trim().parse::<usize>().ok().filter(|&cpu| cpu < 1 << 16);
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first), number(last)),
                None => (number(part), number(part)),
            };
            let (Some(first), Some(last)) = (first, last) else { return Err(wrong()) };
            if first > last {
                return Err(wrong());
            }
            cpus.extend(first..=last);
        }
        cpus.sort_unstable();
        cpus.dedup();
        Ok(CpuList(cpus))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_strict() {
        assert_eq!("6-8,0".parse(), Ok(CpuList(vec![0, 6, 7, 8])));
        for wrong in ["", "a", "3-1", "1-", "-2", "1,,2", "99999999"] {
            assert!(wrong.parse::<CpuList>().is_err(), "{wrong}");
        }
    }
}
