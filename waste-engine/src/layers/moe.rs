//! Mixture of experts: route, stream the chosen experts, sum their outputs in rank order (architecture.md §6).

use rayon::prelude::*;
use waste_common::config::Activation;
use waste_common::plan::scratch::{BLOCK_ROWS, MoeBuffers, TILE_ROWS};
use waste_common::tensors::ExpertKind;

use super::cut;
use super::ffn::{Ffn, activate};
use super::router::{Router, Routing};
use super::tables::Tables;
use crate::compute::Compute;
use crate::error::EngineError;
use crate::experts::source::{Codebooks, ExpertFormat};
use crate::experts::{ExpertId, ExpertStore};
use crate::kernels::columns::Columns;
use crate::matrix::Matrix;

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
    /// Tables of partial dot products, if the experts are vector quantised.
    pub tables: Option<&'a mut Tables>,
    /// Expanded rows, a share a thread.
    pub tiles: &'a mut [f32],
    /// [T, hidden]
    pub spare: &'a mut [f32],
    /// [T, top-k] chosen experts.
    pub ids: &'a mut [u32],
    /// (expert, token, rank), sorted; at most T · top-k.
    pub visits: &'a mut Vec<(u32, u32, u32)>,
}

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
        let inner = [(); 3].map(|()| cut(&mut buffer, sizes.inner));
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
        // While the first reads are on their way: what needs no routed expert.
        let issued = || {
            look_ahead(context, x, scratch.router);
            match &self.shared {
                Some(shared) => shared.forward(compute, activation, x, out, shared_buffer),
                None => out.fill(0.0),
            }
        };
        let mut work = ExpertWork {
            layer: self,
            context,
            gathered,
            inner,
            down,
            tables: scratch.tables,
            tiles: scratch.tiles,
        };
        if tokens == 1 {
            let id = |&expert: &u32| ExpertId { moe: self.number, expert };
            let mut ids = [ExpertId { moe: 0, expert: 0 }; 64];
            for (id_out, expert) in ids.iter_mut().zip(&*scratch.ids) {
                *id_out = id(expert);
            }
            work.prepare(z);
            context.store.for_each(&ids[..top_k], issued, |rank, record| {
                work.one(record, z, &mut outputs[rank * self.input..(rank + 1) * self.input]);
                Ok(())
            })?;
        } else {
            group_by_expert(scratch.ids, top_k, scratch.visits);
            let visits = &*scratch.visits;
            let groups: Vec<&[(u32, u32, u32)]> = visits.chunk_by(|a, b| a.0 == b.0).collect();
            let ids: Vec<ExpertId> =
                groups.iter().map(|group| ExpertId { moe: self.number, expert: group[0].0 }).collect();
            context.store.for_each(&ids, issued, |position, record| {
                work.many(record, z, groups[position], top_k, outputs);
                Ok(())
            })?;
        }

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
                            gathered_rows(work.gathered, self.input).zip(sum.chunks_exact(self.input))
                        {
                            (kernels.rms_norm)(sum, norm, self.eps, normed);
                        }
                        &*work.gathered
                    }
                };
                projections.up.apply(compute, input, scratch.spare);
                &*scratch.spare
            }
        };
        (kernels.axpy)(1.0, routed, out);
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

/// Runs the next MoE layer's router on this layer's input and asks for the experts it would choose. Only time
/// depends on it: the real router still decides. Works in twice as many elements as there are experts.
fn look_ahead(context: &MoeContext, x: &[f32], mut buffer: &mut [f32]) {
    let Some((next, width)) = context.next else { return };
    let experts = next.router.gate.rows;
    let (scores, selection) = (cut(&mut buffer, experts), cut(&mut buffer, experts));
    next.router.scores(context.compute, &next.routing, x, scores);
    let (mut ids, mut weights) = ([0u32; 64], [0.0; 64]);
    let top_k = next.routing.top_k;
    next.router.choose(&next.routing, scores, selection, &mut ids[..top_k], &mut weights[..top_k]);
    let ids = ids[..width.min(top_k)].iter();
    context.store.look_ahead(ids.map(|&expert| ExpertId { moe: next.number, expert }));
}

fn gathered_rows(buffer: &mut [f32], width: usize) -> impl Iterator<Item = &mut [f32]> {
    buffer.chunks_exact_mut(width)
}

/// Fills `visits` with (expert, token, rank), sorted by expert, then token.
fn group_by_expert(ids: &[u32], top_k: usize, visits: &mut Vec<(u32, u32, u32)>) {
    visits.clear();
    visits
        .extend(ids.iter().enumerate().map(|(i, &expert)| (expert, (i / top_k) as u32, (i % top_k) as u32)));
    visits.sort_unstable();
}

/// The buffers in which one expert after the other is computed.
struct ExpertWork<'a, 'b> {
    layer: &'a MoeLayer,
    context: &'a MoeContext<'a>,
    /// [n, input] of the tokens that visit an expert.
    gathered: &'b mut [f32],
    /// Gate and up, [blocks, n, 64], and the activation, [n, intermediate].
    inner: [&'b mut [f32]; 3],
    /// [blocks, n, 64]
    down: &'b mut [f32],
    tables: Option<&'b mut Tables>,
    tiles: &'b mut [f32],
}

impl ExpertWork<'_, '_> {
    /// Builds the tables that all experts of a token share.
    fn prepare(&mut self, z: &[f32]) {
        if let (Some(tables), Some(books)) = (&mut self.tables, &self.layer.codebooks) {
            for kind in [ExpertKind::Gate, ExpertKind::Up] {
                tables.build(self.context.compute, kind, books.by_dimension(kind), z);
            }
        }
    }

    /// One expert for one token.
    fn one(&mut self, record: &[u8], z: &[f32], out: &mut [f32]) {
        let compute = self.context.compute;
        let (Some(tables), Some(books), ExpertFormat::Vq { geometry, .. }) =
            (&mut self.tables, &self.layer.codebooks, self.context.format)
        else {
            self.gathered[..z.len()].copy_from_slice(z);
            self.gathered_tokens(record, 1);
            return gather_blocks(self.down, 1, out);
        };
        let part = |kind| (&record[geometry.indices(kind)], &record[geometry.scales(kind)]);
        let rows = |tables: &Tables, kind, out: &mut [f32]| {
            let (indices, scales) = part(kind);
            tables.rows(compute, kind, indices, scales, out);
        };
        let [gate, up, _] = &mut self.inner;
        let inter = self.layer.intermediate;
        let (gate, up) = (&mut gate[..inter], &mut up[..inter]);
        let built = &**tables;
        rayon::join(|| rows(built, ExpertKind::Gate, gate), || rows(built, ExpertKind::Up, up));
        activate(compute.kernels, self.context.activation, gate, up);
        tables.build(compute, ExpertKind::Down, books.by_dimension(ExpertKind::Down), gate);
        rows(tables, ExpertKind::Down, out);
    }

    /// One expert for all tokens that visit it; `outputs` is [tokens, top-k, input].
    fn many(
        &mut self,
        record: &[u8],
        z: &[f32],
        visits: &[(u32, u32, u32)],
        top_k: usize,
        outputs: &mut [f32],
    ) {
        let input = self.layer.input;
        for (row, &(_, token, _)) in self.gathered.chunks_exact_mut(input).zip(visits) {
            row.copy_from_slice(&z[token as usize * input..][..input]);
        }
        self.gathered_tokens(record, visits.len());
        for (i, &(_, token, rank)) in visits.iter().enumerate() {
            let at = (token as usize * top_k + rank as usize) * input;
            let blocks = self.down.chunks_exact(visits.len() * BLOCK_ROWS);
            for (out, block) in outputs[at..at + input].chunks_mut(BLOCK_ROWS).zip(blocks) {
                out.copy_from_slice(&block[i * BLOCK_ROWS..][..out.len()]);
            }
        }
    }

    /// `down = w2 · act(w1 · x, w3 · x)` for the first `n` gathered tokens, rows expanded tile by tile.
    fn gathered_tokens(&mut self, record: &[u8], n: usize) {
        let (compute, inter) = (self.context.compute, self.layer.intermediate);
        let [gate, up, active] = &mut self.inner;
        let blocks = n * inter.next_multiple_of(BLOCK_ROWS);
        let (gate, up) = (&mut gate[..blocks], &mut up[..blocks]);
        let active = &mut active[..n * inter];
        let x = &self.gathered[..n * self.layer.input];
        let expert = ExpertView { context: self.context, codebooks: self.layer.codebooks.as_ref(), record };
        expert.product(ExpertKind::Gate, inter, x, n, gate, self.tiles);
        expert.product(ExpertKind::Up, inter, x, n, up, self.tiles);
        compute.rows(gate, 16, |first, gate| {
            activate(compute.kernels, self.context.activation, gate, &up[first..first + gate.len()]);
        });
        for (t, row) in active.chunks_exact_mut(inter).enumerate() {
            for (out, block) in row.chunks_mut(BLOCK_ROWS).zip(gate.chunks_exact(n * BLOCK_ROWS)) {
                out.copy_from_slice(&block[t * BLOCK_ROWS..][..out.len()]);
            }
        }
        let input = self.layer.input;
        let down = &mut self.down[..n * input.next_multiple_of(BLOCK_ROWS)];
        expert.product(ExpertKind::Down, input, active, n, down, self.tiles);
    }
}

/// One token's rows out of [blocks, 1, 64].
fn gather_blocks(blocks: &[f32], n: usize, out: &mut [f32]) {
    for (out, block) in out.chunks_mut(BLOCK_ROWS).zip(blocks.chunks_exact(n * BLOCK_ROWS)) {
        out.copy_from_slice(&block[..out.len()]);
    }
}

/// An expert whose rows are used as f32.
struct ExpertView<'a> {
    context: &'a MoeContext<'a>,
    codebooks: Option<&'a Codebooks>,
    record: &'a [u8],
}

impl ExpertView<'_> {
    /// `out[block][t][r] = row(64 · block + r) · x[t]`, parallel over blocks.
    fn product(
        &self,
        kind: ExpertKind,
        rows: usize,
        x: &[f32],
        n: usize,
        out: &mut [f32],
        tiles: &mut [f32],
    ) {
        let compute = self.context.compute;
        let cols = x.len() / n;
        let share = rows.div_ceil(BLOCK_ROWS).div_ceil(compute.threads());
        let block_len = n * BLOCK_ROWS;
        let tile_len = TILE_ROWS * cols;
        let work = |first: usize, out: &mut [f32], tile: &mut [f32]| {
            for (b, out) in out.chunks_exact_mut(block_len).enumerate() {
                let block = first + b;
                let end = (rows - block * BLOCK_ROWS).min(BLOCK_ROWS);
                for row in (0..end).step_by(TILE_ROWS) {
                    let count = TILE_ROWS.min(end - row);
                    let weights = self.rows(kind, block, row, count, cols, tile);
                    let (_, tail) = Columns::new(out, BLOCK_ROWS).split_at(row);
                    (compute.kernels.gemm)(weights, x, cols, &mut tail.split_at(count).0);
                }
            }
        };
        match self.context.format {
            ExpertFormat::Dense { .. } => {
                let out = out.par_chunks_mut(share * block_len).enumerate();
                out.for_each(|(i, out)| work(i * share, out, &mut []));
            }
            ExpertFormat::Vq { .. } => {
                let out = out.par_chunks_mut(share * block_len).zip(tiles.par_chunks_mut(tile_len));
                out.enumerate().for_each(|(i, (out, tile))| work(i * share, out, tile));
            }
        }
    }

    /// `count` rows of a block from row `row` on, as f32.
    fn rows<'t>(
        &'t self,
        kind: ExpertKind,
        block: usize,
        row: usize,
        count: usize,
        cols: usize,
        tile: &'t mut [f32],
    ) -> &'t [f32] {
        let first = block * BLOCK_ROWS + row;
        match (self.context.format, self.codebooks) {
            (ExpertFormat::Vq { geometry, shapes }, Some(books)) => {
                let shape = shapes[kind as usize];
                let (indices, scales) =
                    (&self.record[geometry.indices(kind)], &self.record[geometry.scales(kind)]);
                let indices = &indices[block * shape.block_bytes()..][..shape.block_bytes()];
                let tile = &mut tile[..count * cols];
                let scales = &scales[2 * first..2 * (first + count)];
                (self.context.compute.kernels.vq_expand)(
                    indices,
                    shape,
                    row,
                    scales,
                    books.by_entry(kind),
                    tile,
                );
                tile
            }
            (format, _) => &format.dense(self.record, kind)[first * cols..(first + count) * cols],
        }
    }
}
