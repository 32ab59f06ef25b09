//! The published configurations, and what is wrong with others.

use serde_json::json;

use super::*;

fn k3() -> Value {
    serde_json::from_str(include_str!("../../../tests/configs/kimi-k3.config.json")).unwrap()
}

fn linear() -> Value {
    serde_json::from_str(include_str!("../../../tests/configs/kimi-linear-48b.config.json")).unwrap()
}

#[test]
fn the_published_configurations_are_understood() {
    let k3 = ModelConfig::from_checkpoint(&k3()).unwrap();
    assert_eq!((k3.arch, k3.tensor_prefix, k3.layers()), ("kimi-k3", "language_model.", 93));
    assert_eq!((k3.count(Mixer::Kda), k3.count(Mixer::Mla)), (69, 24));
    assert_eq!(k3.moe_layers().count(), 92);
    assert_eq!(k3.activation, Activation::Situ { beta: 4.0, linear_beta: Some(25.0) });
    let moe = k3.moe.as_ref().unwrap();
    assert_eq!((moe.experts, moe.top_k, moe.input, moe.latent_norm), (896, 16, 3584, true));

    let linear = ModelConfig::from_checkpoint(&linear()).unwrap();
    assert_eq!((linear.arch, linear.tensor_prefix, linear.layers()), ("kimi-linear", "", 27));
    assert_eq!(
        (linear.mixers[26], linear.mixers[24], linear.mixers[0]),
        (Mixer::Mla, Mixer::Kda, Mixer::Kda)
    );
    assert!(linear.kda.lower_bound.is_none() && !linear.mla.output_gate && linear.vision.is_none());
    assert_eq!(linear.moe.as_ref().unwrap().groups, None);
}

#[test]
fn a_container_keeps_the_outer_object_inside() {
    let outer = k3();
    let mut text = outer["text_config"].clone();
    let mut rest = outer.as_object().unwrap().clone();
    rest.remove("text_config");
    text["_outer"] = Value::Object(rest);
    assert_eq!(ModelConfig::from_container(&text).unwrap(), ModelConfig::from_checkpoint(&outer).unwrap());
}

#[test]
fn booleans_are_read_by_value_not_by_presence() {
    type Read = fn(&ModelConfig) -> bool;
    let cases: [(&str, Option<&str>, bool, Read); 5] = [
        ("moe_renormalize", None, true, |c| c.moe.as_ref().unwrap().renormalize),
        ("latent_moe_use_norm", None, false, |c| c.moe.as_ref().unwrap().latent_norm),
        ("mla_use_output_gate", None, false, |c| c.mla.output_gate),
        ("use_full_rank_gate", Some("linear_attn_config"), false, |c| c.kda.full_rank_gate),
        ("tie_word_embeddings", None, false, |c| c.tied_embeddings),
    ];
    for (key, within, absent, read) in cases {
        for (value, expected) in [(Some(true), true), (Some(false), false), (None, absent)] {
            let mut config = k3();
            let text = &mut config["text_config"];
            let object = match within {
                Some(within) => &mut text[within],
                None => text,
            };
            match value {
                Some(value) => object[key] = json!(value),
                None => drop(object.as_object_mut().unwrap().remove(key)),
            }
            let config = ModelConfig::from_checkpoint(&config).unwrap();
            assert_eq!(read(&config), expected, "{key} = {value:?}");
        }
    }
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    for (key, value) in [
        ("mla_use_nope", json!(false)),
        ("num_key_value_heads", json!(8)),
        ("hidden_act", json!("gelu")),
        ("moe_router_activation_func", json!("tanh")),
        ("num_nextn_predict_layers", json!(1)),
        ("architectures", json!(["DeepseekV3ForCausalLM"])),
        ("model_type", json!("llama")),
    ] {
        let mut config = linear();
        config[key] = value;
        match ModelConfig::from_checkpoint(&config) {
            Err(ConfigError::Unsupported { key: named, .. }) => assert_eq!(named, key),
            other => panic!("{key}: {other:?}"),
        }
    }
    let mut config = linear();
    config.as_object_mut().unwrap().remove("mla_use_nope");
    assert!(matches!(ModelConfig::from_checkpoint(&config), Err(ConfigError::Unsupported { .. })));
}

#[test]
fn absurd_numbers_are_errors() {
    for key in ["hidden_size", "num_hidden_layers", "vocab_size", "kv_lora_rank", "num_experts"] {
        for value in [json!(0), json!(-1), json!(1u64 << 60), json!(1.5), json!("big"), json!([])] {
            let mut config = linear();
            config[key] = value.clone();
            assert!(ModelConfig::from_checkpoint(&config).is_err(), "{key} = {value}");
        }
    }
    let mut config = linear();
    config["linear_attn_config"]["kda_layers"] = json!([1, 1]);
    assert!(ModelConfig::from_checkpoint(&config).is_err());
    let mut config = linear();
    config["intermediate_size"] = json!(1 << 20);
    config["hidden_size"] = json!(1 << 20);
    assert!(matches!(ModelConfig::from_checkpoint(&config), Err(ConfigError::Invalid { .. })));
}
