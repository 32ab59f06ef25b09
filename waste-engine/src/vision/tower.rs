//! The vision tower and its projector: patches to rows that stand in the prompt like embeddings.

use rayon::prelude::*;
use waste_common::config::{ModelConfig, Vision};

use super::config::VisionConfig;
use super::image::Patches;
use super::position::{Rotation, add_positions};
use crate::compute::Compute;
use crate::error::EngineError;
use crate::kernels::Kernels;
use crate::layers::cut;
use crate::matrix::Matrix;
use crate::options::EngineOptions;
use crate::weights::{Loader, Source};

/// Queries that pass over the keys together; their scores are a thread's scratch.
const QUERIES: usize = waste_common::plan::VISION_QUERIES;
/// Keys, or dimensions of values, that stay in the cache meanwhile.
const TILE: usize = 32;

/// How far an image has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Patches and positions, [patches, hidden].
    Embed,
    /// The stream after a block, [patches, hidden].
    Block(usize),
    /// After the last norm, [patches, hidden].
    Encoder,
}

/// Sees the values of every stage; an error ends the computation.
pub type StageSink<'a> = dyn FnMut(Stage, &[f32]) -> Result<(), EngineError> + 'a;

/// The tower's weights.
pub struct Tower {
    shape: Vision,
    rms_eps: f32,
    projector_eps: f32,
    patch: Matrix,
    positions: Matrix,
    blocks: Vec<Block>,
    norm: Vec<f32>,
    projector: [Matrix; 2],
    post_norm: Vec<f32>,
}

struct Block {
    norms: [Vec<f32>; 2],
    qkv: Matrix,
    out: Matrix,
    inner: [Matrix; 2],
}

/// Working memory of one image.
struct Scratch {
    /// Lengths of the stream, a sublayer's input or output, q, k, v or the MLP's inner values, and the heads.
    lengths: [usize; 4],
}

impl Scratch {
    fn new(shape: &Vision, patches: usize) -> Self {
        let wide = (3 * shape.qkv).max(shape.intermediate).max(shape.hidden);
        Scratch { lengths: [shape.hidden, shape.hidden, wide, 4 * shape.qkv].map(|width| patches * width) }
    }
}

impl Tower {
    /// Loads all weights.
    ///
    /// # Errors
    /// A tensor is missing, of another shape, or cannot be read.
    pub fn load(source: &Source, model: &ModelConfig, config: &VisionConfig) -> Result<Self, EngineError> {
        let options = EngineOptions::default();
        let loader = Loader::vision(source, model, &options)?;
        let shape = config.shape.clone();
        let (rows, columns) = shape.positions;
        let name = |tail: &str| format!("vision_tower.{tail}.weight");
        let block = |number: usize| -> Result<Block, EngineError> {
            let name = |tail: &str| name(&format!("encoder.blocks.{number}.{tail}"));
            Ok(Block {
                norms: [loader.vector(&name("norm0"))?, loader.vector(&name("norm1"))?],
                qkv: loader.matrix(&name("wqkv"))?,
                out: loader.matrix(&name("wo"))?,
                inner: [loader.matrix(&name("mlp.fc0"))?, loader.matrix(&name("mlp.fc1"))?],
            })
        };
        Ok(Tower {
            rms_eps: config.rms_eps,
            projector_eps: config.projector_eps,
            patch: loader.matrix(&name("patch_embed.proj"))?,
            positions: loader.matrix_of(&name("patch_embed.pos_emb"), rows * columns, shape.hidden)?,
            blocks: (0..shape.layers).map(block).collect::<Result<_, _>>()?,
            norm: loader.vector(&name("encoder.final_layernorm"))?,
            projector: [
                loader.matrix("mm_projector.proj.0.weight")?,
                loader.matrix("mm_projector.proj.2.weight")?,
            ],
            post_norm: loader.vector("mm_projector.post_norm.weight")?,
            shape,
        })
    }

    /// Takes one image through the tower: [patches / 4, text hidden size], row-major over the merged grid.
    ///
    /// # Errors
    /// Only those of `sink`.
    pub fn forward(
        &self,
        compute: &Compute,
        image: Patches,
        sink: &mut StageSink,
    ) -> Result<Vec<f32>, EngineError> {
        let (shape, kernels) = (&self.shape, compute.kernels);
        let Patches { pixels, plan } = image;
        let grid = (plan.grid_height, plan.grid_width);
        let [stream, sublayer, wide, heads] = Scratch::new(shape, plan.patches()).lengths;

        let mut x = vec![0.0; stream];
        compute.run(|| {
            self.patch.apply(compute, &pixels, &mut x);
            add_positions(compute, &self.positions, shape.positions, grid, &mut x);
        });
        drop(pixels);
        sink(Stage::Embed, &x)?;

        let (mut y, mut wide, mut heads) = (vec![0.0; sublayer], vec![0.0; wide], vec![0.0; heads]);
        let rotation = Rotation::new(grid.0.max(grid.1), shape.qkv / shape.heads);
        for (number, block) in self.blocks.iter().enumerate() {
            compute.run(|| {
                self.attention(compute, block, &rotation, grid.1, &mut x, [&mut y, &mut wide, &mut heads]);
                self.mlp(compute, block, &mut x, &mut y, &mut wide);
            });
            sink(Stage::Block(number), &x)?;
        }
        compute.run(|| self.norm(compute, &x, &self.norm, &mut y));
        sink(Stage::Encoder, &y)?;

        let merged = 4 * shape.hidden;
        let mut out = vec![0.0; plan.tokens() * shape.text_hidden];
        compute.run(|| {
            merge(compute, &y, grid.1, shape.hidden, &mut x);
            let inner = &mut wide[..plan.tokens() * merged];
            self.projector[0].apply(compute, &x, inner);
            compute.tokens(inner, merged, |_, row| (kernels.gelu_erf)(row));
            self.projector[1].apply(compute, inner, &mut out);
            compute.tokens(&mut out, shape.text_hidden, |_, row| {
                let values = row.to_vec();
                (kernels.rms_norm)(&values, &self.post_norm, self.projector_eps, row);
            });
        });
        Ok(out)
    }

    fn norm(&self, compute: &Compute, x: &[f32], weight: &[f32], out: &mut [f32]) {
        let width = weight.len();
        compute.tokens(out, width, |t, out| {
            (compute.kernels.rms_norm)(&x[t * width..][..width], weight, self.rms_eps, out);
        });
    }

    /// `x += out(softmax(q kᵀ / √d) v)`, every patch attending to every patch.
    fn attention(
        &self,
        compute: &Compute,
        block: &Block,
        rotation: &Rotation,
        columns: usize,
        x: &mut [f32],
        [y, wide, heads]: [&mut [f32]; 3],
    ) {
        let (kernels, width) = (compute.kernels, self.shape.qkv);
        let dim = width / self.shape.heads;
        let patches = x.len() / self.shape.hidden;
        self.norm(compute, x, &block.norms[0], y);
        let qkv = &mut wide[..3 * patches * width];
        block.qkv.apply(compute, y, qkv);

        let mut rest = &mut *heads;
        let [q, k, v, o] = std::array::from_fn(|_| cut(&mut rest, patches * width));
        let scale = 1.0 / (dim as f32).sqrt();
        let part = |which: usize, head: usize, t: usize| &qkv[(3 * t + which) * width + head * dim..][..dim];
        for (which, heads) in [&mut *q, &mut *k].into_iter().enumerate() {
            heads.par_chunks_exact_mut(patches * dim).enumerate().for_each(|(head, out)| {
                for (t, out) in out.chunks_exact_mut(dim).enumerate() {
                    out.copy_from_slice(part(which, head, t));
                    rotation.rotate(out, t / columns, t % columns);
                    if which == 0 {
                        out.iter_mut().for_each(|q| *q *= scale);
                    }
                }
            });
        }
        // Values lie transposed, [heads, dim, patches], so that their sums are dot products too.
        v.par_chunks_exact_mut(patches * dim).enumerate().for_each(|(head, out)| {
            for t in 0..patches {
                for (d, &value) in part(2, head, t).iter().enumerate() {
                    out[d * patches + t] = value;
                }
            }
        });
        let (q, k, v) = (&*q, &*k, &*v);
        o.par_chunks_exact_mut(patches * dim).enumerate().for_each(|(head, o)| {
            let [q, k, v] = [q, k, v].map(|all| &all[head * patches * dim..][..patches * dim]);
            let tiles = o.par_chunks_mut(QUERIES * dim).zip(q.par_chunks(QUERIES * dim));
            tiles.for_each_init(
                || vec![0.0; QUERIES * patches],
                |scores, (o, q)| {
                    let scores = &mut scores[..q.len() / dim * patches];
                    products(kernels, k, q, dim, scores);
                    scores.chunks_exact_mut(patches).for_each(|scores| (kernels.softmax)(scores));
                    products(kernels, v, scores, patches, o);
                },
            );
        });
        let joined = &mut wide[..patches * width];
        let o = &*o;
        compute.tokens(joined, width, |t, row| {
            for (head, row) in row.chunks_exact_mut(dim).enumerate() {
                row.copy_from_slice(&o[(head * patches + t) * dim..][..dim]);
            }
        });
        block.out.apply(compute, joined, y);
        add(compute, x, y, self.shape.hidden);
    }

    /// `x += fc1(gelu(fc0(norm(x))))`.
    fn mlp(&self, compute: &Compute, block: &Block, x: &mut [f32], y: &mut [f32], wide: &mut [f32]) {
        let inner_width = self.shape.intermediate;
        let inner = &mut wide[..x.len() / self.shape.hidden * inner_width];
        self.norm(compute, x, &block.norms[1], y);
        block.inner[0].apply(compute, y, inner);
        compute.tokens(inner, inner_width, |_, row| (compute.kernels.gelu_tanh)(row));
        block.inner[1].apply(compute, inner, y);
        add(compute, x, y, self.shape.hidden);
    }
}

/// `out[t] = weights · x[t]`: weights [rows, cols], x [tokens, cols], out [tokens, rows].
fn products(kernels: &Kernels, weights: &[f32], x: &[f32], cols: usize, out: &mut [f32]) {
    let rows = weights.len() / cols;
    for (tile, weights) in weights.chunks(TILE * cols).enumerate() {
        let first = tile * TILE;
        let end = first + weights.len() / cols;
        for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(rows)) {
            (kernels.rows_f32)(weights, x, &mut out[first..end]);
        }
    }
}

fn add(compute: &Compute, x: &mut [f32], y: &[f32], width: usize) {
    compute.tokens(x, width, |t, x| (compute.kernels.axpy)(1.0, &y[t * width..][..width], x));
}

/// Squares of 2 x 2 patches side by side: [rows, columns, hidden] to [rows / 2, columns / 2, 2, 2, hidden].
fn merge(compute: &Compute, x: &[f32], columns: usize, hidden: usize, out: &mut [f32]) {
    compute.tokens(out, 4 * hidden, |t, row| {
        let (a, b) = (t / (columns / 2), t % (columns / 2));
        for (i, row) in row.chunks_exact_mut(hidden).enumerate() {
            let patch = (2 * a + i / 2) * columns + 2 * b + i % 2;
            row.copy_from_slice(&x[patch * hidden..][..hidden]);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The plan counts what an image's way through the tower allocates.
    #[test]
    fn the_plan_counts_the_scratch() {
        let shape = Vision {
            hidden: 1024,
            layers: 27,
            heads: 12,
            qkv: 1536,
            intermediate: 4096,
            patch: 14,
            positions: (64, 64),
            text_hidden: 7168,
        };
        let (patches, threads) = (1024, 8);
        let scratch: usize = Scratch::new(&shape, patches).lengths.iter().sum();
        let out = patches / 4 * shape.text_hidden;
        let scores = threads * QUERIES * patches;
        let planned = waste_common::plan::vision_activations(&shape, patches as u64, threads as u64);
        assert_eq!(planned, 4 * (scratch + out + scores) as u128);
    }
}
