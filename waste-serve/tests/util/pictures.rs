//! Images, and how requests have them.

#![allow(dead_code)] // not every file of tests needs all

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use waste_tests::files::data;

/// Takes 6 positions; its markup is `image 75x53`.
pub const IMAGE: &str = "golden/tiny-k3/image.png";
pub const OTHER: &str = "golden/components/rgb_exact.png";

pub fn file(name: &str) -> Vec<u8> {
    std::fs::read(data(name)).unwrap()
}

pub fn url(file: &[u8]) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(file))
}

pub fn picture(file: &[u8]) -> Value {
    json!({"type": "image_url", "image_url": {"url": url(file), "detail": "high"}})
}

pub fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

pub fn user(parts: &[Value]) -> Value {
    json!({"role": "user", "content": parts})
}

/// A PNG of this size whose pixels are all of one gray, or which has none at all.
pub fn png(width: u32, height: u32, gray: Option<u8>) -> Vec<u8> {
    let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut chunk = |kind: &[u8; 4], data: &[u8]| {
        out.extend((data.len() as u32).to_be_bytes());
        let body = [&kind[..], data].concat();
        out.extend(&body);
        out.extend(crc(&body).to_be_bytes());
    };
    chunk(b"IHDR", &[&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 0, 0, 0, 0]].concat());
    if let Some(gray) = gray {
        let row = [vec![0], vec![gray; width as usize]].concat();
        chunk(b"IDAT", &stored(&row.repeat(height as usize)));
    }
    chunk(b"IEND", b"");
    out
}

/// A zlib stream of one stored block.
fn stored(data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(data.len()).unwrap();
    let (mut a, mut b) = (1u32, 0u32);
    for byte in data {
        a = (a + u32::from(*byte)) % 65521;
        b = (b + a) % 65521;
    }
    let head = [&[0x78, 0x01, 1][..], &length.to_le_bytes(), &(!length).to_le_bytes()].concat();
    [&head[..], data, &(b << 16 | a).to_be_bytes()].concat()
}

fn crc(data: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !data.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}
