//! What other tools have written.

use safetensors::SafeTensors;

use super::*;
use crate::quant::golden::{components, f32s};

fn golden_quant(params: &[i32]) -> ExpertQuant {
    let fmt = match params[0] {
        4 => ExpertFmt::Vq3r,
        5 => ExpertFmt::Vq2r,
        _ => ExpertFmt::Vq4p,
    };
    let quant = ExpertQuant::new(fmt, params[1] as u32, params[2] as u32);
    assert_eq!((quant.index_bits as i32, quant.index_block as i32), (params[3], params[4]));
    quant
}

#[test]
fn golden_records_decode() {
    let file = components("vq.safetensors");
    let tensors = SafeTensors::deserialize(&file).unwrap();
    for case in ["vq3r", "vq2r", "vq4p"] {
        let bytes = |part: &str| tensors.tensor(&format!("{case}.{part}")).unwrap().data();
        let params: Vec<i32> =
            bytes("params").chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
        let quant = golden_quant(&params);
        let geometry = Geometry::new(&quant, params[5] as u64, params[6] as u64).unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(CODEBOOKS), bytes("codebooks")).unwrap();
        let books = CodebookFile::new(Source::open(dir.path(), CODEBOOKS).unwrap(), quant.entries).unwrap();
        let base = params[9] as u16;
        let expected = Expected {
            file: Path::new("golden"),
            layer: params[7] as u16,
            expert: params[8] as u16,
            codebook_base: base,
            codebook_count: books.count(),
            geometry: &geometry,
        };
        let record = RecordView::check(bytes("record"), &expected).unwrap();
        record.verify_crc(&expected).unwrap();
        record.verify_padding(&expected).unwrap();
        record.verify_indices(&expected).unwrap();
        assert_eq!(i32::from(record.header().fmt), params[0]);
        for id in 0..u32::from(base) {
            books.check_unnamed(id, &books.read(id).unwrap(), false).unwrap();
        }
        let books = books.read_layer(base, &quant).unwrap();
        for kind in Kind::ALL {
            let layout = geometry.layout(kind);
            let mut found = vec![f32::NAN; layout.rows() * layout.cols()];
            record.matrix(kind).decode(&books.tables(kind), &mut found).unwrap();
            let wanted = f32s(&tensors, &format!("{case}.{}", kind.name()));
            assert_eq!(found.len(), wanted.len());
            for (found, wanted) in found.iter().zip(&wanted) {
                assert!((found - wanted).abs() <= 1e-6, "{case} {}: {found} {wanted}", kind.name());
            }
            // Encoding what was decoded gives the same payload.
            let payload = record.indices(kind);
            assert_eq!(layout.pack(&layout.unpack(payload)).unwrap(), payload);
        }
        let scales = Kind::ALL.map(|kind| {
            let bytes = record.scale_bytes(kind).chunks_exact(2);
            bytes.map(|b| u16::from_le_bytes([b[0], b[1]])).collect::<Vec<_>>()
        });
        let matrices = Kind::ALL
            .map(|kind| MatrixData { indices: record.indices(kind), scales: &scales[kind as usize] });
        let again = encode_record(expected.layer, expected.expert, base, &geometry, matrices);
        assert_eq!(again, bytes("record"), "{case} record");

        // Published VQ2R banks say 4; 6-bit indices go with 8 alone.
        let accepted: Vec<u8> = (0..=255)
            .filter(|fmt| {
                let mut record = bytes("record").to_vec();
                record[8] = *fmt;
                RecordView::check(&record, &expected).is_ok()
            })
            .collect();
        assert_eq!(accepted, if case == "vq4p" { vec![8] } else { vec![4, 5] });
    }
}

#[test]
fn a_k3_record_has_3029_pages() {
    let quant = ExpertQuant::new(ExpertFmt::Vq3r, 3, 256);
    let geometry = Geometry::new(&quant, 3072, 3584).unwrap();
    assert_eq!(geometry.record_bytes(), 12_406_784);
    assert_eq!(geometry.record_bytes() / 4096, 3029);
    let packed = Geometry::new(&ExpertQuant::new(ExpertFmt::Vq4p, 4, 64), 3072, 3584).unwrap();
    assert_eq!(packed.record_bytes(), geometry.record_bytes());
}

#[test]
fn containers_of_another_tool_open_and_verify() {
    for (name, records, tensors) in [("tiny-linear.waste", 4 * 16, 91), ("tiny-k3.waste", 6 * 18, 208)] {
        let container = Container::open(&interop(name)).unwrap();
        assert_eq!(read_all(&container).unwrap(), (records, tensors), "{name}");
        assert!(container.manifest().integrity.is_none());
        let entry = container.trunk().require("no such tensor").unwrap_err();
        assert!(entry.to_string().contains("no such tensor"));
    }
}

#[test]
fn a_manifest_survives_rewriting() {
    for name in ["tiny-linear.waste", "tiny-k3.waste"] {
        let file = interop(name).join(MANIFEST);
        let mut source: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        source["a future key"] = serde_json::json!({"x": [1, 2.5]});
        source["trunk"][3]["another"] = true.into();
        source["layers"]["1"]["another"] = 1.into();
        source["expert_quant"]["another"] = "x".into();
        let manifest = Manifest::parse(&file, source.to_string().as_bytes()).unwrap();
        let bytes = manifest.to_bytes().unwrap();
        let again: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(again, source);
        // Order too: the config is verbatim.
        assert_eq!(again["config"].to_string(), source["config"].to_string());
        assert_eq!(Manifest::parse(&file, &bytes).unwrap(), manifest);
    }
}
