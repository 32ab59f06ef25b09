//! Damaged and hostile containers: refused with a reason, never a panic.

use serde_json::{Value, json};

use super::*;

/// splitmix64: the same mutations on every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A few bytes overwritten, or cut off.
    fn damage(&mut self, bytes: &mut Vec<u8>, within: usize) {
        if self.below(8) == 0 {
            bytes.truncate(self.below(bytes.len()));
            return;
        }
        for _ in 0..=self.below(4) {
            let at = self.below(within);
            bytes[at] = match self.below(3) {
                0 => bytes[at] ^ 1 << self.below(8),
                1 => [0, 0xff, b'9', b'"', b'{', b'-'][self.below(6)],
                _ => self.next() as u8,
            };
        }
    }
}

fn linear() -> (PathBuf, Value) {
    let dir = interop("tiny-linear.waste");
    let value = serde_json::from_slice(&fs::read(dir.join(MANIFEST)).unwrap()).unwrap();
    (dir, value)
}

fn open(dir: &Path, manifest: &[u8]) -> Result<Container, ContainerError> {
    let manifest = Manifest::parse(&dir.join(MANIFEST), manifest)?;
    Container::with_manifest(dir, manifest, String::new())
}

/// JSON pointers of all scalars.
fn scalars(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Object(keys) => keys.iter().for_each(|(k, v)| scalars(v, format!("{at}/{k}"), found)),
        Value::Array(values) => {
            values.iter().enumerate().for_each(|(i, v)| scalars(v, format!("{at}/{i}"), found));
        }
        _ => found.push(at),
    }
}

#[test]
fn every_scalar_of_a_manifest_may_be_anything() {
    let (dir, source) = linear();
    let mut pointers = Vec::new();
    scalars(&source, String::new(), &mut pointers);
    let values = [
        json!(0),
        json!(1),
        json!(-1.5),
        json!(u32::MAX),
        json!(u64::MAX),
        json!("../../etc/passwd"),
        json!(null),
    ];
    let (mut opened, mut refused) = (0, 0);
    for pointer in pointers {
        for value in &values {
            let mut changed = source.clone();
            *changed.pointer_mut(&pointer).unwrap() = value.clone();
            match open(&dir, changed.to_string().as_bytes()) {
                Ok(container) => {
                    opened += 1;
                    // What opens can be read to the end, or says why not.
                    if !pointer.starts_with("/config") && opened % 16 == 0 {
                        let _ = read_all(&container);
                    }
                }
                Err(error) => {
                    refused += 1;
                    assert!(!error.to_string().is_empty());
                }
            }
        }
    }
    assert!(opened > 200 && refused > 2000, "{opened} opened, {refused} refused");
}

#[test]
fn mutated_manifests_never_panic() {
    let (dir, source) = linear();
    let source = source.to_string().into_bytes();
    let mut random = Random(1);
    for _ in 0..3000 {
        let mut bytes = source.clone();
        random.damage(&mut bytes, source.len());
        let _ = open(&dir, &bytes);
    }
}

#[test]
fn mutated_records_never_panic() {
    let container = Container::open(&interop("tiny-linear.waste")).unwrap();
    let bank = container.bank(1).unwrap();
    let books = container.layer_codebooks(1).unwrap();
    let mut record = vec![0; container.geometry().unwrap().record_bytes()];
    bank.read(2, &mut record).unwrap();
    let expected = bank.expected(2);
    let mut random = Random(2);
    let mut out = vec![0.0; 40 * 256];
    let mut accepted = 0;
    for i in 0..3000 {
        let mut bytes = record.clone();
        let within = if i % 2 == 0 { record::HEADER_BYTES } else { bytes.len() };
        random.damage(&mut bytes, within);
        if let Ok(view) = RecordView::check(&bytes, &expected) {
            accepted += 1;
            let _ = view.verify_crc(&expected);
            let _ = view.verify_padding(&expected);
            if i % 16 == 1 {
                let _ = view.verify_indices(&expected);
                let _ = view.matrix(Kind::Gate).decode(&books.tables(Kind::Gate), &mut out);
            }
        }
    }
    assert!(accepted > 1000, "{accepted}");
}

#[test]
fn mutated_codebooks_never_panic() {
    let quant = ExpertQuant::new(ExpertFmt::Vq2r, 2, 5);
    let source: Vec<u8> = (0..12).flat_map(|id| encode_codebook(id, &[0x3c00; 40])).collect();
    let dir = tempfile::tempdir().unwrap();
    let mut random = Random(3);
    let (mut read, mut refused) = (0, 0);
    for _ in 0..3000 {
        let mut bytes = source.clone();
        random.damage(&mut bytes, source.len());
        fs::write(dir.path().join(CODEBOOKS), &bytes).unwrap();
        let opened = CodebookFile::new(Source::open(dir.path(), CODEBOOKS).unwrap(), quant.entries);
        match opened.and_then(|books| books.read_layer(6, &quant)) {
            Ok(_) => read += 1,
            Err(_) => refused += 1,
        }
    }
    assert!(read > 500 && refused > 500, "{read} {refused}");
}

#[test]
fn every_header_bit_is_guarded() {
    let dir = copy_of("tiny-linear.waste");
    let path = dir.path().join("experts-L1.bin");
    let container = Container::open(dir.path()).unwrap();
    let bank = container.bank(1).unwrap();
    let sum = integrity::bank_sum(&bank).unwrap();
    let stride = container.geometry().unwrap().record_bytes();
    let mut record = vec![0; stride];
    bank.read(1, &mut record).unwrap();
    let (mut at_once, mut by_crc, mut by_sum) = (0, 0, 0);
    for bit in 0..8 * record::HEADER_BYTES {
        record[bit / 8] ^= 1 << (bit % 8);
        match RecordView::check(&record, &bank.expected(1)) {
            Err(ContainerError::Record { layer: 1, expert: 1, .. }) => at_once += 1,
            Err(error) => panic!("{error}"),
            Ok(view) if view.verify_crc(&bank.expected(1)).is_err() => by_crc += 1,
            // The flags byte, and fmt 5 instead of 4, are legal for a v0 reader.
            Ok(_) => {
                let mut file = fs::read(&path).unwrap();
                file[stride..2 * stride].copy_from_slice(&record);
                let original = fs::read(&path).unwrap();
                fs::write(&path, file).unwrap();
                assert_ne!(integrity::bank_sum(&bank).unwrap(), sum, "bit {bit}");
                fs::write(&path, original).unwrap();
                by_sum += 1;
            }
        }
        record[bit / 8] ^= 1 << (bit % 8);
    }
    assert_eq!((at_once, by_crc, by_sum), (384 - 32 - 9, 32, 9));
}

#[test]
fn a_wrong_record_is_named() {
    let container = Container::open(&interop("tiny-linear.waste")).unwrap();
    let bank = container.bank(2).unwrap();
    let mut record = vec![0; container.geometry().unwrap().record_bytes()];
    bank.read(3, &mut record).unwrap();
    let error = RecordView::check(&record, &bank.expected(4)).unwrap_err().to_string();
    for part in ["experts-L2.bin", "layer 2", "expert 4", "expert_id is 3", "expected 4"] {
        assert!(error.contains(part), "{error}");
    }
    let mut expected = bank.expected(3);
    expected.codebook_count = 17;
    assert!(RecordView::check(&record, &expected).unwrap_err().to_string().contains("codebook_id"));
    assert!(RecordView::check(&record[..4096], &bank.expected(3)).is_err());
    // A header can be judged alone, and a payload past a header that is not believed.
    let geometry = container.geometry().unwrap();
    RecordView::check_header(&record[..48], &bank.expected(3)).unwrap();
    assert!(RecordView::check_header(&record[..47], &bank.expected(3)).is_err());
    assert!(RecordView::check_header(&record[..48], &bank.expected(4)).is_err());
    assert!(RecordView::unchecked(&record[..48], geometry).is_none());
    RecordView::unchecked(&record, geometry).unwrap().verify_crc(&bank.expected(4)).unwrap();
    record[100] ^= 1;
    let error = RecordView::check(&record, &bank.expected(3)).unwrap().verify_crc(&bank.expected(3));
    assert!(error.unwrap_err().to_string().contains("crc32"));
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let (dir, source) = linear();
    let mut overlap = source["trunk"][1].clone();
    overlap["name"] = "overlapping".into();
    for (pointer, value, wanted) in [
        ("/format_version", json!(1), "format_version is 1"),
        ("/format_version", json!("0"), "format_version is \"0\""),
        ("/format_version", json!(0.0), "format_version is 0.0"),
        ("/expert_quant/index_block", json!(1), "index_block: 1; only 64"),
        ("/expert_quant/vec_dim", json!(4), "vec_dim: 4"),
        ("/expert_quant/stages", json!(0), "stages: 0"),
        ("/expert_quant/stages", json!(9), "stages: 9"),
        ("/expert_quant/entries", json!(0), "entries: 0"),
        ("/expert_quant/entries", json!(257), "entries: 257"),
        ("/expert_quant/index_bits", json!(6), "index_bits"),
        ("/expert_quant/index_bits", json!(7), "index_bits"),
        ("/expert_quant/fmt", json!("VQ5X"), "VQ5X"),
        ("/layers/1/file", json!("../experts-L1.bin"), "path separator"),
        ("/layers/1/file", json!("trunk.bin"), "another file"),
        ("/layers/1/file", json!("experts-L2.bin"), "another file"),
        ("/layers/1/experts", json!(0), "experts: 0"),
        ("/layers/1/codebook_base", json!(8), "lies within"),
        ("/layers/1/codebook_base", json!(9), "the same as"),
        ("/config/num_hidden_layers", json!(4), "layers.4"),
        ("/config/moe_intermediate_size", json!(0), "moe_intermediate_size"),
        ("/config/moe_intermediate_size", json!(42), "multiple of 8"),
        ("/config/moe_intermediate_size", json!(400), "needs"),
        ("/config", json!([]), "config"),
        ("/trunk/0/fmt", json!(4), "fmt 4 (VQ3R)"),
        ("/trunk/0/fmt", json!(5), "fmt 5 (VQ2R)"),
        ("/trunk/0/fmt", json!(6), "fmt 6 (SUB1)"),
        ("/trunk/0/fmt", json!(8), "fmt 8 (VQ4P)"),
        ("/trunk/0/fmt", json!(9), "fmt 9 (unknown)"),
        ("/trunk/0/group", json!(0), "group is 0"),
        ("/trunk/0/group", json!(64), "group is 64"),
        ("/trunk/0/shape", json!([1, 2, 3, 4, 5]), "1 to 4 dimensions"),
        ("/trunk/0/shape", json!([1u64 << 40, 1u64 << 40]), "too large"),
        ("/trunk/0/scale_off", json!(0), "scale_off"),
        ("/trunk/0/off", json!(u64::MAX), "overflows"),
        ("/trunk/0/bytes", json!(1), "bytes is 1"),
        ("/trunk/0/name", json!("model.embed_tokens.weight"), "twice"),
        ("/trunk/0", overlap, "overlap"),
        ("/trunk/2/off", json!(1u64 << 40), "trunk.bin has"),
    ] {
        let mut changed = source.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        let error = open(&dir, changed.to_string().as_bytes()).err().map(|error| error.to_string());
        assert!(error.as_ref().is_some_and(|e| e.contains(wanted)), "{pointer}, {wanted}: {error:?}");
    }
    for key in ["format_version", "arch", "config", "expert_quant", "layers", "trunk"] {
        let mut changed = source.clone();
        changed.as_object_mut().unwrap().remove(key);
        let error = open(&dir, changed.to_string().as_bytes()).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
    for layers in ["01", "+1", "x", "65536", "-1", ""] {
        let mut changed = source.clone();
        let bank = changed["layers"]["1"].clone();
        changed["layers"] = json!({ layers: bank });
        assert!(open(&dir, changed.to_string().as_bytes()).is_err(), "{layers}");
    }
}

#[test]
fn files_of_the_wrong_size_are_refused_at_open() {
    for (name, bytes) in [
        ("experts-L2.bin", 327_679),
        ("experts-L2.bin", 327_680 + 4096),
        ("trunk.bin", 4_679_703),
        ("codebooks.bin", 148_031),
        ("codebooks.bin", 35 * 4112),
    ] {
        let dir = copy_of("tiny-linear.waste");
        let file = fs::OpenOptions::new().write(true).open(dir.path().join(name)).unwrap();
        file.set_len(bytes).unwrap();
        let error = Container::open(dir.path()).unwrap_err();
        assert!(matches!(&error, ContainerError::Size { file, .. } if file.ends_with(name)), "{error}");
    }
    for name in ["experts-L2.bin", "trunk.bin", "codebooks.bin", "manifest.json"] {
        let dir = copy_of("tiny-linear.waste");
        fs::remove_file(dir.path().join(name)).unwrap();
        assert!(Container::open(dir.path()).unwrap_err().to_string().contains(name));
    }
}

#[test]
fn a_flipped_bit_anywhere_is_found_by_the_checksums() {
    let dir = copy_of("tiny-linear.waste");
    let manifest = Container::open(dir.path()).unwrap().manifest().clone();
    let mut manifest = manifest;
    let source = Source::open(dir.path(), TRUNK).unwrap();
    for entry in &mut manifest.trunk {
        entry.crc32 = Some(integrity::crc32_of(&source, entry.off, entry.bytes).unwrap());
    }
    let sidecars = ["tokenizer.model", "specials.json"];
    writer::ContainerWriter::create(dir.path()).unwrap().commit(manifest, &sidecars).unwrap();
    let verify = || -> Result<(), ContainerError> {
        let container = Container::open(dir.path())?;
        read_all(&container)?;
        let sums = container.manifest().integrity.as_ref().unwrap();
        assert_eq!(sums.files.len(), 2);
        sums.files.iter().try_for_each(|(name, sum)| integrity::check_file(dir.path(), name, sum))
    };
    verify().unwrap();
    let mut random = Random(4);
    let mut tried = 0;
    for entry in fs::read_dir(interop("tiny-linear.waste")).unwrap() {
        let path = dir.path().join(entry.unwrap().file_name());
        let original = fs::read(&path).unwrap();
        for _ in 0..4 {
            let mut changed = original.clone();
            changed[random.below(original.len())] ^= 1 << random.below(8);
            fs::write(&path, changed).unwrap();
            assert!(verify().is_err(), "{}", path.display());
            tried += 1;
        }
        fs::write(&path, original).unwrap();
    }
    assert_eq!(tried, 4 * 9);
    verify().unwrap();
}

#[test]
fn a_manifest_digest_that_does_not_fit_is_refused() {
    let dir = copy_of("tiny-linear.waste");
    let digest = integrity::sha256_hex(&fs::read(dir.path().join(MANIFEST)).unwrap());
    let open = |line: &str| {
        fs::write(dir.path().join(MANIFEST_SHA256), line).unwrap();
        Container::open(dir.path())
    };
    open(&format!("{digest}  manifest.json\n")).unwrap();
    let upper = digest.to_uppercase();
    for line in ["", "\n", "00  manifest.json\n", &format!("{digest}  other.json\n"), &"ab".repeat(1 << 20)] {
        assert!(matches!(open(line), Err(ContainerError::Unusable { .. })), "{line:.80}");
    }
    // Whatever sha256sum does not write.
    for line in [
        format!("{upper}  manifest.json\n"),
        format!("{digest} *manifest.json\n"),
        format!("{digest} manifest.json\n"),
        format!("{digest}\tmanifest.json\n"),
        format!("{digest}   manifest.json\n"),
        format!(" {digest}  manifest.json\n"),
        format!("{digest}  manifest.json\r\n"),
        format!("{digest}  manifest.json"),
        format!("{digest}  manifest.json\n\n"),
        format!("{digest}\n"),
        digest.clone(),
    ] {
        assert!(matches!(open(&line), Err(ContainerError::Unusable { .. })), "{line:?}");
    }
    let other = format!("{}  manifest.json\n", "0".repeat(64));
    assert!(matches!(open(&other), Err(ContainerError::Checksum { .. })));
}
