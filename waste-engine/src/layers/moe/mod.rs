//! Mixture of experts: route, stream the chosen experts, sum their outputs in rank order (architecture.md §6).

mod lookup;
mod product;
pub mod visits;

use arrayvec::ArrayVec;
use waste_common::config::Activation;
use waste_common::importance::InputSquares;
use waste_common::plan::scratch::MoeBuffers;

pub use self::lookup::LookUp;
use self::lookup::Lookup;
use self::product::Product;
use self::visits::Visits;
use super::cut;
use super::ffn::Ffn;
use super::router::{Router, Routing};
use super::tables::Tables;
use crate::compute::Compute;
use crate::error::EngineError;
use crate::experts::source::{Codebooks, ExpertFormat};
use crate::experts::{ExpertId, ExpertStore};
use crate::matrix::Matrix;
use crate::options::PARALLEL_MAX;
use crate::profile::{Part, Profile};

/// A model with more experts a token is refused.
const TOP_K_MAX: usize = waste_common::config::TOP_K_MAX as usize;

/// The projections of routed experts that live in a latent of their own.
pub struct Latent {
    /// `routed_expert_down_proj` [latent, hidden].
    pub down: Matrix,
    /// `routed_expert_norm` [latent], if the sum is normalised.
    pub norm: Option<Vec<f32>>,
    /// `routed_expert_up_proj` [hidden, latent].
    pub up: Matrix,
}

/// The weights of an MoE layer that stay in memory.
pub struct MoeLayer {
    /// Number among the MoE layers.
    pub number: u32,
    /// Inner width of a routed expert.
    pub intermediate: usize,
    /// Width routed experts run on.
    pub input: usize,
    /// The router.
    pub router: Router,
    /// How its scores become a choice.
    pub routing: Routing,
    /// The latent, if the experts have one.
    pub latent: Option<Latent>,
    /// The shared experts, one FFN.
    pub shared: Option<Ffn>,
    /// The layer's codebooks, if its experts are vector quantised.
    pub codebooks: Option<Codebooks>,
    /// Epsilon of the latent's norm.
    pub eps: f32,
}

/// What an MoE layer works in, besides the stage buffer.
pub struct MoeScratch<'a> {
    /// [T, experts], [T, top-k], and three times [experts].
    pub router: &'a mut [f32],
    /// Tables of partial dot products for tokens that are decoded, if the experts are vector quantised.
    pub tables: Option<&'a mut Tables>,
    /// [T, hidden]
    pub spare: &'a mut [f32],
    /// [T, top-k] chosen experts.
    pub ids: &'a mut [u32],
    /// By expert; at most T · top-k.
    pub visits: &'a mut Visits,
    /// Room for what tokens that are decoded need of experts.
    pub lookups: &'a mut Vec<LookUp>,
    /// Told what the time goes to.
    pub profile: &'a mut Profile,
    /// Told what each expert is given, if that is measured.
    pub squares: Option<&'a mut InputSquares>,
}

/// Gate, up, and the activation: [tokens or experts, intermediate], in blocks where several tokens share an expert.
type Inner<'a> = [&'a mut [f32]; 3];

/// What an MoE layer needs of the model around it.
pub struct MoeContext<'a> {
    /// Threads and kernels.
    pub compute: &'a Compute,
    /// The experts.
    pub store: &'a ExpertStore,
    /// How they are stored.
    pub format: &'a ExpertFormat,
    /// The FFNs' activation.
    pub activation: Activation,
    /// The next MoE layer, and how many of its experts to read ahead.
    pub next: Option<(&'a MoeLayer, usize)>,
}

impl MoeLayer {
    /// `out = MoE(x)` for [tokens, hidden].
    pub fn forward(
        &self,
        context: &MoeContext,
        x: &[f32],
        out: &mut [f32],
        mut buffer: &mut [f32],
        sizes: &MoeBuffers,
        mut scratch: MoeScratch,
    ) -> Result<(), EngineError> {
        let MoeContext { compute, activation, .. } = *context;
        let kernels = compute.kernels;
        let top_k = self.routing.top_k;
        let tokens = sizes.inputs / self.input;
        let latent = cut(&mut buffer, sizes.inputs);
        let gathered = cut(&mut buffer, sizes.inputs);
        let sum = cut(&mut buffer, sizes.inputs);
        let outputs = cut(&mut buffer, sizes.outputs);
        let mut inner: Inner = [(); 3].map(|()| cut(&mut buffer, sizes.inner));
        let down = cut(&mut buffer, sizes.down);
        let shared_buffer = cut(&mut buffer, 2 * sizes.shared);

        let weights = self.route(compute, x, &mut scratch);
        let z = match &self.latent {
            Some(projections) => {
                projections.down.apply(compute, x, latent);
                &*latent
            }
            None => x,
        };
        let MoeScratch { router, tables, spare, ids, visits, lookups, profile, squares } = scratch;
        visits.group(self.number, ids, top_k);
        let visits = &*visits;
        // While the first reads are on their way: what needs no routed expert.
        let profile = &std::cell::RefCell::new(profile);
        let lap = |part| profile.borrow_mut().lap(part);
        let issued = || {
            look_ahead(context, x, router);
            match &self.shared {
                Some(shared) => shared.forward(compute, activation, x, out, shared_buffer),
                None => out.fill(0.0),
            }
            lap(Part::Trunk);
        };
        // Look-ups never see an expert's input in one place.
        if (tokens == 1 || compute.together)
            && squares.is_none()
            && let (Some(tables), Some(codebooks), ExpertFormat::Vq { geometry, .. }) =
                (tables, &self.codebooks, context.format)
        {
            let mut lookup = Lookup { layer: self, context, codebooks, geometry, tables, visits, lookups };
            lap(Part::Trunk);
            lookup.prepare(z);
            lap(Part::Tables);
            context.store.for_each(visits.experts(), top_k, issued, |batch| {
                lap(Part::Stall);
                lookup.experts(batch, &mut inner, outputs, &mut profile.borrow_mut());
                Ok(())
            })?;
        } else {
            let mut product = Product { layer: self, context, gathered, inner: &mut inner, down, squares };
            context.store.for_each(visits.experts(), 1, issued, |batch| {
                lap(Part::Stall);
                for (place, record) in batch {
                    product.expert(record.bytes(), z, visits.of(*place), top_k, outputs);
                }
                lap(Part::Gather);
                Ok(())
            })?;
        }
        lap(Part::Stall);

        for (t, sum) in sum.chunks_exact_mut(self.input).enumerate() {
            sum.fill(0.0);
            for (weight, output) in weights[t * top_k..(t + 1) * top_k]
                .iter()
                .zip(outputs[t * top_k * self.input..].chunks_exact(self.input))
            {
                (kernels.axpy)(*weight, output, sum);
            }
        }
        let routed = match &self.latent {
            None => &*sum,
            Some(projections) => {
                let input = match &projections.norm {
                    None => &*sum,
                    Some(norm) => {
                        for (normed, sum) in
                            gathered.chunks_exact_mut(self.input).zip(sum.chunks_exact(self.input))
                        {
                            (kernels.rms_norm)(sum, norm, self.eps, normed);
                        }
                        &*gathered
                    }
                };
                projections.up.apply(compute, input, spare);
                &*spare
            }
        };
        (kernels.axpy)(1.0, routed, out);
        lap(Part::Trunk);
        Ok(())
    }

    /// Chooses the experts of every token into `scratch.ids`; returns their weights, [tokens, top-k].
    fn route<'a>(&self, compute: &Compute, x: &[f32], scratch: &mut MoeScratch<'a>) -> &'a [f32] {
        let experts = self.router.gate.rows;
        let tokens = x.len() / self.router.gate.cols;
        let mut buffer = std::mem::take(&mut scratch.router);
        let scores = cut(&mut buffer, tokens * experts);
        let selection = cut(&mut buffer, experts);
        let weights = cut(&mut buffer, tokens * self.routing.top_k);
        self.router.scores(compute, &self.routing, x, scores);
        let top_k = self.routing.top_k;
        for ((scores, ids), weights) in scores
            .chunks_exact(experts)
            .zip(scratch.ids.chunks_exact_mut(top_k))
            .zip(weights.chunks_exact_mut(top_k))
        {
            self.router.choose(&self.routing, scores, selection, ids, weights);
        }
        scratch.router = buffer;
        weights
    }
}

/// Runs the next MoE layer's router on this layer's input and asks for the experts it would choose, the best of all
/// tokens first. Only time depends on it: the real router still decides. Works in twice as many elements as there are
/// experts.
fn look_ahead(context: &MoeContext, x: &[f32], mut buffer: &mut [f32]) {
    let Some((next, width)) = context.next else { return };
    let experts = next.router.gate.rows;
    let (scores, selection) = (cut(&mut buffer, experts), cut(&mut buffer, experts));
    let top_k = next.routing.top_k;
    let mut guesses = ArrayVec::<[u32; TOP_K_MAX], PARALLEL_MAX>::new();
    for x in x.chunks_exact(next.router.gate.cols).take(PARALLEL_MAX) {
        next.router.scores(context.compute, &next.routing, x, scores);
        let (mut ids, mut weights) = ([0u32; TOP_K_MAX], [0.0; TOP_K_MAX]);
        next.router.choose(&next.routing, scores, selection, &mut ids[..top_k], &mut weights[..top_k]);
        guesses.push(ids);
    }
    let ranks = (0..width.min(top_k)).flat_map(|rank| guesses.iter().map(move |ids| (rank, ids[rank])));
    context.store.look_ahead(ranks.map(|(rank, expert)| (rank, ExpertId { moe: next.number, expert })));
}
