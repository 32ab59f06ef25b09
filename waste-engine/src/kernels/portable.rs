//! The definition of every operation. Each function is inlined into the instruction sets' wrappers.

use waste_common::quant::half::f16_to_f32;

use super::math;

/// Lanes of every accumulation.
const LANES: usize = 16;
/// Group of the trunk's quantised formats.
const GROUP: usize = 128;
/// Dimensions of a VQ vector.
pub const VQ_DIM: usize = 8;
/// Rows of a block of VQ indices.
pub const VQ_BLOCK: usize = 64;

type Lanes = [f32; LANES];

#[inline(always)]
fn reduce(mut lanes: Lanes) -> f32 {
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
    rows_grouped(stride, payload, scales, x, out, |row, g, values| {
        for (value, &byte) in values.iter_mut().zip(&row[g * GROUP..(g + 1) * GROUP]) {
            *value = f32::from(byte as i8);
        }
    });
}

/// See [`Kernels::rows_q4`](super::Kernels::rows_q4).
#[inline(always)]
pub fn rows_q4(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]) {
    let stride = x.len().div_ceil(GROUP) * GROUP / 2;
    rows_grouped(stride, payload, scales, x, out, |row, g, values| {
        let bytes = &row[g * GROUP / 2..(g + 1) * GROUP / 2];
        for (pair, &byte) in values.chunks_exact_mut(2).zip(bytes) {
            pair[0] = f32::from((byte & 15) as i8 - 8);
            pair[1] = f32::from((byte >> 4) as i8 - 8);
        }
    });
}

/// See [`Kernels::rows_q3`](super::Kernels::rows_q3).
#[inline(always)]
pub fn rows_q3(payload: &[u8], scales: &[u16], x: &[f32], out: &mut [f32]) {
    let stride = (3 * x.len().div_ceil(GROUP) * GROUP).div_ceil(8) + 1;
    rows_grouped(stride, payload, scales, x, out, |row, g, values| {
        for (i, value) in values.iter_mut().enumerate() {
            let bit = 3 * (g * GROUP + i);
            let two = u16::from_le_bytes([row[bit / 8], row[bit / 8 + 1]]);
            *value = f32::from((two >> (bit % 8) & 7) as i8 - 4);
        }
    });
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

/// One step of the gated delta rule; `state` is [key, value]. The output must come in as scratch.
#[inline(always)]
pub fn kda_step(state: &mut [f32], head: KdaHead, o: &mut [f32]) {
    let dim = o.len();
    // `o` first holds what the decayed state predicts for the key, then the correction, then the output.
    o.fill(0.0);
    for ((row, decay), k) in state.chunks_exact_mut(dim).zip(head.decay).zip(head.k) {
        for (s, o) in row.iter_mut().zip(o.iter_mut()) {
            *s *= decay;
            *o = k.mul_add(*s, *o);
        }
    }
    for (o, v) in o.iter_mut().zip(head.v) {
        *o = head.beta * (v - *o);
    }
    for (row, k) in state.chunks_exact_mut(dim).zip(head.k) {
        for (s, u) in row.iter_mut().zip(o.iter()) {
            *s = k.mul_add(*u, *s);
        }
    }
    o.fill(0.0);
    for (row, q) in state.chunks_exact(dim).zip(head.q) {
        for (s, o) in row.iter().zip(o.iter_mut()) {
            *o = q.mul_add(*s, *o);
        }
    }
}

/// How a VQ matrix is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VqShape {
    /// Codebooks summed for a vector.
    pub stages: usize,
    /// Entries of a codebook.
    pub entries: usize,
    /// Indices of 6 bits, four in three bytes, instead of a byte each.
    pub packed: bool,
    /// Vectors of a row: columns / 8.
    pub vectors: usize,
}

impl VqShape {
    /// Bytes of one vector's indices.
    pub fn index_bytes(self) -> usize {
        if self.packed { 3 } else { self.stages }
    }

    /// Bytes of a block of 64 rows.
    pub fn block_bytes(self) -> usize {
        self.vectors * VQ_BLOCK * self.index_bytes()
    }

    /// Elements of one input's tables.
    pub fn table_len(self) -> usize {
        self.vectors * self.stages * self.entries
    }

    /// Elements of one kind's codebooks.
    pub fn codebook_len(self) -> usize {
        self.stages * self.entries * VQ_DIM
    }

    #[inline(always)]
    fn indices(self, bytes: &[u8]) -> [usize; 8] {
        let mut indices = [0; 8];
        if self.packed {
            let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]);
            for (s, index) in indices.iter_mut().take(4).enumerate() {
                *index = (word >> (6 * s) & 63) as usize;
            }
        } else {
            for (index, &byte) in indices.iter_mut().zip(bytes) {
                *index = usize::from(byte);
            }
        }
        indices
    }
}

/// Builds `tables[v][stage][entry] = Σ_d codebook[stage][d][entry] · x[8v + d]`.
///
/// `codebooks` is [stages, 8, entries]: transposed, so that entries are the vector lanes.
#[inline(always)]
pub fn vq_tables(codebooks: &[f32], shape: VqShape, x: &[f32], tables: &mut [f32]) {
    let stages = tables.chunks_exact_mut(shape.entries);
    let pairs = x.chunks_exact(VQ_DIM).flat_map(|x| (0..shape.stages).map(move |s| (x, s)));
    for (table, (x, s)) in stages.zip(pairs) {
        let book = &codebooks[s * VQ_DIM * shape.entries..(s + 1) * VQ_DIM * shape.entries];
        table.fill(0.0);
        for (x, book) in x.iter().zip(book.chunks_exact(shape.entries)) {
            for (t, c) in table.iter_mut().zip(book) {
                *t = c.mul_add(*x, *t);
            }
        }
    }
}

/// Row blocks by table look-up: `out[r] = scale[r] · Σ_v (Σ_s tables[v][s][index[r, v, s]])`.
///
/// `indices` are whole blocks of 64 rows, `scales` the little-endian f16 of the rows in `out`, which may end
/// inside the last block.
#[inline(always)]
pub fn vq_rows(indices: &[u8], shape: VqShape, scales: &[u8], tables: &[f32], out: &mut [f32]) {
    // One copy of the loop per layout, so that the usual ones have constant strides.
    match (shape.stages, shape.entries, shape.packed) {
        (3, 256, false) => rows_by_table(
            VqShape { stages: 3, entries: 256, packed: false, ..shape },
            indices,
            scales,
            tables,
            out,
        ),
        (2, 256, false) => rows_by_table(
            VqShape { stages: 2, entries: 256, packed: false, ..shape },
            indices,
            scales,
            tables,
            out,
        ),
        (4, 64, true) => rows_by_table(
            VqShape { stages: 4, entries: 64, packed: true, ..shape },
            indices,
            scales,
            tables,
            out,
        ),
        _ => rows_by_table(shape, indices, scales, tables, out),
    }
}

#[inline(always)]
fn rows_by_table(shape: VqShape, indices: &[u8], scales: &[u8], tables: &[f32], out: &mut [f32]) {
    let per_vector = shape.stages * shape.entries;
    let bytes = shape.index_bytes();
    let blocks = indices.chunks_exact(shape.block_bytes());
    for ((out, scales), block) in out.chunks_mut(VQ_BLOCK).zip(scales.chunks(2 * VQ_BLOCK)).zip(blocks) {
        let mut acc = [0.0f32; VQ_BLOCK];
        for (table, rows) in tables.chunks_exact(per_vector).zip(block.chunks_exact(VQ_BLOCK * bytes)) {
            for (acc, index) in acc.iter_mut().zip(rows.chunks_exact(bytes)) {
                let indices = shape.indices(index);
                let mut sum = 0.0;
                for s in 0..shape.stages {
                    sum += table[s * shape.entries + indices[s]];
                }
                *acc += sum;
            }
        }
        for ((out, acc), scale) in out.iter_mut().zip(acc).zip(scales.chunks_exact(2)) {
            *out = f16_to_f32(u16::from_le_bytes([scale[0], scale[1]])) * acc;
        }
    }
}

/// Decodes rows `first ..` of one block of 64 to f32: `out[r, 8v..8v+8] = scale[r] · Σ_s codebook[s][index[r, v, s]]`.
///
/// `codebooks` is [stages, entries, 8]; `block` one block's indices; `scales` and `out` ([rows, 8 · vectors]) begin
/// with row `first`.
#[inline(always)]
pub fn vq_expand(
    block: &[u8],
    shape: VqShape,
    first: usize,
    scales: &[u8],
    codebooks: &[f32],
    out: &mut [f32],
) {
    let (cols, bytes) = (shape.vectors * VQ_DIM, shape.index_bytes());
    for (r, (row, scale)) in out.chunks_exact_mut(cols).zip(scales.chunks_exact(2)).enumerate() {
        let scale = f16_to_f32(u16::from_le_bytes([scale[0], scale[1]]));
        for (v, out) in row.chunks_exact_mut(VQ_DIM).enumerate() {
            let indices = shape.indices(&block[(v * VQ_BLOCK + first + r) * bytes..][..bytes]);
            let mut sum = [0.0f32; VQ_DIM];
            for s in 0..shape.stages {
                let entry = &codebooks[(s * shape.entries + indices[s]) * VQ_DIM..][..VQ_DIM];
                for d in 0..VQ_DIM {
                    sum[d] += entry[d];
                }
            }
            for d in 0..VQ_DIM {
                out[d] = scale * sum[d];
            }
        }
    }
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
