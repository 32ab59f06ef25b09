//! Small containers of random weights, and ways to run the tool on them.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use waste_common::cli::{Captured, Exit, run_captured};
use waste_common::config::ModelConfig;
use waste_common::container::writer::{BankWriter, ContainerWriter, TrunkWriter, write_codebook_part};
use waste_common::container::{
    Container, ExpertFmt, ExpertQuant, Geometry, Kind, Manifest, MatrixData, TrunkFmt,
};
use waste_common::quant::half::f32_to_f16;
use waste_common::tensors;
use waste_verify::{TOOL, run};

pub const EXPERTS: u32 = 3;
pub const LAYERS: [u16; 2] = [1, 2];
pub const RECORD: usize = 4096;

/// A generator that gives the same numbers for ever (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Between −1 and 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn units(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.unit()).collect()
    }
}

pub fn config() -> Value {
    json!({
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "bos_token_id": 1,
        "eos_token_id": 2, "first_k_dense_replace": 1, "hidden_size": 32, "hidden_act": "silu",
        "intermediate_size": 48, "kv_lora_rank": 16,
        "linear_attn_config": {"full_attn_layers": [3], "head_dim": 8, "kda_layers": [1, 2], "num_heads": 4,
            "short_conv_kernel_size": 4},
        "mla_use_nope": true, "moe_intermediate_size": 24, "moe_layer_freq": 1, "moe_renormalize": true,
        "moe_router_activation_func": "sigmoid", "num_attention_heads": 4, "num_expert_group": 1,
        "num_experts": EXPERTS, "num_experts_per_token": 2, "num_hidden_layers": 3, "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": null, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.0,
        "tie_word_embeddings": false, "topk_group": 1, "use_grouped_topk": true, "v_head_dim": 8,
        "vocab_size": 40,
    })
}

pub fn quant(fmt: ExpertFmt) -> ExpertQuant {
    match fmt {
        ExpertFmt::Vq3r => ExpertQuant::new(fmt, 3, 256),
        ExpertFmt::Vq2r => ExpertQuant::new(fmt, 2, 16),
        ExpertFmt::Vq4p => ExpertQuant::new(fmt, 4, 64),
    }
}

pub fn geometry(fmt: ExpertFmt) -> Geometry {
    Geometry::new(&quant(fmt), 24, 32).unwrap()
}

/// The first codebook of a layer: one slot before each layer's stays empty.
pub fn base(fmt: ExpertFmt, layer: u16) -> u16 {
    let stride = quant(fmt).codebooks_per_layer() as u16 + 1;
    (layer - 1) * stride + 1
}

fn write_layer(dir: &Path, fmt: ExpertFmt, layer: u16, random: &mut Random) -> waste_common::container::Bank {
    let (quant, geometry) = (quant(fmt), geometry(fmt));
    let mut bank = BankWriter::create(dir, layer, base(fmt, layer), &geometry).unwrap();
    for _ in 0..EXPERTS {
        let payloads = Kind::ALL.map(|kind| {
            let layout = geometry.layout(kind);
            let count = layout.rows() * layout.vectors() * layout.stages();
            let indices: Vec<u8> = (0..count).map(|_| random.below(quant.entries as usize) as u8).collect();
            layout.pack(&indices).unwrap()
        });
        let scales = Kind::ALL.map(|kind| {
            let rows = geometry.layout(kind).rows();
            (0..rows).map(|_| f32_to_f16(1.5 + random.unit())).collect::<Vec<_>>()
        });
        let data =
            |kind: Kind| MatrixData { indices: &payloads[kind as usize], scales: &scales[kind as usize] };
        bank.push(Kind::ALL.map(data)).unwrap();
    }
    let books: Vec<Vec<u16>> = (0..quant.codebooks_per_layer())
        .map(|_| random.units(quant.entries as usize * 8).into_iter().map(f32_to_f16).collect())
        .collect();
    write_codebook_part(dir, layer, base(fmt, layer), &quant, &books).unwrap();
    bank.finish().unwrap()
}

/// The smallest tokenizer there is: a token for each byte.
pub fn rank_file() -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |value: u8| char::from(DIGITS[usize::from(value & 63)]);
    (0..=255u8).map(|byte| format!("{}{}== {byte}\n", digit(byte >> 2), digit(byte << 4))).collect()
}

/// Writes a container of ours: every trunk format, all sidecars.
pub fn write(dir: &Path, fmt: ExpertFmt) {
    let mut random = Random(7 + fmt.code() as u64);
    let writer = ContainerWriter::create(dir).unwrap();
    let layers: BTreeMap<u32, _> =
        LAYERS.iter().map(|layer| (u32::from(*layer), write_layer(dir, fmt, *layer, &mut random))).collect();
    let config = config();
    let mut trunk = TrunkWriter::create(dir).unwrap();
    let fmts = [TrunkFmt::F32, TrunkFmt::Q8g, TrunkFmt::Q4g, TrunkFmt::F16, TrunkFmt::Q3g];
    for (i, spec) in tensors::trunk(&ModelConfig::from_container(&config).unwrap()).iter().enumerate() {
        let shape: Vec<u64> = spec.shape.iter().map(|dim| *dim as u64).collect();
        let data = random.units(spec.elements() as usize);
        trunk.push_tensor(&spec.name, &shape, fmts[i % fmts.len()], &data).unwrap();
    }
    let trunk = trunk.finish().unwrap();
    let ranks = rank_file();
    let sidecars: [(&str, &[u8]); 5] = [
        ("tokenizer.model", ranks.as_bytes()),
        ("specials.json", br#"[{"id":256,"text":"[EOS]"}]"#),
        ("vision.json", br#"{"patch_size":14}"#),
        ("chat.json", br#"{"format":"k3"}"#),
        ("chat_template.jinja", b"{{ messages }}"),
    ];
    for (name, content) in sidecars {
        writer.sidecar(name, content).unwrap();
    }
    let manifest = Manifest {
        arch: "kimi-linear".into(),
        tensor_prefix: String::new(),
        config,
        expert_quant: quant(fmt),
        layers,
        trunk,
        integrity: None,
        extra: Default::default(),
    };
    writer.commit(manifest, &sidecars.map(|(name, _)| name)).unwrap();
}

/// A container in a directory of its own.
pub struct Fixture {
    _home: TempDir,
    pub dir: PathBuf,
}

impl Fixture {
    pub fn new(fmt: ExpertFmt) -> Self {
        let fixture = Self::empty();
        write(&fixture.dir, fmt);
        fixture
    }

    pub fn empty() -> Self {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("m.waste");
        fs::create_dir(&dir).unwrap();
        Fixture { _home: home, dir }
    }

    /// A copy of a container that another tool has written.
    pub fn interop(name: &str) -> Self {
        let fixture = Self::empty();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/interop").join(name);
        for entry in fs::read_dir(source).unwrap() {
            let entry = entry.unwrap();
            fs::write(fixture.path(entry.file_name().to_str().unwrap()), fs::read(entry.path()).unwrap())
                .unwrap();
        }
        fixture
    }

    /// A path beside the container.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.dir.parent().unwrap().join(name)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    pub fn set(&self, name: &str, content: &[u8]) {
        fs::write(self.path(name), content).unwrap();
    }

    pub fn open(&self) -> Container {
        Container::open(&self.dir).unwrap()
    }

    /// Changes the manifest and its checksum file.
    pub fn edit_manifest(&self, edit: impl FnOnce(&mut Value)) {
        let mut manifest: Value = serde_json::from_slice(&self.read("manifest.json")).unwrap();
        edit(&mut manifest);
        self.set_manifest(manifest.to_string().as_bytes());
    }

    pub fn set_manifest(&self, content: &[u8]) {
        self.set("manifest.json", content);
        let line = waste_common::container::integrity::manifest_sidecar(content);
        self.set("manifest.sha256", line.as_bytes());
    }

    pub fn run(&self, args: &[&str]) -> Captured {
        let mut all = args.to_vec();
        if !args.contains(&"--threads") {
            all.extend(["--threads", "2"]);
        }
        all.push(self.dir.to_str().unwrap());
        run_captured(TOOL, all, run)
    }

    /// The result with the exit it must have.
    pub fn report(&self, args: &[&str], exit: Exit) -> Value {
        let mut all = vec!["--json"];
        all.extend(args);
        let captured = self.run(&all);
        assert_eq!(captured.exit, exit, "{}{}", captured.stdout, captured.stderr);
        serde_json::from_str(&captured.stdout).unwrap()
    }

    /// The problems: there must be some.
    pub fn problems(&self, args: &[&str]) -> Vec<Value> {
        let report = self.report(args, Exit::No);
        assert_eq!(report["ok"], false);
        let problems = report["problems"].as_array().unwrap().clone();
        assert!(!problems.is_empty());
        problems
    }

    pub fn assert_sound(&self) -> Value {
        let report = self.report(&[], Exit::Done);
        assert_eq!((&report["ok"], &report["problems"]), (&json!(true), &json!([])));
        report
    }
}

/// Whether a problem has all the keys and values of `wanted`.
pub fn has(problems: &[Value], wanted: &Value) -> bool {
    let fits =
        |problem: &Value| wanted.as_object().unwrap().iter().all(|(key, value)| problem[key] == *value);
    problems.iter().any(fits)
}

/// Writes a checkpoint whose weights are the container's, passed through `change(layer, expert, kind, weights)`;
/// trunk tensors have no layer and go through `trunk(name, weights)`.
pub fn write_source(
    dir: &Path,
    container: &Container,
    mut change: impl FnMut(u32, u16, Kind, &mut Vec<f32>),
    mut trunk: impl FnMut(&str, &mut Vec<f32>),
) {
    fs::create_dir_all(dir).unwrap();
    let config = ModelConfig::from_container(&container.manifest().config).unwrap();
    let mut all: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    let bytes = |weights: &[f32]| weights.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    for entry in container.trunk().entries() {
        let mut weights = container.trunk().decode(entry).unwrap();
        trunk(&entry.name, &mut weights);
        let shape = entry.shape.iter().map(|dim| *dim as usize).collect();
        all.push((entry.name.clone(), shape, bytes(&weights)));
    }
    for (layer, bank) in &container.manifest().layers {
        let books = container.layer_codebooks(*layer).unwrap();
        let file = container.bank(*layer).unwrap();
        let mut buffer = vec![0; container.geometry().unwrap().record_bytes()];
        for expert in 0..bank.experts as u16 {
            let record = file.read(expert, &mut buffer).unwrap();
            for kind in Kind::ALL {
                let layout = container.geometry().unwrap().layout(kind);
                let mut weights = vec![0.0; layout.rows() * layout.cols()];
                record.matrix(kind).decode(&books.tables(kind), &mut weights).unwrap();
                change(*layer, expert, kind, &mut weights);
                let name = tensors::expert(&config, *layer as usize, expert.into(), kind) + ".weight";
                all.push((name, vec![layout.rows(), layout.cols()], bytes(&weights)));
            }
        }
    }
    let views = all.iter().map(|(name, shape, bytes)| {
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap();
        (name.clone(), view)
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    fs::write(dir.join("config.json"), container.manifest().config.to_string()).unwrap();
    fs::copy(container.dir().join("tokenizer.model"), dir.join("tiktoken.model")).unwrap();
}
