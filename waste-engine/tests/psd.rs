//! Photoshop documents, made here byte by byte: every kind that is read, and what is damaged or promises too much.
#![cfg(feature = "vision")]
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use waste_engine::vision::decode::{decode, dimensions};
use waste_engine::vision::{Bitmap, ImageError, Limits};

const BITMAP: u16 = 0;
const GREY: u16 = 1;
const INDEXED: u16 = 2;
const RGB: u16 = 3;
const CMYK: u16 = 4;
const DUOTONE: u16 = 8;
const LAB: u16 = 9;

/// A document of one colour mode.
#[derive(Clone)]
struct Document {
    width: u32,
    height: u32,
    mode: u16,
    depth: u16,
    palette: Vec<u8>,
    resources: Vec<u8>,
    layers: Vec<u8>,
    packed: bool,
    /// Of each channel, rows of bytes as they are stored unpacked.
    channels: Vec<Vec<Vec<u8>>>,
}

impl Document {
    /// `sample(channel, x, y)` says what is in it.
    fn new(mode: u16, depth: u16, channels: usize, sample: impl Fn(usize, usize, usize) -> u16) -> Document {
        let (width, height) = (11, 5);
        let row = |channel, y| -> Vec<u8> {
            let values = (0..width).map(|x| sample(channel, x, y));
            match depth {
                16 => values.flat_map(u16::to_be_bytes).collect(),
                8 => values.map(|value| value as u8).collect(),
                _ => {
                    let bits: Vec<u16> = values.collect();
                    let byte = |bits: &[u16]| {
                        bits.iter().enumerate().fold(0, |byte, (i, bit)| byte | (*bit as u8) << (7 - i))
                    };
                    bits.chunks(8).map(byte).collect()
                }
            }
        };
        let channels = (0..channels).map(|channel| (0..height).map(|y| row(channel, y)).collect()).collect();
        Document {
            width: width as u32,
            height: height as u32,
            mode,
            depth,
            palette: Vec::new(),
            resources: Vec::new(),
            layers: Vec::new(),
            packed: false,
            channels,
        }
    }

    /// As many layers; a negative number makes the first further channel the transparency of all.
    fn layers(mut self, count: i16) -> Document {
        self.layers = [&4u32.to_be_bytes() as &[u8], &count.to_be_bytes(), &[0, 0]].concat();
        self
    }

    fn packed(mut self) -> Document {
        self.packed = true;
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut file = b"8BPS\0\x01\0\0\0\0\0\0".to_vec();
        file.extend((self.channels.len() as u16).to_be_bytes());
        file.extend(self.height.to_be_bytes());
        file.extend(self.width.to_be_bytes());
        file.extend(self.depth.to_be_bytes());
        file.extend(self.mode.to_be_bytes());
        for section in [&self.palette, &self.resources, &self.layers] {
            file.extend((section.len() as u32).to_be_bytes());
            file.extend(section);
        }
        file.extend(u16::from(self.packed).to_be_bytes());
        let rows = self.channels.concat();
        let rows: Vec<Vec<u8>> = if self.packed { rows.iter().map(|row| pack(row)).collect() } else { rows };
        if self.packed {
            file.extend(rows.iter().flat_map(|row| (row.len() as u16).to_be_bytes()));
        }
        file.extend(rows.concat());
        file
    }
}

/// Runs where there are some, and between them what is literal; and a byte that means nothing.
fn pack(row: &[u8]) -> Vec<u8> {
    let mut packed = vec![0x80];
    for part in row.chunk_by(|a, b| a == b) {
        for part in part.chunks(128) {
            match part {
                [one] => packed.extend([0, *one]),
                _ => packed.extend([(257 - part.len()) as u8, part[0]]),
            }
        }
    }
    packed
}

fn read(document: &Document) -> Bitmap {
    let file = document.bytes();
    let found = decode(&file, &Limits::default()).unwrap();
    assert_eq!(dimensions(&file, &Limits::default()).unwrap(), (found.width, found.height));
    assert_eq!((found.width, found.height), (11, 5));
    // However it is stored.
    assert_eq!(decode(&document.clone().packed().bytes(), &Limits::default()).unwrap(), found);
    found
}

fn refused(document: &Document) -> String {
    let file = document.bytes();
    let why = decode(&file, &Limits::default()).unwrap_err();
    assert!(dimensions(&file, &Limits::default()).is_err());
    why.to_string()
}

fn picture(channel: usize, x: usize, y: usize) -> u16 {
    ((channel * 90 + x * 20 + y) % 256) as u16
}

/// [height, width, channels] of what `value` says.
fn expected(channels: usize, value: impl Fn(usize, usize, usize) -> u8) -> Vec<u8> {
    let value = &value;
    (0..5).flat_map(|y| (0..11).flat_map(move |x| (0..channels).map(move |c| value(c, x, y)))).collect()
}

#[test]
fn colours_of_every_kind() {
    let plain = expected(3, |c, x, y| picture(c, x, y) as u8);
    let grey = expected(3, |_, x, y| picture(0, x, y) as u8);
    assert_eq!(read(&Document::new(RGB, 8, 3, picture)).data, plain);
    assert_eq!(read(&Document::new(GREY, 8, 1, picture)).data, grey);
    assert_eq!(read(&Document::new(DUOTONE, 8, 1, picture)).data, grey);
    // To the nearest of 8 bits.
    let deep = |c, x, y| picture(c, x, y) * 257 + 128 - 256 * (picture(c, x, y) / 255);
    assert_eq!(read(&Document::new(RGB, 16, 3, deep)).data, plain);
    assert_eq!(read(&Document::new(GREY, 16, 1, deep)).data, grey);

    let bits = |_, x: usize, y: usize| u16::from((x + y).is_multiple_of(3));
    let found = read(&Document::new(BITMAP, 1, 1, bits));
    assert_eq!(found.data, expected(3, |c, x, y| if bits(c, x, y) == 1 { 0 } else { 255 }));

    let mut indexed = Document::new(INDEXED, 8, 1, |_, x, y| (x * 16 + y) as u16);
    indexed.palette = (0..768).map(|i| (i / 256 * 100 + i % 256 / 2) as u8).collect();
    let colour = |c, x, y| indexed.palette[c * 256 + x * 16 + y];
    assert_eq!(read(&indexed).data, expected(3, colour));

    // Stored is what is left white.
    let cmyk = read(&Document::new(CMYK, 8, 4, |c, x, _| [255, 0, x as u16 * 25, [255, 0, 51][x % 3]][c]));
    let ink = |c: usize, x: usize| {
        let black = [1.0, 0.0, 0.2][x % 3];
        ([255.0, 0.0, x as f64 * 25.0][c] * black).round() as u8
    };
    assert_eq!(cmyk.data, expected(3, |c, x, _| ink(c, x)));
}

#[test]
fn transparency_is_what_the_layers_say_it_is() {
    for (mode, depth, colours) in [(GREY, 8, 1), (RGB, 8, 3), (CMYK, 8, 4), (RGB, 16, 3)] {
        let opaque = |c: usize, x, y| if c == colours { x as u16 * 20 } else { picture(c, x, y) };
        let wide = |c, x, y| if depth == 16 { opaque(c, x, y) * 257 } else { opaque(c, x, y) };
        let document = Document::new(mode, depth, colours + 2, wide);
        let found = read(&document.clone().layers(-2));
        assert_eq!(found.channels, 4, "{mode} {depth}");
        let alpha: Vec<u8> = found.data.iter().skip(3).step_by(4).copied().collect();
        assert_eq!(alpha, expected(1, |_, x, _| x as u8 * 20));
        // A selection that was kept is none.
        assert_eq!(read(&document.clone().layers(2)).channels, 3);
        assert_eq!(read(&document).channels, 3);
    }
    // With 16 bits the layers are elsewhere.
    let mut deep = Document::new(RGB, 16, 4, picture);
    for (blocks, channels) in [
        (b"8BIMMt16\0\0\0\0" as &[u8], 4),
        (b"8BIMPatt\0\0\0\x01-\0\0\x008BIMLr16\0\0\0\x02\xff\xff", 4),
        (b"8BIMLr16\0\0\0\x02\0\x01", 3),
        (b"8BIMLr16\0\0\0\x03\xff\xff", 3),
        (b"8BIM", 3),
    ] {
        deep.layers = [&[0; 8], blocks].concat();
        assert_eq!(read(&deep).channels, channels, "{blocks:?}");
    }
}

#[test]
fn a_document_without_its_picture_is_refused() {
    let mut document = Document::new(RGB, 8, 3, picture).layers(1);
    for (merged, whole) in [(0, false), (1, true)] {
        // A resource of another kind and of odd size before it; names of two lengths.
        document.resources = b"8BIM\x03\xed\x02ab\0\0\0\0\x03xyz\0".to_vec();
        document.resources.extend(b"8BIM\x04\x21\0\0\0\0\0\x05\0\0\0\x01");
        document.resources.extend([merged, 0]);
        if whole {
            read(&document);
        } else {
            assert!(refused(&document).contains("compatibility"));
        }
    }
}

#[test]
fn what_is_not_read_is_named() {
    for (mode, depth, channels) in [(LAB, 8, 3), (7, 8, 3), (RGB, 32, 3), (RGB, 1, 3), (BITMAP, 8, 1)] {
        let why = refused(&Document::new(mode, depth, channels, picture));
        assert!(why.contains(&format!("mode {mode}, {depth} bits")), "{why}");
    }
    assert!(refused(&Document::new(RGB, 8, 2, picture)).contains("2 channels"));
    assert!(refused(&Document::new(INDEXED, 8, 1, picture)).contains("palette"));
    let mut file = Document::new(RGB, 8, 3, picture).bytes();
    file[5] = 2;
    let why = decode(&file, &Limits::default()).unwrap_err().to_string();
    assert!(why.contains("PSB"), "{why}");
    let mut file = Document::new(RGB, 8, 3, picture).bytes();
    let compression = file.len() - 3 * 11 * 5 - 1;
    file[compression] = 3;
    let why = decode(&file, &Limits::default()).unwrap_err().to_string();
    assert!(why.contains("compression is 3"), "{why}");
}

#[test]
fn limits_hold_before_anything_is_decoded() {
    let limits = Limits::default();
    let sized = |width, height, data: usize| {
        let document =
            Document { width, height, channels: vec![vec![]; 3], ..Document::new(RGB, 8, 0, picture) };
        [document.bytes(), vec![0; data]].concat()
    };
    for (width, height) in [(30_000, 30_000), (30_001, 1), (u32::MAX, u32::MAX), (0, 5), (5, 0)] {
        assert!(dimensions(&sized(width, height, 100), &limits).is_err());
        assert!(decode(&sized(width, height, 100), &limits).is_err());
    }
    let wide = decode(&sized(16_385, 1, 3 * 16_385), &limits).unwrap_err();
    assert!(matches!(wide, ImageError::Dimensions { width: 16_385, .. }), "{wide}");
    // A small file of many pixels: rows of 13 000 in 206 bytes.
    let mut bomb = Document { width: 13_000, height: 9000, ..Document::new(GREY, 8, 0, picture) };
    bomb.channels = vec![vec![vec![0; 13_000]; 9000]];
    let large = decode(&bomb.packed().bytes(), &limits).unwrap_err();
    assert!(matches!(large, ImageError::Dimensions { height: 9000, .. }), "{large}");
}

#[test]
fn a_document_that_is_cut_anywhere_is_refused() {
    for document in [
        Document::new(RGB, 8, 5, picture).layers(-1),
        Document::new(CMYK, 16, 4, picture).packed(),
        Document::new(BITMAP, 1, 1, picture).packed(),
    ] {
        let file = document.bytes();
        decode(&file, &Limits::default()).unwrap();
        for length in 0..file.len() {
            assert!(decode(&file[..length], &Limits::default()).is_err(), "{length} of {}", file.len());
            assert!(dimensions(&file[..length], &Limits::default()).is_err(), "{length} of {}", file.len());
        }
    }
}

proptest! {
    /// Whatever stands in a document, it is read within its limits or refused.
    #[test]
    fn any_bytes(
        header in proptest::collection::vec(any::<u8>(), 0..64),
        mode in 0u16..10,
        depth in prop_oneof![Just(1u16), Just(8), Just(16)],
        channels in 1usize..6,
        packed: bool,
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6),
    ) {
        let limits = Limits { decoded: 1 << 16, ..Limits::default() };
        let mut document = Document::new(mode, depth, channels, picture).layers(-1);
        document.palette = vec![5; 768];
        document.packed = packed;
        let mut file = document.bytes();
        for (at, value) in changes {
            let at = at.index(file.len());
            file[at] = value;
        }
        for file in [file, [b"8BPS\0\x01", &header[..]].concat()] {
            match (decode(&file, &limits), dimensions(&file, &limits)) {
                (Ok(found), Ok(size)) => {
                    prop_assert_eq!(size, (found.width, found.height));
                    prop_assert_eq!(found.data.len(), found.width * found.height * found.channels);
                    prop_assert!(found.data.len() <= 1 << 16);
                }
                (found, _) => prop_assert!(found.is_err()),
            }
        }
    }
}
