//! Images: what they take, their tokens, and attaching them to a session.
#![allow(unsafe_code)] // the border: see each function

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use waste_common::config::ModelConfig;
use waste_common::container::integrity::sha256_hex;
use waste_common::plan::VISION_IMAGES;
use waste_engine::chat::{Image, Segments};
use waste_engine::saved::ImageSpan;
use waste_engine::vision::{ImageSize, PATCHES_DEFAULT, Reader, Vision};
use waste_engine::weights::Source;
use waste_engine::{Engine, EngineError};

use crate::error::{Fault, Status, guard};
use crate::model::{Model, Opened};
use crate::raw;
use crate::session::{Inner, Session};

/// What an image takes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ImageInfo {
    /// sizeof(waste_image_info).
    pub size: usize,
    /// Pixels of a row, turned upright.
    pub width: u64,
    /// Rows.
    pub height: u64,
    /// Positions of the context.
    pub positions: u64,
}

raw::sized!(ImageInfo);

impl From<ImageSize> for ImageInfo {
    fn from(image: ImageSize) -> ImageInfo {
        ImageInfo {
            size: size_of::<ImageInfo>(),
            width: image.width as u64,
            height: image.height as u64,
            positions: image.tokens as u64,
        }
    }
}

/// How a model takes images.
pub struct Eyes {
    reader: Reader,
    /// One image is encoded at a time: that is what the plan counts.
    tower: Mutex<Vision>,
}

/// An image on its way into a session.
pub struct Waiting {
    rows: Vec<f32>,
    tokens: usize,
    sha256: String,
}

impl Eyes {
    /// Loads the tower.
    ///
    /// # Errors
    /// A tensor of it cannot be read.
    pub fn load(engine: &Engine, reader: Reader) -> Result<Eyes, Fault> {
        let tower = reader.load(engine)?;
        Ok(Eyes { reader, tower: Mutex::new(tower) })
    }
}

/// How images are taken, before anything large is loaded.
///
/// # Errors
/// Images are shrunk to another number of patches than there may be, or the model's files are damaged.
pub fn reader(source: &Source, config: &ModelConfig, patches: Option<usize>) -> Result<Reader, Fault> {
    if let Some(patches) = patches.filter(|patches| *patches > PATCHES_DEFAULT) {
        // The plan counts as many.
        return Err(Fault::usage(format!(
            "{patches} patches of an image; at most {PATCHES_DEFAULT} are planned for"
        )));
    }
    Ok(Reader::open(source, config, patches)?)
}

impl Opened {
    /// # Errors
    /// It takes no images.
    fn eyes(&self) -> Result<&Eyes, Fault> {
        let disabled =
            || Fault::data("vision_disabled", "the model was opened without `vision`: it takes no images");
        self.eyes.as_ref().ok_or_else(disabled)
    }
}

impl Inner {
    /// Where the images that wait stand in `ids`, which come next: each as a run of placeholders.
    ///
    /// # Errors
    /// There are fewer placeholders or more.
    pub fn places(&self, ids: &[u32], model: &Opened) -> Result<Vec<ImageSpan>, Fault> {
        // Without vision a placeholder is a token like others.
        if model.eyes.is_none() {
            return Ok(Vec::new());
        }
        let is_placeholder = |id: &u32| Some(*id) == model.engine.config().media_placeholder;
        let positions: usize = self.waiting.iter().map(|image| image.tokens).sum();
        let found = ids.iter().filter(|id| is_placeholder(id)).count();
        if found != positions {
            return Err(Fault::data(
                "image_placeholders",
                format!(
                    "{} images are attached, which take {positions} positions, and there are {found} media placeholders",
                    self.waiting.len()
                ),
            ));
        }
        let mut at = 0;
        let place = |image: &Waiting| {
            let rest = ids.get(at..).unwrap_or_default();
            let start = at + rest.iter().position(is_placeholder).unwrap_or(0);
            at = start + image.tokens;
            if !ids.get(start..at).is_some_and(|run| run.iter().all(is_placeholder)) {
                return Err(Fault::data(
                    "image_placeholders",
                    format!("the {} media placeholders of an image do not follow each other", image.tokens),
                ));
            }
            let position = self.tokens.len() + start;
            Ok(ImageSpan { position, tokens: image.tokens, sha256: image.sha256.clone() })
        };
        self.waiting.iter().map(place).collect()
    }

    /// Hands the images that wait to the state, as their tokens come.
    pub fn take_images(&mut self, places: Vec<ImageSpan>) {
        for image in self.waiting.drain(..) {
            self.state.queue_image(&image.rows);
        }
        self.images.extend(places);
    }

    /// Images whose rows are in memory.
    fn in_memory(&self) -> usize {
        let position = self.state.position();
        let queued = self.images.iter().filter(|image| image.position + image.tokens > position);
        self.waiting.len() + queued.count()
    }
}

/// Says what an image file takes (PNG, JPEG, GIF, BMP, TGA, WebP, PSD: `length` bytes at `file`); only its header is
/// looked at. The model must have been opened with `vision`.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_image_measure(
    model: *const Model,
    file: *const u8,
    length: usize,
    image: *mut ImageInfo,
) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let eyes = unsafe { raw::handle(model, "the model")? }.0.eyes()?;
        // SAFETY: as above.
        let size = eyes.reader.measure(unsafe { raw::slice(file, length, "the image")? })?;
        // SAFETY: as above.
        unsafe { raw::fill(image, &size.into(), "the image's info") }
    })
}

/// Writes the tokens that stand for an image in a prompt, its placeholders among them: up to `capacity` ids go to `ids`,
/// and `*count` says how many there are. `image` comes from waste_image_measure or waste_session_attach.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_image_tokens(
    model: *const Model,
    image: *const ImageInfo,
    ids: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let model = &unsafe { raw::handle(model, "the model")? }.0;
        model.eyes()?;
        // SAFETY: as above.
        let image = unsafe { raw::read(image, "the image's info")? };
        let (Ok(width), Ok(height), Ok(rows)) =
            (u32::try_from(image.width), u32::try_from(image.height), usize::try_from(image.positions))
        else {
            return Err(Fault::usage("the image's info is of no image"));
        };
        if !(1..=model.engine.ctx()).contains(&rows) {
            return Err(Fault::data(
                "image_too_long",
                format!("an image of {rows} positions has no place in the context"),
            ));
        }
        let mut segments = Segments::default();
        segments.image(0, &Image { width, height, rows });
        let tokens = segments.encode(model.tokenizer()?).ids;
        // SAFETY: as above.
        unsafe { raw::put_all(&tokens, ids, capacity, count) }
    })
}

/// Encodes an image file and attaches it to a session: the placeholders of the next waste_generate or waste_eval take
/// its positions, and must be as many as all images attached take, each image's side by side, in their order. `image`
/// (or NULL) says what it takes. waste_cancel stops it, and it may be called again then. Images that wait for their
/// tokens are no part of a saved session; a reset drops them.
///
/// # Safety
/// See the manners at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waste_session_attach(
    session: *mut Session,
    file: *const u8,
    length: usize,
    image: *mut ImageInfo,
) -> Status {
    guard(|| {
        // SAFETY: the caller's promise.
        let session = unsafe { raw::handle(session, "the session")? };
        // SAFETY: as above.
        let file = unsafe { raw::slice(file, length, "the image")? };
        let (model, mut inner) = (&session.model, session.inner()?);
        let eyes = model.eyes()?;
        if inner.in_memory() >= VISION_IMAGES {
            return Err(Fault::usage(format!(
                "{VISION_IMAGES} images wait, and there is memory for no more"
            )));
        }
        let size = eyes.reader.measure(file)?;
        if !image.is_null() {
            // SAFETY: as above.
            unsafe { raw::fill(image, &size.into(), "the image's info")? };
        }
        let tower = eyes.tower.lock().unwrap_or_else(PoisonError::into_inner);
        let encoded = model.engine.image_rows(&tower, file);
        if matches!(encoded, Err(EngineError::Interrupted)) {
            model.cancelled.store(false, Ordering::Relaxed);
        }
        let rows = encoded?.rows;
        inner.waiting.push(Waiting { rows, tokens: size.tokens, sha256: sha256_hex(file) });
        Ok(())
    })
}
