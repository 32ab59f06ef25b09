//! What is read of an image and of the tower beside the tower's shape: `vision.json` of a container, `config.json` and
//! `preprocessor_config.json` of a checkpoint.

use serde::Deserialize;
use serde_json::{Map, Value};
use waste_common::config::{ConfigError, ModelConfig, Vision};
use waste_common::json::{self, MANIFEST_BYTES_MAX};

use crate::error::EngineError;
use crate::weights::Source;

/// Patches an image is shrunk to unless the model says otherwise: 256 positions of the prompt.
pub const PATCHES_DEFAULT: usize = 1024;
/// Most patches that can be asked for: the release's own limit.
pub const PATCHES_MAX: usize = 65_536;

/// Everything the vision tower needs to know beside its weights.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// The tower's shape.
    pub shape: Vision,
    /// Epsilon of the tower's norms.
    pub rms_eps: f32,
    /// Epsilon of the projector's last norm.
    pub projector_eps: f32,
    /// How pixels become patches.
    pub processing: Processing,
}

/// How pixels become patches.
#[derive(Clone, Debug, PartialEq)]
pub struct Processing {
    /// Whole patches an image is shrunk to.
    pub patch_limit: usize,
    /// Patches on a side.
    pub side_limit: usize,
    /// Subtracted from channels of 0 to 1.
    pub mean: [f64; 3],
    /// Then divided by.
    pub std: [f64; 3],
    /// What lies under transparent pixels.
    pub board: Board,
}

/// A chessboard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Board {
    /// Side of a square in pixels.
    pub square: usize,
    /// Value of the light squares.
    pub white: u8,
    /// Value of the dark ones.
    pub gray: u8,
    /// Whether the top left square is light.
    pub top_left: bool,
}

impl Default for Processing {
    fn default() -> Self {
        Processing {
            patch_limit: PATCHES_DEFAULT,
            side_limit: 512,
            mean: [0.5; 3],
            std: [0.5; 3],
            board: Board { square: 8, white: 255, gray: 180, top_left: true },
        }
    }
}

impl VisionConfig {
    /// Reads the files of a source.
    ///
    /// # Errors
    /// The model has no tower, a file is damaged, or it asks for what is not implemented.
    pub fn read(source: &Source, config: &ModelConfig) -> Result<Self, EngineError> {
        let shape =
            config.vision.clone().ok_or_else(|| ConfigError::Missing { key: "vision_config".into() })?;
        let (tower, media) = match source {
            Source::Container(container) => {
                let path = container.dir().join("vision.json");
                let file = json::read(&path, MANIFEST_BYTES_MAX)?;
                (file.clone(), file)
            }
            Source::Checkpoint(checkpoint) => {
                let tower = checkpoint.config().get("vision_config").cloned().unwrap_or_default();
                let path = checkpoint.dir().join("preprocessor_config.json");
                let mut media = Value::Object(Map::new());
                if path.exists() {
                    media = json::read(&path, MANIFEST_BYTES_MAX)?
                        .get_mut("media_proc_cfg")
                        .map_or(media, Value::take);
                }
                (tower, media)
            }
        };
        Ok(Self::from_json(shape, &tower, &media)?)
    }

    /// Reads `vision_config` and `media_proc_cfg`, or the one object of `vision.json` as both.
    ///
    /// # Errors
    /// A value is out of range or of the wrong type, or asks for what is not implemented.
    pub fn from_json(shape: Vision, tower: &Value, media: &Value) -> Result<Self, ConfigError> {
        for (key, implemented) in [
            ("activation_func", Value::from("gelu_pytorch_tanh")),
            ("projector_hidden_act", Value::from("gelu")),
            ("pos_emb_interpolation_mode", Value::from("bilinear")),
            ("pos_emb_type", Value::from("divided_fixed")),
            ("merge_type", Value::from("sd2_tpool")),
            ("mm_projector_type", Value::from("patchmergerv2")),
            ("norm_type", Value::from("rmsnorm")),
            ("merge_kernel_size", Value::from(vec![2, 2])),
            ("attn_bias", Value::from(false)),
            ("linear_bias", Value::from(false)),
            ("patch_embed_proj_bias", Value::from(false)),
            ("mm_hidden_size", Value::from(shape.hidden)),
        ] {
            demand(tower, key, &implemented)?;
        }
        demand(media, "patch_size", &Value::from(shape.patch))?;
        demand(media, "transparent_bg_fill_stage", &Value::from("after_resize"))?;
        if media.get("fixed_output_tokens").is_some_and(|tokens| !tokens.is_null()) {
            return Err(unsupported("fixed_output_tokens", media, "null"));
        }
        let head = shape.qkv / shape.heads;
        if !shape.qkv.is_multiple_of(shape.heads) || !head.is_multiple_of(4) {
            let found = format!("{} for {} heads", shape.qkv, shape.heads);
            let expected = "a multiple of 4 for each head".to_owned();
            return Err(ConfigError::Invalid { key: "qkv_hidden_size".to_owned(), found, expected });
        }
        let tower: Tower = read("vision_config", tower)?;
        for (key, eps) in [("vt_rms_eps", tower.vt_rms_eps), ("projector_ln_eps", tower.projector_ln_eps)] {
            if !(eps > 0.0 && eps < 1.0) {
                return Err(invalid(key, eps, "a number between 0 and 1"));
            }
        }
        Ok(VisionConfig {
            shape,
            rms_eps: tower.vt_rms_eps,
            projector_eps: tower.projector_ln_eps,
            processing: Processing::from_json(media)?,
        })
    }
}

impl Processing {
    fn from_json(media: &Value) -> Result<Self, ConfigError> {
        let usual = Processing::default();
        let media: Media = read("media_proc_cfg", media)?;
        let patch_limit = media.max_patches.unwrap_or(PATCHES_DEFAULT).min(media.in_patch_limit);
        for (key, patches, max) in [
            ("max_patches", patch_limit, PATCHES_MAX),
            ("patch_limit_on_one_side", media.patch_limit_on_one_side, 1 << 12),
        ] {
            if patches == 0 || patches > max {
                return Err(invalid(key, patches, &format!("a whole number from 1 to {max}")));
            }
        }
        if let Some(std) = media.image_std.iter().find(|std| **std <= 0.0) {
            return Err(invalid("image_std", std, "positive numbers"));
        }
        let board = match media.transparent_bg_config {
            None => usual.board,
            Some(board) => {
                if board.pattern != "chessboard" {
                    return Err(ConfigError::Unsupported {
                        key: "transparent_bg_config.pattern".to_owned(),
                        found: board.pattern,
                        implemented: "chessboard".to_owned(),
                    });
                }
                if board.chessboard_square_size == 0 {
                    return Err(invalid("chessboard_square_size", 0, "a positive number"));
                }
                Board {
                    square: board.chessboard_square_size,
                    white: board.chessboard_white_value,
                    gray: board.chessboard_gray_value,
                    top_left: board.chessboard_square_on_top_left,
                }
            }
        };
        Ok(Processing {
            patch_limit,
            side_limit: media.patch_limit_on_one_side,
            mean: media.image_mean,
            std: media.image_std,
            board,
        })
    }
}

#[derive(Deserialize)]
#[serde(default)]
struct Tower {
    vt_rms_eps: f32,
    projector_ln_eps: f32,
}

impl Default for Tower {
    fn default() -> Self {
        // The release's norms are built without an epsilon, and then use that of f32.
        Tower { vt_rms_eps: f32::EPSILON, projector_ln_eps: 1e-5 }
    }
}

#[derive(Deserialize)]
#[serde(default)]
struct Media {
    max_patches: Option<usize>,
    in_patch_limit: usize,
    patch_limit_on_one_side: usize,
    image_mean: [f64; 3],
    image_std: [f64; 3],
    transparent_bg_config: Option<BoardKeys>,
}

impl Default for Media {
    fn default() -> Self {
        let Processing { side_limit, mean, std, .. } = Processing::default();
        Media {
            max_patches: None,
            in_patch_limit: PATCHES_MAX,
            patch_limit_on_one_side: side_limit,
            image_mean: mean,
            image_std: std,
            transparent_bg_config: None,
        }
    }
}

#[derive(Deserialize)]
struct BoardKeys {
    pattern: String,
    chessboard_square_size: usize,
    chessboard_square_on_top_left: bool,
    chessboard_white_value: u8,
    chessboard_gray_value: u8,
}

fn read<T: serde::de::DeserializeOwned>(key: &str, value: &Value) -> Result<T, ConfigError> {
    if !value.is_object() {
        return Err(invalid(key, value.to_string().chars().take(60).collect::<String>(), "an object"));
    }
    T::deserialize(value).map_err(|error| invalid(key, "not usable", &error.to_string()))
}

fn invalid(key: &str, found: impl ToString, expected: &str) -> ConfigError {
    ConfigError::Invalid { key: key.to_owned(), found: found.to_string(), expected: expected.to_owned() }
}

fn unsupported(key: &str, object: &Value, implemented: &str) -> ConfigError {
    let found =
        object.get(key).map_or_else(String::new, |found| found.to_string().chars().take(60).collect());
    ConfigError::Unsupported { key: key.to_owned(), found, implemented: implemented.to_owned() }
}

/// A key that, where it is present, must have the one value that is implemented.
fn demand(object: &Value, key: &str, implemented: &Value) -> Result<(), ConfigError> {
    match object.get(key) {
        Some(found) if !found.is_null() && found != implemented => {
            Err(unsupported(key, object, &implemented.to_string()))
        }
        _ => Ok(()),
    }
}
