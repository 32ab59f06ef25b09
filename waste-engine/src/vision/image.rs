//! From a decoded image to the tower's patches: the size it is given, alpha over a chessboard, padding,
//! normalisation.

use std::fmt;

use super::ImageSize;
use super::config::{Board, Processing};
use super::decode::Bitmap;
use super::resize::resize;

/// Patches are merged in squares of this side.
pub const MERGE: usize = 2;

/// The size an image is given, and the grid of its patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Width after resizing.
    pub width: usize,
    /// Height after resizing.
    pub height: usize,
    /// Columns added on the right.
    pub pad_right: usize,
    /// Rows added at the bottom.
    pub pad_bottom: usize,
    /// Rows of patches, even.
    pub grid_height: usize,
    /// Columns of patches, even.
    pub grid_width: usize,
}

impl Plan {
    /// Patches.
    pub fn patches(&self) -> usize {
        self.grid_height * self.grid_width
    }

    /// Positions the image takes in the prompt.
    pub fn tokens(&self) -> usize {
        self.patches() / (MERGE * MERGE)
    }
}

/// The plan of an image of `width` x `height` pixels: never enlarged, shrunk to `limit` whole patches, padded to whole
/// squares of patches.
///
/// Padding may take an image over the limit, a narrow one up to twice (with 512 patches on a side and 1024 in all).
pub fn plan(width: usize, height: usize, limit: usize, side_limit: usize, patch: usize) -> Plan {
    let (width, height) = (width.max(1), height.max(1));
    let longest = side_limit * patch;
    let whole = |pixels: usize| (pixels / patch).max(1) as f64;
    let scale = (limit as f64 / (whole(width) * whole(height)))
        .sqrt()
        .min(1.0)
        .min(longest as f64 / width as f64)
        .min(longest as f64 / height as f64);
    let scaled = |pixels: usize| ((pixels as f64 * scale) as usize).max(1).min(longest);
    let (width, height) = (scaled(width), scaled(height));
    let square = MERGE * patch;
    let (padded_width, padded_height) = (width.next_multiple_of(square), height.next_multiple_of(square));
    Plan {
        width,
        height,
        pad_right: padded_width - width,
        pad_bottom: padded_height - height,
        grid_height: padded_height / patch,
        grid_width: padded_width / patch,
    }
}

/// An image cut into patches.
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    /// [patches, 3, patch, patch], row-major over the grid.
    pub pixels: Vec<f32>,
    /// How it was made.
    pub plan: Plan,
}

/// A decoded image of the size that the tower takes: a quarter of what its patches are.
#[derive(Clone, PartialEq, Eq)]
pub struct Prepared {
    /// Of the image it was made of, upright, in pixels.
    width: usize,
    height: usize,
    rgb: Vec<u8>,
    plan: Plan,
}

impl Prepared {
    /// Gives an image its size.
    pub fn new(image: Bitmap, processing: &Processing, patch: usize) -> Prepared {
        let (width, height) = (image.width, image.height);
        let (rgb, plan) = padded_rgb(image, processing, patch);
        Prepared { width, height, rgb, plan }
    }

    /// What the prompt says of it.
    pub fn size(&self) -> ImageSize {
        ImageSize { width: self.width, height: self.height, tokens: self.plan.tokens() }
    }

    /// The memory it takes.
    pub fn bytes(&self) -> usize {
        self.rgb.len()
    }

    /// Cuts it into patches.
    pub fn patches(&self, processing: &Processing, patch: usize) -> Patches {
        let Prepared { rgb, plan, .. } = self;
        let values = processing.normalised();
        let stride = plan.grid_width * patch * 3;
        let mut pixels = vec![0.0; plan.patches() * 3 * patch * patch];
        for (p, out) in pixels.chunks_exact_mut(3 * patch * patch).enumerate() {
            let (row, column) = (p / plan.grid_width, p % plan.grid_width);
            let origin = row * patch * stride + column * patch * 3;
            for (i, out) in out.iter_mut().enumerate() {
                let (channel, y, x) = (i / (patch * patch), i / patch % patch, i % patch);
                *out = values[channel][rgb[origin + y * stride + x * 3 + channel] as usize];
            }
        }
        Patches { pixels, plan: *plan }
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Prepared { width, height, plan, .. } = self;
        f.debug_struct("Prepared").field("width", width).field("height", height).field("plan", plan).finish()
    }
}

/// Resizes an image and fills in what is transparent: [height, width, 3], padded with 0 on the right and at the bottom.
pub fn padded_rgb(image: Bitmap, processing: &Processing, patch: usize) -> (Vec<u8>, Plan) {
    let plan = plan(image.width, image.height, processing.patch_limit, processing.side_limit, patch);
    let image = resize(image, plan.width, plan.height);
    let stride = (plan.width + plan.pad_right) * 3;
    let mut rgb = vec![0; (plan.height + plan.pad_bottom) * stride];
    let row_bytes = plan.width * image.channels;
    for (y, (row, out)) in image.data.chunks_exact(row_bytes).zip(rgb.chunks_exact_mut(stride)).enumerate() {
        if image.channels == 3 {
            out[..row_bytes].copy_from_slice(row);
            continue;
        }
        for (x, (pixel, out)) in row.chunks_exact(4).zip(out.chunks_exact_mut(3)).enumerate() {
            composite(pixel, processing.board.at(x, y), out);
        }
    }
    (rgb, plan)
}

/// Makes the patches of an image.
pub fn patches(image: Bitmap, processing: &Processing, patch: usize) -> Patches {
    Prepared::new(image, processing, patch).patches(processing, patch)
}

fn composite(pixel: &[u8], background: u8, out: &mut [u8]) {
    let alpha = f32::from(pixel[3]) / 255.0;
    for (out, &c) in out.iter_mut().zip(pixel) {
        *out = (alpha * f32::from(c) + (1.0 - alpha) * f32::from(background)) as u8;
    }
}

impl Board {
    fn at(&self, x: usize, y: usize) -> u8 {
        let first = (y / self.square + x / self.square).is_multiple_of(2) == self.top_left;
        if first { self.white } else { self.gray }
    }
}

impl Processing {
    /// Per channel, the tower's input of each byte.
    fn normalised(&self) -> [[f32; 256]; 3] {
        std::array::from_fn(|c| {
            let (mean, inverse) = (self.mean[c], 1.0 / self.std[c]);
            std::array::from_fn(|byte| {
                let value = (byte as f64 / 255.0) as f32;
                let centred = (f64::from(value) - mean) as f32;
                (f64::from(centred) * inverse) as f32
            })
        })
    }
}
