//! One sequence: the state it carries, and the buffers it is computed in.

use waste_common::container::RowBuffer;

use crate::layers::kda::KdaState;
use crate::layers::kv_cache::KvCache;
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

/// One sequence: its state, and the buffers it is computed in.
pub struct Session {
    pub(crate) position: usize,
    pub(crate) state: Vec<LayerState>,
    pub(crate) stream: Vec<f32>,
    pub(crate) blocks: Vec<f32>,
    pub(crate) stage: Vec<f32>,
    pub(crate) router: Vec<f32>,
    pub(crate) tables: Option<Tables>,
    pub(crate) logits: Vec<f32>,
    pub(crate) ids: Vec<u32>,
    pub(crate) visits: Vec<(u32, u32, u32)>,
    /// Rows of images that no placeholder has taken yet, [rows, hidden].
    pub(crate) image_rows: std::collections::VecDeque<f32>,
    /// A stored row of the embedding.
    pub(crate) row: RowBuffer,
    pub(crate) profile: Profile,
}

impl Session {
    /// Tokens in the state.
    pub fn position(&self) -> usize {
        self.position
    }

    /// What each layer carries.
    pub fn state(&self) -> &[LayerState] {
        &self.state
    }

    /// Where the time of its forward passes went.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Queues the rows of an image, [rows, hidden]: each media placeholder that comes along takes the next one in
    /// place of its embedding, in a prompt as well as token by token.
    pub fn queue_image(&mut self, rows: &[f32]) {
        self.image_rows.extend(rows);
    }

    /// Back to the empty sequence.
    pub fn reset(&mut self) {
        self.position = 0;
        self.image_rows.clear();
        for state in &mut self.state {
            if let LayerState::Kda(state) = state {
                state.recurrent.fill(0.0);
                state.conv.iter_mut().for_each(|history| history.fill(0.0));
            }
        }
    }
}
