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

/// The tables of one input of one matrix.
pub struct Table {
    shape: VqShape,
    entries: Entries,
}

enum Entries {
    /// f32.
    Exact(Vec<f32>),
    /// 16-bit whole numbers, and what a unit is worth in each block of them.
    Fast { planes: AlignedBuf, units: Vec<f32> },
}

/// Room for the tables that tokens need in an MoE layer.
pub struct Tables {
    /// Of each token's input, which all its experts share.
    pub inputs: Vec<InputTables>,
    /// Of the activation of each expert of each token.
    pub down: Vec<Table>,
}

/// The tables of one token's input.
pub struct InputTables {
    /// For the gate.
    pub gate: Table,
    /// For up.
    pub up: Table,
}

impl Tables {
    /// Room for `tokens` tokens with `experts` experts of one shape each.
    pub fn new(
        shapes: [VqShape; 3],
        arith: Arith,
        tokens: usize,
        experts: usize,
    ) -> Result<Self, OutOfMemory> {
        let room = |kind: ExpertKind| Table::new(shapes[kind as usize], arith);
        let input = |_| Ok(InputTables { gate: room(ExpertKind::Gate)?, up: room(ExpertKind::Up)? });
        Ok(Tables {
            inputs: (0..tokens).map(input).collect::<Result<_, OutOfMemory>>()?,
            down: (0..tokens * experts).map(|_| room(ExpertKind::Down)).collect::<Result<_, _>>()?,
        })
    }
}

impl Table {
    fn new(shape: VqShape, arith: Arith) -> Result<Self, OutOfMemory> {
        let entries = match arith {
            Arith::Exact => Entries::Exact(vec![0.0; shape.table_len()]),
            Arith::Fast => Entries::Fast {
                planes: AlignedBuf::zeroed(shape.fast_len())?,
                units: vec![0.0; shape.fast_blocks()],
            },
        };
        Ok(Table { shape, entries })
    }

    /// Builds the tables of an input, in parallel over blocks of its vectors. `codebooks` is [stages, 8, entries].
    pub fn build(&mut self, compute: &Compute, codebooks: &[f32], x: &[f32]) {
        let shape = self.shape;
        let share = shape.fast_blocks().div_ceil(compute.threads()) * TABLE_BLOCK;
        let inputs = x.par_chunks(share * VQ_DIM);
        let part = |x: &[f32]| VqShape { vectors: x.len() / VQ_DIM, ..shape };
        match &mut self.entries {
            Entries::Exact(entries) => {
                let tables = entries.par_chunks_mut(share * shape.stages * shape.entries);
                tables.zip(inputs).for_each(|(tables, x)| {
                    (compute.kernels.vq_tables)(codebooks, part(x), x, tables);
                });
            }
            Entries::Fast { planes, units } => {
                let planes = planes.bytes_mut()[..shape.fast_len()]
                    .par_chunks_mut(2 * share * shape.stages * shape.entries);
                let units = units.par_chunks_mut(share / TABLE_BLOCK);
                planes.zip(units).zip(inputs).for_each(|((planes, units), x)| {
                    compute.with_scratch(shape.fast_scratch_len(), |scratch| {
                        (compute.kernels.vq_tables_fast)(codebooks, part(x), x, scratch, planes, units);
                    });
                });
            }
        }
    }

    /// Rows of a matrix by look-up, in parallel over blocks of rows. `indices` and `scales` are the record's.
    pub fn rows(&self, compute: &Compute, indices: &[u8], scales: &[u8], out: &mut [f32]) {
        let shape = self.shape;
        compute.rows(out, ROWS_UNIT, |first, out| {
            let indices = &indices[first / BLOCK_ROWS * shape.block_bytes()..];
            let scales = &scales[2 * first..];
            match &self.entries {
                Entries::Exact(tables) => (compute.kernels.vq_rows)(indices, shape, scales, tables, out),
                Entries::Fast { planes, units } => {
                    let tables = FastTables { planes: &planes.bytes()[..shape.fast_len()], scales: units };
                    (compute.kernels.vq_rows_fast)(indices, shape, scales, tables, out);
                }
            }
        });
    }
}
