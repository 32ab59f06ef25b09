//! An image file: its header alone, then all of it, within small bounds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use waste_engine::vision::Limits;
use waste_engine::vision::decode::{decode, dimensions};

fuzz_target!(|data: &[u8]| {
    let limits = Limits { encoded: 1 << 20, side: 4096, decoded: 1 << 20 };
    let measured = dimensions(data, &limits);
    if let Ok(bitmap) = decode(data, &limits) {
        assert_eq!(measured.expect("what can be decoded can be measured"), (bitmap.width, bitmap.height));
    }
});
