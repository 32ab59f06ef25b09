//! Experts for several tokens: rows are expanded tile by tile, each once for all tokens that visit the expert.

use rayon::prelude::*;
use waste_common::importance::InputSquares;
use waste_common::plan::scratch::{BLOCK_ROWS, TILE_ROWS};
use waste_common::tensors::ExpertKind;

use super::visits::Visit;
use super::{Inner, MoeContext, MoeLayer};
use crate::experts::source::{Codebooks, ExpertFormat};
use crate::kernels::columns::Columns;
use crate::layers::ffn::activate;

/// The buffers in which one expert after the other is computed.
pub(super) struct Product<'a, 'b, 'c> {
    pub layer: &'a MoeLayer,
    pub context: &'a MoeContext<'a>,
    /// [n, input] of the tokens that visit an expert.
    pub gathered: &'b mut [f32],
    /// Gate and up, [blocks, n, 64], and the activation, [n, intermediate].
    pub inner: &'b mut Inner<'c>,
    /// [blocks, n, 64]
    pub down: &'b mut [f32],
    /// Told what each expert is given.
    pub squares: Option<&'b mut InputSquares>,
}

impl Product<'_, '_, '_> {
    /// One expert for all tokens that visit it; `outputs` is [tokens, top-k, input].
    pub fn expert(&mut self, record: &[u8], z: &[f32], visits: &[Visit], top_k: usize, outputs: &mut [f32]) {
        let input = self.layer.input;
        for (row, visit) in self.gathered.chunks_exact_mut(input).zip(visits) {
            row.copy_from_slice(&z[visit.token as usize * input..][..input]);
        }
        self.gathered_tokens(record, visits.len());
        if let (Some(squares), Some(first)) = (&mut self.squares, visits.first()) {
            let inner = &self.inner[2][..visits.len() * self.layer.intermediate];
            squares.add(first.expert as usize, &self.gathered[..visits.len() * input], inner);
        }
        for (i, visit) in visits.iter().enumerate() {
            let at = (visit.token as usize * top_k + visit.rank as usize) * input;
            let blocks = self.down.chunks_exact(visits.len() * BLOCK_ROWS);
            for (out, block) in outputs[at..at + input].chunks_mut(BLOCK_ROWS).zip(blocks) {
                out.copy_from_slice(&block[i * BLOCK_ROWS..][..out.len()]);
            }
        }
    }

    /// `down = w2 · act(w1 · x, w3 · x)` for the first `n` gathered tokens, rows expanded tile by tile.
    fn gathered_tokens(&mut self, record: &[u8], n: usize) {
        let (compute, inter) = (self.context.compute, self.layer.intermediate);
        let [gate, up, active] = &mut *self.inner;
        let blocks = n * inter.next_multiple_of(BLOCK_ROWS);
        let (gate, up) = (&mut gate[..blocks], &mut up[..blocks]);
        let active = &mut active[..n * inter];
        let x = &self.gathered[..n * self.layer.input];
        let expert = ExpertView { context: self.context, codebooks: self.layer.codebooks.as_ref(), record };
        expert.product(ExpertKind::Gate, inter, x, n, gate);
        expert.product(ExpertKind::Up, inter, x, n, up);
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
        expert.product(ExpertKind::Down, input, active, n, down);
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
    fn product(&self, kind: ExpertKind, rows: usize, x: &[f32], n: usize, out: &mut [f32]) {
        let compute = self.context.compute;
        let cols = x.len() / n;
        let block_len = n * BLOCK_ROWS;
        let work = |block: usize, out: &mut [f32], tile: &mut [f32]| {
            let end = (rows - block * BLOCK_ROWS).min(BLOCK_ROWS);
            for row in (0..end).step_by(TILE_ROWS) {
                let count = TILE_ROWS.min(end - row);
                let weights = self.rows(kind, block, row, count, cols, tile);
                let (_, tail) = Columns::new(out, BLOCK_ROWS).split_at(row);
                (compute.kernels.gemm)(weights, x, cols, &mut tail.split_at(count).0);
            }
        };
        out.par_chunks_mut(block_len).enumerate().with_max_len(1).for_each(|(block, out)| {
            match self.context.format {
                ExpertFormat::Dense { .. } => work(block, out, &mut []),
                ExpertFormat::Vq { .. } => {
                    compute.with_scratch(TILE_ROWS * cols, |tile| work(block, out, tile));
                }
            }
        });
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
