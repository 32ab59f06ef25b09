//! Tables of partial dot products of an expert's inputs: built once, looked up by every row.

use rayon::prelude::*;
use waste_common::io::{AlignedBuf, OutOfMemory};
use waste_common::plan::scratch::{BLOCK_ROWS, TABLE_BLOCK};
use waste_common::tensors::ExpertKind;

use crate::compute::Compute;
use crate::kernels::portable::{FastTables, VQ_DIM, VqShape};
use crate::options::Arith;

/// Rows that share tables well in the kernels.
const ROWS_UNIT: usize = 4 * BLOCK_ROWS;

/// Room for the tables of gate, up and one down.
pub struct Tables {
    shapes: [VqShape; 3],
    entries: Entries,
}

enum Entries {
    /// f32 entries of the three, one after the other.
    Exact(Vec<f32>),
    /// 16-bit entries of the three, what a unit is worth in each block of them, and room to quantise in.
    Fast { planes: AlignedBuf, units: Vec<f32>, scratch: Vec<f32> },
}

impl Tables {
    /// Room for the tables of one expert shape, built by as many threads.
    pub fn new(shapes: [VqShape; 3], arith: Arith, threads: usize) -> Result<Self, OutOfMemory> {
        let sum = |size: fn(VqShape) -> usize| shapes.iter().map(|&shape| size(shape)).sum::<usize>();
        let entries = match arith {
            Arith::Exact => Entries::Exact(vec![0.0; sum(VqShape::table_len)]),
            Arith::Fast => {
                let scratch = shapes.iter().map(|shape| shape.fast_scratch_len()).max().unwrap_or(0);
                Entries::Fast {
                    planes: AlignedBuf::zeroed(sum(VqShape::fast_len))?,
                    units: vec![0.0; sum(VqShape::fast_blocks)],
                    scratch: vec![0.0; threads * scratch],
                }
            }
        };
        Ok(Tables { shapes, entries })
    }

    /// Where a matrix's part begins and ends, for parts of these sizes.
    fn part(&self, kind: ExpertKind, size: fn(VqShape) -> usize) -> std::ops::Range<usize> {
        let start = self.shapes[..kind as usize].iter().map(|&shape| size(shape)).sum();
        start..start + size(self.shapes[kind as usize])
    }

    /// Builds the tables of a matrix for an input, in parallel over blocks of its vectors. `codebooks` is
    /// [stages, 8, entries].
    pub fn build(&mut self, compute: &Compute, kind: ExpertKind, codebooks: &[f32], x: &[f32]) {
        let shape = self.shapes[kind as usize];
        let (exact, fast) = (self.part(kind, VqShape::table_len), self.part(kind, VqShape::fast_len));
        let blocks = self.part(kind, VqShape::fast_blocks);
        let share = blocks.len().div_ceil(compute.threads()) * TABLE_BLOCK;
        let inputs = x.par_chunks(share * VQ_DIM);
        let part = |x: &[f32]| VqShape { vectors: x.len() / VQ_DIM, ..shape };
        match &mut self.entries {
            Entries::Exact(entries) => {
                let tables = entries[exact].par_chunks_mut(share * shape.stages * shape.entries);
                tables.zip(inputs).for_each(|(tables, x)| {
                    (compute.kernels.vq_tables)(codebooks, part(x), x, tables);
                });
            }
            Entries::Fast { planes, units, scratch } => {
                let planes =
                    planes.bytes_mut()[fast].par_chunks_mut(2 * share * shape.stages * shape.entries);
                let units = units[blocks].par_chunks_mut(share / TABLE_BLOCK);
                let scratch = scratch.par_chunks_mut(shape.fast_scratch_len());
                planes.zip(units).zip(scratch).zip(inputs).for_each(|(((planes, units), scratch), x)| {
                    (compute.kernels.vq_tables_fast)(codebooks, part(x), x, scratch, planes, units);
                });
            }
        }
    }

    /// Rows of a matrix by look-up, in parallel over blocks of rows. `indices` and `scales` are the record's.
    pub fn rows(&self, compute: &Compute, kind: ExpertKind, indices: &[u8], scales: &[u8], out: &mut [f32]) {
        let shape = self.shapes[kind as usize];
        compute.rows(out, ROWS_UNIT, |first, out| {
            let indices = &indices[first / BLOCK_ROWS * shape.block_bytes()..];
            let scales = &scales[2 * first..];
            match &self.entries {
                Entries::Exact(entries) => {
                    let tables = &entries[self.part(kind, VqShape::table_len)];
                    (compute.kernels.vq_rows)(indices, shape, scales, tables, out);
                }
                Entries::Fast { planes, units, .. } => {
                    let tables = FastTables {
                        planes: &planes.bytes()[self.part(kind, VqShape::fast_len)],
                        scales: &units[self.part(kind, VqShape::fast_blocks)],
                    };
                    (compute.kernels.vq_rows_fast)(indices, shape, scales, tables, out);
                }
            }
        });
    }
}
