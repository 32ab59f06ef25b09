//! Tokens through the layers: a prompt in chunks, one token, or a token each of several sequences.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use arrayvec::ArrayVec;
use waste_common::importance::InputSquares;
use waste_common::plan::scratch::{KdaBuffers, LOGIT_ROWS, MlaBuffers, MoeBuffers};

use super::{Engine, FfnLayer, MixerLayer};
use crate::compute::Compute;
use crate::error::EngineError;
use crate::experts::ExpertStore;
use crate::layers::moe::{MoeContext, MoeLayer, MoeScratch};
use crate::options::{Event, PARALLEL_MAX};
use crate::profile::Part;
use crate::session::{LayerState, Sequence, Session, Workspace};

/// Which positions' logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// None: the pass only changes the state.
    Nothing,
    /// The last token's only.
    Last,
    /// Every token's.
    All,
}

/// Takes the logits of a position: `(position, [vocab])`. It is called within the pass, so it cannot begin another one of
/// the same engine.
pub type LogitSink<'a> = dyn FnMut(usize, &[f32]) -> Result<(), EngineError> + Send + 'a;

/// Takes the logits of a place among several, [vocab], or why there are none.
pub type TogetherSink<'a> =
    dyn FnMut(usize, Result<&[f32], EngineError>) -> Result<(), EngineError> + Send + 'a;

/// The same of a row of a chunk; nothing where they are no numbers.
type RowSink<'a> = dyn FnMut(usize, Option<&[f32]>) -> Result<(), EngineError> + 'a;

/// What happened inside, for tests and tools that compare engines.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The stream after the embedding and after each layer: [layers + 1][tokens · hidden].
    pub hidden: Vec<Vec<f32>>,
    /// Input of the head, [tokens · hidden].
    pub last: Vec<f32>,
    /// Chosen experts of each MoE layer, best first: (layer, [tokens · top-k]).
    pub routes: std::collections::BTreeMap<usize, Vec<u32>>,
}

impl Engine {
    /// Takes tokens through the model and hands the wanted positions' logits, [vocab], to `sink`.
    ///
    /// The tokens are computed in chunks; the state is that of all tokens when this returns `Ok`, and unusable but
    /// by [`Session::reset`] after an error. (A single token that was interrupted leaves the state as it was.)
    pub fn forward(
        &self,
        session: &mut Session,
        tokens: &[u32],
        wanted: Wanted,
        sink: &mut LogitSink<'_>,
    ) -> Result<(), EngineError> {
        self.forward_traced(session, tokens, wanted, sink, None)
    }

    /// [`Engine::forward`] that also records what happens inside.
    pub fn forward_traced(
        &self,
        session: &mut Session,
        tokens: &[u32],
        wanted: Wanted,
        sink: &mut LogitSink<'_>,
        trace: Option<&mut Trace>,
    ) -> Result<(), EngineError> {
        self.pass(session, tokens, 0..tokens.len(), wanted, sink, trace)
    }

    /// [`Engine::forward`] of a part of a longer prompt, for those who look around between its parts: cut at multiples
    /// of [`Engine::chunk`], they give the bits of the whole. `part.start` tokens were done before, and there are
    /// `part.end` in all.
    pub fn forward_part(
        &self,
        session: &mut Session,
        tokens: &[u32],
        part: std::ops::Range<usize>,
        wanted: Wanted,
        sink: &mut LogitSink<'_>,
    ) -> Result<(), EngineError> {
        self.pass(session, tokens, part, wanted, sink, None)
    }

    fn pass(
        &self,
        session: &mut Session,
        tokens: &[u32],
        of: std::ops::Range<usize>,
        wanted: Wanted,
        sink: &mut LogitSink<'_>,
        mut trace: Option<&mut Trace>,
    ) -> Result<(), EngineError> {
        EngineError::check_tokens(tokens, session.position, self.options.ctx, self.config.vocab)?;
        session.check_intact()?;
        // Outside the pool: a worker that waited for it might hold the one who has it.
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.compute.run(|| {
            let mut done = 0;
            for chunk in tokens.chunks(self.options.chunk) {
                if self.options.cancelled.load(Ordering::Relaxed) {
                    return Err(EngineError::Interrupted);
                }
                let Session { sequence, work } = &mut *session;
                sequence.intact = false;
                self.layers(work, &mut [&mut *sequence], chunk, trace.as_deref_mut())?;
                sequence.intact = true;
                let first = sequence.position;
                sequence.position += chunk.len();
                done += chunk.len();
                if of.end > 1 {
                    self.options.watch.tell(Event::Prefilled { tokens: of.start + done, of: of.end });
                }
                let rows = match wanted {
                    Wanted::Nothing => continue,
                    Wanted::All => 0..chunk.len(),
                    Wanted::Last if done == tokens.len() => chunk.len() - 1..chunk.len(),
                    Wanted::Last => continue,
                };
                self.logits(work, &self.compute, rows, &mut |row, logits| {
                    let position = first + row;
                    sink(position, logits.ok_or(EngineError::NotFinite { position })?)
                })?;
            }
            Ok(())
        })
    }

    /// Takes one token each of several sequences through the model, at most [`EngineOptions::parallel`], in the buffers
    /// of `session`, whose own sequence is not touched. Each sequence gets the bits that [`Engine::forward`] of its
    /// token alone would give it; `sink` gets their logits by their place, or what is wrong with those of one.
    ///
    /// # Errors
    /// A token or a place in a context that is none, more sequences than planned, an interruption: nothing has changed
    /// then. Or an expert that cannot be read: then the state of all of them is lost.
    pub fn forward_together(
        &self,
        session: &mut Session,
        sequences: &mut [&mut Sequence],
        tokens: &[u32],
        sink: &mut TogetherSink<'_>,
    ) -> Result<(), EngineError> {
        if sequences.len() != tokens.len() || tokens.len() > self.options.parallel {
            let (found, most) = (sequences.len(), self.options.parallel);
            let why = format!("{found} with {} tokens, and at most {most} were planned", tokens.len());
            return Err(EngineError::Option { what: "the sequences together", why });
        }
        for (sequence, token) in sequences.iter().zip(tokens.chunks(1)) {
            EngineError::check_tokens(token, sequence.position, self.options.ctx, self.config.vocab)?;
            sequence.check_intact()?;
        }
        if tokens.is_empty() {
            return Ok(());
        }
        if self.options.cancelled.load(Ordering::Relaxed) {
            return Err(EngineError::Interrupted);
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.compute.run(|| {
            let compute = if tokens.len() > 1 { &self.together } else { &self.compute };
            sequences.iter_mut().for_each(|sequence| sequence.intact = false);
            self.layers(&mut session.work, sequences, tokens, None)?;
            for sequence in sequences.iter_mut() {
                sequence.intact = true;
                sequence.position += 1;
            }
            self.logits(&mut session.work, compute, 0..tokens.len(), &mut |row, logits| {
                // The token's own: its sequence is at the next one by now.
                let position = sequences[row].position - 1;
                sink(row, logits.ok_or(EngineError::NotFinite { position }))
            })
        })
    }

    /// Hands the logits of rows of the last chunk to `sink`, or nothing for a row whose are no numbers.
    fn logits(
        &self,
        work: &mut Workspace,
        compute: &Compute,
        rows: std::ops::Range<usize>,
        sink: &mut RowSink<'_>,
    ) -> Result<(), EngineError> {
        let (hidden, vocab) = (self.config.hidden, self.config.vocab);
        let capacity = work.stream.len() / 4;
        // The normed stream of the chunk stands in the third quarter; see `layers`.
        let normed = &work.stream[2 * capacity..3 * capacity];
        for start in rows.clone().step_by(LOGIT_ROWS) {
            let count = LOGIT_ROWS.min(rows.end - start);
            let logits = &mut work.logits[..count * vocab];
            work.profile.start();
            self.head.apply(compute, &normed[start * hidden..(start + count) * hidden], logits);
            work.profile.lap(Part::Head);
            for (row, logits) in (start..).zip(logits.chunks_exact(vocab)) {
                let finite = (compute.kernels.dot)(logits, logits).is_finite();
                sink(row, finite.then_some(logits))?;
            }
        }
        Ok(())
    }

    /// A chunk of one sequence, or a token each of several, through all layers; the head's inputs end up in the third
    /// quarter of the workspace's stream.
    fn layers(
        &self,
        work: &mut Workspace,
        sequences: &mut [&mut Sequence],
        tokens: &[u32],
        mut trace: Option<&mut Trace>,
    ) -> Result<(), EngineError> {
        let hidden = self.config.hidden;
        let n = tokens.len();
        let alone = sequences.len() == 1;
        let compute = if alone { &self.compute } else { &self.together };
        let capacity = work.stream.len() / 4;
        let Workspace {
            stream,
            blocks,
            stage,
            router,
            tables,
            ids,
            visits,
            lookups,
            row,
            profile,
            squares,
            ..
        } = work;
        let finish_chunks = work.finish_chunks;
        profile.start();
        let [prefix, mixed, normed, delta] = quarters(stream, capacity, n * hidden);
        let block = self.config.attn_res_block;
        let stride = n * hidden;
        let mut stored = 0;

        let each = n / sequences.len();
        let rows = tokens.chunks(each).zip(prefix.chunks_mut(each * hidden));
        for (sequence, (tokens, out)) in sequences.iter_mut().zip(rows) {
            self.embedding.rows(compute.kernels, &self.head, tokens, &mut sequence.image_rows, row, out)?;
        }
        if let Some(trace) = trace.as_deref_mut() {
            record_hidden(trace, 0, prefix);
        }
        let kda_sizes = KdaBuffers::of(&self.config, n);
        let mla_sizes = MlaBuffers::of(&self.config, n);
        let moe_sizes =
            if alone { MoeBuffers::of(&self.config, n) } else { MoeBuffers::together(&self.config, n) };
        for (l, layer) in self.layers.iter().enumerate() {
            // A chunk of a large model takes minutes; a single token is finished, and the state stays usable.
            if each > 1 && !finish_chunks && self.options.cancelled.load(Ordering::Relaxed) {
                return Err(EngineError::Interrupted);
            }
            let starts_block = block.is_some_and(|block| l % block == 0);
            let input = match &layer.attn_res {
                Some([before, _]) if stored > 0 => {
                    before.mix(compute, &blocks[..stored * stride], stride, prefix, mixed);
                    &*mixed
                }
                _ => &*prefix,
            };
            self.norm(input, &layer.input_norm, normed);
            if starts_block {
                blocks[stored * stride..(stored + 1) * stride].copy_from_slice(prefix);
                stored += 1;
            }
            profile.lap(Part::Rest);
            match &layer.mixer {
                MixerLayer::Kda(kda) => {
                    let mut states = ArrayVec::<_, PARALLEL_MAX>::new();
                    for sequence in sequences.iter_mut() {
                        let Some(LayerState::Kda(state)) = sequence.state.get_mut(l) else {
                            return Err(foreign());
                        };
                        states.push(state);
                    }
                    kda.forward(compute, normed, &mut states, delta, stage, &kda_sizes);
                    profile.lap(Part::Kda);
                }
                MixerLayer::Mla(mla) => {
                    let mut caches = ArrayVec::<_, PARALLEL_MAX>::new();
                    for sequence in sequences.iter_mut() {
                        let Sequence { position, state, .. } = &mut **sequence;
                        let Some(LayerState::Mla(cache)) = state.get_mut(l) else { return Err(foreign()) };
                        caches.push((*position, cache));
                    }
                    mla.forward(compute, normed, &mut caches, delta, stage, &mla_sizes);
                    profile.lap(Part::Mla);
                }
            }
            if starts_block {
                prefix.copy_from_slice(delta);
            } else {
                (compute.kernels.axpy)(1.0, delta, prefix);
            }
            let input = match &layer.attn_res {
                Some([_, after]) => {
                    after.mix(compute, &blocks[..stored * stride], stride, prefix, mixed);
                    &*mixed
                }
                None => &*prefix,
            };
            self.norm(input, &layer.post_norm, normed);
            profile.lap(Part::Rest);
            match &layer.ffn {
                FfnLayer::Dense(ffn) => {
                    ffn.forward(compute, self.config.activation, normed, delta, stage);
                    profile.lap(Part::Dense);
                }
                FfnLayer::Moe(moe) => {
                    let Some(store) = &self.store else { return Err(EngineError::NoSlot { slots: 0 }) };
                    let context = MoeContext {
                        compute,
                        store,
                        format: &self.format,
                        activation: self.config.activation,
                        next: self.next_moe(l, each),
                    };
                    let ids = &mut ids[..n * moe.routing.top_k];
                    let tables = tables.as_mut();
                    let experts = self.config.moe_of(l).map_or(0, |moe| moe.experts);
                    let squares = squares.as_mut().map(|layers| {
                        let new = || InputSquares::new(experts, moe.input, moe.intermediate);
                        layers.entry(l as u16).or_insert_with(new)
                    });
                    let scratch =
                        MoeScratch { router, tables, spare: mixed, ids, visits, lookups, profile, squares };
                    moe.forward(&context, normed, delta, stage, &moe_sizes, scratch)?;
                    if let Some(trace) = trace.as_deref_mut() {
                        trace.routes.entry(l).or_default().extend_from_slice(ids);
                    }
                }
            }
            (compute.kernels.axpy)(1.0, delta, prefix);
            if let Some(trace) = trace.as_deref_mut() {
                record_hidden(trace, l + 1, prefix);
            }
        }
        let output = match &self.output_res {
            Some(mix) => {
                mix.mix(compute, &blocks[..stored * stride], stride, prefix, mixed);
                &*mixed
            }
            None => &*prefix,
        };
        self.norm(output, &self.norm, normed);
        profile.lap(Part::Rest);
        if let Some(trace) = trace {
            trace.last.extend_from_slice(normed);
        }
        Ok(())
    }

    /// The next layer's MoE, if experts are read ahead: only in decoding, where a layer needs few, and if they do not
    /// all stay.
    fn next_moe(&self, layer: usize, tokens: usize) -> Option<(&MoeLayer, usize)> {
        if tokens > 1 || self.options.lookahead == 0 || self.store.as_ref().is_none_or(ExpertStore::holds_all)
        {
            return None;
        }
        match &self.layers.get(layer + 1)?.ffn {
            FfnLayer::Moe(moe) => Some((moe, self.options.lookahead)),
            FfnLayer::Dense(_) => None,
        }
    }

    fn norm(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        let (kernels, hidden, eps) = (self.compute.kernels, self.config.hidden, self.config.rms_eps);
        self.compute.tokens(out, hidden, |t, out| {
            (kernels.rms_norm)(&x[t * hidden..(t + 1) * hidden], weight, eps, out);
        });
    }
}

/// A sequence belongs to the engine that made it: layer kinds agree.
fn foreign() -> EngineError {
    EngineError::Option { what: "session", why: "it is of another model".to_owned() }
}

/// The four stream buffers, each cut to `len`.
fn quarters(stream: &mut [f32], capacity: usize, len: usize) -> [&mut [f32]; 4] {
    let mut rest = stream;
    [(); 4].map(|()| &mut crate::layers::cut(&mut rest, capacity)[..len])
}

fn record_hidden(trace: &mut Trace, index: usize, stream: &[f32]) {
    if trace.hidden.len() <= index {
        trace.hidden.resize(index + 1, Vec::new());
    }
    trace.hidden[index].extend_from_slice(stream);
}
