//! How a model takes images, known before its tower is loaded.

use waste_common::config::ModelConfig;

use super::{ImageError, ImageSize, Limits, Prepared, Vision, VisionConfig};
use crate::error::EngineError;
use crate::model::Engine;
use crate::weights::Source;

/// Looks at images for a model.
#[derive(Clone, Debug)]
pub struct Reader {
    config: VisionConfig,
    limits: Limits,
}

impl Reader {
    /// How a model takes images; they are shrunk to `patches`, or what its files say.
    ///
    /// # Errors
    /// It has no tower, its files are damaged, or `patches` is out of range.
    pub fn open(source: &Source, model: &ModelConfig, patches: Option<usize>) -> Result<Reader, EngineError> {
        if model.vision.is_none() {
            return Err(EngineError::NoVision);
        }
        let mut config = VisionConfig::read(source, model)?;
        if let Some(patches) = patches {
            config.set_patch_limit(patches)?;
        }
        Ok(Reader { config, limits: Limits::default() })
    }

    /// Size of an image and positions it will take; only its header is read.
    ///
    /// # Errors
    /// The image is refused.
    pub fn measure(&self, file: &[u8]) -> Result<ImageSize, ImageError> {
        self.config.measure(file, &self.limits)
    }

    /// Decodes an image and gives it the size that the tower takes.
    ///
    /// # Errors
    /// The image is refused or damaged.
    pub fn prepare(&self, file: &[u8]) -> Result<Prepared, ImageError> {
        self.config.prepare(file, &self.limits)
    }

    /// Loads the tower.
    ///
    /// # Errors
    /// A tensor of it cannot be read.
    pub fn load(&self, engine: &Engine) -> Result<Vision, EngineError> {
        engine.vision(self.config.clone(), self.limits.clone())
    }
}
