//! Byte-pair encoding of one piece.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use waste_common::tokens::Ranks;

const NONE: u32 = u32::MAX;

/// Working memory, reused from piece to piece.
#[derive(Default)]
pub struct Scratch {
    nodes: Vec<Node>,
    /// Candidate merges: rank in the upper half, position of the left node in the lower. Lowest first, so
    /// equal ranks merge from the left. Entries are not removed when they go stale, but skipped.
    heap: BinaryHeap<Reverse<u64>>,
}

/// The token that starts at this byte of the piece, in a linked list of the tokens left.
#[derive(Clone, Copy)]
struct Node {
    token: u32,
    /// Where the token ends, which is the next node.
    end: u32,
    /// The node before.
    before: u32,
    /// The rank of this token joined with the next one, `NONE` if that is no token (or this node is merged).
    joined: u32,
}

/// Appends the tokens of `piece`: the whole if it is a token, else the single bytes, merging the adjacent
/// pair of lowest rank, leftmost first, until no pair is a token. O(n log n). `piece` is below 4 GiB.
pub fn encode(ranks: &Ranks, piece: &[u8], scratch: &mut Scratch, tokens: &mut Vec<u32>) {
    match ranks.rank(piece) {
        Some(rank) => tokens.push(rank),
        None => merge(ranks, piece, scratch, tokens),
    }
}

fn merge(ranks: &Ranks, piece: &[u8], scratch: &mut Scratch, tokens: &mut Vec<u32>) {
    let Scratch { nodes, heap } = scratch;
    let rank = |start: u32, end: u32| ranks.rank(&piece[start as usize..end as usize]).unwrap_or(NONE);
    let length = piece.len() as u32;
    heap.clear();
    nodes.clear();
    nodes.extend((0..length).zip(piece).map(|(at, byte)| Node {
        token: ranks.single(*byte),
        end: at + 1,
        before: at.wrapping_sub(1),
        joined: if at + 2 <= length { rank(at, at + 2) } else { NONE },
    }));
    heap.extend(
        (0..)
            .zip(nodes.iter())
            .filter(|(_, node)| node.joined != NONE)
            .map(|(at, node)| entry(node.joined, at)),
    );

    while let Some(Reverse(lowest)) = heap.pop() {
        let (joined, at) = ((lowest >> 32) as u32, lowest as u32);
        let left = nodes[at as usize];
        if left.joined != joined {
            continue;
        }
        let right = nodes[left.end as usize];
        nodes[left.end as usize].joined = NONE;
        nodes[at as usize].token = joined;
        nodes[at as usize].end = right.end;
        if right.end < length {
            nodes[right.end as usize].before = at;
        }
        // The merged token has new pairs with both neighbours.
        for start in [left.before, at] {
            let Some(node) = nodes.get(start as usize).copied() else { continue };
            let new = match nodes.get(node.end as usize) {
                Some(next) => rank(start, next.end),
                None => NONE,
            };
            nodes[start as usize].joined = new;
            if new != NONE {
                heap.push(entry(new, start));
            }
        }
    }

    let mut at = 0;
    while let Some(node) = nodes.get(at as usize) {
        tokens.push(node.token);
        at = node.end;
    }
}

fn entry(rank: u32, at: u32) -> Reverse<u64> {
    Reverse(u64::from(rank) << 32 | u64::from(at))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, word for word.
    fn naive(ranks: &Ranks, piece: &[u8]) -> Vec<u32> {
        if let Some(rank) = ranks.rank(piece) {
            return vec![rank];
        }
        let mut parts: Vec<Vec<u8>> = piece.iter().map(|byte| vec![*byte]).collect();
        loop {
            let pairs = parts.windows(2).enumerate();
            let lowest = pairs.filter_map(|(at, pair)| Some((ranks.rank(&pair.concat())?, at))).min();
            let Some((_, at)) = lowest else { break };
            let right = parts.remove(at + 1);
            parts[at].extend(right);
        }
        parts.iter().map(|part| ranks.rank(part).unwrap()).collect()
    }

    fn ranks(merges: &[Vec<u8>]) -> Ranks {
        use base64::Engine as _;
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        for merge in merges {
            if !tokens.contains(merge) {
                tokens.push(merge.clone());
            }
        }
        let line = |(rank, token)| {
            format!("{} {rank}\n", base64::engine::general_purpose::STANDARD.encode::<&Vec<u8>>(token))
        };
        Ranks::parse(tokens.iter().enumerate().map(line).collect::<String>().as_bytes()).unwrap()
    }

    proptest! {
        #[test]
        fn merges_follow_the_definition(
            merges in proptest::collection::vec(proptest::collection::vec(b'a'..=b'c', 2..6), 0..40),
            pieces in proptest::collection::vec(proptest::collection::vec(b'a'..=b'c', 1..60), 1..8),
        ) {
            let ranks = ranks(&merges);
            let mut scratch = Scratch::default();
            for piece in pieces {
                let mut tokens = Vec::new();
                encode(&ranks, &piece, &mut scratch, &mut tokens);
                prop_assert_eq!(tokens, naive(&ranks, &piece));
            }
        }
    }

    #[test]
    fn equal_ranks_merge_from_the_left() {
        let ranks = ranks(&[b"aa".to_vec()]);
        let mut tokens = Vec::new();
        encode(&ranks, b"aaaaa", &mut Scratch::default(), &mut tokens);
        assert_eq!(tokens, [256, 256, 97]);
    }
}
