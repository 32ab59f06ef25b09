//! Images of this model: its tower, run on the engine's threads.

use std::sync::atomic::Ordering;

use super::Engine;
use crate::error::EngineError;
use crate::vision::{ImageRows, Limits, Prepared, Vision, VisionConfig};

impl Engine {
    /// Loads the model's vision tower, which the engine does not keep.
    ///
    /// # Errors
    /// The model has none, or a tensor of it is missing, of another shape, or cannot be read.
    pub fn vision(&self, config: VisionConfig, limits: Limits) -> Result<Vision, EngineError> {
        Vision::with_config(&self.source, &self.config, config, limits)
    }

    /// Encodes an image file: rows for [`Sequence::queue_image`](crate::Sequence::queue_image).
    ///
    /// # Errors
    /// The image is refused or damaged, or it was interrupted.
    pub fn image_rows(&self, vision: &Vision, file: &[u8]) -> Result<ImageRows, EngineError> {
        vision.rows_watched(&self.compute, file, &mut |_, _| self.go_on(true))
    }

    /// Encodes an image as long as it is `wanted`, which is asked before each of the tower's blocks.
    ///
    /// # Errors
    /// It is not wanted any more, or was interrupted.
    pub fn encode_image(
        &self,
        vision: &Vision,
        image: &Prepared,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Vec<f32>, EngineError> {
        vision.encode(&self.compute, image, &mut |_, _| self.go_on(wanted()))
    }

    fn go_on(&self, wanted: bool) -> Result<(), EngineError> {
        if wanted && !self.options.cancelled.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(EngineError::Interrupted)
    }
}
