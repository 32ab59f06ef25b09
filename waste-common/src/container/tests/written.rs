//! Writing and reading back.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::writer::*;
use super::*;
use crate::error::{Coded, Exit};
use crate::quant::half::{f16_to_f32, f32_to_f16};

/// A small model of random weights; deterministic in its fields.
#[derive(Debug, Clone)]
struct Plan {
    fmt: ExpertFmt,
    stages: u32,
    entries: u32,
    inter: u64,
    input: u64,
    layers: Vec<(u16, u16)>,
    experts: u32,
    seed: u64,
}

fn plans() -> impl Strategy<Value = Plan> {
    let quant = prop_oneof![
        (1u32..=8, 1u32..=256).prop_map(|(stages, entries)| (ExpertFmt::Vq3r, stages, entries)),
        (1u32..=256).prop_map(|entries| (ExpertFmt::Vq2r, 2, entries)),
        (1u32..=64).prop_map(|entries| (ExpertFmt::Vq4p, 4, entries)),
    ];
    (quant, 1u64..20, 1u64..20, 1u16..4, 0u16..3, 1u32..5, any::<u64>()).prop_map(
        |((fmt, stages, entries), inter, input, layers, gap, experts, seed)| {
            // Bases run against the layer numbers, with gaps.
            let stride = 3 * stages as u16 + gap;
            let layers = (0..layers).map(|i| (i + 1, (layers - 1 - i) * stride + gap)).collect();
            Plan { fmt, stages, entries, inter: inter * 8, input: input * 8, layers, experts, seed }
        },
    )
}

impl Plan {
    fn quant(&self) -> ExpertQuant {
        ExpertQuant::new(self.fmt, self.stages, self.entries)
    }

    fn geometry(&self) -> Geometry {
        Geometry::new(&self.quant(), self.inter, self.input).unwrap()
    }

    fn indices(&self, layer: u16, expert: u32, kind: Kind) -> Vec<u8> {
        let layout = *self.geometry().layout(kind);
        let count = layout.rows() * layout.vectors() * layout.stages();
        let seed = self.seed ^ u64::from(layer) << 32 ^ u64::from(expert) << 8 ^ kind as u64;
        let index = |x: &f32| (((x + 1.0) / 2.0 * self.entries as f32) as u32).min(self.entries - 1) as u8;
        noise(seed, count).iter().map(index).collect()
    }

    fn scales(&self, layer: u16, expert: u32, kind: Kind) -> Vec<u16> {
        let seed = self.seed ^ 1 ^ u64::from(layer) << 32 ^ u64::from(expert) << 8 ^ kind as u64;
        noise(seed, self.geometry().layout(kind).rows()).iter().map(|x| f32_to_f16(*x)).collect()
    }

    fn books(&self, layer: u16) -> Vec<Vec<u16>> {
        let len = self.entries as usize * 8;
        let values = noise(self.seed ^ 2 ^ u64::from(layer), 3 * self.stages as usize * len);
        values.chunks(len).map(|book| book.iter().map(|x| f32_to_f16(*x)).collect()).collect()
    }

    fn write_layer(&self, dir: &Path, layer: u16, base: u16) -> Bank {
        let geometry = self.geometry();
        let mut bank = BankWriter::create(dir, layer, base, &geometry).unwrap();
        for expert in 0..self.experts {
            let payloads =
                Kind::ALL.map(|kind| geometry.layout(kind).pack(&self.indices(layer, expert, kind)).unwrap());
            let scales = Kind::ALL.map(|kind| self.scales(layer, expert, kind));
            let matrices = Kind::ALL
                .map(|kind| MatrixData { indices: &payloads[kind as usize], scales: &scales[kind as usize] });
            bank.push(matrices).unwrap();
        }
        write_codebook_part(dir, layer, base, &self.quant(), &self.books(layer)).unwrap();
        bank.finish().unwrap()
    }

    fn tensors(&self) -> Vec<(String, Vec<u64>, TrunkFmt, Vec<f32>)> {
        let fmts = [TrunkFmt::F32, TrunkFmt::F16, TrunkFmt::Q8g, TrunkFmt::Q4g, TrunkFmt::Q3g];
        let shapes = [vec![self.inter], vec![3, self.input + 1], vec![2, 3, self.inter], vec![2, 1, 5, 14]];
        let mut tensors = Vec::new();
        for fmt in fmts {
            for shape in &shapes {
                let count = shape.iter().product::<u64>() as usize;
                let name = format!("{}.{}", fmt.name(), shape.len());
                tensors.push((name, shape.clone(), fmt, noise(self.seed ^ 3, count)));
            }
        }
        tensors
    }

    fn write_trunk(&self, dir: &Path) -> Vec<TrunkEntry> {
        let mut trunk = TrunkWriter::create(dir).unwrap();
        for (name, shape, fmt, data) in self.tensors() {
            trunk.push_tensor(&name, &shape, fmt, &data).unwrap();
        }
        trunk.finish().unwrap()
    }

    fn manifest(&self, layers: BTreeMap<u32, Bank>, trunk: Vec<TrunkEntry>) -> Manifest {
        Manifest {
            arch: "kimi-linear".into(),
            tensor_prefix: String::new(),
            config: serde_json::json!({
                "num_hidden_layers": 9, "hidden_size": 7, "routed_expert_hidden_size": self.input,
                "moe_intermediate_size": self.inter,
            }),
            expert_quant: self.quant(),
            layers,
            trunk,
            integrity: None,
            extra: Default::default(),
        }
    }

    fn write(&self, dir: &Path) -> Manifest {
        let writer = ContainerWriter::create(dir).unwrap();
        let layers = self
            .layers
            .iter()
            .map(|(layer, base)| (u32::from(*layer), self.write_layer(dir, *layer, *base)))
            .collect();
        let trunk = self.write_trunk(dir);
        writer.sidecar("tokenizer.model", b"ranks").unwrap();
        writer.commit(self.manifest(layers, trunk), &["tokenizer.model"]).unwrap()
    }
}

fn small(fmt: ExpertFmt) -> Plan {
    let (stages, entries) = if fmt == ExpertFmt::Vq4p { (4, 64) } else { (3, 16) };
    Plan { fmt, stages, entries, inter: 24, input: 72, layers: vec![(1, 0), (3, 16)], experts: 3, seed: 5 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn what_is_written_reads_back(plan in plans()) {
        let dir = tempfile::tempdir().unwrap();
        let manifest = plan.write(dir.path());
        let container = Container::open(dir.path()).unwrap();
        prop_assert_eq!(container.manifest(), &manifest);
        let tensors = plan.tensors();
        prop_assert_eq!(
            read_all(&container).unwrap(),
            (plan.layers.len() * plan.experts as usize, tensors.len())
        );
        let geometry = container.geometry().unwrap();
        for (layer, _) in &plan.layers {
            let books = container.layer_codebooks((*layer).into()).unwrap();
            let wanted = plan.books(*layer);
            for kind in Kind::ALL {
                for stage in 0..plan.stages as usize {
                    let bits = &wanted[kind as usize * plan.stages as usize + stage];
                    let values: Vec<f32> = bits.iter().map(|b| f16_to_f32(*b)).collect();
                    prop_assert_eq!(books.table(kind, stage), &values[..]);
                }
            }
            let bank = container.bank((*layer).into()).unwrap();
            let mut buffer = vec![0; geometry.record_bytes()];
            for expert in 0..plan.experts {
                let record = bank.read(expert as u16, &mut buffer).unwrap();
                prop_assert_eq!(record.header().fmt, plan.fmt.code());
                for kind in Kind::ALL {
                    let matrix = record.matrix(kind);
                    prop_assert_eq!(
                        geometry.layout(kind).unpack(matrix.indices()),
                        plan.indices(*layer, expert, kind)
                    );
                    for (row, scale) in plan.scales(*layer, expert, kind).iter().enumerate() {
                        prop_assert_eq!(matrix.scale(row), f16_to_f32(*scale));
                    }
                }
            }
        }
        for (name, shape, fmt, data) in tensors {
            let entry = container.trunk().get(&name).unwrap();
            prop_assert_eq!(&entry.shape, &shape);
            let found = container.trunk().decode(entry).unwrap();
            let step = match fmt {
                TrunkFmt::F32 => 0.0,
                TrunkFmt::F16 => 1e-3,
                TrunkFmt::Q8g => 0.6 / 127.0,
                TrunkFmt::Q4g => 0.6 / 7.0,
                TrunkFmt::Q3g => 0.6 / 3.0,
            };
            for (found, wanted) in found.iter().zip(&data) {
                prop_assert!((found - wanted).abs() <= step, "{name}: {found} {wanted}");
            }
        }
        for (name, sum) in &manifest.integrity.as_ref().unwrap().files {
            integrity::check_file(dir.path(), name, sum).unwrap();
        }
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        let work = |name: &str| name.ends_with(".tmp") || name.starts_with("codebooks-L") || name == TRUNK_INDEX;
        prop_assert!(!left.iter().any(|name| work(name.to_str().unwrap())), "{left:?}");
    }
}

#[test]
fn the_same_model_gives_the_same_bytes() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let plan = small(ExpertFmt::Vq4p);
    plan.write(one.path());
    // Layers in another order, one written twice.
    let writer = ContainerWriter::create(two.path()).unwrap();
    let trunk = plan.write_trunk(two.path());
    let mut layers = BTreeMap::new();
    for (layer, base) in [plan.layers[1], plan.layers[0], plan.layers[1]] {
        layers.insert(u32::from(layer), plan.write_layer(two.path(), layer, base));
    }
    writer.sidecar("tokenizer.model", b"ranks").unwrap();
    writer.commit(plan.manifest(layers, trunk), &["tokenizer.model"]).unwrap();
    for entry in fs::read_dir(one.path()).unwrap() {
        let name = entry.unwrap().file_name();
        let read = |dir: &Path| fs::read(dir.join(&name)).unwrap();
        assert!(read(one.path()) == read(two.path()), "{name:?} differs");
    }
}

#[test]
fn finished_layers_are_recognised_by_what_is_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let plan = small(ExpertFmt::Vq3r);
    let (geometry, quant) = (plan.geometry(), plan.quant());
    let done = |experts| finished_layer(dir.path(), 3, experts, &geometry, &quant).unwrap();
    assert_eq!(done(3), None);
    plan.write_layer(dir.path(), 3, 16);
    assert_eq!(done(3), Some(16));
    assert_eq!(done(2), None);
    // A part of another base does not belong to this bank.
    write_codebook_part(dir.path(), 3, 9, &quant, &plan.books(3)).unwrap();
    assert_eq!(done(3), None);
    fs::remove_file(dir.path().join(codebook_part_name(3))).unwrap();
    assert_eq!(done(3), None);

    assert_eq!(finished_trunk(dir.path()).unwrap(), None);
    let entries = plan.write_trunk(dir.path());
    assert_eq!(finished_trunk(dir.path()).unwrap(), Some(entries));
    fs::write(dir.path().join(TRUNK), b"short").unwrap();
    assert_eq!(finished_trunk(dir.path()).unwrap(), None);
}

#[test]
fn a_layer_added_later_keeps_the_codebooks_of_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let plan = small(ExpertFmt::Vq3r);
    let first = Plan { layers: vec![(1, 0)], ..plan.clone() };
    let manifest = first.write(dir.path());
    let writer = ContainerWriter::create(dir.path()).unwrap();
    let mut layers = manifest.layers.clone();
    layers.insert(3, plan.write_layer(dir.path(), 3, 16));
    writer.commit(Manifest { layers, ..manifest }, &["tokenizer.model"]).unwrap();
    let container = Container::open(dir.path()).unwrap();
    assert_eq!(read_all(&container).unwrap().0, 6);
    assert_eq!(container.codebooks().unwrap().count(), 16 + 9);
}

#[test]
fn nothing_inconsistent_is_committed() {
    let dir = tempfile::tempdir().unwrap();
    let plan = small(ExpertFmt::Vq3r);
    let bank = plan.write_layer(dir.path(), 1, 0);
    let other = plan.write_layer(dir.path(), 3, 8);
    let trunk = plan.write_trunk(dir.path());
    let commit = |manifest: Manifest, sidecars: &[&str]| {
        ContainerWriter::create(dir.path()).unwrap().commit(manifest, sidecars).unwrap_err()
    };
    let good = plan.manifest([(1, bank.clone())].into(), trunk);
    let overlapping = Manifest { layers: [(1, bank.clone()), (3, other)].into(), ..good.clone() };
    assert!(commit(overlapping, &[]).to_string().contains("codebook"));
    let wrong_size = Bank { experts: 4, ..bank };
    commit(Manifest { layers: [(1, wrong_size)].into(), ..good.clone() }, &[]);
    commit(good.clone(), &["absent.json"]);
    let mut short = good.clone();
    short.trunk[0].bytes += 4;
    commit(short, &[]);
    assert!(!dir.path().join(MANIFEST).exists() && !dir.path().join(MANIFEST_SHA256).exists());

    let writer = ContainerWriter::create(dir.path()).unwrap();
    assert_eq!(ContainerWriter::create(dir.path()).unwrap_err().exit(), Exit::Locked);
    assert!(writer.sidecar("../x", b"").is_err());
    let mut trunk = TrunkWriter::create(dir.path()).unwrap();
    assert!(trunk.tensor("x", &[1, 2, 3, 4, 5], TrunkFmt::F32).is_err());
    let mut tensor = trunk.tensor("x", &[2, 128], TrunkFmt::Q8g).unwrap();
    tensor.rows(&[1.0; 128]).unwrap();
    assert!(tensor.finish().is_err());
    assert!(trunk.finish().is_err());
}
