//! The definition of every operation. Each function is inlined into the instruction sets' wrappers.

use waste_common::quant::half::f16_to_f32;

use super::math;

pub use super::columns::Columns;
pub use super::gemm::gemm;

mod vq;
mod whole;

pub use vq::*;
pub use whole::*;

/// Lanes of every accumulation.
const LANES: usize = 16;
/// Group of the trunk's quantised formats.
pub const GROUP: usize = 128;

/// The lanes of every accumulation.
pub type Lanes = [f32; LANES];

/// The sum of 16 lanes by halving.
#[inline(always)]
pub fn reduce(mut lanes: Lanes) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn accumulate(acc: &mut Lanes, a: &[f32], b: &[f32]) {
    let (a16, b16) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (l, (a, b)) in a16.remainder().iter().zip(b16.remainder()).enumerate() {
        acc[l] = a.mul_add(*b, acc[l]);
    }
    for (a, b) in a16.zip(b16) {
        for l in 0..LANES {
            acc[l] = a[l].mul_add(b[l], acc[l]);
        }
    }
}

/// Dot product: lane l sums elements l, l + 16, …; the tail goes to the first lanes, first.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    accumulate(&mut acc, a, b);
    reduce(acc)
}

/// See [`Kernels::rows_f32`](super::Kernels::rows_f32). Four rows go together, to hide the latency of the sums.
#[inline(always)]
pub fn rows_f32(weights: &[f32], x: &[f32], out: &mut [f32]) {
    let cols = x.len();
    let mut rows = weights.chunks_exact(cols);
    let mut quads = out.chunks_exact_mut(4);
    for quad in &mut quads {
        let (Some(a), Some(b), Some(c), Some(d)) = (rows.next(), rows.next(), rows.next(), rows.next())
        else {
            return;
        };
        let mut acc = [[0.0f32; LANES]; 4];
        let whole = cols / LANES * LANES;
        for (l, column) in (whole..cols).enumerate() {
            for (acc, row) in acc.iter_mut().zip([a, b, c, d]) {
                acc[l] = row[column].mul_add(x[column], acc[l]);
            }
        }
        let blocks = a.chunks_exact(LANES).zip(b.chunks_exact(LANES));
        let blocks = blocks.zip(c.chunks_exact(LANES)).zip(d.chunks_exact(LANES));
        for ((((a, b), c), d), x) in blocks.zip(x.chunks_exact(LANES)) {
            for l in 0..LANES {
                acc[0][l] = a[l].mul_add(x[l], acc[0][l]);
                acc[1][l] = b[l].mul_add(x[l], acc[1][l]);
                acc[2][l] = c[l].mul_add(x[l], acc[2][l]);
                acc[3][l] = d[l].mul_add(x[l], acc[3][l]);
            }
        }
        for (out, acc) in quad.iter_mut().zip(acc) {
            *out = reduce(acc);
        }
    }
    for (out, row) in quads.into_remainder().iter_mut().zip(rows) {
        *out = dot(row, x);
    }
}

/// See [`Kernels::rows_f16`](super::Kernels::rows_f16).
#[inline(always)]
pub fn rows_f16(weights: &[u16], x: &[f32], out: &mut [f32]) {
    for (out, row) in out.iter_mut().zip(weights.chunks_exact(x.len())) {
        let mut acc = [0.0; LANES];
        for (row, x) in row.chunks(GROUP).zip(x.chunks(GROUP)) {
            let mut values = [0.0; GROUP];
            for (value, &bits) in values.iter_mut().zip(row) {
                *value = f16_to_f32(bits);
            }
            accumulate(&mut acc, &values[..row.len()], x);
        }
        *out = reduce(acc);
    }
}

/// See [`Kernels::widen_f16`](super::Kernels::widen_f16).
#[inline(always)]
pub fn widen_f16(x: &[u16], out: &mut [f32]) {
    for (out, &bits) in out.iter_mut().zip(x) {
        *out = f16_to_f32(bits);
    }
}

/// Rows in groups: the group's products are summed in lanes, then scaled into the row's lanes.
#[inline(always)]
fn rows_grouped(
    stride: usize,
    payload: &[u8],
    scales: &[u16],
    x: &[f32],
    out: &mut [f32],
    unpack: impl Fn(&[u8], usize, &mut [f32; GROUP]),
) {
    let groups = x.len().div_ceil(GROUP);
    let rows = payload.chunks_exact(stride).zip(scales.chunks_exact(groups));
    for (out, (row, scales)) in out.iter_mut().zip(rows) {
        let mut total = [0.0; LANES];
        for (g, (x, &scale)) in x.chunks(GROUP).zip(scales).enumerate() {
            let mut values = [0.0; GROUP];
            unpack(row, g, &mut values);
            let mut acc = [0.0; LANES];
            accumulate(&mut acc, &values[..x.len()], x);
            let scale = f16_to_f32(scale);
            for l in 0..LANES {
                total[l] = scale.mul_add(acc[l], total[l]);
            }
        }
        *out = reduce(total);
    }
}

/// See [`Kernels::rows_q8`](super::Kernels::rows_q8).
#[inline(always)]
pub fn rows_q8(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]) {
    let stride = x.len().div_ceil(GROUP) * GROUP;
    rows_grouped(stride, payload, scales, x, out, |row, g, values| unpack_q8(&row[g * GROUP..], values));
}

#[inline(always)]
fn unpack_q8(bytes: &[u8], values: &mut [f32; GROUP]) {
    for (value, &byte) in values.iter_mut().zip(&bytes[..GROUP]) {
        *value = f32::from(byte as i8);
    }
}

/// The lanes of a Q8G row's last group, when it is shorter than others.
#[inline(always)]
pub fn last_q8(bytes: &[u8], x: &[f32]) -> [f32; 16] {
    last_group(bytes, x, unpack_q8)
}

/// See [`Kernels::rows_q4`](super::Kernels::rows_q4).
#[inline(always)]
pub fn rows_q4(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]) {
    let stride = x.len().div_ceil(GROUP) * GROUP / 2;
    rows_grouped(stride, payload, scales, x, out, |row, g, values| unpack_q4(&row[g * GROUP / 2..], values));
}

#[inline(always)]
fn unpack_q4(bytes: &[u8], values: &mut [f32; GROUP]) {
    for (pair, &byte) in values.chunks_exact_mut(2).zip(&bytes[..GROUP / 2]) {
        pair[0] = f32::from((byte & 15) as i8 - 8);
        pair[1] = f32::from((byte >> 4) as i8 - 8);
    }
}

/// The lanes of a Q4G row's last group, when it is shorter than others.
#[inline(always)]
pub fn last_q4(bytes: &[u8], x: &[f32]) -> [f32; 16] {
    last_group(bytes, x, unpack_q4)
}

#[inline(always)]
fn last_group(bytes: &[u8], x: &[f32], unpack: impl Fn(&[u8], &mut [f32; GROUP])) -> Lanes {
    let (mut values, mut acc) = ([0.0; GROUP], [0.0; LANES]);
    unpack(bytes, &mut values);
    accumulate(&mut acc, &values[..x.len()], x);
    acc
}

/// See [`Kernels::rows_q3`](super::Kernels::rows_q3).
#[inline(always)]
pub fn rows_q3(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]) {
    let stride = (3 * x.len().div_ceil(GROUP) * GROUP).div_ceil(8) + 1;
    rows_grouped(stride, payload, scales, x, out, |row, g, values| {
        unpack_q3(&row[3 * g * GROUP / 8..], values)
    });
}

#[inline(always)]
fn unpack_q3(bytes: &[u8], values: &mut [f32; GROUP]) {
    for (i, value) in values.iter_mut().enumerate() {
        let two = u16::from_le_bytes([bytes[3 * i / 8], bytes[3 * i / 8 + 1]]);
        *value = f32::from((two >> (3 * i % 8) & 7) as i8 - 4);
    }
}

/// One grouped row decoded: each value times its group's scale.
#[inline(always)]
fn decode_grouped(
    group_bytes: usize,
    payload: &[u8],
    scales: &[u16],
    out: &mut [f32],
    unpack: impl Fn(&[u8], &mut [f32; GROUP]),
) {
    for ((g, out), &scale) in out.chunks_mut(GROUP).enumerate().zip(scales) {
        let mut values = [0.0; GROUP];
        unpack(&payload[g * group_bytes..], &mut values);
        let scale = f16_to_f32(scale);
        for (out, value) in out.iter_mut().zip(values) {
            *out = value * scale;
        }
    }
}

/// See [`Kernels::decode_q8`](super::Kernels::decode_q8).
#[inline(always)]
pub fn decode_q8(payload: &[u8], scales: &[u16], out: &mut [f32]) {
    decode_grouped(GROUP, payload, scales, out, unpack_q8);
}

/// See [`Kernels::decode_q4`](super::Kernels::decode_q4).
#[inline(always)]
pub fn decode_q4(payload: &[u8], scales: &[u16], out: &mut [f32]) {
    decode_grouped(GROUP / 2, payload, scales, out, unpack_q4);
}

/// See [`Kernels::decode_q3`](super::Kernels::decode_q3).
#[inline(always)]
pub fn decode_q3(payload: &[u8], scales: &[u16], out: &mut [f32]) {
    decode_grouped(3 * GROUP / 8, payload, scales, out, unpack_q3);
}

/// See [`Kernels::axpy`](super::Kernels::axpy).
#[inline(always)]
pub fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = a.mul_add(*x, *y);
    }
}

/// See [`Kernels::rms_norm`](super::Kernels::rms_norm).
#[inline(always)]
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

/// See [`Kernels::softmax`](super::Kernels::softmax).
#[inline(always)]
pub fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for x in x.iter_mut() {
        *x = math::exp(*x - max);
    }
    let mut lanes = [0.0; LANES];
    for block in x.chunks(LANES) {
        for (lane, x) in lanes.iter_mut().zip(block) {
            *lane += x;
        }
    }
    let scale = 1.0 / reduce(lanes);
    for x in x.iter_mut() {
        *x *= scale;
    }
}

/// A softmax over scores that come in tiles: largest score so far, and the sum of exponentials relative to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunningSoftmax {
    /// Largest scaled score.
    pub max: f32,
    /// `Σ e^(score − max)`.
    pub sum: f32,
}

impl RunningSoftmax {
    /// Before the first tile.
    pub const EMPTY: RunningSoftmax = RunningSoftmax { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// See [`Kernels::attend_tile`](super::Kernels::attend_tile).
#[inline(always)]
pub fn attend_tile(
    scores: &mut [f32],
    scale: f32,
    tile: &[f32],
    cached: usize,
    running: &mut RunningSoftmax,
    mix: &mut [f32],
) {
    let mut max = running.max;
    for score in scores.iter_mut() {
        *score *= scale;
        max = max.max(*score);
    }
    // Before the first tile there is nothing to rescale, and −∞ − −∞ is no number.
    let factor = if running.sum > 0.0 { math::exp(running.max - max) } else { 0.0 };
    let mut lanes = [0.0; LANES];
    for block in scores.chunks_mut(LANES) {
        for (score, lane) in block.iter_mut().zip(&mut lanes) {
            *score = math::exp(*score - max);
            *lane += *score;
        }
    }
    *running = RunningSoftmax { max, sum: running.sum.mul_add(factor, reduce(lanes)) };
    for x in mix.iter_mut() {
        *x *= factor;
    }
    let latents = mix.len();
    for (score, row) in scores.iter().zip(tile.chunks_exact(cached)) {
        axpy(*score, &row[..latents], mix);
    }
}

/// See [`Kernels::sigmoid`](super::Kernels::sigmoid).
#[inline(always)]
pub fn sigmoid(x: &mut [f32]) {
    for x in x {
        *x = math::sigmoid(*x);
    }
}

/// See [`Kernels::silu`](super::Kernels::silu).
#[inline(always)]
pub fn silu(x: &mut [f32]) {
    for x in x {
        *x *= math::sigmoid(*x);
    }
}

/// See [`Kernels::gate`](super::Kernels::gate).
#[inline(always)]
pub fn gate(x: &mut [f32], gate: &[f32]) {
    for (x, gate) in x.iter_mut().zip(gate) {
        *x *= math::sigmoid(*gate);
    }
}

/// See [`Kernels::silu_mul`](super::Kernels::silu_mul).
#[inline(always)]
pub fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate *= math::sigmoid(*gate) * up;
    }
}

/// See [`Kernels::situ_mul`](super::Kernels::situ_mul).
#[inline(always)]
pub fn situ_mul(gate: &mut [f32], up: &[f32], beta: f32, linear_beta: f32) {
    let bounded = linear_beta.is_finite();
    for (gate, up) in gate.iter_mut().zip(up) {
        let linear = if bounded { linear_beta * math::tanh(up / linear_beta) } else { *up };
        *gate = beta * math::tanh(*gate / beta) * math::sigmoid(*gate) * linear;
    }
}

/// See [`Kernels::decay_softplus`](super::Kernels::decay_softplus).
#[inline(always)]
pub fn decay_softplus(z: &mut [f32], bias: &[f32], a: f32) {
    for (z, bias) in z.iter_mut().zip(bias) {
        *z = -a * math::softplus(*z + bias);
    }
}

/// See [`Kernels::decay_bounded`](super::Kernels::decay_bounded).
#[inline(always)]
pub fn decay_bounded(z: &mut [f32], bias: &[f32], a: f32, bound: f32) {
    for (z, bias) in z.iter_mut().zip(bias) {
        *z = bound * math::sigmoid(a * (*z + bias));
    }
}

/// See [`Kernels::exp`](super::Kernels::exp).
#[inline(always)]
pub fn exp(x: &mut [f32]) {
    for x in x {
        *x = math::exp(*x);
    }
}

/// See [`Kernels::conv_silu`](super::Kernels::conv_silu). `weight` is [taps, channels].
#[inline(always)]
pub fn conv_silu(taps: &[&[f32]], weight: &[f32], y: &mut [f32]) {
    let channels = y.len();
    y.fill(0.0);
    for (tap, weight) in taps.iter().zip(weight.chunks_exact(channels)) {
        for ((y, x), weight) in y.iter_mut().zip(*tap).zip(weight) {
            *y = weight.mul_add(*x, *y);
        }
    }
    silu(y);
}

/// What one KDA head sees of one token; every slice has the head's dimension.
#[derive(Clone, Copy)]
pub struct KdaHead<'a> {
    /// Query, normalised and scaled.
    pub q: &'a [f32],
    /// Key, normalised.
    pub k: &'a [f32],
    /// Value.
    pub v: &'a [f32],
    /// Decay factors `e^g` of the state's rows.
    pub decay: &'a [f32],
    /// Strength of the update.
    pub beta: f32,
}

/// Columns of a KDA state that stay in registers while its rows pass.
const KDA_COLUMNS: usize = 64;

/// One step of the gated delta rule; `state` is [key, value]. The output must come in as scratch.
///
/// Columns do not depend on each other, so the state goes by in tiles of columns that fit the first cache.
#[inline(always)]
pub fn kda_step(state: &mut [f32], head: KdaHead, o: &mut [f32]) {
    let dim = o.len();
    let mut first = 0;
    while first < dim {
        if dim - first >= KDA_COLUMNS {
            kda_columns::<KDA_COLUMNS>(state, head, first, o);
            first += KDA_COLUMNS;
        } else if dim - first >= LANES {
            kda_columns::<LANES>(state, head, first, o);
            first += LANES;
        } else {
            kda_columns::<1>(state, head, first, o);
            first += 1;
        }
    }
}

/// Columns `first .. first + N`.
#[inline(always)]
fn kda_columns<const N: usize>(state: &mut [f32], head: KdaHead, first: usize, o: &mut [f32]) {
    let dim = o.len();
    let columns = first..first + N;
    // What the decayed state predicts for the key, then the correction.
    let mut u = [0.0f32; N];
    for ((row, decay), k) in state.chunks_exact(dim).zip(head.decay).zip(head.k) {
        for (s, u) in row[columns.clone()].iter().zip(&mut u) {
            *u = k.mul_add(s * decay, *u);
        }
    }
    for (u, v) in u.iter_mut().zip(&head.v[columns.clone()]) {
        *u = head.beta * (v - *u);
    }
    let mut sum = [0.0f32; N];
    let keys = head.decay.iter().zip(head.k).zip(head.q);
    for (row, ((decay, k), q)) in state.chunks_exact_mut(dim).zip(keys) {
        for ((s, u), sum) in row[columns.clone()].iter_mut().zip(&u).zip(&mut sum) {
            *s = k.mul_add(*u, *s * decay);
            *sum = q.mul_add(*s, *sum);
        }
    }
    o[columns].copy_from_slice(&sum);
}

/// See [`Kernels::gelu_tanh`](super::Kernels::gelu_tanh).
#[inline(always)]
pub fn gelu_tanh(x: &mut [f32]) {
    for x in x {
        *x = math::gelu_tanh(*x);
    }
}

/// See [`Kernels::gelu_erf`](super::Kernels::gelu_erf).
#[inline(always)]
pub fn gelu_erf(x: &mut [f32]) {
    for x in x {
        *x = math::gelu_erf(*x);
    }
}
