//! Experts by look-up, for tokens that are decoded: no weight is ever expanded.

use rayon::prelude::*;
use waste_common::container::Geometry;
use waste_common::tensors::ExpertKind;

use super::visits::Visits;
use super::{Inner, MoeContext, MoeLayer};
use crate::experts::ExpertRef;
use crate::experts::source::Codebooks;
use crate::layers::ffn::activate;
use crate::layers::tables::{InputTables, Table, Tables};
use crate::profile::{Part, Profile};

/// One token's look-up in an expert that has come.
#[derive(Clone, Copy, Debug)]
pub struct LookUp {
    /// The expert's place among those that came with it.
    record: usize,
    token: usize,
    /// Where the output goes: row of [tokens, top-k].
    row: usize,
}

/// What the experts of a token, or of a few, are computed with.
pub(super) struct Lookup<'a> {
    pub layer: &'a MoeLayer,
    pub context: &'a MoeContext<'a>,
    pub codebooks: &'a Codebooks,
    pub geometry: &'a Geometry,
    pub tables: &'a mut Tables,
    pub visits: &'a Visits,
    /// Room for as many as there are visits.
    pub lookups: &'a mut Vec<LookUp>,
}

impl Lookup<'_> {
    /// Builds the tables that all experts of a token share; `z` is [tokens, input].
    pub fn prepare(&mut self, z: &[f32]) {
        let compute = self.context.compute;
        let inputs = self.tables.inputs.par_iter_mut().zip(z.par_chunks(self.layer.input));
        inputs.with_max_len(1).for_each(|(InputTables { gate, up }, z)| {
            rayon::join(
                || gate.build(compute, self.codebooks.by_dimension(ExpertKind::Gate), z),
                || up.build(compute, self.codebooks.by_dimension(ExpertKind::Up), z),
            );
        });
    }

    /// Some experts at once, for all tokens that visit them, so that three parallel steps do for all of them; `outputs`
    /// is [tokens, top-k, input].
    pub fn experts(
        &mut self,
        batch: &[(usize, ExpertRef)],
        inner: &mut Inner,
        outputs: &mut [f32],
        profile: &mut Profile,
    ) {
        let compute = self.context.compute;
        let (input, inter, top_k) = (self.layer.input, self.layer.intermediate, self.layer.routing.top_k);
        let Tables { inputs, down: down_tables } = &mut *self.tables;
        self.lookups.clear();
        for (record, &(place, _)) in batch.iter().enumerate() {
            let visits = self.visits.of(place).iter();
            self.lookups.extend(visits.map(|visit| {
                let (token, rank) = (visit.token as usize, visit.rank as usize);
                LookUp { record, token, row: token * top_k + rank }
            }));
        }
        let lookups = &*self.lookups;
        let rows = |table: &Table, record: &ExpertRef, kind, out: &mut [f32]| {
            let record = record.bytes();
            let (indices, scales) = (self.geometry.indices(kind), self.geometry.scales(kind));
            table.rows(compute, &record[indices], &record[scales], out);
        };
        let [gates, ups, _] = inner;
        let (gates, ups) = (&mut gates[..lookups.len() * inter], &mut ups[..lookups.len() * inter]);
        let both = gates.par_chunks_mut(inter).zip(ups.par_chunks_mut(inter));
        both.zip(lookups).with_max_len(1).for_each(|((gate, up), lookup)| {
            let (tables, record) = (&inputs[lookup.token], &batch[lookup.record].1);
            rayon::join(
                || rows(&tables.gate, record, ExpertKind::Gate, gate),
                || rows(&tables.up, record, ExpertKind::Up, up),
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
        outputs.for_each(|(row, out)| {
            if let Some(at) = lookups.iter().position(|lookup| lookup.row == row) {
                rows(&down_tables[at], &batch[lookups[at].record].1, ExpertKind::Down, out);
            }
        });
        profile.lap(Part::Gather);
    }
}
