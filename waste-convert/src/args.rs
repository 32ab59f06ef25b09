//! The command line.

use std::collections::BTreeSet;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use waste_common::cli::{ByteSize, CommonArgs};

/// Turns a safetensors checkpoint into a .waste container
///
/// The container is written layer by layer. An interrupted conversion goes on where it stopped when the same command
/// is run again; same checkpoint and options give the same bytes, whatever the machine and its threads.
#[derive(Debug, Parser)]
pub struct Args {
    /// Directory of the checkpoint (config.json, index, safetensors), or `-` for the JSON of waste-download
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,

    /// Directory of the container to write
    #[arg(value_name = "CONTAINER")]
    pub container: PathBuf,

    /// How routed experts are stored: vq3r and vq4p at 3 bits per weight, vq2r at 2 (its error is far larger)
    #[arg(long, value_enum, default_value_t = Format::Vq3r)]
    pub format: Format,

    /// How much time goes into good weights: the time for encoding roughly doubles with each step
    #[arg(long, value_enum, default_value_t = EffortArg::Normal)]
    pub effort: EffortArg,

    /// Bits of the other matrices; embedding, head and vision tower have 8 always
    #[arg(long, value_name = "BITS", default_value = "4", value_parser = ["4", "8"])]
    pub trunk_bits: String,

    /// Weight vectors each layer's codebooks are fitted to
    #[arg(long, value_name = "N", default_value_t = crate::options::CB_SAMPLE as u32,
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub cb_sample: u32,

    /// Matrices of the trunk with fewer elements stay f32
    #[arg(long, value_name = "N", default_value_t = crate::options::TRUNK_MIN_ELEMENTS)]
    pub trunk_min_elements: u64,

    /// Seed of the samples: another one gives a container that is as good, of other bytes
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Weigh errors by how much each input column of each expert matters: a file of
    /// `waste-run perplexity --save-importance`
    #[arg(long, value_name = "FILE")]
    pub importance: Option<PathBuf>,

    /// Worker processes; each converts one layer at a time, with its share of the threads [default: 3, or one a CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub jobs: Option<u16>,

    /// Only these layers, such as 1-10,40: neither trunk nor manifest. Runs for other layers may go on beside it
    #[arg(long, value_name = "LIST", value_parser = layer_list, conflicts_with = "finish")]
    pub layers: Option<LayerList>,

    /// Neither trunk nor manifest, only layers
    #[arg(long, conflicts_with = "finish")]
    pub skip_trunk: bool,

    /// Only what is left when all layers are there: trunk, tokenizer, manifest
    #[arg(long)]
    pub finish: bool,

    /// Work beside waste-download: each layer as its shards arrive, which are asked for in the order they are wanted
    #[arg(long)]
    pub follow: bool,

    /// Remove each shard when all that is made of it is durable and was read back (on), or only name it (dry)
    #[arg(long, value_enum, default_value_t = ReclaimArg::Off)]
    pub reclaim: ReclaimArg,

    /// Free disk space that is left alone: below it the conversion pauses
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub reserve: ByteSize,

    /// Say what the conversion would take, with one expert as a probe; nothing is written
    #[arg(long, conflicts_with_all = ["status", "follow", "reclaim", "layers", "skip_trunk", "finish"])]
    pub dry_run: bool,

    /// Say how far the conversion has come; nothing is written
    #[arg(long)]
    pub status: bool,

    /// Run as a worker of another waste-convert
    #[arg(long, hide = true)]
    pub worker: bool,

    /// Threads of all workers together; all CPUs by default
    #[arg(long, value_name = "N", env = "WASTE_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    /// Replace what stands in CONTAINER: a finished container, or one begun with other options
    #[arg(long)]
    pub force: bool,

    /// Common options.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Names of the expert formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum Format {
    Vq3r,
    Vq2r,
    Vq4p,
}

/// Names of the efforts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EffortArg {
    /// The cost of the published recipe: residual k-means, greedy search
    Fast,
    /// Codebooks refined together, a beam search of 4
    Normal,
    /// A beam search of 16, row scales and codes fitted to each other
    Max,
}

/// What becomes of shards that are used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum ReclaimArg {
    Off,
    Dry,
    On,
}

/// Layer numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerList(pub BTreeSet<u16>);

/// `1-10,40`
fn layer_list(text: &str) -> Result<LayerList, String> {
    let fail = || format!("`{text}`: layer numbers and ranges such as 1-10,40 are expected");
    let number = |text: &str| text.trim().parse::<u16>().map_err(|_| fail());
    let mut layers = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(fail());
        }
        layers.extend(first..=last);
    }
    Ok(LayerList(layers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_layers() {
        let list = |text| layer_list(text).map(|list| list.0.into_iter().collect::<Vec<_>>());
        assert_eq!(list("1-3, 40,2"), Ok(vec![1, 2, 3, 40]));
        assert_eq!(crate::error::layer_list(&[1, 2, 3, 40]), "1-3,40");
        for wrong in ["", "3-1", "1-", "x", "1,,2", "70000"] {
            assert!(list(wrong).is_err(), "{wrong}");
        }
    }
}
