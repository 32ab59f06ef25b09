//! Photoshop documents (PSD): the picture that all layers together make, which stands at the end of the file.
//!
//! Everything is borrowed from the file; decoding allocates a row of each channel.

use image::error::{DecodingError, ImageFormatHint};
use image::{ColorType, ImageDecoder, ImageError, ImageResult};

/// The first bytes of a document.
pub const MAGIC: &[u8] = b"8BPS";
/// Longest side of a document.
const SIDE_MAX: u32 = 30_000;
/// Most channels of a document.
const CHANNELS_MAX: u16 = 56;

/// A document whose structure was looked at.
pub struct Psd<'a> {
    width: u32,
    height: u32,
    colours: Colours<'a>,
    /// Two bytes a sample.
    wide: bool,
    /// The channel after the colours says how opaque the picture is.
    alpha: bool,
    /// The rows' lengths, channel by channel, if they are packed.
    lengths: Option<&'a [u8]>,
    rows: &'a [u8],
}

/// What samples mean.
enum Colours<'a> {
    /// Eight pixels a byte; a bit that is set is black.
    Bitmap,
    Grey,
    /// 256 reds, greens and blues.
    Palette(&'a [u8; 768]),
    Rgb,
    /// Without ink is 255.
    Cmyk,
}

impl Colours<'_> {
    /// Channels they take.
    fn channels(&self) -> usize {
        match self {
            Colours::Bitmap | Colours::Grey | Colours::Palette(_) => 1,
            Colours::Rgb => 3,
            Colours::Cmyk => 4,
        }
    }
}

fn damaged(problem: impl Into<String>) -> ImageError {
    ImageError::Decoding(DecodingError::new(ImageFormatHint::Name("PSD".to_owned()), problem.into()))
}

/// What is left of a file or section; numbers are big-endian.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> ImageResult<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or_else(|| damaged("it ends early"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> ImageResult<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk().ok_or_else(|| damaged("it ends early"))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u16(&mut self) -> ImageResult<u16> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    fn u32(&mut self) -> ImageResult<u32> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    /// A part that begins with its length, and ends at a multiple of `align`.
    fn section(&mut self, align: usize) -> ImageResult<Bytes<'a>> {
        let length = self.u32()? as usize;
        let section = self.take(length)?;
        // The last one's padding may be missing.
        let padding = (length.next_multiple_of(align) - length).min(self.0.len());
        self.take(padding)?;
        Ok(Bytes(section))
    }
}

impl<'a> Psd<'a> {
    /// Looks at a document's structure; no pixel is decoded.
    ///
    /// # Errors
    /// It is damaged, ends early, has colours that are not read, or was saved without the picture.
    pub fn open(file: &'a [u8]) -> ImageResult<Psd<'a>> {
        let mut file = Bytes(file);
        if file.take(MAGIC.len())? != MAGIC || file.u16()? != 1 {
            return Err(damaged("its version is not 1: large documents (PSB) are not read"));
        }
        file.take(6)?;
        let channels = file.u16()?;
        let (height, width) = (file.u32()?, file.u32()?);
        let (depth, mode) = (file.u16()?, file.u16()?);
        if ![width, height].iter().all(|side| (1..=SIDE_MAX).contains(side)) {
            return Err(damaged(format!("it has {width} x {height} pixels")));
        }
        let palette = file.section(1)?.0;
        // Of a duotone only the grey values are documented.
        let colours = match (mode, depth) {
            (0, 1) => Colours::Bitmap,
            (1 | 8, 8 | 16) => Colours::Grey,
            (2, 8) => Colours::Palette(palette.first_chunk().ok_or_else(|| damaged("it has no palette"))?),
            (3, 8 | 16) => Colours::Rgb,
            (4, 8 | 16) => Colours::Cmyk,
            _ => {
                return Err(damaged(format!(
                    "its colours (mode {mode}, {depth} bits) are not read: convert it to RGB with 8 or 16 bits"
                )));
            }
        };
        if channels > CHANNELS_MAX || usize::from(channels) < colours.channels() {
            return Err(damaged(format!("it has {channels} channels")));
        }
        if !has_picture(file.section(1)?) {
            return Err(damaged("it was saved without its picture: save it with maximal compatibility"));
        }
        let transparent = is_transparent(file.section(1)?);
        let alpha = transparent && depth > 1 && usize::from(channels) > colours.channels();
        let packed = match file.u16()? {
            0 => false,
            1 => true,
            other => return Err(damaged(format!("its compression is {other}, neither raw nor run-length"))),
        };
        let lines = usize::from(channels) * height as usize;
        let lengths = if packed { Some(file.take(2 * lines)?) } else { None };
        let psd = Psd { width, height, colours, wide: depth == 16, alpha, lengths, rows: file.0 };
        // All there is must be there, of channels too that are not looked at.
        let whole: u64 = (0..lines).map(|line| psd.stored(line) as u64).sum();
        if (psd.rows.len() as u64) < whole {
            return Err(damaged("it ends early"));
        }
        Ok(psd)
    }

    /// Bytes of a row of samples.
    fn row_bytes(&self) -> usize {
        let width = self.width as usize;
        match self.colours {
            Colours::Bitmap => width.div_ceil(8),
            _ if self.wide => 2 * width,
            _ => width,
        }
    }

    /// Bytes of a row in the file.
    fn stored(&self, line: usize) -> usize {
        let Some(lengths) = self.lengths else { return self.row_bytes() };
        let length = lengths.get(2 * line..2 * line + 2).and_then(|two| two.first_chunk());
        length.map_or(0, |two| usize::from(u16::from_be_bytes(*two)))
    }

    /// One sample of 8 bits.
    fn sample(&self, row: &[u8], x: usize) -> u8 {
        if !self.wide {
            return row[x];
        }
        let value = u32::from(u16::from_be_bytes([row[2 * x], row[2 * x + 1]]));
        ((value + 128) / 257) as u8
    }

    /// Makes pixels of the channels' rows.
    fn pixels(&self, rows: &[Vec<u8>], line: &mut [u8]) {
        let size = self.color_type().bytes_per_pixel() as usize;
        for (x, pixel) in line.chunks_exact_mut(size).enumerate() {
            let sample = |channel: usize| self.sample(&rows[channel], x);
            match &self.colours {
                Colours::Bitmap => pixel[0] = if rows[0][x / 8] >> (7 - x % 8) & 1 == 1 { 0 } else { 255 },
                Colours::Grey => pixel[0] = sample(0),
                Colours::Palette(palette) => {
                    let index = usize::from(sample(0));
                    pixel[..3].copy_from_slice(&[0, 256, 512].map(|colour| palette[colour + index]));
                }
                Colours::Rgb => pixel[..3].copy_from_slice(&[0, 1, 2].map(sample)),
                Colours::Cmyk => {
                    let black = u32::from(sample(3));
                    let mixed = |ink| ((u32::from(sample(ink)) * black + 127) / 255) as u8;
                    pixel[..3].copy_from_slice(&[0, 1, 2].map(mixed));
                }
            }
            if self.alpha {
                pixel[size - 1] = sample(self.colours.channels());
            }
        }
    }
}

impl ImageDecoder for Psd<'_> {
    fn dimensions(&self) -> (u32, u32) {
        (self.width, self.height)
    }

    fn color_type(&self) -> ColorType {
        match (&self.colours, self.alpha) {
            (Colours::Bitmap | Colours::Grey, false) => ColorType::L8,
            (Colours::Bitmap | Colours::Grey, true) => ColorType::La8,
            (_, false) => ColorType::Rgb8,
            (_, true) => ColorType::Rgba8,
        }
    }

    fn read_image(self, out: &mut [u8]) -> ImageResult<()> {
        let height = self.height as usize;
        let channels = self.colours.channels() + usize::from(self.alpha);
        // Where each channel's next row begins.
        let mut places = Vec::with_capacity(channels);
        let mut place = 0;
        for channel in 0..channels {
            places.push(place);
            place += (channel * height..(channel + 1) * height).map(|line| self.stored(line)).sum::<usize>();
        }
        let mut rows = vec![vec![0; self.row_bytes()]; channels];
        for (y, line) in out.chunks_exact_mut(out.len() / height).enumerate() {
            for (channel, (row, place)) in rows.iter_mut().zip(&mut places).enumerate() {
                let length = self.stored(channel * height + y);
                let stored = Bytes(&self.rows[*place..]).take(length)?;
                *place += length;
                match self.lengths {
                    None => row.copy_from_slice(stored),
                    Some(_) => unpack(stored, row)?,
                }
            }
            self.pixels(&rows, line);
        }
        Ok(())
    }

    fn read_image_boxed(self: Box<Self>, out: &mut [u8]) -> ImageResult<()> {
        (*self).read_image(out)
    }
}

/// Unpacks a row of runs (PackBits).
fn unpack(packed: &[u8], row: &mut [u8]) -> ImageResult<()> {
    let mut packed = Bytes(packed);
    let mut at = 0;
    while at < row.len() {
        let [control] = packed.array()?;
        let (length, literal) = match control {
            0..128 => (usize::from(control) + 1, true),
            128 => continue,
            _ => (257 - usize::from(control), false),
        };
        let out = row.get_mut(at..at + length).ok_or_else(|| damaged("a run is longer than its row"))?;
        if literal {
            out.copy_from_slice(packed.take(length)?);
        } else {
            let [value] = packed.array()?;
            out.fill(value);
        }
        at += length;
    }
    Ok(())
}

/// Whether the picture stands at the end, as far as the document's resources say.
fn has_picture(mut resources: Bytes<'_>) -> bool {
    /// Version of the document, and whether it has its picture.
    const VERSION_INFO: u16 = 1057;
    while let (Ok(_), Ok(id), Ok([name])) = (resources.take(4), resources.u16(), resources.array()) {
        // The name with its length is of even size.
        let (Ok(_), Ok(data)) = (resources.take(usize::from(name) | 1), resources.section(2)) else { break };
        if id == VERSION_INFO {
            return data.0.get(4) != Some(&0);
        }
    }
    true
}

/// Whether the picture is transparent somewhere, and further channels are not mere selections: a negative number of
/// layers says so. With 16 bits the layers are in a block of their own, and another one may say it by being there.
fn is_transparent(mut section: Bytes<'_>) -> bool {
    let negative = |layers: &[u8]| layers.first().is_some_and(|high| high & 0x80 != 0);
    if section.section(1).is_ok_and(|layers| negative(layers.0)) {
        return true;
    }
    // What masks all layers.
    let _ = section.section(1);
    while let (Ok(_), Ok(key), Ok(block)) = (section.take(4), section.array(), section.section(4)) {
        if matches!(&key, b"Mtrn" | b"Mt16") || &key == b"Lr16" && negative(block.0) {
            return true;
        }
    }
    false
}
