//! Images beside a text: what they take of the context, known before the model is loaded, and the rows they become.

use std::path::{Path, PathBuf};
use std::time::Instant;

use waste_common::cli::{Failure, Output};
use waste_common::config::ModelConfig;
use waste_common::container::integrity::sha256_hex;
use waste_common::json;
use waste_common::plan::VISION_IMAGES;
use waste_engine::chat::{self, Image, Segments};
use waste_engine::saved::ImageSpan;
use waste_engine::tokenizer::Tokenizer;
use waste_engine::vision::{ImageSize, Limits, Reader, Vision};
use waste_engine::{Engine, EngineError, Session, open_source};

use crate::args::ImageArgs;
use crate::open::Found;

/// An image that was looked at. Its file is read again when it is encoded: one is in memory at a time.
pub struct Seen {
    path: PathBuf,
    sha256: String,
    size: ImageSize,
}

/// How the model in `dir` takes images.
///
/// # Errors
/// It has no tower, or its files are damaged.
pub fn reader(dir: &Path, config: &ModelConfig, args: &ImageArgs) -> Result<Reader, Failure> {
    let (source, _) = open_source(dir)?;
    Ok(Reader::open(&source, config, args.max_patches)?)
}

impl Seen {
    /// Reads an image file and looks at its header.
    ///
    /// # Errors
    /// It cannot be read, or is refused.
    pub fn look(reader: &Reader, path: &Path) -> Result<Seen, Failure> {
        let file = read(path)?;
        let size = reader.measure(&file).map_err(|error| of(path, error.into()))?;
        Ok(Seen { path: path.to_owned(), sha256: sha256_hex(&file), size })
    }

    /// What a prompt says of it.
    pub fn image(&self) -> Image {
        self.size.into()
    }

    /// SHA-256 of its file, lower-case hex.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Its rows, [tokens, hidden].
    ///
    /// # Errors
    /// It is damaged or has changed, or it was interrupted.
    pub fn encode(&self, engine: &Engine, vision: &Vision, output: &Output) -> Result<Vec<f32>, Failure> {
        let start = Instant::now();
        let file = read(&self.path)?;
        if sha256_hex(&file) != self.sha256 {
            let path = self.path.display();
            return Err(Failure::data("image_changed", format!("{path} has changed while it was used")));
        }
        let rows = engine.image_rows(vision, &file).map_err(|error| of(&self.path, error))?;
        let ImageSize { width, height, tokens } = self.size;
        output.detail(format_args!(
            "{}: {width} x {height} pixels, {tokens} tokens, encoded in {:.2} s",
            self.path.display(),
            start.elapsed().as_secs_f64()
        ));
        Ok(rows.rows)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    Ok(json::read_bounded(path, Limits::default().encoded as u64)?)
}

/// An error with the image's name.
fn of(path: &Path, error: EngineError) -> Failure {
    let mut failure = Failure::from(error);
    failure.message = format!("{}: {}", path.display(), failure.message);
    failure
}

/// Images of a command line, which stand before its text.
pub struct Given(Option<(Reader, Vec<Seen>)>);

impl Given {
    /// Looks at them, and makes the plan count them.
    ///
    /// # Errors
    /// The model takes none, there are too many, or one is refused.
    pub fn look(args: &ImageArgs, found: &mut Found, dir: &Path) -> Result<Given, Failure> {
        match args.images.len() {
            0 if args.max_patches.is_some() => Err(Failure::usage("--max-patches goes with --image")),
            0 => Ok(Given(None)),
            1..=VISION_IMAGES => {
                let reader = reader(dir, found.config(), args)?;
                let seen =
                    args.images.iter().map(|path| Seen::look(&reader, path)).collect::<Result<_, _>>()?;
                found.count_images();
                Ok(Given(Some((reader, seen))))
            }
            given => Err(Failure::usage(format!("{given} images; at most {VISION_IMAGES} are accepted"))),
        }
    }

    fn seen(&self) -> &[Seen] {
        self.0.as_ref().map_or(&[], |(_, seen)| seen)
    }

    /// Their markup as tokens.
    pub fn markup(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let mut segments = Segments::default();
        self.seen().iter().enumerate().for_each(|(i, seen)| segments.image(i, &seen.image()));
        segments.encode(tokenizer).ids
    }

    /// Where they stand in a prompt that begins at `start` of the text.
    ///
    /// # Errors
    /// The tokenizer has no placeholder for them.
    pub fn places(&self, prompt: &[u32], config: &ModelConfig, start: usize) -> Result<Vec<usize>, Failure> {
        let images: Vec<Image> = self.seen().iter().map(Seen::image).collect();
        let places = chat::places(&images, prompt, config.media_placeholder)?;
        Ok(places.into_iter().map(|place| start + place).collect())
    }

    /// Encodes them and queues them for the session. The tower's memory is given back.
    ///
    /// # Errors
    /// One is damaged, or it was interrupted.
    pub fn queue(
        &self,
        places: &[usize],
        engine: &Engine,
        session: &mut Session,
        output: &Output,
    ) -> Result<Vec<ImageSpan>, Failure> {
        let Some((reader, seen)) = &self.0 else { return Ok(Vec::new()) };
        let vision = reader.load(engine)?;
        let mut spans = Vec::with_capacity(seen.len());
        for (seen, place) in seen.iter().zip(places) {
            session.queue_image(&seen.encode(engine, &vision, output)?);
            spans.push(ImageSpan { position: *place, tokens: seen.size.tokens, sha256: seen.sha256.clone() });
        }
        Ok(spans)
    }
}
