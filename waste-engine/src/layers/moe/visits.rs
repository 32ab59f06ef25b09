//! Which tokens visit which expert.

use crate::experts::ExpertId;

/// A token that an expert is one of the best for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Visit {
    /// The expert.
    pub expert: u32,
    /// The token.
    pub token: u32,
    /// The expert's place among the token's experts.
    pub rank: u32,
}

/// The visits of a chunk's tokens, by expert.
pub struct Visits {
    visits: Vec<Visit>,
    /// Where each expert's begin.
    starts: Vec<u32>,
    experts: Vec<ExpertId>,
}

impl Visits {
    /// Room for so many visits to so many experts.
    pub fn new(visits: usize, experts: usize) -> Self {
        let experts = experts.min(visits);
        Visits {
            visits: Vec::with_capacity(visits),
            starts: Vec::with_capacity(experts),
            experts: Vec::with_capacity(experts),
        }
    }

    /// Takes the choice of a layer's tokens, [tokens, top-k], best first. A single token's experts stay in that order;
    /// those of several are sorted.
    pub fn group(&mut self, moe: u32, ids: &[u32], top_k: usize) {
        self.visits.clear();
        let visit = |(i, &expert): (usize, &u32)| Visit {
            expert,
            token: (i / top_k) as u32,
            rank: (i % top_k) as u32,
        };
        self.visits.extend(ids.iter().enumerate().map(visit));
        if ids.len() > top_k {
            self.visits.sort_unstable();
        }
        self.starts.clear();
        self.experts.clear();
        for (i, visit) in self.visits.iter().enumerate() {
            if i == 0 || self.visits[i - 1].expert != visit.expert {
                self.starts.push(i as u32);
                self.experts.push(ExpertId { moe, expert: visit.expert });
            }
        }
    }

    /// The experts that are visited, each once.
    pub fn experts(&self) -> &[ExpertId] {
        &self.experts
    }

    /// The visits to the expert at this place of [`experts`](Self::experts).
    pub fn of(&self, place: usize) -> &[Visit] {
        let end = self.starts.get(place + 1).map_or(self.visits.len(), |&end| end as usize);
        &self.visits[self.starts[place] as usize..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(ids: &[u32], top_k: usize) -> Vec<(u32, Vec<(u32, u32)>)> {
        let mut visits = Visits::new(ids.len(), 100);
        visits.group(3, ids, top_k);
        let of = |place| visits.of(place).iter().map(|visit| (visit.token, visit.rank)).collect();
        visits.experts().iter().enumerate().map(|(place, id)| (id.expert, of(place))).collect()
    }

    #[test]
    fn one_token_keeps_its_order() {
        assert_eq!(listed(&[7, 2, 5], 3), [(7, vec![(0, 0)]), (2, vec![(0, 1)]), (5, vec![(0, 2)])]);
    }

    #[test]
    fn several_tokens_share_an_expert() {
        let expected =
            [(2, vec![(0, 1), (1, 0)]), (5, vec![(2, 1)]), (7, vec![(0, 0), (2, 0)]), (9, vec![(1, 1)])];
        assert_eq!(listed(&[7, 2, 2, 9, 7, 5], 2), expected);
    }
}
