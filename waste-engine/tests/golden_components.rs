//! The parts of a layer against the f64 oracle.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Golden, assert_rows, max_abs};
use waste_common::config::{Activation, RouterScore};
use waste_common::plan::KvType;
use waste_common::plan::scratch::QUERIES;
use waste_engine::Arith;
use waste_engine::compute::Compute;
use waste_engine::kernels::Kernels;
use waste_engine::kernels::portable::KdaHead;
use waste_engine::layers::attn_res::AttnRes;
use waste_engine::layers::ffn::activate;
use waste_engine::layers::kda::{convolve, l2_normalise};
use waste_engine::layers::kv_cache::KvCache;
use waste_engine::layers::mla::{MlaLayer, Query};
use waste_engine::layers::router::{Router, Routing};
use waste_engine::matrix::{Matrix, MatrixData, QuantFormat};

/// Every kernel set of this machine, with two threads.
fn computes() -> Vec<Compute> {
    let sets = Kernels::NAMES.iter().filter_map(|name| Kernels::named(name).ok());
    sets.map(|kernels| Compute::new(kernels, Arith::Exact, 2, None, 0).unwrap()).collect()
}

fn component(name: &str) -> Golden {
    Golden::open(&format!("golden/components/{name}.safetensors"))
}

fn assert_close(what: &str, found: &[f32], golden: &Golden, name: &str, gate: f64) {
    let difference = max_abs(found, &golden.f64(name));
    assert!(difference <= gate, "{what} {name}: {difference:e} > {gate:e}");
}

fn check_kda(file: &str, bound: Option<f32>) {
    let golden = component(file);
    let shape = golden.shape("q");
    let (tokens, heads, dim) = (shape[0], shape[1], shape[2]);
    for compute in computes() {
        let kernels = compute.kernels;
        let [mut q, mut k, v, mut g] = ["q", "k", "v", "z"].map(|name| golden.f32(name));
        let (bias, a_log) = (golden.f32("dt_bias"), golden.f32("A_log"));
        q.chunks_exact_mut(dim).for_each(|q| l2_normalise(kernels.dot, q, 1.0 / (dim as f32).sqrt()));
        k.chunks_exact_mut(dim).for_each(|k| l2_normalise(kernels.dot, k, 1.0));
        for (i, z) in g.chunks_exact_mut(dim).enumerate() {
            let head = i % heads;
            let (bias, a) = (&bias[head * dim..(head + 1) * dim], a_log[head].exp());
            match bound {
                None => (kernels.decay_softplus)(z, bias, a),
                Some(bound) => (kernels.decay_bounded)(z, bias, a, bound),
            }
        }
        assert_close(file, &g, &golden, "g_f64", 5e-6);
        assert_close(file, &q, &golden, "qn_f64", 2e-6);
        assert_close(file, &k, &golden, "kn_f64", 2e-6);
        let mut beta = golden.f32("b_logit");
        (kernels.sigmoid)(&mut beta);
        assert_close(file, &beta, &golden, "beta_f64", 2e-6);
        (kernels.exp)(&mut g);
        let mut state = golden.f32("S0");
        let mut o = vec![0.0; q.len()];
        for t in 0..tokens {
            for h in 0..heads {
                let at = (t * heads + h) * dim..(t * heads + h + 1) * dim;
                let (q, k, v, decay) = (&q[at.clone()], &k[at.clone()], &v[at.clone()], &g[at.clone()]);
                let head = KdaHead { q, k, v, decay, beta: beta[t * heads + h] };
                (kernels.kda_step)(&mut state[h * dim * dim..(h + 1) * dim * dim], head, &mut o[at]);
            }
        }
        assert_close(file, &o, &golden, "o_f64", 2e-6);
        assert_close(file, &state, &golden, "S1_f64", 2e-6);
    }
}

#[test]
fn kda_with_softplus_decay() {
    check_kda("kda_linear", None);
}

#[test]
fn kda_with_bounded_decay_and_padded_a_log() {
    check_kda("kda_k3", Some(-5.0));
}

#[test]
fn short_convolution() {
    let golden = component("short_conv");
    let (x, w, ring) = (golden.f32("x"), golden.f32("w"), golden.f32("ring0"));
    let channels = golden.shape("x")[1];
    let transposed = |m: &[f32], cols: usize| -> Vec<f32> {
        let rows = m.len() / cols;
        (0..m.len()).map(|i| m[i % rows * cols + i / rows]).collect()
    };
    for compute in computes() {
        let tokens = x.len() / channels;
        for split in [tokens, 1, 2, 3] {
            let mut history = transposed(&ring, 3);
            let mut y = vec![0.0; x.len()];
            for (x, y) in x.chunks(split * channels).zip(y.chunks_mut(split * channels)) {
                convolve(&compute, &transposed(&w, 4), &mut history, x, y, channels);
            }
            assert_close("short_conv", &y, &golden, "y_f64", 2e-6);
            assert_close("short_conv", &transposed(&history, channels), &golden, "ring1_f64", 0.0);
        }
    }
}

#[test]
fn gated_norm() {
    let golden = component("gated_norm");
    let (x, gate, weight) = (golden.f32("x"), golden.f32("gate"), golden.f32("w"));
    for compute in computes() {
        let norm = |eps: f32| -> Vec<f32> {
            let mut out = vec![0.0; x.len()];
            for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
                (compute.kernels.rms_norm)(x, &weight, eps, out);
            }
            out
        };
        let mut y = norm(1e-5);
        assert_close("gated_norm", &y, &golden, "rms_only_eps1e-5_f64", 5e-6);
        assert_close("gated_norm", &norm(1e-6), &golden, "rms_only_eps1e-6_f64", 5e-6);
        (compute.kernels.gate)(&mut y, &gate);
        assert_close("gated_norm", &y, &golden, "y_f64", 5e-6);
    }
}

#[test]
fn activations() {
    let golden = component("situ");
    let up = golden.f32("up");
    let situ = |linear_beta| Activation::Situ {
        beta: if linear_beta == Some(25.0) { 4.0 } else { 1.0 },
        linear_beta,
    };
    for compute in computes() {
        for (name, activation) in
            [("situ_4_25", situ(Some(25.0))), ("situ_1_none", situ(None)), ("silu_mul", Activation::Silu)]
        {
            let mut found = golden.f32("gate");
            activate(compute.kernels, activation, &mut found, &up);
            for (found, expected) in found.iter().zip(golden.f64(&format!("{name}_f64"))) {
                let difference = (f64::from(*found) - expected).abs();
                assert!(
                    difference <= 1e-6 * expected.abs() + 1e-5 * f64::from(expected.abs() < 1.0),
                    "{name}: {found} {expected}"
                );
            }
        }
    }
}

#[test]
fn attention_residuals() {
    let golden = component("attn_res");
    let (blocks, prefix) = (golden.f32("blocks"), golden.f32("prefix"));
    let stride = prefix.len();
    let weight = golden.f32("norm_w").iter().zip(golden.f32("proj_w")).map(|(n, p)| n * p).collect();
    let mix = AttnRes { weight, eps: 1e-5 };
    for compute in computes() {
        // What the output buffer holds before must not matter.
        let mut out = vec![f32::NAN; stride];
        mix.mix(&compute, &blocks, stride, &prefix, &mut out);
        assert_close("attn_res", &out, &golden, "out_f64", 5e-6);
        mix.mix(&compute, &blocks[..stride], stride, &prefix, &mut out);
        assert_close("attn_res", &out, &golden, "out_one_block_f64", 5e-6);
    }
}

#[test]
fn latent_attention() {
    let golden = component("mla");
    let shape = golden.shape("q");
    let (tokens, heads) = (shape[0], shape[1]);
    let (nope, rope, value, kv_lora) = (12, 8, 10, 20);
    let (queries, latent) = (golden.f32("q"), golden.f32("latent"));
    let position = golden.shape("latent")[0] - tokens;
    let empty = || Matrix::f32(0, 1, Vec::new());
    let layer = MlaLayer {
        heads,
        nope,
        rope,
        value,
        kv_lora,
        query: Query::Direct(empty()),
        latent: empty(),
        latent_norm: Vec::new(),
        expand: Matrix::f32(heads * (nope + value), kv_lora, golden.f32("kv_b")),
        gate: None,
        out: empty(),
    };
    for compute in computes() {
        // All queries, [heads, tokens], in blocks.
        let mut by_head = vec![0.0; heads * tokens * value];
        let mut cache = KvCache::new(KvType::F32, position + tokens, kv_lora + rope);
        for (position, row) in latent.chunks_exact(kv_lora + rope).enumerate() {
            cache.store(position, row);
        }
        for (b, out) in by_head.chunks_mut(QUERIES * value).enumerate() {
            layer.attend(&compute, b * QUERIES, tokens, &queries, position, &cache, out);
        }
        let mut found = vec![0.0; by_head.len()];
        for (i, out) in by_head.chunks_exact(value).enumerate() {
            let (head, t) = (i / tokens, i % tokens);
            found[(t * heads + head) * value..][..value].copy_from_slice(out);
        }
        assert_close("mla", &found, &golden, "o_f64", 5e-6);
    }
}

#[test]
fn routers() {
    let golden = component("router");
    for case in ["k3", "linear", "grouped", "raw"] {
        let tensor = |name: &str| format!("{case}.{name}");
        let params = golden.u32(&tensor("params"));
        let [experts, top_k, groups, kept, renormalize] = params[..] else { panic!() };
        let routing = Routing {
            top_k: top_k as usize,
            score: RouterScore::Sigmoid,
            renormalize: renormalize != 0,
            scaling: golden.f32(&tensor("scale"))[0],
            groups: (groups > 1 && groups > kept).then_some((groups as usize, kept as usize)),
        };
        let x = golden.f32(&tensor("x"));
        let hidden = golden.shape(&tensor("x"))[1];
        let gate = Matrix::f32(experts as usize, hidden, golden.f32(&tensor("gate_w")));
        let router = Router { gate, bias: golden.f32(&tensor("bias")) };
        for compute in computes() {
            let tokens = x.len() / hidden;
            let mut scores = vec![0.0; tokens * experts as usize];
            router.scores(&compute, &routing, &x, &mut scores);
            assert_close(case, &scores, &golden, &tensor("scores_f64"), 2e-6);
            let mut ids = vec![0; tokens * routing.top_k];
            let mut weights = vec![0.0; ids.len()];
            let mut selection = vec![0.0; experts as usize];
            for ((scores, ids), weights) in scores
                .chunks_exact(experts as usize)
                .zip(ids.chunks_exact_mut(routing.top_k))
                .zip(weights.chunks_exact_mut(routing.top_k))
            {
                router.choose(&routing, scores, &mut selection, ids, weights);
            }
            assert_eq!(ids, golden.u32(&tensor("ids")), "{case}");
            assert_close(case, &weights, &golden, &tensor("weights_f64"), 2e-6);
        }
    }
}

#[test]
fn quantised_rows_times_vector() {
    let golden = component("trunk_quant");
    for shape in ["3x96", "5x256", "7x200"] {
        let x = golden.f32(&format!("{shape}.act"));
        for (name, format) in [("q8", QuantFormat::Q8), ("q4", QuantFormat::Q4), ("q3", QuantFormat::Q3)] {
            let tensor = |part: &str| format!("{shape}.{name}.{part}");
            let [rows, stride] = golden.shape(&tensor("payload"))[..] else { panic!() };
            let data = MatrixData::Quant {
                format,
                stride,
                payload: golden.bytes(&tensor("payload")).into(),
                scales: golden
                    .bytes(&tensor("scale"))
                    .chunks_exact(2)
                    .map(|b| u16::from_le_bytes([b[0], b[1]]))
                    .collect::<Vec<_>>()
                    .into(),
            };
            let matrix = Matrix { rows, cols: x.len(), data };
            for compute in computes() {
                let mut out = vec![0.0; rows];
                matrix.apply(&compute, &x, &mut out);
                let expected = golden.f64(&tensor("matvec_f64"));
                assert_rows(&tensor("matvec"), &out, &expected, rows, 1e-6, f64::INFINITY);
                let values = golden.f32(&tensor("value"));
                for (row, values) in values.chunks_exact(x.len()).enumerate() {
                    let mut decoded = vec![0.0; x.len()];
                    matrix.decode_row(compute.kernels, row, &mut decoded);
                    assert_eq!(decoded, values, "{shape} {name}");
                }
            }
        }
    }
}
