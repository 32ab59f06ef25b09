//! The shapes that can be made up: published and small models' configurations, perhaps cut down.

use serde_json::{Map, Value, json};
use waste_common::cli::Failure;
use waste_common::config::ModelConfig;
use waste_common::container::{ExpertFmt, ExpertQuant};
use waste_common::plan::known;

use super::sidecars;

/// A named shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Name {
    /// Kimi K3 in small: both mixers, latent experts, vision
    TinyK3,
    /// The same with experts of 1024 x 1024, large enough to judge an encoder by
    WideK3,
    /// Kimi-Linear in small
    TinyLinear,
    /// Kimi-Linear-48B
    #[value(name = "kimi-linear-48b")]
    KimiLinear48b,
    /// Kimi K3
    K3,
}

/// How experts are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Three stages of 256 entries
    #[default]
    Vq3r,
    /// Four stages of 64 entries
    Vq4p,
    /// Two stages of 256 entries
    Vq2r,
}

impl Format {
    /// Its description in a manifest.
    pub fn quant(self) -> ExpertQuant {
        match self {
            Format::Vq3r => ExpertQuant::new(ExpertFmt::Vq3r, 3, 256),
            Format::Vq4p => ExpertQuant::new(ExpertFmt::Vq4p, 4, 64),
            Format::Vq2r => ExpertQuant::new(ExpertFmt::Vq2r, 2, 256),
        }
    }
}

impl Name {
    /// The `config.json` of the shape as published.
    pub fn config(self) -> Result<Value, Failure> {
        let parse = |text| serde_json::from_str(text).ok();
        let config = match self {
            Name::TinyK3 => parse(include_str!("shapes/tiny-k3.json")),
            Name::WideK3 => Name::TinyK3.config().ok().map(wide),
            Name::TinyLinear => parse(include_str!("shapes/tiny-linear.json")),
            Name::KimiLinear48b => known::config("kimi-linear-48b"),
            Name::K3 => known::config("kimi-k3"),
        };
        config.ok_or_else(|| Failure::internal("the configuration of a known shape is damaged"))
    }
}

/// Experts of 1024 x 1024, eight a layer.
fn wide(mut config: Value) -> Value {
    if let Some(text) = decoder(&mut config) {
        for (key, value) in
            [("moe_intermediate_size", 1024), ("routed_expert_hidden_size", 1024), ("num_experts", 8)]
        {
            text.insert(key.to_owned(), json!(value));
        }
    }
    config
}

/// A configuration with the first `layers` layers and `experts` experts a layer, and the token ids of the made-up
/// tokenizer.
///
/// # Errors
/// There are not that many layers or experts, or too few of them are left (exit 2).
pub fn shaped(
    name: Name,
    layers: Option<u64>,
    experts: Option<u64>,
) -> Result<(Value, ModelConfig), Failure> {
    let mut config = name.config()?;
    let whole = ModelConfig::from_checkpoint(&config)?;
    let most = whole.layers() as u64;
    if let Some(layers) = layers {
        in_range("--layers", layers, 1, most)?;
        config = cut(&config, layers);
    }
    if let (Some(experts), Some(moe)) = (experts, &whole.moe) {
        in_range("--experts", experts, 2, moe.experts as u64)?;
        if let Some(text) = decoder(&mut config) {
            text.insert("num_experts".to_owned(), json!(experts));
            text.insert("num_experts_per_token".to_owned(), json!(experts.min(moe.top_k as u64)));
        }
    }
    set_tokens(&mut config);
    let model = ModelConfig::from_checkpoint(&config)?;
    Ok((config, model))
}

fn in_range(option: &str, found: u64, least: u64, most: u64) -> Result<(), Failure> {
    if (least..=most).contains(&found) {
        return Ok(());
    }
    Err(Failure::usage(format!("{option} {found}: the shape allows {least} to {most}")))
}

/// The first `layers` layers of a model: the same configuration, cut short.
pub fn cut(config: &Value, layers: u64) -> Value {
    let mut config = config.clone();
    let Some(text) = decoder(&mut config) else { return config };
    text.insert("num_hidden_layers".to_owned(), json!(layers));
    if let Some(lists) = text.get_mut("linear_attn_config").and_then(Value::as_object_mut) {
        for list in ["kda_layers", "full_attn_layers"] {
            if let Some(list) = lists.get_mut(list).and_then(Value::as_array_mut) {
                list.retain(|layer| layer.as_u64().is_some_and(|layer| layer <= layers));
            }
        }
    }
    config
}

/// The decoder's object: `text_config`, or the whole configuration.
fn decoder(config: &mut Value) -> Option<&mut Map<String, Value>> {
    if config.get("text_config").is_some_and(Value::is_object) {
        config["text_config"].as_object_mut()
    } else {
        config.as_object_mut()
    }
}

fn set_tokens(config: &mut Value) {
    let set = |object: &mut Map<String, Value>| {
        for (key, id) in sidecars::TOKEN_IDS {
            if let Some(value) = object.get_mut(key) {
                *value = json!(id);
            }
        }
    };
    decoder(config).map(set);
    config.as_object_mut().map(set);
}

/// A checkpoint's configuration as a manifest keeps it: the decoder's object, the rest of the outer one inside.
pub fn container_config(config: &Value) -> Value {
    let Some(text) = config.get("text_config") else { return config.clone() };
    let (mut text, mut outer) = (text.clone(), config.clone());
    if let Some(outer) = outer.as_object_mut() {
        outer.remove("text_config");
    }
    text["_outer"] = outer;
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_can_be_cut() {
        for name in [Name::TinyK3, Name::TinyLinear, Name::KimiLinear48b, Name::K3] {
            let (_, whole) = shaped(name, None, None).unwrap();
            let (config, model) = shaped(name, Some(4), Some(8)).unwrap();
            assert_eq!((model.layers(), model.moe.as_ref().unwrap().experts), (4, 8));
            assert_eq!(model.hidden, whole.hidden);
            assert!(ModelConfig::from_container(&container_config(&config)).is_ok());
            for (layers, experts) in
                [(Some(0), None), (Some(1 + whole.layers() as u64), None), (None, Some(1))]
            {
                assert!(shaped(name, layers, experts).is_err());
            }
        }
    }
}
