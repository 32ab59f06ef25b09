//! An expert record: what passes the checks has every part.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use waste_common::container::{Expected, Geometry, Kind, RecordView};
use waste_common::plan::usual_quant;

static GEOMETRY: LazyLock<Geometry> = LazyLock::new(|| Geometry::new(&usual_quant(), 64, 32).expect("a shape"));

fuzz_target!(|data: &[u8]| {
    // Most inputs are short: the rest is zeros, and the magic is given, so that the other fields are reached.
    let mut record = vec![0; GEOMETRY.record_bytes()];
    let given = data.len().min(record.len());
    record[..given].copy_from_slice(&data[..given]);
    if data.first().is_some_and(|byte| byte % 2 == 0) {
        record[..4].copy_from_slice(b"WEXP");
    }
    let expected = Expected {
        file: Path::new("experts-L1.bin"),
        layer: 1,
        expert: 0,
        codebook_base: 0,
        codebook_count: 9,
        geometry: &GEOMETRY,
    };
    let _ = RecordView::check_header(data, &expected);
    if let Ok(view) = RecordView::check(&record, &expected) {
        for kind in Kind::ALL {
            assert!(!view.indices(kind).is_empty() && !view.scale_bytes(kind).is_empty());
        }
        let _ = view.verify_crc(&expected);
        let _ = view.verify_padding(&expected);
        let _ = view.verify_indices(&expected);
    }
});
