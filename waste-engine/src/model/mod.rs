//! The model: layers in order, the state they carry, and the working buffers they share.

#[cfg(feature = "vision")]
mod images;
mod load;
mod pass;

pub use load::open_source;
pub use pass::{LogitSink, TogetherSink, Trace, Wanted};

use std::path::Path;
use std::sync::Mutex;

use waste_common::config::ModelConfig;
use waste_common::container::RowBuffer;
use waste_common::plan::scratch::{Scratch, ScratchOptions};

use crate::compute::Compute;
use crate::error::EngineError;
use crate::experts::source::ExpertFormat;
use crate::experts::{ExpertId, ExpertStore, ReadStats, Usage};
use crate::kernels::Kernels;
use crate::layers::attn_res::AttnRes;
use crate::layers::embedding::Embedding;
use crate::layers::ffn::Ffn;
use crate::layers::kda::{KdaLayer, KdaState};
use crate::layers::kv_cache::KvCache;
use crate::layers::mla::MlaLayer;
use crate::layers::moe::MoeLayer;
use crate::layers::moe::visits::Visits;
use crate::layers::tables::Tables;
use crate::matrix::Matrix;
use crate::options::EngineOptions;
use crate::profile::Profile;
use crate::session::{LayerState, Sequence, Session, Workspace};
use crate::weights::Source;

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

/// An opened model: weights, threads, expert store. Sessions hold all that changes. Threads may share an engine, each
/// with a session of its own; their passes wait for each other.
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
    /// Held by a pass: the expert store has one consumer at a time.
    turn: Mutex<()>,
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
            lookups: Vec::with_capacity(options.parallel * top_k),
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
}
