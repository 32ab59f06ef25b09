//! Experts for one token, by look-up: no weight is ever expanded.

use rayon::prelude::*;
use waste_common::container::Geometry;
use waste_common::tensors::ExpertKind;

use super::{Inner, MoeContext, MoeLayer};
use crate::experts::ExpertRef;
use crate::experts::source::Codebooks;
use crate::layers::ffn::activate;
use crate::layers::tables::{Table, Tables};
use crate::profile::{Part, Profile};

/// What one token's experts are computed with.
pub(super) struct Lookup<'a> {
    pub layer: &'a MoeLayer,
    pub context: &'a MoeContext<'a>,
    pub codebooks: &'a Codebooks,
    pub geometry: &'a Geometry,
    pub tables: &'a mut Tables,
}

impl Lookup<'_> {
    /// Builds the tables that all experts of a token share.
    pub fn prepare(&mut self, z: &[f32]) {
        let compute = self.context.compute;
        let Tables { gate, up, .. } = &mut *self.tables;
        rayon::join(
            || gate.build(compute, self.codebooks.by_dimension(ExpertKind::Gate), z),
            || up.build(compute, self.codebooks.by_dimension(ExpertKind::Up), z),
        );
    }

    /// Some of a token's experts at once, so that three parallel steps do for all of them; `outputs` is
    /// [top-k, input], a row for each rank.
    pub fn experts(
        &mut self,
        batch: &[(usize, ExpertRef)],
        inner: &mut Inner,
        outputs: &mut [f32],
        profile: &mut Profile,
    ) {
        let compute = self.context.compute;
        let (input, inter) = (self.layer.input, self.layer.intermediate);
        let Tables { gate: gate_table, up: up_table, down: down_tables } = &mut *self.tables;
        let rows = |table: &Table, record: &ExpertRef, kind, out: &mut [f32]| {
            let record = record.bytes();
            let (indices, scales) = (self.geometry.indices(kind), self.geometry.scales(kind));
            table.rows(compute, &record[indices], &record[scales], out);
        };
        let [gates, ups, _] = inner;
        let (gates, ups) = (&mut gates[..batch.len() * inter], &mut ups[..batch.len() * inter]);
        let both = gates.par_chunks_mut(inter).zip(ups.par_chunks_mut(inter));
        both.zip(batch).with_max_len(1).for_each(|((gate, up), (_, record))| {
            rayon::join(
                || rows(gate_table, record, ExpertKind::Gate, gate),
                || rows(up_table, record, ExpertKind::Up, up),
            );
        });
        profile.lap(Part::Gather);

        let book = self.codebooks.by_dimension(ExpertKind::Down);
        let both = gates.par_chunks_mut(inter).zip(ups.par_chunks(inter));
        both.zip(&mut *down_tables).with_max_len(1).for_each(|((gate, up), table)| {
            activate(compute.kernels, self.context.activation, gate, up);
            table.build(compute, book, gate);
        });
        profile.lap(Part::Tables);

        let outputs = outputs.par_chunks_mut(input).enumerate().with_max_len(1);
        outputs.for_each(|(rank, out)| {
            if let Some(at) = batch.iter().position(|&(of, _)| of == rank) {
                rows(&down_tables[at], &batch[at].1, ExpertKind::Down, out);
            }
        });
        profile.lap(Part::Gather);
    }
}
