//! Routing as skewed as that of real models: a bias that makes some experts popular with every token.
//!
//! On the real Kimi-Linear-48B 16 to 17 % of a token's experts are those of a token far before it, and 34 % those of
//! the token just before it. The first share is that of popularity; what neighbours have in common beyond it is due
//! to the text, and belongs into the tokens that are fed (see the workload). A bias that made up the whole 34 % would
//! leave a layer with some 30 experts ever used, where the real one uses 195 of 256 within 300 tokens.
//!
//! The spread of the biases that gives the share is found by simulating the router, whose logits have unit variance
//! here.

use crate::random::Random;

/// Layers of a simulation: much depends on the few most popular experts, so that one layer says little.
const LAYERS: usize = 16;
/// Tokens of each.
const TOKENS: usize = 17;
/// Halvings of the interval that holds the spread.
const STEPS: usize = 10;
/// Biases beyond this decide alone: scores lie between 0 and 1.
const SPREAD_MAX: f32 = 1.0;

/// How popular experts are.
#[derive(Clone, Debug, PartialEq)]
pub struct Popularity {
    spread: f32,
}

impl Popularity {
    /// The share of a token's experts that a token far from it used too, as measured on Kimi-Linear-48B.
    pub const REUSE: f64 = 0.165;

    /// No expert is more popular than another.
    pub const NONE: Popularity = Popularity { spread: 0.0 };

    /// The popularity that makes a router of so many experts reuse `reuse` of them from token to token.
    pub fn for_reuse(experts: usize, top_k: usize, reuse: f64) -> Popularity {
        let (mut low, mut high) = (0.0, SPREAD_MAX);
        for _ in 0..STEPS {
            let spread = (low + high) / 2.0;
            if simulate(experts, top_k, spread) < reuse {
                low = spread;
            } else {
                high = spread;
            }
        }
        Popularity { spread: (low + high) / 2.0 }
    }

    /// The biases of a layer's experts.
    pub fn draw(&self, random: &mut Random, experts: usize) -> Vec<f32> {
        (0..experts).map(|_| self.spread * random.normal()).collect()
    }
}

/// The share of chosen experts that the token before chose too.
fn simulate(experts: usize, top_k: usize, spread: f32) -> f64 {
    let mut random = Random::new(1);
    let mut reused = 0;
    for _ in 0..LAYERS {
        let biases = Popularity { spread }.draw(&mut random, experts);
        let mut before: Vec<usize> = Vec::new();
        for _ in 0..TOKENS {
            let scores: Vec<f32> =
                biases.iter().map(|bias| bias + 1.0 / (1.0 + (-random.normal()).exp())).collect();
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            order.truncate(top_k);
            reused += order.iter().filter(|expert| before.contains(expert)).count();
            before = order;
        }
    }
    reused as f64 / (LAYERS * (TOKENS - 1) * top_k.max(1)) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spread_gives_the_reuse() {
        for (experts, top_k) in [(256, 8), (896, 16)] {
            let Popularity { spread } = Popularity::for_reuse(experts, top_k, Popularity::REUSE);
            let reuse = simulate(experts, top_k, spread);
            assert!((reuse - Popularity::REUSE).abs() < 0.03, "{experts}: {reuse} at {spread}");
        }
    }

    #[test]
    fn what_cannot_be_reached_ends_at_the_bound() {
        assert!(Popularity::for_reuse(4, 4, 0.1).spread < 0.01);
    }
}
