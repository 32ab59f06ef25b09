//! What a layer of each kind takes; and for a slice of a model, what all its layers would take at that rate.

use serde::Serialize;
use waste_common::config::{Mixer, ModelConfig};
use waste_common::plan::known;
use waste_engine::Part;

use super::measure::Phase;
use super::rows::Row;
use crate::report::{Cell, Table};

/// Layers of a kind.
#[derive(Clone, Copy, Debug)]
struct Kind {
    name: &'static str,
    parts: &'static [Part],
    /// Layers of this model, and of the whole one.
    layers: [usize; 2],
}

/// The time of one kind of layer in a row.
#[derive(Clone, Debug, Serialize)]
pub struct LayerTime {
    /// The arm.
    pub arm: String,
    /// Prefill or decode.
    pub phase: Phase,
    /// `cold` or `warm`.
    pub cache: &'static str,
    /// `kda`, `mla`, `moe`, `dense`, or `rest` for all that is not a layer's.
    pub kind: &'static str,
    /// Layers of this kind; 1 for the rest.
    pub layers: usize,
    /// Milliseconds of a token in one layer.
    pub ms_per_layer: f64,
    /// Of these, milliseconds of waiting for reads.
    pub stall_ms_per_layer: f64,
    /// Layers of this kind in the whole model of which this is a slice.
    pub of_layers: usize,
    /// Milliseconds of a token in all of them.
    pub ms_of_all: f64,
}

/// The time of each kind of layer, row by row.
pub fn times(rows: &[Row], config: &ModelConfig) -> Vec<LayerTime> {
    let whole = whole(config);
    let counts = |count: &dyn Fn(&ModelConfig) -> usize| [count(config), whole.as_ref().map_or(0, count)];
    let kinds = [
        Kind { name: "kda", parts: &[Part::Kda], layers: counts(&|c| c.count(Mixer::Kda)) },
        Kind { name: "mla", parts: &[Part::Mla], layers: counts(&|c| c.count(Mixer::Mla)) },
        Kind {
            name: "moe",
            parts: &[Part::Trunk, Part::Tables, Part::Gather, Part::Stall],
            layers: counts(&|c| c.moe_layers().count()),
        },
        Kind {
            name: "dense",
            parts: &[Part::Dense],
            layers: counts(&|c| c.layers() - c.moe_layers().count()),
        },
        Kind { name: "rest", parts: &[Part::Head, Part::Rest], layers: counts(&|_| 1) },
    ];
    let time = |row: &Row, kind: &Kind| {
        let [layers, of_layers] = kind.layers.map(|layers| layers as f64);
        let ms = |part: &Part| row.parts_ms_per_token[part.name()] / layers;
        let ms_per_layer: f64 = kind.parts.iter().map(ms).sum();
        let stall = if kind.parts.contains(&Part::Stall) { ms(&Part::Stall) } else { 0.0 };
        LayerTime {
            arm: row.arm.clone(),
            phase: row.phase,
            cache: row.cache,
            kind: kind.name,
            layers: kind.layers[0],
            ms_per_layer,
            stall_ms_per_layer: stall,
            of_layers: kind.layers[1].max(kind.layers[0]),
            ms_of_all: ms_per_layer * of_layers.max(layers),
        }
    };
    let present = |kind: &&Kind| kind.layers[0] > 0;
    rows.iter().flat_map(|row| kinds.iter().filter(present).map(move |kind| time(row, kind))).collect()
}

/// The published model of the same widths, if this has fewer of its layers.
fn whole(config: &ModelConfig) -> Option<ModelConfig> {
    let same = |whole: &ModelConfig| {
        (whole.arch, whole.hidden, whole.vocab) == (config.arch, config.hidden, config.vocab)
            && whole.layers() >= config.layers()
    };
    let configs = known::names().filter_map(|name| ModelConfig::from_checkpoint(&known::config(name)?).ok());
    configs.into_iter().find(same)
}

/// The times as a table.
pub fn table(times: &[LayerTime]) -> Table {
    let cells = |time: &LayerTime| {
        vec![
            Cell::Text(time.arm.clone()),
            Cell::Text(time.phase.name().to_owned()),
            Cell::Text(time.cache.to_owned()),
            Cell::Text(time.kind.to_owned()),
            Cell::Count(time.layers as u64),
            Cell::Number(time.ms_per_layer, 3),
            Cell::Number(time.stall_ms_per_layer, 3),
            Cell::Count(time.of_layers as u64),
            Cell::Number(time.ms_of_all, 1),
        ]
    };
    Table {
        title: "milliseconds a token and layer, and in all layers of the whole model",
        columns: vec![
            ("arm", "arm"),
            ("phase", "phase"),
            ("cache", "cache"),
            ("kind", "kind"),
            ("layers", "layers"),
            ("ms", "ms_per_layer"),
            ("of it stall", "stall_ms_per_layer"),
            ("of layers", "of_layers"),
            ("ms in all", "ms_of_all"),
        ],
        rows: times.iter().map(cells).collect(),
    }
}
