//! Images: decoding, preprocessing and the vision tower of Kimi K3.
//!
//! An image becomes rows that take the place of embeddings, one a position, where the prompt has its placeholder.

pub mod config;
pub mod decode;
pub mod image;
pub mod position;
mod psd;
mod reader;
mod resize;
pub mod tower;

use waste_common::config::ModelConfig;

pub use self::config::{PATCHES_DEFAULT, PATCHES_MAX, Processing, VisionConfig};
pub use self::decode::{Bitmap, ImageError, Limits};
pub use self::image::{Plan, Prepared};
pub use self::reader::Reader;
pub use self::tower::{Stage, StageSink, Tower};

use crate::compute::Compute;
use crate::error::EngineError;
use crate::weights::Source;

/// The vision tower of a model, loaded.
pub struct Vision {
    config: VisionConfig,
    limits: Limits,
    tower: Tower,
}

/// An image as the decoder takes it.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageRows {
    /// [tokens, hidden size of the decoder].
    pub rows: Vec<f32>,
    /// Positions of the prompt.
    pub tokens: usize,
    /// Width of the image, upright, in pixels: what the prompt says of it.
    pub width: usize,
    /// Height of the image, upright, in pixels.
    pub height: usize,
}

/// What an image will take, from its header alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSize {
    /// Width of the image, upright, in pixels.
    pub width: usize,
    /// Height of the image, upright, in pixels.
    pub height: usize,
    /// Positions of the prompt.
    pub tokens: usize,
}

impl From<ImageSize> for crate::chat::Image {
    fn from(size: ImageSize) -> Self {
        let pixels = |side| u32::try_from(side).unwrap_or(u32::MAX);
        Self { width: pixels(size.width), height: pixels(size.height), rows: size.tokens }
    }
}

impl VisionConfig {
    /// Lowers or raises the number of patches an image is shrunk to; a quarter of them are positions of the prompt.
    ///
    /// # Errors
    /// `patches` is less than 4 (one position) or more than the release's limit.
    pub fn set_patch_limit(&mut self, patches: usize) -> Result<(), EngineError> {
        if !(4..=PATCHES_MAX).contains(&patches) {
            let why = format!("{patches} is not between 4 and {PATCHES_MAX}");
            return Err(EngineError::Option { what: "the number of patches of an image", why });
        }
        self.processing.patch_limit = patches;
        Ok(())
    }

    /// Size of an image and positions it will take; only its header is read.
    ///
    /// # Errors
    /// The image is refused: see [`decode::dimensions`].
    pub fn measure(&self, file: &[u8], limits: &Limits) -> Result<ImageSize, ImageError> {
        let (width, height) = decode::dimensions(file, limits)?;
        let Processing { patch_limit, side_limit, .. } = self.processing;
        let plan = image::plan(width, height, patch_limit, side_limit, self.shape.patch);
        Ok(ImageSize { width, height, tokens: plan.tokens() })
    }

    /// Decodes an image and gives it the size that the tower takes.
    ///
    /// # Errors
    /// The image is refused or damaged: see [`decode::decode`].
    pub fn prepare(&self, file: &[u8], limits: &Limits) -> Result<Prepared, ImageError> {
        let bitmap = decode::decode(file, limits)?;
        Ok(Prepared::new(bitmap, &self.processing, self.shape.patch))
    }
}

impl Vision {
    /// Loads the tower of a model, set up as its files say.
    ///
    /// # Errors
    /// The model has no tower, or its files are damaged or ask for what is not implemented.
    pub fn open(source: &Source, model: &ModelConfig) -> Result<Self, EngineError> {
        Self::with_config(source, model, VisionConfig::read(source, model)?, Limits::default())
    }

    /// Loads the tower of a model with a set-up and limits of the caller's.
    ///
    /// # Errors
    /// A tensor is missing, of another shape, or cannot be read.
    pub fn with_config(
        source: &Source,
        model: &ModelConfig,
        config: VisionConfig,
        limits: Limits,
    ) -> Result<Self, EngineError> {
        if config.shape.text_hidden != model.hidden {
            return Err(EngineError::Shape {
                name: "vision_config.text_hidden_size".to_owned(),
                found: vec![config.shape.text_hidden],
                expected: vec![model.hidden],
            });
        }
        let tower = Tower::load(source, model, &config)?;
        Ok(Vision { config, limits, tower })
    }

    /// How images are read.
    pub fn config(&self) -> &VisionConfig {
        &self.config
    }

    /// Size of an image and positions it will take; only its header is read.
    ///
    /// # Errors
    /// The image is refused.
    pub fn measure(&self, file: &[u8]) -> Result<ImageSize, EngineError> {
        Ok(self.config.measure(file, &self.limits)?)
    }

    /// Encodes an image file.
    ///
    /// # Errors
    /// The image is refused or damaged.
    pub fn rows(&self, compute: &Compute, file: &[u8]) -> Result<ImageRows, EngineError> {
        self.rows_watched(compute, file, &mut |_, _| Ok(()))
    }

    /// Encodes an image file; `watch` is called at every stage and may end it with an error.
    ///
    /// # Errors
    /// The image is refused or damaged, or `watch` ended it.
    pub fn rows_watched(
        &self,
        compute: &Compute,
        file: &[u8],
        watch: &mut StageSink,
    ) -> Result<ImageRows, EngineError> {
        let image = self.config.prepare(file, &self.limits)?;
        let rows = self.encode(compute, &image, watch)?;
        let ImageSize { width, height, tokens } = image.size();
        Ok(ImageRows { rows, tokens, width, height })
    }

    /// Encodes an image, [tokens, hidden size of the decoder]; `watch` as there.
    ///
    /// # Errors
    /// Only those of `watch`.
    pub fn encode(
        &self,
        compute: &Compute,
        image: &Prepared,
        watch: &mut StageSink,
    ) -> Result<Vec<f32>, EngineError> {
        let patches = image.patches(&self.config.processing, self.config.shape.patch);
        self.tower.forward(compute, patches, watch)
    }
}
