//! The embedding: rows of a table that is not kept in memory unless the head is the same table.

use std::collections::VecDeque;
use std::sync::Arc;

use waste_common::checkpoint::Checkpoint;
use waste_common::config::ModelConfig;
use waste_common::container::{Container, RowBuffer, TrunkEntry};
use waste_common::tensors;

use crate::error::EngineError;
use crate::kernels::Kernels;
use crate::matrix::Matrix;
use crate::weights::Source;

/// Where tokens' rows come from.
pub struct Embedding {
    hidden: usize,
    /// The token in whose place an image's rows stand.
    placeholder: Option<u32>,
    table: Table,
}

enum Table {
    /// The head's matrix.
    Tied,
    Container(Arc<Container>, TrunkEntry),
    Checkpoint(Arc<Checkpoint>, String),
}

impl Embedding {
    /// The embedding of a model.
    ///
    /// # Errors
    /// There is no such tensor.
    pub fn new(source: &Source, config: &ModelConfig) -> Result<Self, EngineError> {
        let name = tensors::embedding(config);
        let table = match source {
            _ if config.tied_embeddings => Table::Tied,
            Source::Container(container) => {
                let entry = container.trunk().require(&name)?.clone();
                Table::Container(Arc::clone(container), entry)
            }
            Source::Checkpoint(checkpoint) => Table::Checkpoint(Arc::clone(checkpoint), name),
        };
        Ok(Embedding { hidden: config.hidden, placeholder: config.media_placeholder, table })
    }

    /// The tokens' rows, [tokens, hidden]: an image's where a placeholder stands and rows of one are queued, else the
    /// table's. `head` is the table if it is tied.
    pub fn rows(
        &self,
        kernels: &Kernels,
        head: &Matrix,
        tokens: &[u32],
        images: &mut VecDeque<f32>,
        buffer: &mut RowBuffer,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        for (&token, row) in tokens.iter().zip(out.chunks_exact_mut(self.hidden)) {
            if Some(token) == self.placeholder && images.len() >= self.hidden {
                for (out, value) in row.iter_mut().zip(images.drain(..self.hidden)) {
                    *out = value;
                }
                continue;
            }
            match &self.table {
                Table::Tied => head.decode_row(kernels, token as usize, row),
                Table::Container(container, entry) => {
                    container.trunk().decode_rows(entry, u64::from(token), 1, row, buffer)?;
                }
                Table::Checkpoint(checkpoint, name) => {
                    row.copy_from_slice(&checkpoint.read_rows_f32(name, token as usize, 1)?);
                }
            }
        }
        Ok(())
    }
}
