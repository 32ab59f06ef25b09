//! Loading the trunk: tensors by name, from a container in the format in which they are stored, or from a
//! checkpoint in f32, each compared with the shape that the configuration demands.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use waste_common::checkpoint::Checkpoint;
use waste_common::config::{Mixer, ModelConfig, Moe};
use waste_common::container::{Container, Trunk, TrunkEntry, TrunkFmt};
use waste_common::tensors::{self, TensorSpec};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::error::EngineError;
use crate::layers::attn_res::AttnRes;
use crate::layers::ffn::Ffn;
use crate::layers::kda::{Decay, Gate, KdaLayer};
use crate::layers::mla::{MlaLayer, Query};
use crate::layers::moe::{Latent, MoeLayer};
use crate::layers::router::Router;
use crate::matrix::{Matrix, MatrixData, QuantFormat};
use crate::options::{EngineOptions, Event};
use crate::resident::{Resident, Weights};

/// Where the weights are.
#[derive(Clone)]
pub enum Source {
    /// A `.waste` container.
    Container(Arc<Container>),
    /// A checkpoint, opened directly: slow and exact.
    Checkpoint(Arc<Checkpoint>),
}

impl Source {
    /// Which model this is: the SHA-256 of a container's manifest, which is over all its checksums; of a checkpoint, of
    /// its configuration and the sizes of its files.
    pub fn fingerprint(&self) -> String {
        match self {
            Source::Container(container) => container.manifest_sha256().to_owned(),
            Source::Checkpoint(checkpoint) => checkpoint.fingerprint(),
        }
    }
}

/// Loads a model's tensors from a source.
pub struct Loader<'a> {
    source: &'a Source,
    config: &'a ModelConfig,
    options: &'a EngineOptions,
    specs: HashMap<String, TensorSpec>,
    /// What of a container's trunk stays in memory.
    resident: Option<Resident>,
    /// Bytes of f32 taken from a checkpoint so far, and of the whole.
    taken: (Cell<u64>, u64),
}

impl<'a> Loader<'a> {
    /// A loader; every tensor the configuration demands is looked up and its shape compared first, and a container's
    /// are read.
    pub fn new(
        source: &'a Source,
        config: &'a ModelConfig,
        options: &'a EngineOptions,
    ) -> Result<Self, EngineError> {
        Self::of(source, config, options, tensors::trunk(config))
    }

    /// A loader of the vision tower's tensors, likewise.
    pub fn vision(
        source: &'a Source,
        config: &'a ModelConfig,
        options: &'a EngineOptions,
    ) -> Result<Self, EngineError> {
        Self::of(source, config, options, tensors::vision(config))
    }

    fn of(
        source: &'a Source,
        config: &'a ModelConfig,
        options: &'a EngineOptions,
        specs: Vec<TensorSpec>,
    ) -> Result<Self, EngineError> {
        // The embedding's rows are read as they are needed; see `Embedding`.
        let embedding = (!config.tied_embeddings).then(|| tensors::embedding(config));
        let (mut spans, mut of) = (Vec::new(), 0);
        for spec in &specs {
            let stays = embedding.as_ref() != Some(&spec.name);
            let found = match source {
                Source::Container(container) => {
                    let trunk = container.trunk();
                    let entry = trunk.require(&spec.name)?;
                    if stays {
                        // The index was compared with the file when it was opened.
                        spans.push(entry.off..entry.off.saturating_add(trunk.sizes(entry)?.bytes));
                    }
                    entry.shape.iter().map(|&d| d as usize).collect()
                }
                Source::Checkpoint(checkpoint) => checkpoint.info(&spec.name)?.shape,
            };
            of += if stays { 4 * spec.elements() } else { 0 };
            if !spec.accepts(&found) {
                return Err(EngineError::Shape {
                    name: spec.name.clone(),
                    found,
                    expected: spec.shape.clone(),
                });
            }
        }
        let specs = specs.into_iter().map(|spec| (spec.name.clone(), spec)).collect();
        let resident = match source {
            Source::Container(container) => Some(Resident::load(container.trunk(), spans, options)?),
            Source::Checkpoint(_) => None,
        };
        Ok(Loader { source, config, options, specs, resident, taken: (Cell::new(0), of) })
    }

    fn name(&self, layer: usize, tail: &str) -> String {
        tensors::layer_name(self.config, layer, tail)
    }

    /// A vector as f32.
    pub fn vector(&self, name: &str) -> Result<Vec<f32>, EngineError> {
        match self.source {
            Source::Container(container) => self.decoded(container.trunk(), container.trunk().require(name)?),
            Source::Checkpoint(checkpoint) => {
                let weights = checkpoint.read_f32(name)?;
                let (taken, of) = &self.taken;
                // As the configuration counts them: a padded vector has more.
                taken.set(taken.get() + 4 * self.specs.get(name).map_or(0, TensorSpec::elements));
                self.options.watch.tell(Event::Loaded { bytes: taken.get(), of: *of });
                Ok(weights)
            }
        }
    }

    /// A resident tensor as f32.
    fn decoded(&self, trunk: &Trunk, entry: &TrunkEntry) -> Result<Vec<f32>, EngineError> {
        let sizes = trunk.sizes(entry)?;
        let payload = self.resident::<u8>(entry, entry.off, sizes.payload_bytes)?;
        let scales = self.resident::<u16>(entry, entry.off + sizes.payload_bytes, sizes.scales)?;
        let (cols, row_bytes) = (sizes.cols as usize, sizes.row_bytes as usize);
        let groups = (sizes.scales / sizes.rows) as usize;
        let mut out = vec![0.0; sizes.rows as usize * cols];
        for (row, out) in out.chunks_exact_mut(cols).enumerate() {
            let payload = &payload[row * row_bytes..][..row_bytes];
            entry.fmt.decode_row(payload, &scales[row * groups..][..groups], out);
        }
        Ok(out)
    }

    /// `count` values of a tensor, at `offset` of the trunk file.
    fn resident<T>(&self, entry: &TrunkEntry, offset: u64, count: u64) -> Result<Weights<T>, EngineError>
    where
        T: FromBytes + FromZeros + IntoBytes + Immutable + KnownLayout + Clone,
    {
        let weights = self.resident.as_ref().and_then(|resident| resident.weights(offset, count));
        weights.ok_or_else(|| self.missing(&entry.name))
    }

    /// A matrix, rows × columns as the configuration demands, in the format in which it is stored.
    pub fn matrix(&self, name: &str) -> Result<Matrix, EngineError> {
        match self.specs.get(name) {
            Some(spec) => self.matrix_of(name, spec.shape[0], spec.shape[1..].iter().product()),
            None => Err(self.missing(name)),
        }
    }

    /// A tensor of the configuration as a matrix of `rows` x `cols`, whatever its rank.
    pub fn matrix_of(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix, EngineError> {
        if self.specs.get(name).is_none_or(|spec| spec.elements() != rows as u64 * cols as u64) {
            return Err(self.missing(name));
        }
        let Source::Container(container) = self.source else {
            return Ok(Matrix::f32(rows, cols, self.vector(name)?));
        };
        let trunk = container.trunk();
        let entry = trunk.require(name)?;
        let sizes = trunk.sizes(entry)?;
        let quantised = match entry.fmt {
            TrunkFmt::F32 => None,
            TrunkFmt::F16 => None,
            TrunkFmt::Q8g => Some(QuantFormat::Q8),
            TrunkFmt::Q4g => Some(QuantFormat::Q4),
            TrunkFmt::Q3g => Some(QuantFormat::Q3),
        };
        let elements = sizes.rows * sizes.cols;
        let data = match quantised {
            None if entry.fmt == TrunkFmt::F32 => MatrixData::F32(self.resident(entry, entry.off, elements)?),
            None => MatrixData::F16(self.resident(entry, entry.off, elements)?),
            // Groups along an axis that is not the matrix's (a convolution stored with rank 4).
            Some(_) if sizes.cols != cols as u64 => MatrixData::F32(self.decoded(trunk, entry)?.into()),
            Some(format) => MatrixData::Quant {
                format,
                stride: sizes.row_bytes as usize,
                payload: self.resident(entry, entry.off, sizes.payload_bytes)?,
                scales: self.resident(entry, entry.off + sizes.payload_bytes, sizes.scales)?,
            },
        };
        Ok(Matrix { rows, cols, data })
    }

    fn missing(&self, name: &str) -> EngineError {
        EngineError::Shape { name: name.to_owned(), found: vec![], expected: vec![] }
    }

    /// The mixes of attention residuals: before the mixer and before the FFN.
    pub fn attn_res(&self, layer: usize) -> Result<Option<[AttnRes; 2]>, EngineError> {
        if self.config.attn_res_block.is_none() {
            return Ok(None);
        }
        let mix = |place: &str| {
            let norm = self.name(layer, &format!("{place}_res_norm.weight"));
            self.mix(&norm, &self.name(layer, &format!("{place}_res_proj.weight")))
        };
        Ok(Some([mix("self_attention")?, mix("mlp")?]))
    }

    /// One mix of attention residuals.
    pub fn mix(&self, norm: &str, projection: &str) -> Result<AttnRes, EngineError> {
        let weight = self.vector(norm)?.into_iter().zip(self.vector(projection)?).map(|(n, p)| n * p);
        Ok(AttnRes { weight: weight.collect(), eps: self.config.rms_eps })
    }

    /// A layer's norm: `input_layernorm` or `post_attention_layernorm`.
    pub fn norm(&self, layer: usize, which: &str) -> Result<Vec<f32>, EngineError> {
        self.vector(&self.name(layer, &format!("{which}.weight")))
    }

    /// A KDA layer.
    pub fn kda(&self, layer: usize) -> Result<KdaLayer, EngineError> {
        let kda = &self.config.kda;
        let name = |tail: &str| self.name(layer, &format!("self_attn.{tail}"));
        let matrix = |tail: &str| self.matrix(&name(&format!("{tail}.weight")));
        let conv = |part: &str| -> Result<Vec<f32>, EngineError> {
            let weight = self.vector(&name(&format!("{part}_conv1d.weight")))?;
            Ok(transposed(&weight, kda.conv_kernel))
        };
        let a_log = self.vector(&name("A_log"))?;
        Ok(KdaLayer {
            heads: kda.heads,
            dim: kda.dim,
            qkv: [matrix("q_proj")?, matrix("k_proj")?, matrix("v_proj")?],
            conv: [conv("q")?, conv("k")?, conv("v")?],
            decay_projection: (matrix("f_a_proj")?, matrix("f_b_proj")?),
            // K3 pads the vector with zeros behind the heads.
            a: a_log[..kda.heads].iter().map(|&a| f64::from(a).exp() as f32).collect(),
            dt_bias: self.vector(&name("dt_bias"))?,
            decay: kda.lower_bound.map_or(Decay::Softplus, Decay::Bounded),
            beta: matrix("b_proj")?,
            gate: if kda.full_rank_gate {
                Gate::Full(matrix("g_proj")?)
            } else {
                Gate::LowRank(matrix("g_a_proj")?, matrix("g_b_proj")?)
            },
            norm: self.vector(&name("o_norm.weight"))?,
            eps: self.config.rms_eps,
            out: matrix("o_proj")?,
        })
    }

    /// An MLA layer.
    pub fn mla(&self, layer: usize) -> Result<MlaLayer, EngineError> {
        let mla = &self.config.mla;
        let name = |tail: &str| self.name(layer, &format!("self_attn.{tail}.weight"));
        let matrix = |tail: &str| self.matrix(&name(tail));
        Ok(MlaLayer {
            heads: mla.heads,
            nope: mla.nope,
            rope: mla.rope,
            value: mla.value,
            kv_lora: mla.kv_lora,
            query: match mla.q_lora {
                None => Query::Direct(matrix("q_proj")?),
                Some(_) => Query::LowRank {
                    down: matrix("q_a_proj")?,
                    norm: self.vector(&name("q_a_layernorm"))?,
                    up: matrix("q_b_proj")?,
                },
            },
            latent: matrix("kv_a_proj_with_mqa")?,
            latent_norm: self.vector(&name("kv_a_layernorm"))?,
            expand: matrix("kv_b_proj")?,
            gate: if mla.output_gate { Some(matrix("g_proj")?) } else { None },
            out: matrix("o_proj")?,
        })
    }

    /// A gated FFN.
    pub fn ffn(&self, layer: usize, base: &str) -> Result<Ffn, EngineError> {
        let matrix = |tail: &str| self.matrix(&self.name(layer, &format!("{base}.{tail}.weight")));
        Ok(Ffn { gate: matrix("gate_proj")?, up: matrix("up_proj")?, down: matrix("down_proj")? })
    }

    /// An MoE layer, `number`th of its kind, without its codebooks.
    pub fn moe(&self, layer: usize, moe: &Moe, number: u32) -> Result<MoeLayer, EngineError> {
        let name = |tail: &str| self.name(layer, &format!("block_sparse_moe.{tail}"));
        let latent = if moe.latent {
            let norm = name("routed_expert_norm.weight");
            Some(Latent {
                down: self.matrix(&name("routed_expert_down_proj.weight"))?,
                norm: if moe.latent_norm { Some(self.vector(&norm)?) } else { None },
                up: self.matrix(&name("routed_expert_up_proj.weight"))?,
            })
        } else {
            None
        };
        Ok(MoeLayer {
            number,
            intermediate: moe.intermediate,
            input: moe.input,
            router: Router {
                gate: self.matrix(&name("gate.weight"))?,
                bias: self.vector(&name("gate.e_score_correction_bias"))?,
            },
            routing: moe.into(),
            latent,
            shared: match moe.shared {
                0 => None,
                _ => Some(self.ffn(layer, "block_sparse_moe.shared_experts")?),
            },
            codebooks: None,
            eps: self.config.rms_eps,
        })
    }

    /// Which mixer a layer has.
    pub fn mixer(&self, layer: usize) -> Mixer {
        self.config.mixers[layer]
    }
}

/// [channels, taps] to [taps, channels].
fn transposed(weight: &[f32], taps: usize) -> Vec<f32> {
    let channels = weight.len() / taps;
    (0..taps * channels).map(|i| weight[i % channels * taps + i / channels]).collect()
}
