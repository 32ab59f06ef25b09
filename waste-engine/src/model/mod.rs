//! The model: layers in order, the state they carry, and the working buffers they share.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrayvec::ArrayVec;
use waste_common::checkpoint::Checkpoint;
use waste_common::config::{Mixer, ModelConfig};
use waste_common::container::{Container, RowBuffer};
use waste_common::importance::InputSquares;
use waste_common::plan::scratch::{KdaBuffers, LOGIT_ROWS, MlaBuffers, MoeBuffers, Scratch, ScratchOptions};
use waste_common::tensors;

use crate::compute::Compute;
use crate::error::EngineError;
use crate::experts::source::{BankSource, CheckpointSource, Codebooks, ExpertFormat};
use crate::experts::{ExpertId, ExpertSource, ExpertStore, ReadStats, StoreOptions, Usage};
use crate::kernels::Kernels;
use crate::layers::attn_res::AttnRes;
use crate::layers::embedding::Embedding;
use crate::layers::ffn::Ffn;
use crate::layers::kda::{KdaLayer, KdaState};
use crate::layers::kv_cache::KvCache;
use crate::layers::mla::MlaLayer;
use crate::layers::moe::visits::Visits;
use crate::layers::moe::{MoeContext, MoeLayer, MoeScratch};
use crate::layers::tables::Tables;
use crate::matrix::Matrix;
use crate::options::{EngineOptions, Event, PARALLEL_MAX};
use crate::profile::{Part, Profile};
use crate::session::{LayerState, Sequence, Session, Workspace};
use crate::weights::{Loader, Source};

enum MixerLayer {
    Kda(Box<KdaLayer>),
    Mla(Box<MlaLayer>),
}

enum FfnLayer {
    Dense(Box<Ffn>),
    Moe(Box<MoeLayer>),
}

struct Layer {
    input_norm: Vec<f32>,
    post_norm: Vec<f32>,
    attn_res: Option<[AttnRes; 2]>,
    mixer: MixerLayer,
    ffn: FfnLayer,
}

/// An opened model: weights, threads, expert store. Sessions hold all that changes.
pub struct Engine {
    config: ModelConfig,
    options: EngineOptions,
    compute: Compute,
    /// The same for sequences that decode together.
    together: Compute,
    source: Source,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    output_res: Option<AttnRes>,
    head: Matrix,
    format: ExpertFormat,
    store: Option<ExpertStore>,
}

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

/// Takes the logits of a position: `(position, [vocab])`.
pub type LogitSink<'a> = dyn FnMut(usize, &[f32]) -> Result<(), EngineError> + Send + 'a;

/// Takes the logits of a place among several, [vocab], or why there are none.
pub type TogetherSink<'a> =
    dyn FnMut(usize, Result<&[f32], EngineError>) -> Result<(), EngineError> + Send + 'a;

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
    /// Opens a container or a checkpoint directory.
    pub fn open(dir: &Path, options: EngineOptions) -> Result<Self, EngineError> {
        Self::open_with(dir, options, Kernels::from_env()?)
    }

    /// [`Engine::open`] with kernels of the caller's choice.
    pub fn open_with(
        dir: &Path,
        options: EngineOptions,
        kernels: &'static Kernels,
    ) -> Result<Self, EngineError> {
        let (source, config) = open_source(dir)?;
        Self::load(source, config, options, kernels)
    }

    fn load(
        source: Source,
        config: ModelConfig,
        options: EngineOptions,
        kernels: &'static Kernels,
    ) -> Result<Self, EngineError> {
        options.check()?;
        let loader = Loader::new(&source, &config, &options)?;
        let (format, store) = open_experts(&source, &config, &options)?;
        let scratch = Scratch::thread(&config, &format.storage());
        let compute =
            Compute::new(kernels, options.arith, options.threads, options.cpus.as_deref(), scratch)?;
        let mut number = 0;
        let mut layers = Vec::with_capacity(config.layers());
        for layer in 0..config.layers() {
            let ffn = match config.moe_of(layer) {
                None => FfnLayer::Dense(Box::new(loader.ffn(layer, "mlp")?)),
                Some(moe) => {
                    let mut weights = loader.moe(layer, moe, number)?;
                    if let (Source::Container(container), ExpertFormat::Vq { shapes, .. }) =
                        (&source, &format)
                    {
                        weights.codebooks =
                            Some(Codebooks::new(&container.layer_codebooks(layer as u32)?, shapes));
                    }
                    number += 1;
                    FfnLayer::Moe(Box::new(weights))
                }
            };
            layers.push(Layer {
                input_norm: loader.norm(layer, "input_layernorm")?,
                post_norm: loader.norm(layer, "post_attention_layernorm")?,
                attn_res: loader.attn_res(layer)?,
                mixer: match loader.mixer(layer) {
                    Mixer::Kda => MixerLayer::Kda(Box::new(loader.kda(layer)?)),
                    Mixer::Mla => MixerLayer::Mla(Box::new(loader.mla(layer)?)),
                },
                ffn,
            });
            if options.cancelled.load(Ordering::Relaxed) {
                return Err(EngineError::Interrupted);
            }
        }
        let global = |tail: &str| format!("{}model.{tail}", config.tensor_prefix);
        let output_res = match config.attn_res_block {
            None => None,
            Some(_) => {
                let (norm, projection) = ("output_attn_res_norm.weight", "output_attn_res_proj.weight");
                Some(loader.mix(&global(norm), &global(projection))?)
            }
        };
        let norm = loader.vector(&global("norm.weight"))?;
        let head = if config.tied_embeddings { tensors::embedding(&config) } else { tensors::head(&config) };
        let head = loader.matrix(&head)?;
        let embedding = Embedding::new(&source, &config)?;
        Ok(Engine {
            config,
            options,
            together: compute.together(),
            compute,
            source,
            embedding,
            layers,
            norm,
            output_res,
            head,
            format,
            store,
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Context length.
    pub fn ctx(&self) -> usize {
        self.options.ctx
    }

    /// Tokens of a prompt that go through the model together.
    pub fn chunk(&self) -> usize {
        self.options.chunk
    }

    /// How it was opened.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Which model this is; see [`Source::fingerprint`].
    pub fn fingerprint(&self) -> String {
        self.source.fingerprint()
    }

    /// Name of the kernel set in use.
    pub fn kernels(&self) -> &'static str {
        self.compute.kernels.name
    }

    /// Whether expert reads bypass the page cache.
    pub fn direct_io(&self) -> bool {
        self.store.as_ref().is_some_and(ExpertStore::direct_io)
    }

    /// What the expert store has done since open.
    pub fn read_stats(&self) -> ReadStats {
        self.store.as_ref().map(ExpertStore::stats).unwrap_or_default()
    }

    /// Adds what the model's tokens have used since open.
    pub fn learn(&self, usage: &mut Usage) {
        let Some(store) = &self.store else { return };
        let layers: Vec<u16> =
            self.config.moe_layers().filter_map(|layer| u16::try_from(layer).ok()).collect();
        let (tokens, uses) = store.uses();
        let place = |id: ExpertId| Some((*layers.get(id.moe as usize)?, u16::try_from(id.expert).ok()?));
        usage.learn(u64::from(tokens), uses.into_iter().filter_map(|(id, uses)| Some((place(id)?, uses))));
    }

    /// An empty sequence, and the buffers it is computed in. All their memory is allocated here.
    ///
    /// # Errors
    /// There is not that much memory.
    pub fn session(&self) -> Result<Session, EngineError> {
        let options = self.scratch_options();
        let scratch = Scratch::of(&self.config, &options);
        let (top_k, experts) = self.config.moe.as_ref().map_or((0, 0), |moe| (moe.top_k, moe.experts));
        let tables = match &self.format {
            ExpertFormat::Dense { .. } => None,
            ExpertFormat::Vq { shapes, .. } => {
                Some(Tables::new(*shapes, self.options.arith, options.parallel, top_k)?)
            }
        };
        let visits = options.chunk.max(options.parallel) * top_k;
        let work = Workspace {
            finish_chunks: false,
            stream: vec![0.0; scratch.stream],
            blocks: vec![0.0; scratch.blocks],
            stage: vec![0.0; scratch.stage],
            router: vec![0.0; scratch.router],
            tables,
            logits: vec![0.0; scratch.logits],
            ids: vec![0; visits],
            visits: Visits::new(visits, experts),
            experts: Vec::with_capacity(options.parallel * top_k),
            row: RowBuffer::default(),
            profile: Profile::default(),
            squares: None,
        };
        Ok(Session { sequence: self.sequence(), work })
    }

    /// An empty sequence alone, for sessions that are computed in another one's buffers. All its memory is allocated here.
    pub fn sequence(&self) -> Sequence {
        let state = self.layers.iter().map(|layer| match &layer.mixer {
            MixerLayer::Kda(kda) => {
                LayerState::Kda(KdaState::new(kda.heads, kda.dim, self.config.kda.conv_kernel))
            }
            MixerLayer::Mla(_) => {
                LayerState::Mla(KvCache::new(self.options.kv, self.options.ctx, self.config.mla.cached()))
            }
        });
        Sequence {
            position: 0,
            intact: true,
            state: state.collect(),
            image_rows: std::collections::VecDeque::new(),
        }
    }

    fn scratch_options(&self) -> ScratchOptions {
        ScratchOptions {
            chunk: self.options.chunk,
            parallel: self.options.parallel,
            threads: self.compute.threads(),
            experts: self.format.storage(),
        }
    }

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
                self.logits(work, &self.compute, rows, &mut |row, logits| sink(first + row, logits?))?;
            }
            Ok(())
        })
    }

    /// Takes one token each of several sequences through the model, at most [`EngineOptions::parallel`], in the buffers
    /// of `session`, whose own sequence is not touched. Each sequence gets the bits that [`Engine::forward`] of its
    /// token alone would give it; `sink` gets their logits by their place, or what is wrong with those of one.
    ///
    /// # Errors
    /// A token or a place in a context that is none (nothing has changed then), more sequences than planned, or an
    /// expert that cannot be read: then the state of all of them is lost.
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
        self.compute.run(|| {
            let compute = if tokens.len() > 1 { &self.together } else { &self.compute };
            sequences.iter_mut().for_each(|sequence| sequence.intact = false);
            self.layers(&mut session.work, sequences, tokens, None)?;
            for sequence in sequences.iter_mut() {
                sequence.intact = true;
                sequence.position += 1;
            }
            self.logits(&mut session.work, compute, 0..tokens.len(), sink)
        })
    }

    /// Hands the logits of rows of the last chunk to `sink`, or says that a row's are no numbers.
    fn logits(
        &self,
        work: &mut Workspace,
        compute: &Compute,
        rows: std::ops::Range<usize>,
        sink: &mut TogetherSink<'_>,
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
                sink(row, if finite { Ok(logits) } else { Err(EngineError::NotFinite { position: row }) })?;
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
            experts,
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
                    let work = &mut *experts;
                    let experts = self.config.moe_of(l).map_or(0, |moe| moe.experts);
                    let squares = squares.as_mut().map(|layers| {
                        let new = || InputSquares::new(experts, moe.input, moe.intermediate);
                        layers.entry(l as u16).or_insert_with(new)
                    });
                    let scratch =
                        MoeScratch { router, tables, spare: mixed, ids, visits, work, profile, squares };
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

/// Opens a directory as what it is.
pub fn open_source(dir: &Path) -> Result<(Source, ModelConfig), EngineError> {
    if dir.join("manifest.json").exists() {
        let container = Container::open(dir)?;
        let config = ModelConfig::from_container(&container.manifest().config)?;
        let found = &container.manifest().tensor_prefix;
        if found != config.tensor_prefix {
            return Err(EngineError::Prefix { found: found.clone(), expected: config.tensor_prefix });
        }
        return Ok((Source::Container(Arc::new(container)), config));
    }
    if Checkpoint::is_checkpoint(dir) {
        let checkpoint = Checkpoint::open(dir)?;
        let config = ModelConfig::from_checkpoint(checkpoint.config())?;
        return Ok((Source::Checkpoint(Arc::new(checkpoint)), config));
    }
    Err(EngineError::NotAModel { path: dir.to_owned() })
}

fn open_experts(
    source: &Source,
    config: &ModelConfig,
    options: &EngineOptions,
) -> Result<(ExpertFormat, Option<ExpertStore>), EngineError> {
    let elements = config.moe.as_ref().map_or(0, |moe| moe.input * moe.intermediate);
    let mut format = ExpertFormat::Dense { elements };
    if config.moe_layers().next().is_none() {
        return Ok((format, None));
    }
    let experts: Box<dyn ExpertSource> = match source {
        Source::Checkpoint(checkpoint) => Box::new(CheckpointSource::new(Arc::clone(checkpoint), config)),
        Source::Container(container) => {
            check_layers(container, config)?;
            let Some(source) = BankSource::open(container, options.bypass, options.verify)? else {
                return Ok((format, None));
            };
            if let Some(geometry) = container.geometry() {
                format = ExpertFormat::of(geometry);
            }
            Box::new(source)
        }
    };
    let store = StoreOptions { slots: options.cache_slots, readers: options.readers };
    let store = ExpertStore::new(experts, store)?;
    let layers: Vec<usize> = config.moe_layers().collect();
    store.warm(&shares(options.usage.as_deref(), &layers, config.moe.as_ref().map_or(0, |moe| moe.experts)));
    Ok((format, Some(store)))
}

/// What was learned of the experts that there are.
fn shares(usage: Option<&Usage>, layers: &[usize], experts: usize) -> Vec<(ExpertId, f32)> {
    let shares = usage.into_iter().flat_map(Usage::shares);
    let id = |(layer, expert): (u16, u16)| {
        let moe = layers.binary_search(&usize::from(layer)).ok()? as u32;
        (usize::from(expert) < experts).then_some(ExpertId { moe, expert: u32::from(expert) })
    };
    shares.filter_map(|(place, share)| Some((id(place)?, share))).collect()
}

/// The manifest's banks must be those of the configuration.
fn check_layers(container: &Container, config: &ModelConfig) -> Result<(), EngineError> {
    let layers: Vec<usize> = config.moe_layers().collect();
    let banks: Vec<usize> = container.manifest().layers.keys().map(|&layer| layer as usize).collect();
    let experts = config.moe.as_ref().map_or(0, |moe| moe.experts);
    let mut counts = container.manifest().layers.values().map(|bank| bank.experts as usize);
    if layers != banks || counts.any(|count| count != experts) {
        return Err(EngineError::Shape {
            name: "the manifest's `layers`".to_owned(),
            found: banks,
            expected: layers,
        });
    }
    Ok(())
}
