//! The rank file: the byte strings that are tokens, and the order in which they merge.

use std::hash::{BuildHasher, RandomState};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::error::{Coded, Exit};

/// Largest rank file that is read (K3's has 2.8 MB).
pub const RANK_FILE_BYTES_MAX: u64 = 64 << 20;

const TOKEN_BYTES_MAX: usize = u16::MAX as usize;

/// What is wrong with a rank file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum RankError {
    #[error("it has {bytes} bytes; at most {RANK_FILE_BYTES_MAX} are accepted")]
    TooLarge { bytes: u64 },
    #[error("line {line}: expected `base64 rank` with one space between")]
    Line { line: usize },
    #[error("line {line}: the token is not canonical base64: {source}")]
    Base64 { line: usize, source: base64::DecodeSliceError },
    #[error("line {line}: the token has {bytes} bytes; expected 1 to {TOKEN_BYTES_MAX}")]
    Length { line: usize, bytes: usize },
    #[error("line {line}: the rank is not a plain decimal number below 2^32")]
    Number { line: usize },
    #[error("line {line}: rank {rank} with {tokens} tokens in the file; ranks must run from 0 without a gap")]
    Gap { line: usize, rank: u32, tokens: usize },
    #[error("line {line}: rank {rank} appears a second time")]
    DuplicateRank { line: usize, rank: u32 },
    #[error("line {line}: the token of rank {rank} appears a second time; it already has rank {first}")]
    DuplicateToken { line: usize, rank: u32, first: u32 },
    #[error("the single byte 0x{byte:02x} is not a token; all 256 must be")]
    MissingByte { byte: u8 },
}

impl Coded for RankError {
    fn exit(&self) -> Exit {
        Exit::Data
    }

    fn code(&self) -> &'static str {
        "invalid_rank_file"
    }
}

/// All ordinary tokens: bytes by rank, and rank by bytes.
pub struct Ranks {
    bytes: Vec<u8>,
    /// Start and length of each token in `bytes`, by rank.
    spans: Vec<(u32, u16)>,
    /// Open addressing, at most 2/3 full: upper half of the hash, then rank + 1; 0 is a free slot.
    slots: Vec<u64>,
    hasher: RandomState,
    longest: usize,
    singles: [u32; 256],
}

impl Ranks {
    /// Parses a rank file: lines `base64 SP rank` ending in LF or CRLF; blank lines are skipped.
    ///
    /// # Errors
    /// A line that is not canonical, a token or rank given twice, a gap in the ranks, a single byte missing.
    pub fn parse(file: &[u8]) -> Result<Ranks, RankError> {
        if file.len() as u64 > RANK_FILE_BYTES_MAX {
            return Err(RankError::TooLarge { bytes: file.len() as u64 });
        }
        let mut bytes = Vec::with_capacity(file.len() / 2);
        let mut entries: Vec<Entry> = Vec::new();
        for (number, content) in file.split(|&byte| byte == b'\n').enumerate() {
            let content = content.strip_suffix(b"\r").unwrap_or(content);
            if !content.is_empty() {
                entries.push(Entry::parse(number + 1, content, &mut bytes)?);
            }
        }
        bytes.shrink_to_fit();

        let tokens = entries.len();
        let mut ranks = Ranks {
            bytes,
            spans: vec![(0, 0); tokens],
            slots: vec![0; (tokens + tokens / 2 + 1).next_power_of_two()],
            hasher: RandomState::new(),
            longest: 0,
            singles: [0; 256],
        };
        for entry in &entries {
            ranks.insert(entry, tokens)?;
        }
        for byte in 0..=u8::MAX {
            ranks.singles[usize::from(byte)] = ranks.rank(&[byte]).ok_or(RankError::MissingByte { byte })?;
        }
        Ok(ranks)
    }

    fn insert(&mut self, entry: &Entry, tokens: usize) -> Result<(), RankError> {
        let &Entry { line, rank, start, length } = entry;
        let span = self.spans.get_mut(rank as usize).ok_or(RankError::Gap { line, rank, tokens })?;
        if span.1 != 0 {
            return Err(RankError::DuplicateRank { line, rank });
        }
        *span = (start, length);
        self.longest = self.longest.max(usize::from(length));
        let token = &self.bytes[start as usize..][..usize::from(length)];
        match self.find(token) {
            Ok(first) => Err(RankError::DuplicateToken { line, rank, first }),
            Err((slot, tag)) => {
                self.slots[slot] = tag | (u64::from(rank) + 1);
                Ok(())
            }
        }
    }

    /// The number of ordinary tokens; the first special id.
    #[allow(clippy::len_without_is_empty)] // never empty: 256 single bytes
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// The bytes of a token.
    pub fn token(&self, rank: u32) -> Option<&[u8]> {
        let &(start, length) = self.spans.get(rank as usize)?;
        Some(&self.bytes[start as usize..][..usize::from(length)])
    }

    /// The rank of these bytes, if they are a token.
    pub fn rank(&self, token: &[u8]) -> Option<u32> {
        if token.len() > self.longest {
            return None;
        }
        self.find(token).ok()
    }

    /// The rank of a single byte.
    pub fn single(&self, byte: u8) -> u32 {
        self.singles[usize::from(byte)]
    }

    /// The rank of the token, or the free slot where it belongs and its tag.
    fn find(&self, token: &[u8]) -> Result<u32, (usize, u64)> {
        let hash = self.hasher.hash_one(token);
        let tag = hash & 0xffff_ffff_0000_0000;
        let mask = self.slots.len() - 1;
        let mut slot = hash as usize & mask;
        loop {
            match self.slots[slot] {
                0 => return Err((slot, tag)),
                found => {
                    let rank = (found as u32).wrapping_sub(1);
                    if found & 0xffff_ffff_0000_0000 == tag && self.token(rank) == Some(token) {
                        return Ok(rank);
                    }
                }
            }
            slot = (slot + 1) & mask;
        }
    }
}

/// One line of the file; the token lies in a shared buffer.
struct Entry {
    line: usize,
    rank: u32,
    start: u32,
    length: u16,
}

impl Entry {
    fn parse(line: usize, content: &[u8], bytes: &mut Vec<u8>) -> Result<Entry, RankError> {
        let space = content.iter().position(|&byte| byte == b' ').ok_or(RankError::Line { line })?;
        let (token, digits) = (&content[..space], &content[space + 1..]);
        if digits.contains(&b' ') {
            return Err(RankError::Line { line });
        }
        let rank = decimal(digits).ok_or(RankError::Number { line })?;
        let start = bytes.len();
        bytes.resize(start + base64::decoded_len_estimate(token.len()), 0);
        let length = STANDARD
            .decode_slice(token, &mut bytes[start..])
            .map_err(|source| RankError::Base64 { line, source })?;
        bytes.truncate(start + length);
        match u16::try_from(length) {
            Ok(short) if short > 0 => Ok(Entry { line, rank, start: start as u32, length: short }),
            _ => Err(RankError::Length { line, bytes: length }),
        }
    }
}

/// Digits without sign, blank or leading zero.
pub(super) fn decimal(digits: &[u8]) -> Option<u32> {
    if digits.is_empty() || (digits.len() > 1 && digits[0] == b'0') {
        return None;
    }
    digits.iter().try_fold(0u32, |number, byte| {
        let digit = byte.checked_sub(b'0').filter(|&digit| digit < 10)?;
        number.checked_mul(10)?.checked_add(u32::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The 256 single bytes, then `more` as written.
    fn file(more: &str) -> Vec<u8> {
        let singles = (0..=255u8).map(|byte| format!("{} {byte}\n", STANDARD.encode([byte])));
        (singles.collect::<String>() + more).into_bytes()
    }

    fn error(more: &str) -> RankError {
        match Ranks::parse(&file(more)) {
            Ok(_) => panic!("{more:?} was accepted"),
            Err(error) => error,
        }
    }

    #[test]
    fn both_directions_agree_whatever_the_order_and_line_ends() {
        let ranks = Ranks::parse(&file("\r\nYWJj 257\r\n\nYWI= 256")).unwrap();
        assert_eq!(ranks.len(), 258);
        assert_eq!(
            (ranks.rank(b"ab"), ranks.rank(b"abc"), ranks.rank(b"abcd")),
            (Some(256), Some(257), None)
        );
        for rank in 0..258 {
            assert_eq!(ranks.rank(ranks.token(rank).unwrap()), Some(rank));
        }
        assert_eq!(ranks.token(258), None);
        assert_eq!(ranks.single(b'a'), 97);
    }

    #[test]
    fn every_fault_names_its_line() {
        use base64::{DecodeError, DecodeSliceError};
        for bad in ["YWI=", "YWI=256", "YWI= 256 ", "YWI=  256", "YWI=\t256"] {
            assert_eq!(error(bad), RankError::Line { line: 257 }, "{bad:?}");
        }
        for bad in ["", "-1", "+256", "0256", "256x", "4294967296", "256\t"] {
            assert_eq!(error(&format!("YWI= {bad}")), RankError::Number { line: 257 }, "{bad:?}");
        }
        for bad in ["YWI", "YWI==", "YWJ=", "YW I=", "YW*=", "=YWI"] {
            let found = error(&format!("{bad} 256").replacen("YW I", "YW\u{b}I", 1));
            assert!(matches!(found, RankError::Base64 { line: 257, .. }), "{bad:?}: {found}");
        }
        assert_eq!(
            error("YWJ= 256"),
            RankError::Base64 {
                line: 257,
                source: DecodeSliceError::DecodeError(DecodeError::InvalidLastSymbol(2, b'J'))
            }
        );
        assert_eq!(error("\n 256"), RankError::Length { line: 258, bytes: 0 });
        let long = STANDARD.encode(vec![7; 65536]);
        assert_eq!(error(&format!("{long} 256")), RankError::Length { line: 257, bytes: 65536 });
        assert_eq!(error("YWI= 257"), RankError::Gap { line: 257, rank: 257, tokens: 257 });
        assert_eq!(error("YWI= 255"), RankError::DuplicateRank { line: 257, rank: 255 });
        assert_eq!(error("YQ== 256"), RankError::DuplicateToken { line: 257, rank: 256, first: 97 });
        assert_eq!(Ranks::parse(b"").err(), Some(RankError::MissingByte { byte: 0 }));
        assert_eq!(Ranks::parse(b"AA== 0\n").err(), Some(RankError::MissingByte { byte: 1 }));
    }

    #[test]
    fn the_longest_token_is_accepted() {
        let long = STANDARD.encode(vec![7; 65535]);
        assert_eq!(Ranks::parse(&file(&format!("{long} 256"))).unwrap().rank(&[7; 65535]), Some(256));
    }
}
