//! Images of a request: from an URL to what the tower takes. All that can be refused is refused here, before the line,
//! and nothing is ever fetched.

use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use waste_common::cli::Failure;
use waste_common::config::Vision;
use waste_common::container::integrity::sha256_hex;
use waste_common::json::{JsonError, read_bounded};
use waste_common::plan::{VISION_IMAGES, VISION_PATCHES, vision_patch_bytes};
use waste_engine::chat::read::ImagePart;
use waste_engine::chat::{self, ChatError, Encoded, Image};
use waste_engine::saved::ImageSpan;
use waste_engine::vision::{ImageError, Limits, Prepared, Reader};

use crate::app::decoded;
use crate::error::ApiError;

/// What `data:` URLs may be of; what the bytes are of is found out from them.
const TYPES: [&str; 4] = ["png", "jpeg", "webp", "gif"];
/// Most memory for the images of all requests that wait, unless one request needs more.
const ROOM_MAX: u64 = 256 << 20;

/// How images come in.
pub struct Images {
    reader: Reader,
    placeholder: Option<u32>,
    dirs: Vec<Dir>,
    /// For images that wait to be encoded, in KiB.
    room: Arc<Semaphore>,
    /// One is decoded at a time: that takes up to hundreds of MiB.
    decoding: Mutex<()>,
}

/// A directory whose files may be named.
struct Dir {
    named: PathBuf,
    real: PathBuf,
}

/// An image of a prompt.
#[derive(Debug)]
pub struct Seen {
    /// Where it stands, and which one it is.
    pub span: ImageSpan,
    /// The image, until the tower has seen it.
    pub picture: Option<Picture>,
}

/// An image that waits to be encoded.
#[derive(Debug)]
pub struct Picture {
    /// As the tower takes it.
    pub image: Prepared,
    /// SHA-256 of its file.
    sha256: String,
    _room: OwnedSemaphorePermit,
}

/// The memory for the images of so many requests.
pub fn room_bytes(vision: &Vision, requests: usize) -> u64 {
    let images = VISION_IMAGES as u128 * vision_patch_bytes(vision, VISION_PATCHES);
    let one = u64::try_from(images).unwrap_or(u64::MAX);
    one.saturating_mul(requests as u64).min(ROOM_MAX.max(one))
}

impl Images {
    /// Images in `data:` URLs, and in files of these directories. `room` is in bytes.
    ///
    /// # Errors
    /// There is no such directory.
    pub fn new(
        reader: Reader,
        placeholder: Option<u32>,
        dirs: &[PathBuf],
        room: u64,
    ) -> Result<Images, Failure> {
        let room = usize::try_from(room.div_ceil(1024)).unwrap_or(usize::MAX);
        Ok(Images {
            reader,
            placeholder,
            dirs: dirs.iter().map(|dir| Dir::new(dir)).collect::<Result<_, _>>()?,
            room: Arc::new(Semaphore::new(room.min(Semaphore::MAX_PERMITS))),
            decoding: Mutex::new(()),
        })
    }

    /// Decodes the image of a part.
    fn picture(&self, part: &ImagePart) -> Result<Picture, ApiError> {
        let invalid = |why: &str| {
            ApiError::bad("image_invalid", &part.param, format!("{}: the image {why}", part.param))
        };
        let url =
            part.url().ok_or_else(|| invalid("is missing: expected a URL, or an object with one in url"))?;
        // Bytes, pixels and what a decoder works in are those of one image.
        let one = self.decoding.lock().unwrap_or_else(PoisonError::into_inner);
        let file = if let Some(data) = strip(url, "data:") {
            let text = TYPES.iter().find_map(|kind| strip(data, &format!("image/{kind};base64,")));
            let text = text.ok_or_else(|| {
                invalid("is no data:image/png;base64,… (or jpeg, webp, gif instead of png)")
            })?;
            let (bytes, max) = (text.len() / 4 * 3, Limits::default().encoded);
            if bytes > max.next_multiple_of(3) {
                return Err(refused(part, &ImageError::Encoded { bytes, max }));
            }
            STANDARD.decode(text).map_err(|error| invalid(&format!("is no base64: {error}")))?
        } else if let Some(path) = strip(url, "file://").filter(|_| !self.dirs.is_empty()) {
            match self.read(path) {
                Some(Ok(file)) => file,
                Some(Err(error)) => return Err(refused(part, &error)),
                None => return Err(not_supported(part, "no file in a directory that the server allows")),
            }
        } else {
            return Err(elsewhere(part));
        };
        if !is_of_the_web(&file) {
            return Err(invalid("is no PNG, JPEG, WebP or GIF"));
        }
        let image = self.reader.prepare(&file).map_err(|error| refused(part, &error))?;
        let sha256 = sha256_hex(&file);
        drop((file, one));
        let kib = u32::try_from(image.bytes().div_ceil(1024)).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.room).try_acquire_many_owned(kib).map_err(|_| ApiError::crowded())?;
        Ok(Picture { image, sha256, _room: room })
    }

    /// A file in one of the directories; `None` if there is none that may be read.
    fn read(&self, path: &str) -> Option<Result<Vec<u8>, ImageError>> {
        let path = strip(path, "localhost").unwrap_or(path);
        let path = if cfg!(windows) { path.strip_prefix('/')? } else { path };
        let path = PathBuf::from(decoded(path));
        // By its name alone first: what is elsewhere is not even looked for.
        let below = !path.components().any(|part| part == Component::ParentDir)
            && self.dirs.iter().any(|dir| path.starts_with(&dir.named) || path.starts_with(&dir.real));
        let real = path.canonicalize().ok().filter(|_| below)?;
        self.dirs.iter().find(|dir| real.starts_with(&dir.real))?;
        match read_bounded(&real, Limits::default().encoded as u64) {
            Ok(file) => Some(Ok(file)),
            Err(JsonError::TooLarge { bytes, max, .. }) => {
                let size = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
                Some(Err(ImageError::Encoded { bytes: size(bytes), max: size(max) }))
            }
            Err(_) => None,
        }
    }

    /// The images of an encoded prompt, in their order.
    ///
    /// # Errors
    /// They stand nowhere in it.
    pub fn seen(&self, pictures: Vec<Picture>, encoded: &Encoded) -> Result<Vec<Seen>, ChatError> {
        let mut pictures: Vec<_> = pictures.into_iter().map(Some).collect();
        let order = encoded.images.iter();
        let pictures: Vec<Picture> = order.filter_map(|at| pictures.get_mut(*at)?.take()).collect();
        let images: Vec<Image> = pictures.iter().map(Picture::image).collect();
        let places = chat::places(&images, &encoded.ids, self.placeholder)?;
        let seen = places.into_iter().zip(images).zip(pictures).map(|((position, image), mut picture)| {
            let sha256 = std::mem::take(&mut picture.sha256);
            Seen { span: ImageSpan { position, tokens: image.rows, sha256 }, picture: Some(picture) }
        });
        Ok(seen.collect())
    }
}

impl Picture {
    /// What the prompt says of it.
    pub fn image(&self) -> Image {
        self.image.size().into()
    }
}

/// Decodes the images of messages.
///
/// # Errors
/// There is no vision, there are too many, or the first one that is refused.
pub fn look(images: Option<&Images>, parts: &[ImagePart]) -> Result<Vec<Picture>, ApiError> {
    let Some(first) = parts.first() else { return Ok(Vec::new()) };
    let Some(images) = images else {
        return Err(match first.url().and_then(|url| strip(url, "data:")) {
            Some(_) => ApiError::bad("vision_disabled", &first.param, "this server does not take images"),
            None => elsewhere(first),
        });
    };
    if parts.len() > VISION_IMAGES {
        let message = format!("{} images; at most {VISION_IMAGES} are accepted", parts.len());
        return Err(ApiError::value("messages", message));
    }
    parts.iter().map(|part| images.picture(part)).collect()
}

impl Dir {
    fn new(dir: &Path) -> Result<Dir, Failure> {
        let real = dir.canonicalize().and_then(|real| match real.is_dir() {
            true => Ok(real),
            false => Err(std::io::ErrorKind::NotADirectory.into()),
        });
        let real = real.map_err(|error| {
            Failure::usage(format!("images cannot come out of {}: {error}", dir.display()))
        })?;
        Ok(Dir { named: std::path::absolute(dir).unwrap_or_else(|_| real.clone()), real })
    }
}

fn refused(part: &ImagePart, error: &ImageError) -> ApiError {
    ApiError::bad("image_invalid", &part.param, format!("{}: {error}", part.param))
}

fn not_supported(part: &ImagePart, why: &str) -> ApiError {
    ApiError::bad("image_url_not_supported", &part.param, format!("{}: {why}", part.param))
}

fn elsewhere(part: &ImagePart) -> ApiError {
    not_supported(part, "only data:image/…;base64 URLs: the server fetches nothing")
}

/// What comes after a prefix, in which case means nothing.
fn strip<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    let (head, rest) = text.split_at_checked(prefix.len())?;
    head.eq_ignore_ascii_case(prefix).then_some(rest)
}

/// Whether a file begins as one of [`TYPES`] does; the engine reads further formats, of which one has no mark at all.
fn is_of_the_web(file: &[u8]) -> bool {
    let riff = file.starts_with(b"RIFF") && file.get(8..12) == Some(b"WEBP");
    riff || [&b"\x89PNG\r\n\x1a\n"[..], b"\xff\xd8\xff", b"GIF87a", b"GIF89a"]
        .iter()
        .any(|mark| file.starts_with(mark))
}
