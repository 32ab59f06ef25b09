//! Where the time of a forward pass goes.

use std::time::{Duration, Instant};

/// What time is spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// KDA layers.
    Kda,
    /// MLA layers.
    Mla,
    /// Dense FFNs.
    Dense,
    /// What is resident of MoE layers: routers, shared experts, latent projections.
    Trunk,
    /// Building look-up tables.
    Tables,
    /// Routed experts: looking up, or expanding and multiplying.
    Gather,
    /// Waiting for experts to be read.
    Stall,
    /// The output head.
    Head,
    /// Embedding, norms, residuals, sums.
    Rest,
}

impl Part {
    /// All parts, in their order.
    pub const ALL: [Part; 9] = [
        Part::Kda,
        Part::Mla,
        Part::Dense,
        Part::Trunk,
        Part::Tables,
        Part::Gather,
        Part::Stall,
        Part::Head,
        Part::Rest,
    ];

    /// The part's name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Part::Kda => "kda",
            Part::Mla => "mla",
            Part::Dense => "dense",
            Part::Trunk => "trunk",
            Part::Tables => "tables",
            Part::Gather => "gather",
            Part::Stall => "stall",
            Part::Head => "head",
            Part::Rest => "rest",
        }
    }
}

/// A stopwatch with a sum for each part: every moment of a forward pass belongs to exactly one.
#[derive(Clone, Debug)]
pub struct Profile {
    spent: [Duration; Part::ALL.len()],
    since: Instant,
}

impl Default for Profile {
    fn default() -> Self {
        Profile { spent: Default::default(), since: Instant::now() }
    }
}

impl Profile {
    /// What happens until the next [`lap`](Self::lap) begins now.
    pub(crate) fn start(&mut self) {
        self.since = Instant::now();
    }

    /// What happened since the last lap or start was this.
    pub(crate) fn lap(&mut self, part: Part) {
        let now = Instant::now();
        self.spent[part as usize] += now - self.since;
        self.since = now;
    }

    /// Time spent on a part so far.
    pub fn spent(&self, part: Part) -> Duration {
        self.spent[part as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_moment_belongs_to_one_part() {
        let mut profile = Profile::default();
        let begin = Instant::now();
        profile.start();
        std::thread::sleep(Duration::from_millis(2));
        profile.lap(Part::Kda);
        profile.lap(Part::Head);
        std::thread::sleep(Duration::from_millis(1));
        profile.lap(Part::Kda);
        let total: Duration = Part::ALL.into_iter().map(|part| profile.spent(part)).sum();
        assert!(profile.spent(Part::Kda) >= Duration::from_millis(3) && total <= begin.elapsed());
        for (at, part) in Part::ALL.into_iter().enumerate() {
            assert_eq!(part as usize, at);
        }
    }
}
