//! Decoding image files that may come from anyone: sizes are checked before pixels are decoded.

use std::io::Cursor;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader};
use waste_common::error::{Coded, Exit};

use super::psd::{self, Psd};

const FORMATS: [ImageFormat; 6] = [
    ImageFormat::Png,
    ImageFormat::Jpeg,
    ImageFormat::Gif,
    ImageFormat::Bmp,
    ImageFormat::Tga,
    ImageFormat::WebP,
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    /// One that the image crate reads.
    Usual(ImageFormat),
    Psd,
}

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ImageError {
    #[error("the image file has {bytes} bytes; at most {max} are accepted: save it smaller")]
    Encoded { bytes: usize, max: usize },
    #[error("the image is in no format that is read: PNG, JPEG, GIF, BMP, TGA, WebP, PSD")]
    Format,
    #[error(
        "the image has {width} x {height} pixels; at most {side} on a side and {decoded} bytes decoded are accepted: \
         make it smaller"
    )]
    Dimensions { width: u32, height: u32, side: u32, decoded: u64 },
    #[error("the image has {width} x {height} pixels: it is empty")]
    Empty { width: u32, height: u32 },
    #[error("the {format} image cannot be read: {problem}")]
    Damaged { format: &'static str, problem: String },
}

impl Coded for ImageError {
    fn exit(&self) -> Exit {
        Exit::Data
    }

    fn code(&self) -> &'static str {
        "image_invalid"
    }
}

/// What an image may take.
///
/// While it is decoded, an image takes its file twice (a decoder may keep a copy) and at most four times `decoded`:
/// the pixels, and what a decoder keeps of the whole image (a progressive JPEG's coefficients), or the pixels
/// converted or turned. Preprocessing takes at most three times `decoded`: the image, resized across, resized down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the file.
    pub encoded: usize,
    /// Pixels on a side.
    pub side: u32,
    /// Bytes of the decoded pixels, both as the file has them and as RGB or RGBA.
    pub decoded: u64,
}

impl Default for Limits {
    /// 20 MiB encoded, 64 MiB decoded, 16,384 pixels on a side.
    fn default() -> Self {
        Limits { encoded: 20 << 20, side: 16_384, decoded: 64 << 20 }
    }
}

/// Pixels of 8 bits a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Pixels of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// 3 (RGB) or 4 (RGB and straight alpha).
    pub channels: usize,
    /// [height, width, channels].
    pub data: Vec<u8>,
}

/// Width and height of an image, turned upright, from its header; the same checks as in [`decode`], no pixel decoded.
///
/// # Errors
/// The file is larger than allowed, its format is not read, its header is damaged, or its pixels exceed the limits.
pub fn dimensions(file: &[u8], limits: &Limits) -> Result<(usize, usize), ImageError> {
    let format = format_of(file, limits)?;
    let mut decoder = open(file, format, limits)?;
    let (width, height) = decoder.dimensions();
    let (width, height) = (width as usize, height as usize);
    Ok(match orientation(&mut decoder) {
        Orientation::Rotate90
        | Orientation::Rotate270
        | Orientation::Rotate90FlipH
        | Orientation::Rotate270FlipH => (height, width),
        _ => (width, height),
    })
}

/// Decodes an image (of an animation, the first frame) and turns it upright.
///
/// # Errors
/// As [`dimensions`]; or its pixels are damaged or incomplete.
pub fn decode(file: &[u8], limits: &Limits) -> Result<Bitmap, ImageError> {
    let format = format_of(file, limits)?;
    if format == Format::Usual(ImageFormat::Jpeg) && !jpeg_is_whole(file) {
        return Err(damaged(format)("it ends before its last scan does"));
    }
    let mut decoder = open(file, format, limits)?;
    let orientation = orientation(&mut decoder);
    let alpha = decoder.color_type().has_alpha();
    let mut image = DynamicImage::from_decoder(decoder).map_err(damaged(format))?;
    // Narrow first: turning takes a copy.
    image = if alpha { image.into_rgba8().into() } else { image.into_rgb8().into() };
    image.apply_orientation(orientation);
    Ok(Bitmap {
        width: image.width() as usize,
        height: image.height() as usize,
        channels: if alpha { 4 } else { 3 },
        data: image.into_bytes(),
    })
}

fn format_of(file: &[u8], limits: &Limits) -> Result<Format, ImageError> {
    if file.len() > limits.encoded {
        return Err(ImageError::Encoded { bytes: file.len(), max: limits.encoded });
    }
    if file.starts_with(psd::MAGIC) {
        return Ok(Format::Psd);
    }
    match image::guess_format(file) {
        Ok(format) if FORMATS.contains(&format) => Ok(Format::Usual(format)),
        Err(_) if looks_like_tga(file) => Ok(Format::Usual(ImageFormat::Tga)),
        _ => Err(ImageError::Format),
    }
}

fn open<'a>(
    file: &'a [u8],
    format: Format,
    limits: &Limits,
) -> Result<Box<dyn ImageDecoder + 'a>, ImageError> {
    let decoder: Box<dyn ImageDecoder> = match format {
        Format::Usual(usual) => {
            let mut reader = ImageReader::with_format(Cursor::new(file), usual);
            let mut own = image::Limits::default();
            // What a decoder allocates beside the pixels; the sides are checked below, with a message of our own.
            own.max_alloc = Some(limits.decoded.saturating_mul(3));
            reader.limits(own);
            Box::new(reader.into_decoder().map_err(damaged(format))?)
        }
        Format::Psd => Box::new(Psd::open(file).map_err(damaged(format))?),
    };
    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 {
        return Err(ImageError::Empty { width, height });
    }
    let channels = if decoder.color_type().has_alpha() { 4 } else { 3 };
    let bytes = decoder.total_bytes().max(u64::from(width) * u64::from(height) * channels);
    if width > limits.side || height > limits.side || bytes > limits.decoded {
        return Err(ImageError::Dimensions { width, height, side: limits.side, decoded: limits.decoded });
    }
    Ok(decoder)
}

/// Unreadable metadata is no reason to refuse the pixels.
fn orientation(decoder: &mut impl ImageDecoder) -> Orientation {
    decoder.orientation().unwrap_or(Orientation::NoTransforms)
}

fn damaged<E: ToString>(format: Format) -> impl Fn(E) -> ImageError {
    let format = match format {
        Format::Psd => "PSD",
        Format::Usual(ImageFormat::Png) => "PNG",
        Format::Usual(ImageFormat::Jpeg) => "JPEG",
        Format::Usual(ImageFormat::Gif) => "GIF",
        Format::Usual(ImageFormat::Bmp) => "BMP",
        Format::Usual(ImageFormat::Tga) => "TGA",
        Format::Usual(_) => "WebP",
    };
    move |problem| ImageError::Damaged { format, problem: problem.to_string() }
}

/// The decoder fills what is missing of a JPEG with grey. An end marker must follow the last start of a scan; the
/// pair cannot occur in compressed data.
fn jpeg_is_whole(file: &[u8]) -> bool {
    let last = |marker: u8| file.windows(2).rposition(|pair| pair == [0xff, marker]);
    matches!((last(0xda), last(0xd9)), (Some(scan), Some(end)) if end > scan)
}

/// TGA has no magic number: a header whose fields agree with each other.
fn looks_like_tga(file: &[u8]) -> bool {
    let Some(&[_, palette, kind, _, _, _, _, entry_bits, _, _, _, _, _, _, _, _, depth, flags]) =
        file.first_chunk::<18>()
    else {
        return false;
    };
    let agrees = match kind {
        1 | 9 => palette == 1 && matches!(depth, 8 | 16) && matches!(entry_bits, 15 | 16 | 24 | 32),
        2 | 10 => palette <= 1 && matches!(depth, 15 | 16 | 24 | 32),
        3 | 11 => palette == 0 && matches!(depth, 8 | 16),
        _ => false,
    };
    // The two highest bits are unused.
    agrees && flags & 0xc0 == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_other_formats_are_no_images() {
        for file in
            [&b""[..], b"GIF", b"hello, this is not an image at all", b"II*\0tiff", b"%PDF-1.7 ............."]
        {
            let error = decode(file, &Limits::default()).unwrap_err();
            assert_eq!(error.code(), "image_invalid");
            assert!(dimensions(file, &Limits::default()).is_err());
        }
    }
}
