//! Sequences: the state each carries, and the buffers they are computed in.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use waste_common::container::RowBuffer;
use waste_common::importance::InputSquares;
use zerocopy::IntoBytes;

use crate::error::EngineError;
use crate::layers::kda::KdaState;
use crate::layers::kv_cache::KvCache;
use crate::layers::moe::LookUp;
use crate::layers::moe::visits::Visits;
use crate::layers::tables::Tables;
use crate::profile::Profile;

/// What a layer carries from token to token.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerState {
    /// Recurrent state and convolution histories.
    Kda(KdaState),
    /// Normalised latents and shared keys, valid up to the position.
    Mla(KvCache),
}

impl LayerState {
    /// What it holds of the first `rows` tokens, as bytes in a fixed order.
    pub(crate) fn parts(&self, rows: usize) -> Vec<&[u8]> {
        match self {
            LayerState::Kda(state) => {
                std::iter::once(&state.recurrent).chain(&state.conv).map(|x| x.as_bytes()).collect()
            }
            LayerState::Mla(cache) => cache.parts(rows),
        }
    }

    /// The same to write to.
    pub(crate) fn parts_mut(&mut self, rows: usize) -> Vec<&mut [u8]> {
        match self {
            LayerState::Kda(state) => {
                let parts = std::iter::once(&mut state.recurrent).chain(&mut state.conv);
                parts.map(|x| x.as_mut_bytes()).collect()
            }
            LayerState::Mla(cache) => cache.parts_mut(rows),
        }
    }

    fn head(&self, rows: usize) -> LayerState {
        match self {
            LayerState::Kda(state) => LayerState::Kda(state.clone()),
            LayerState::Mla(cache) => LayerState::Mla(cache.head(rows)),
        }
    }
}

/// The exact state of a sequence at a position, apart from the buffers it is computed in.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    position: usize,
    state: Vec<LayerState>,
    image_rows: Vec<f32>,
}

impl Snapshot {
    /// Tokens in the state.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The memory it takes.
    pub fn bytes(&self) -> usize {
        let parts = self.state.iter().flat_map(|state| state.parts(self.position));
        parts.map(<[u8]>::len).sum::<usize>() + self.image_rows.as_bytes().len()
    }
}

/// One sequence: the state it carries from token to token.
pub struct Sequence {
    pub(crate) position: usize,
    /// The state is that of `position` tokens: no pass stopped within it.
    pub(crate) intact: bool,
    pub(crate) state: Vec<LayerState>,
    /// Rows of images that no placeholder has taken yet, [rows, hidden].
    pub(crate) image_rows: std::collections::VecDeque<f32>,
}

/// A sequence, and the buffers it is computed in. Other sequences take its place to be computed in them too.
pub struct Session {
    pub(crate) sequence: Sequence,
    pub(crate) work: Workspace,
}

/// The buffers in which sequences are computed.
pub(crate) struct Workspace {
    pub finish_chunks: bool,
    pub stream: Vec<f32>,
    pub blocks: Vec<f32>,
    pub stage: Vec<f32>,
    pub router: Vec<f32>,
    pub tables: Option<Tables>,
    pub logits: Vec<f32>,
    pub ids: Vec<u32>,
    pub visits: Visits,
    pub lookups: Vec<LookUp>,
    /// A stored row of the embedding.
    pub row: RowBuffer,
    pub profile: Profile,
    /// What each layer's experts are given, if that is measured.
    pub squares: Option<BTreeMap<u16, InputSquares>>,
}

impl Session {
    /// Where the time of its forward passes went.
    pub fn profile(&self) -> &Profile {
        &self.work.profile
    }

    /// An interrupt from now on waits for the end of a prompt's chunk, so that the state stays usable.
    pub fn finish_chunks(&mut self) {
        self.work.finish_chunks = true;
    }

    /// Measures from now on what each routed expert is given: memory beyond the budget, 4 bytes for each input column of
    /// each expert. Single tokens are computed like prompts then.
    pub fn measure_inputs(&mut self) {
        self.work.squares = Some(BTreeMap::new());
    }

    /// What was measured, by layer.
    pub fn take_inputs(&mut self) -> BTreeMap<u16, InputSquares> {
        self.work.squares.take().unwrap_or_default()
    }

    /// Puts a sequence of the same engine in the place of this session's.
    pub fn swap(&mut self, sequence: &mut Sequence) {
        std::mem::swap(&mut self.sequence, sequence);
    }
}

/// A session is its sequence, wherever that alone is asked for.
impl Deref for Session {
    type Target = Sequence;

    fn deref(&self) -> &Sequence {
        &self.sequence
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut Sequence {
        &mut self.sequence
    }
}

impl Sequence {
    /// Tokens in the state.
    pub fn position(&self) -> usize {
        self.position
    }

    /// What each layer carries.
    pub fn state(&self) -> &[LayerState] {
        &self.state
    }

    /// Queues the rows of an image, [rows, hidden]: each media placeholder that comes along takes the next one in
    /// place of its embedding, in a prompt as well as token by token.
    pub fn queue_image(&mut self, rows: &[f32]) {
        self.image_rows.reserve_exact(rows.len());
        self.image_rows.extend(rows);
    }

    /// Takes the state; [`restore`](Self::restore) goes back to it, bit for bit.
    ///
    /// # Errors
    /// A pass failed on the way, so that the state is that of no position.
    pub fn snapshot(&self) -> Result<Snapshot, EngineError> {
        self.check_intact()?;
        Ok(Snapshot {
            position: self.position,
            state: self.state.iter().map(|state| state.head(self.position)).collect(),
            image_rows: self.image_rows.iter().copied().collect(),
        })
    }

    /// The memory that [`snapshot`](Self::snapshot) would take at a position.
    pub fn snapshot_bytes(&self, position: usize) -> usize {
        self.state.iter().flat_map(|state| state.parts(position)).map(<[u8]>::len).sum()
    }

    /// Back to a state that was taken, of this session or another one of an engine with the same model and options.
    ///
    /// # Errors
    /// The state does not fit; then nothing has changed.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), EngineError> {
        let rows = snapshot.position;
        let lengths = |state: &[LayerState]| -> Vec<usize> {
            state.iter().flat_map(|state| state.parts(rows)).map(<[u8]>::len).collect()
        };
        if lengths(&self.state) != lengths(&snapshot.state) {
            return Err(EngineError::Option {
                what: "snapshot",
                why: "it is of another model, of other options, or longer than the context".to_owned(),
            });
        }
        for (state, from) in self.state.iter_mut().zip(&snapshot.state) {
            for (part, from) in state.parts_mut(rows).into_iter().zip(from.parts(rows)) {
                part.copy_from_slice(from);
            }
        }
        self.image_rows = snapshot.image_rows.iter().copied().collect();
        self.position = rows;
        self.intact = true;
        Ok(())
    }

    /// Refuses a session whose last pass failed.
    ///
    /// # Errors
    /// Its state is that of no position; reset or restore it.
    pub fn check_intact(&self) -> Result<(), EngineError> {
        if self.intact {
            return Ok(());
        }
        Err(EngineError::Option {
            what: "session",
            why: "a pass failed, and its state is that of no position; reset or restore it".to_owned(),
        })
    }

    /// Back to the empty sequence.
    pub fn reset(&mut self) {
        self.position = 0;
        self.intact = true;
        self.image_rows.clear();
        for state in &mut self.state {
            if let LayerState::Kda(state) = state {
                state.recurrent.fill(0.0);
                state.conv.iter_mut().for_each(|history| history.fill(0.0));
            }
        }
    }
}
