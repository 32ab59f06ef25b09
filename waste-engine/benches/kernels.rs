//! Every kernel, for every set this machine has, at the shapes of Kimi-Linear-48B: in the cache and from memory.
//!
//! `cargo bench -p waste-engine --bench kernels [-- FILTER]`; compare the `fastest` columns of one run. `f32_gather`
//! is the opponent of the table look-ups: a plain scalar loop over f32 tables.
#![allow(missing_docs, clippy::unwrap_used)]

use std::cell::Cell;

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use rayon::prelude::*;
use waste_common::quant::half;
use waste_engine::kernels::Kernels;
use waste_engine::kernels::portable::{FastTables, KdaHead, VqShape};

const HIDDEN: usize = 2304;
const INTERMEDIATE: usize = 1024;
const PROJECTION: usize = 4096;
const HEAD: usize = 128;
const VQ3R: VqShape = VqShape { stages: 3, entries: 256, packed: false, vectors: HIDDEN / 8 };
const VQ4P: VqShape = VqShape { stages: 4, entries: 64, packed: true, vectors: HIDDEN / 8 };
/// More than the caches that are a core's own; a large shared one may still hold it.
const MEMORY: usize = 256 << 20;

fn main() {
    divan::main();
}

fn sets() -> Vec<&'static str> {
    Kernels::NAMES.iter().copied().filter(|name| Kernels::named(name).is_ok()).collect()
}

/// The sets whose fused multiply-add is an instruction; without one, whole matrices take seconds.
fn fused() -> Vec<&'static str> {
    sets().into_iter().filter(|&name| name != "portable" || cfg!(target_arch = "aarch64")).collect()
}

fn noise(n: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn random_bytes(n: usize) -> Vec<u8> {
    let mut state = 7u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..n).map(|_| next()).collect()
}

/// Copies of `data`, one after the other: enough of them that none is in the cache when its turn comes.
struct Copies<T> {
    all: Vec<T>,
    len: usize,
    next: Cell<usize>,
}

impl<T: Copy> Copies<T> {
    fn new(data: &[T], bytes: usize) -> Self {
        let count = (bytes / size_of_val(data)).max(1);
        Copies { all: data.repeat(count), len: data.len(), next: Cell::new(0) }
    }

    fn next(&self) -> &[T] {
        let at = self.next.get();
        self.next.set((at + self.len) % self.all.len());
        &self.all[at..at + self.len]
    }
}

fn one_scales(rows: usize) -> Vec<u8> {
    (0..rows).flat_map(|_| half::f32_to_f16(1.0).to_le_bytes()).collect()
}

/// The look-ups as a plain compiler-made scalar loop.
mod gather {
    use super::*;

    fn look_up(indices: &[u8], shape: VqShape, tables: &[f32], out: &mut [f32]) {
        for (out, block) in out.chunks_mut(64).zip(indices.chunks_exact(shape.block_bytes())) {
            out.fill(0.0);
            for (v, rows) in block.chunks_exact(64 * 3).enumerate() {
                if shape.packed {
                    let table: &[f32; 256] = tables[v * 256..][..256].try_into().unwrap();
                    for (out, i) in out.iter_mut().zip(rows.chunks_exact(3)) {
                        let word = u32::from_le_bytes([i[0], i[1], i[2], 0]) as usize;
                        *out += table[word & 63]
                            + table[64 + (word >> 6 & 63)]
                            + table[128 + (word >> 12 & 63)]
                            + table[192 + (word >> 18 & 63)];
                    }
                } else {
                    let table: &[f32; 768] = tables[v * 768..][..768].try_into().unwrap();
                    for (out, i) in out.iter_mut().zip(rows.chunks_exact(3)) {
                        *out += table[usize::from(i[0])]
                            + table[256 + usize::from(i[1])]
                            + table[512 + usize::from(i[2])];
                    }
                }
            }
        }
    }

    fn run(bencher: Bencher, shape: VqShape, memory: usize) {
        let rows = INTERMEDIATE;
        let indices = Copies::new(&random_bytes(rows / 64 * shape.block_bytes()), memory);
        let tables = noise(shape.table_len());
        let mut out = vec![0.0; rows];
        bencher
            .counter(ItemsCount::new(rows * shape.vectors))
            .counter(BytesCount::new(rows * shape.vectors * 3))
            .bench_local(|| look_up(black_box(indices.next()), shape, &tables, &mut out));
    }

    #[divan::bench]
    fn vq3r_cached(bencher: Bencher) {
        run(bencher, VQ3R, 0);
    }

    #[divan::bench]
    fn vq3r_memory(bencher: Bencher) {
        run(bencher, VQ3R, MEMORY);
    }

    #[divan::bench]
    fn vq4p_cached(bencher: Bencher) {
        run(bencher, VQ4P, 0);
    }

    #[divan::bench]
    fn vq4p_memory(bencher: Bencher) {
        run(bencher, VQ4P, MEMORY);
    }
}

mod exact {
    use super::*;

    fn rows(bencher: Bencher, set: &str, shape: VqShape, memory: usize) {
        let (kernels, rows) = (Kernels::named(set).unwrap(), INTERMEDIATE);
        let indices = Copies::new(&random_bytes(rows / 64 * shape.block_bytes()), memory);
        let (tables, scales) = (noise(shape.table_len()), one_scales(rows));
        let mut out = vec![0.0; rows];
        bencher
            .counter(ItemsCount::new(rows * shape.vectors))
            .counter(BytesCount::new(rows * shape.vectors * 3))
            .bench_local(|| (kernels.vq_rows)(indices.next(), shape, &scales, &tables, &mut out));
    }

    #[divan::bench(args = sets())]
    fn vq3r_rows_cached(bencher: Bencher, set: &str) {
        rows(bencher, set, VQ3R, 0);
    }

    #[divan::bench(args = sets())]
    fn vq3r_rows_memory(bencher: Bencher, set: &str) {
        rows(bencher, set, VQ3R, MEMORY);
    }

    #[divan::bench(args = sets())]
    fn vq4p_rows_cached(bencher: Bencher, set: &str) {
        rows(bencher, set, VQ4P, 0);
    }

    fn tables(bencher: Bencher, set: &str, shape: VqShape) {
        let kernels = Kernels::named(set).unwrap();
        let (books, x) = (noise(shape.codebook_len()), noise(8 * shape.vectors));
        let mut tables = vec![0.0; shape.table_len()];
        bencher.bench_local(|| (kernels.vq_tables)(&books, shape, black_box(&x), &mut tables));
    }

    #[divan::bench(args = fused())]
    fn vq3r_tables(bencher: Bencher, set: &str) {
        tables(bencher, set, VQ3R);
    }

    #[divan::bench(args = fused())]
    fn vq4p_tables(bencher: Bencher, set: &str) {
        tables(bencher, set, VQ4P);
    }

    /// 32 rows of an expert's gate.
    #[divan::bench(args = sets(), consts = [true, false])]
    fn expand<const PACKED: bool>(bencher: Bencher, set: &str) {
        let shape = if PACKED { VQ4P } else { VQ3R };
        let kernels = Kernels::named(set).unwrap();
        let (block, scales) = (random_bytes(shape.block_bytes()), one_scales(32));
        let books = noise(shape.codebook_len());
        let mut out = vec![0.0; 32 * HIDDEN];
        bencher
            .counter(BytesCount::new(4 * out.len()))
            .bench_local(|| (kernels.vq_expand)(black_box(&block), shape, 0, &scales, &books, &mut out));
    }
}

mod fast {
    use super::*;

    fn rows(bencher: Bencher, set: &str, shape: VqShape, memory: usize) {
        let (kernels, rows) = (Kernels::named(set).unwrap(), INTERMEDIATE);
        let indices = Copies::new(&random_bytes(rows / 64 * shape.block_bytes()), memory);
        let (planes, units) = (random_bytes(shape.fast_len()), noise(shape.fast_blocks()));
        let tables = FastTables { planes: &planes, scales: &units };
        let (scales, mut out) = (one_scales(rows), vec![0.0; rows]);
        bencher
            .counter(ItemsCount::new(rows * shape.vectors))
            .counter(BytesCount::new(rows * shape.vectors * 3))
            .bench_local(|| (kernels.vq_rows_fast)(indices.next(), shape, &scales, tables, &mut out));
    }

    #[divan::bench(args = sets())]
    fn vq3r_rows_cached(bencher: Bencher, set: &str) {
        rows(bencher, set, VQ3R, 0);
    }

    #[divan::bench(args = sets())]
    fn vq3r_rows_memory(bencher: Bencher, set: &str) {
        rows(bencher, set, VQ3R, MEMORY);
    }

    #[divan::bench(args = sets())]
    fn vq4p_rows_cached(bencher: Bencher, set: &str) {
        rows(bencher, set, VQ4P, 0);
    }

    #[divan::bench(args = sets())]
    fn vq4p_rows_memory(bencher: Bencher, set: &str) {
        rows(bencher, set, VQ4P, MEMORY);
    }

    fn tables(bencher: Bencher, set: &str, shape: VqShape) {
        let kernels = Kernels::named(set).unwrap();
        let (books, x) = (noise(shape.codebook_len()), noise(8 * shape.vectors));
        let mut scratch = vec![0.0; shape.fast_scratch_len()];
        let (mut planes, mut units) = (vec![0; shape.fast_len()], vec![0.0; shape.fast_blocks()]);
        bencher.bench_local(|| {
            (kernels.vq_tables_fast)(&books, shape, black_box(&x), &mut scratch, &mut planes, &mut units);
        });
    }

    #[divan::bench(args = fused())]
    fn vq3r_tables(bencher: Bencher, set: &str) {
        tables(bencher, set, VQ3R);
    }

    #[divan::bench(args = fused())]
    fn vq4p_tables(bencher: Bencher, set: &str) {
        tables(bencher, set, VQ4P);
    }
}

mod trunk {
    use super::*;

    fn sum(words: &[u64]) -> u64 {
        let mut sums = [0u64; 8];
        for chunk in words.as_chunks::<8>().0 {
            for (sum, word) in sums.iter_mut().zip(chunk) {
                *sum = sum.wrapping_add(*word);
            }
        }
        sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
    }

    /// What memory gives one core: a sum over it.
    #[divan::bench]
    fn memory_read(bencher: Bencher) {
        let words: Vec<u64> = vec![1; MEMORY / 8];
        bencher.counter(BytesCount::new(MEMORY)).bench_local(|| sum(black_box(&words)));
    }

    /// What memory gives all cores.
    #[divan::bench]
    fn memory_read_all_cores(bencher: Bencher) {
        let words: Vec<u64> = vec![1; MEMORY / 8];
        let add = |a: u64, b: u64| a.wrapping_add(b);
        bencher
            .counter(BytesCount::new(MEMORY))
            .bench_local(|| words.par_chunks(1 << 17).map(sum).reduce(|| 0, add));
    }

    /// A stack of projections on all cores, in shares of 64 rows.
    #[divan::bench(args = fused())]
    fn q4_memory_all_cores(bencher: Bencher, set: &str) {
        let kernels = Kernels::named(set).unwrap();
        let rows = MEMORY / (HIDDEN / 2) / 64 * 64;
        let payload = random_bytes(rows * HIDDEN / 2);
        let scales = vec![half::f32_to_f16(0.01); rows * HIDDEN / 128];
        let (x, mut out) = (noise(HIDDEN), vec![0.0; rows]);
        bencher.counter(BytesCount::new(payload.len() + 2 * scales.len())).bench_local(|| {
            let shares = payload.par_chunks(64 * HIDDEN / 2).zip(scales.par_chunks(64 * HIDDEN / 128));
            let shares = shares.zip(out.par_chunks_mut(64));
            shares.for_each(|((payload, scales), out)| (kernels.rows_q4)(payload, scales, &x, out));
        });
    }

    fn quant(bencher: Bencher, set: &str, bits: usize, rows: usize, memory: usize) {
        let kernels = Kernels::named(set).unwrap();
        let payload = Copies::new(&random_bytes(rows * HIDDEN * bits / 8), memory);
        let scales = vec![half::f32_to_f16(0.01); rows * HIDDEN / 128];
        let (x, mut out) = (noise(HIDDEN), vec![0.0; rows]);
        let kernel = if bits == 4 { kernels.rows_q4 } else { kernels.rows_q8 };
        bencher
            .counter(BytesCount::new(rows * HIDDEN * bits / 8 + 2 * scales.len()))
            .bench_local(|| kernel(black_box(payload.next()), &scales, &x, &mut out));
    }

    #[divan::bench(args = fused())]
    fn q4_cached(bencher: Bencher, set: &str) {
        quant(bencher, set, 4, PROJECTION / 8, 0);
    }

    #[divan::bench(args = fused())]
    fn q4_memory(bencher: Bencher, set: &str) {
        quant(bencher, set, 4, PROJECTION, MEMORY);
    }

    #[divan::bench(args = fused())]
    fn q8_cached(bencher: Bencher, set: &str) {
        quant(bencher, set, 8, PROJECTION / 8, 0);
    }

    #[divan::bench(args = fused())]
    fn q8_memory(bencher: Bencher, set: &str) {
        quant(bencher, set, 8, PROJECTION, MEMORY);
    }

    /// 32 rows of an expanded tile.
    #[divan::bench(args = fused())]
    fn f32_tile(bencher: Bencher, set: &str) {
        let kernels = Kernels::named(set).unwrap();
        let (w, x, mut out) = (noise(32 * HIDDEN), noise(HIDDEN), vec![0.0; 32]);
        bencher
            .counter(BytesCount::new(4 * w.len()))
            .bench_local(|| (kernels.rows_f32)(black_box(&w), &x, &mut out));
    }

    /// Thirty-two heads of one layer: their states do not fit the first cache.
    #[divan::bench(args = fused())]
    fn kda_step(bencher: Bencher, set: &str) {
        let kernels = Kernels::named(set).unwrap();
        let mut states = noise(32 * HEAD * HEAD);
        let (q, k, v) = (noise(HEAD), noise(HEAD), noise(HEAD));
        let decay = vec![0.5; HEAD];
        let mut o = vec![0.0; HEAD];
        bencher.counter(BytesCount::new(4 * states.len())).bench_local(|| {
            for state in states.chunks_exact_mut(HEAD * HEAD) {
                let head = KdaHead { q: &q, k: &k, v: &v, decay: &decay, beta: 0.5 };
                (kernels.kda_step)(state, head, &mut o);
            }
        });
    }

    #[divan::bench(args = fused())]
    fn axpy(bencher: Bencher, set: &str) {
        let kernels = Kernels::named(set).unwrap();
        let (x, mut y) = (noise(512), noise(512));
        bencher
            .counter(BytesCount::new(4096usize))
            .bench_local(|| (kernels.axpy)(1e-9, black_box(&x), &mut y));
    }

    #[divan::bench(args = fused())]
    fn silu_mul(bencher: Bencher, set: &str) {
        let kernels = Kernels::named(set).unwrap();
        let (mut gate, up) = (noise(INTERMEDIATE), noise(INTERMEDIATE));
        bencher.bench_local(|| (kernels.silu_mul)(black_box(&mut gate), &up));
    }
}
