//! `manifest.json`: the model's config and the index of everything. The commit record of a container, and as
//! untrusted as any other file: whatever is not understood is refused by name.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

use super::ContainerError;
use super::pread::check_file_name;
pub use super::schema::*;
use crate::json;

/// The only format version there is.
pub const FORMAT_VERSION: u64 = 0;
/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";
/// The file of all tensors but the routed experts.
pub const TRUNK: &str = "trunk.bin";
/// The file of all codebooks.
pub const CODEBOOKS: &str = "codebooks.bin";
/// The `sha256sum` line of the manifest.
pub const MANIFEST_SHA256: &str = "manifest.sha256";

/// What `manifest.json` says. Keys that are not known stay in `extra` and are written back.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// Descriptive only.
    pub arch: String,
    /// What stands before `model.` in tensor names.
    pub tensor_prefix: String,
    /// The text model's config object, verbatim.
    pub config: Value,
    /// How the routed experts are quantised.
    pub expert_quant: ExpertQuant,
    /// The bank of each MoE layer, by 0-based layer number.
    pub layers: BTreeMap<u32, Bank>,
    /// Every tensor of `trunk.bin`.
    pub trunk: Vec<TrunkEntry>,
    /// Checksums, if the writer left any.
    pub integrity: Option<Integrity>,
    /// Further keys.
    pub extra: Map<String, Value>,
}

impl Manifest {
    /// Parses and checks the content of `file`; everything that needs no other file is checked here.
    pub fn parse(file: &Path, content: &[u8]) -> Result<Self, ContainerError> {
        let fail = |at: &str, problem: String| ContainerError::manifest(file, at, problem);
        let Value::Object(mut keys) = json::parse(file, content)? else {
            return Err(fail("manifest", "a JSON object is expected".into()));
        };
        match keys.shift_remove("format_version") {
            Some(version) if version.as_u64() == Some(FORMAT_VERSION) => {}
            found => {
                // Bounded: the value may be anything.
                let found = found.map_or("absent".into(), |v| v.to_string().chars().take(40).collect());
                return Err(ContainerError::FormatVersion { file: file.to_owned(), found });
            }
        }
        let mut take =
            |at: &'static str| keys.shift_remove(at).ok_or_else(|| fail(at, "the key is missing".into()));
        let arch = text(take("arch")?).map_err(|p| fail("arch", p))?;
        let tensor_prefix = text(take("tensor_prefix")?).map_err(|p| fail("tensor_prefix", p))?;
        let config = take("config")?;
        let expert_quant: ExpertQuant =
            serde_json::from_value(take("expert_quant")?).map_err(|e| fail("expert_quant", e.to_string()))?;
        let layers = parse_layers(file, take("layers")?)?;
        let trunk = parse_trunk(file, take("trunk")?)?;
        let integrity = match keys.shift_remove("integrity") {
            None => None,
            Some(value) => Some(serde_json::from_value(value).map_err(|e| fail("integrity", e.to_string()))?),
        };
        let manifest =
            Manifest { arch, tensor_prefix, config, expert_quant, layers, trunk, integrity, extra: keys };
        manifest.check(file)?;
        Ok(manifest)
    }

    /// Checks all bounds; `file` is for the messages. Writers call it too.
    pub fn check(&self, file: &Path) -> Result<(), ContainerError> {
        let fail = |at: String, problem: String| Err(ContainerError::manifest(file, at, problem));
        if !self.config.is_object() {
            return fail("config".into(), "a JSON object is expected".into());
        }
        if let Err((key, problem)) = self.expert_quant.check() {
            return fail(format!("expert_quant.{key}"), problem);
        }
        self.check_layers(file)?;
        self.check_trunk(file)?;
        self.check_integrity(file)
    }

    fn check_layers(&self, file: &Path) -> Result<(), ContainerError> {
        let fail = |at: String, problem: String| Err(ContainerError::manifest(file, at, problem));
        let count = self.config.get("num_hidden_layers").and_then(Value::as_u64);
        let owned = self.expert_quant.codebooks_per_layer();
        let mut names = HashSet::new();
        let mut bases = BTreeMap::new();
        for (layer, bank) in &self.layers {
            let at = |key: &str| format!("layers.{layer}.{key}");
            if u64::from(*layer) >= count.unwrap_or(u64::MAX) || *layer > u32::from(u16::MAX) {
                let limit = count.unwrap_or(1 << 16).min(1 << 16);
                return fail(format!("layers.{layer}"), format!("the model has {limit} layers at most"));
            }
            if let Err(problem) = check_file_name(&bank.file) {
                return fail(at("file"), format!("the file name {:?} {problem}", bank.file));
            }
            let own = [MANIFEST, TRUNK, CODEBOOKS, MANIFEST_SHA256];
            if own.iter().any(|name| name.eq_ignore_ascii_case(&bank.file)) || !names.insert(&bank.file) {
                return fail(at("file"), format!("{:?} is another file of the container", bank.file));
            }
            if bank.experts < 1 || bank.experts > 1 << 16 {
                return fail(at("experts"), format!("{}; 1 to 65536 are supported", bank.experts));
            }
            if u32::from(bank.codebook_base) + owned > 1 << 16 {
                return fail(
                    at("codebook_base"),
                    format!("{} leaves no room below 65536", bank.codebook_base),
                );
            }
            if let Some(other) = bases.insert(bank.codebook_base, layer) {
                return fail(at("codebook_base"), format!("the same as that of layer {other}"));
            }
        }
        for ((base, layer), (next, other)) in bases.iter().zip(bases.iter().skip(1)) {
            if u32::from(*base) + owned > u32::from(*next) {
                return fail(
                    format!("layers.{other}.codebook_base"),
                    format!("{next} lies within the {owned} codebooks of layer {layer} from {base}"),
                );
            }
        }
        Ok(())
    }

    fn check_trunk(&self, file: &Path) -> Result<(), ContainerError> {
        let mut names = HashSet::new();
        let mut spans = Vec::with_capacity(self.trunk.len());
        for (i, entry) in self.trunk.iter().enumerate() {
            let fail = |problem| ContainerError::manifest(file, at_trunk(i, &entry.name), problem);
            let end = entry.check().map_err(fail)?;
            if !names.insert(entry.name.as_str()) {
                return Err(fail("the name occurs twice".into()));
            }
            spans.push((entry.off, end, i));
        }
        spans.sort_unstable();
        for pair in spans.windows(2) {
            if pair[1].0 < pair[0].1 {
                let (one, two) = (&self.trunk[pair[0].2].name, &self.trunk[pair[1].2].name);
                let problem = format!("its bytes overlap those of {one}");
                return Err(ContainerError::manifest(file, at_trunk(pair[1].2, two), problem));
            }
        }
        Ok(())
    }

    fn check_integrity(&self, file: &Path) -> Result<(), ContainerError> {
        let Some(integrity) = &self.integrity else { return Ok(()) };
        let fail = |at: String, problem: String| Err(ContainerError::manifest(file, at, problem));
        if integrity.algorithm != "crc32" {
            let found: String = integrity.algorithm.chars().take(40).collect();
            return fail("integrity.algorithm".into(), format!("{found:?}; only \"crc32\" is supported"));
        }
        for (layer, sum) in &integrity.banks {
            if self.layers.get(layer).is_none_or(|bank| bank.bytes != sum.bytes) {
                let problem = format!("{} bytes are not those of the layer's bank", sum.bytes);
                return fail(format!("integrity.banks.{layer}"), problem);
            }
        }
        for (name, sum) in &integrity.files {
            if let Err(problem) = check_file_name(name) {
                return fail("integrity.files".into(), format!("the file name {name:?} {problem}"));
            }
            let hex = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
            if sum.sha256.len() != 64 || !sum.sha256.bytes().all(hex) {
                return fail(
                    format!("integrity.files.{name}.sha256"),
                    "64 lower-case hex digits expected".into(),
                );
            }
        }
        Ok(())
    }

    /// The manifest as it is written: pretty JSON, known keys first and in a fixed order.
    pub fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut keys = Map::new();
        keys.insert("format_version".into(), FORMAT_VERSION.into());
        keys.insert("arch".into(), self.arch.clone().into());
        keys.insert("tensor_prefix".into(), self.tensor_prefix.clone().into());
        keys.insert("config".into(), self.config.clone());
        keys.insert("expert_quant".into(), serde_json::to_value(&self.expert_quant)?);
        keys.insert("layers".into(), serde_json::to_value(&self.layers)?);
        keys.insert("trunk".into(), serde_json::to_value(&self.trunk)?);
        if let Some(integrity) = &self.integrity {
            keys.insert("integrity".into(), serde_json::to_value(integrity)?);
        }
        keys.extend(self.extra.iter().map(|(key, value)| (key.clone(), value.clone())));
        let mut bytes = Vec::new();
        let style = serde_json::ser::PrettyFormatter::with_indent(b" ");
        keys.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, style))?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// The shape of the experts that config names: (`moe_intermediate_size`, inputs), the inputs being
    /// `routed_expert_hidden_size`, else `hidden_size`.
    pub fn expert_shape(&self, file: &Path) -> Result<(u64, u64), ContainerError> {
        let dim = |key: &str| match self.config.get(key).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(dim @ 1..=0x10_0000) => Ok(Some(dim)),
                _ => {
                    let found: String = value.to_string().chars().take(40).collect();
                    let problem = format!("{found}; an integer from 1 to 2^20 is expected");
                    Err(ContainerError::manifest(file, format!("config.{key}"), problem))
                }
            },
        };
        let inter = dim("moe_intermediate_size")?;
        let input =
            dim("routed_expert_hidden_size")?.map_or_else(|| dim("hidden_size"), |dim| Ok(Some(dim)))?;
        match (inter, input) {
            (Some(inter), Some(input)) => Ok((inter, input)),
            (None, _) => {
                Err(ContainerError::manifest(file, "config.moe_intermediate_size", "the key is missing"))
            }
            (_, None) => Err(ContainerError::manifest(file, "config.hidden_size", "the key is missing")),
        }
    }
}

fn text(value: Value) -> Result<String, String> {
    match value {
        Value::String(text) if text.len() <= 1024 => Ok(text),
        _ => Err("a string of at most 1024 bytes is expected".into()),
    }
}

fn parse_layers(file: &Path, value: Value) -> Result<BTreeMap<u32, Bank>, ContainerError> {
    let Value::Object(keys) = value else {
        return Err(ContainerError::manifest(file, "layers", "a JSON object is expected"));
    };
    let mut layers = BTreeMap::new();
    for (key, value) in keys {
        let shown: String = key.chars().take(40).collect();
        let fail = |problem: String| ContainerError::manifest(file, format!("layers.{shown}"), problem);
        // "01" and "+1" would be second names for layer 1.
        let layer = key.parse().ok().filter(|layer: &u32| layer.to_string() == key);
        let layer = layer.ok_or_else(|| fail("a layer number is expected".into()))?;
        layers.insert(layer, serde_json::from_value(value).map_err(|e| fail(e.to_string()))?);
    }
    Ok(layers)
}

fn parse_trunk(file: &Path, value: Value) -> Result<Vec<TrunkEntry>, ContainerError> {
    let Value::Array(values) = value else {
        return Err(ContainerError::manifest(file, "trunk", "a JSON array is expected"));
    };
    let entry = |(i, value): (usize, Value)| {
        let name = value.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        serde_json::from_value(value)
            .map_err(|e| ContainerError::manifest(file, at_trunk(i, &name), e.to_string()))
    };
    values.into_iter().enumerate().map(entry).collect()
}

fn at_trunk(i: usize, name: &str) -> String {
    format!("trunk[{i}] {:?}", name.chars().take(120).collect::<String>())
}
