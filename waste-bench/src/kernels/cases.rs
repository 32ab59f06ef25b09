//! The kernels and their operands, in the shapes of Kimi-Linear-48B.

use std::hint::black_box;
use std::rc::Rc;
use std::sync::Arc;

use rayon::prelude::*;
use waste_common::io::{OutOfMemory, Slab};
use waste_common::quant::half;
use waste_engine::kernels::Kernels;
use waste_engine::kernels::columns::Columns;
use waste_engine::kernels::portable::{FastTables, KdaHead, RunningSoftmax, VqShape, whole_len, words_len};

use super::{Case, MEMORY, PLAIN};
use crate::plain;
use crate::random::Random;

const HIDDEN: usize = 2304;
const ROWS: usize = 512;
const HEAD: usize = 128;
const LATENT: usize = 576;
const VECTORS: usize = HIDDEN / 8;
const SHAPES: [(&str, VqShape); 3] = [
    ("vq3r", VqShape { stages: 3, entries: 256, packed: false, vectors: VECTORS }),
    ("vq2r", VqShape { stages: 2, entries: 256, packed: false, vectors: VECTORS }),
    ("vq4p", VqShape { stages: 4, entries: 64, packed: true, vectors: VECTORS }),
];

/// All cases whose kernel's name contains `only`, with operands from memory spread over `spread` bytes.
pub(super) fn all(sets: &[&'static Kernels], spread: usize, only: &str) -> Result<Vec<Case>, OutOfMemory> {
    let mut list = List { only, cases: Vec::new() };
    look_ups(&mut list, sets, spread)?;
    trunk(&mut list, sets, spread)?;
    products(&mut list, sets);
    state(&mut list, sets);
    elementwise(&mut list, sets);
    Ok(list.cases)
}

struct List<'a> {
    only: &'a str,
    cases: Vec<Case>,
}

/// What is known of a case before its operands are made.
struct Of {
    kernel: String,
    set: &'static str,
    from: &'static str,
    threads: usize,
    bytes: usize,
    items: usize,
}

impl List<'_> {
    fn add(&mut self, of: Of, run: impl FnMut() + 'static) {
        let Of { kernel, set, from, threads, bytes, items } = of;
        if kernel.contains(self.only) || set == MEMORY {
            self.cases.push(Case { kernel, set, from, threads, bytes, items, run: Box::new(run) });
        }
    }

    /// A case on one thread with operands from the cache, a multiply-add for four bytes.
    fn add_simple(&mut self, kernel: &str, set: &'static str, bytes: usize, run: impl FnMut() + 'static) {
        let kernel = kernel.to_owned();
        self.add(Of { kernel, set, from: "cache", threads: 1, bytes, items: bytes / 4 }, run);
    }
}

fn noise(n: usize) -> Vec<f32> {
    let mut random = Random::new(1);
    (0..n).map(|_| random.float()).collect()
}

fn random_bytes(n: usize) -> Vec<u8> {
    Random::new(7).bytes(n, |bits| bits)
}

/// f16 scales of so many rows, as records hold them.
fn row_scales(rows: usize) -> Vec<u8> {
    half::f32_to_f16(0.01).to_le_bytes().repeat(rows)
}

/// Copies of an operand, enough of them that none is in the cache when its turn comes.
struct Copies {
    all: Slab,
    len: usize,
    next: usize,
}

impl Copies {
    fn new(len: usize, spread: usize) -> Result<Self, OutOfMemory> {
        Ok(Copies { all: repeated(&random_bytes(len), (spread / len).max(1))?, len, next: 0 })
    }

    fn next(&mut self) -> &[u8] {
        let at = self.next;
        self.next = (at + self.len) % self.all.len();
        &self.all[at..at + self.len]
    }
}

/// Copies side by side, in memory as the engine has it.
fn repeated(one: &[u8], count: usize) -> Result<Slab, OutOfMemory> {
    let mut all = Slab::new(count * one.len())?;
    all.chunks_exact_mut(one.len()).for_each(|copy| copy.copy_from_slice(one));
    Ok(all)
}

fn look_ups(list: &mut List, sets: &[&'static Kernels], spread: usize) -> Result<(), OutOfMemory> {
    for (name, shape) in SHAPES {
        let of = |kernel: &str, set: &'static str, from: &'static str| Of {
            kernel: format!("{kernel} {name}"),
            set,
            from,
            threads: 1,
            bytes: ROWS / 64 * shape.block_bytes(),
            items: ROWS * shape.vectors,
        };
        let exact = Rc::new(noise(shape.table_len()));
        let planes = Rc::new((random_bytes(shape.fast_len()), noise(shape.fast_blocks())));
        let scales = Rc::new(row_scales(ROWS));
        for (from, spread) in [("cache", 0), (MEMORY, spread)] {
            let copies = || Copies::new(ROWS / 64 * shape.block_bytes(), spread);
            let (mut indices, tables, mut out) = (copies()?, Rc::clone(&exact), vec![0.0; ROWS]);
            list.add(of("vq_rows", PLAIN, from), move || {
                plain::gather(black_box(indices.next()), shape, &tables, &mut out);
            });
            for &kernels in sets {
                let (mut indices, tables, mut out) = (copies()?, Rc::clone(&exact), vec![0.0; ROWS]);
                let row_scales = Rc::clone(&scales);
                list.add(of("vq_rows", kernels.name, from), move || {
                    (kernels.vq_rows)(black_box(indices.next()), shape, &row_scales, &tables, &mut out);
                });
                let (mut indices, tables, mut out) = (copies()?, Rc::clone(&planes), vec![0.0; ROWS]);
                let row_scales = Rc::clone(&scales);
                list.add(of("vq_rows_fast", kernels.name, from), move || {
                    let tables = FastTables { planes: &tables.0, scales: &tables.1 };
                    (kernels.vq_rows_fast)(black_box(indices.next()), shape, &row_scales, tables, &mut out);
                });
            }
        }
        // A quarter of the vectors: without an instruction for it, a multiply-add is slow.
        let shape = VqShape { vectors: VECTORS / 4, ..shape };
        let made = |kernel: &str, set: &'static str| Of {
            kernel: format!("{kernel} {name}"),
            set,
            from: "cache",
            threads: 1,
            bytes: 4 * shape.table_len(),
            items: 8 * shape.table_len(),
        };
        let books = Rc::new(noise(shape.codebook_len()));
        for &kernels in sets {
            let (books_of, x, mut tables) =
                (Rc::clone(&books), noise(8 * shape.vectors), vec![0.0; shape.table_len()]);
            list.add(made("vq_tables", kernels.name), move || {
                (kernels.vq_tables)(&books_of, shape, black_box(&x), &mut tables);
            });
            let (books_of, x) = (Rc::clone(&books), noise(8 * shape.vectors));
            let mut scratch = vec![0.0; shape.fast_scratch_len()];
            let (mut planes, mut units) = (vec![0; shape.fast_len()], vec![0.0; shape.fast_blocks()]);
            list.add(made("vq_tables_fast", kernels.name), move || {
                let x = black_box(&x);
                (kernels.vq_tables_fast)(&books_of, shape, x, &mut scratch, &mut planes, &mut units);
            });
            let (books_of, block, scales) =
                (Rc::clone(&books), random_bytes(shape.block_bytes()), row_scales(32));
            let mut out = vec![0.0; 32 * 8 * shape.vectors];
            let expand = Of { bytes: 4 * out.len(), items: out.len() / 8, ..made("vq_expand", kernels.name) };
            list.add(expand, move || {
                (kernels.vq_expand)(black_box(&block), shape, 0, &scales, &books_of, &mut out);
            });
        }
    }
    Ok(())
}

fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 8];
    for line in bytes.as_chunks::<64>().0 {
        for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}

/// Bytes of a task on several threads.
const SHARE: usize = 1 << 20;

fn trunk(list: &mut List, sets: &[&'static Kernels], spread: usize) -> Result<(), OutOfMemory> {
    let cpus = rayon::current_num_threads();
    let whole = spread.div_ceil(SHARE) * SHARE;
    for threads in [1, cpus] {
        let (bytes, of) = (
            repeated(&random_bytes(SHARE), whole / SHARE)?,
            Of {
                kernel: "sum".to_owned(),
                set: MEMORY,
                from: MEMORY,
                threads,
                bytes: whole,
                items: whole / 4,
            },
        );
        list.add(of, move || {
            let parts = bytes.par_chunks(if threads == 1 { whole } else { SHARE });
            black_box(parts.map(sum).reduce(|| 0, u64::wrapping_add));
        });
        if cpus == 1 {
            break;
        }
    }
    let scale = half::f32_to_f16(0.01);
    for &kernels in sets {
        type Rows = Arc<dyn Fn(&[u8], &[u16], &[f32], &mut [f32]) + Send + Sync>;
        let q4_fast: Rows = Arc::new(|payload, scales, x, out| {
            let mut scratch = [0.0; whole_len(HIDDEN)];
            (kernels.to_whole)(x, &mut scratch);
            (kernels.rows_q4_fast)(payload, scales, &scratch, out);
        });
        let q8_fast: Rows = Arc::new(|payload, scales, x, out| {
            let mut scratch = [0.0; words_len(HIDDEN)];
            (kernels.to_words)(x, &mut scratch);
            (kernels.rows_q8_fast)(payload, scales, &scratch, out);
        });
        let formats: [(&str, usize, Rows); 5] = [
            ("rows_q8", HIDDEN, Arc::new(kernels.rows_q8)),
            ("rows_q8_fast", HIDDEN, q8_fast),
            ("rows_q4", HIDDEN / 2, Arc::new(kernels.rows_q4)),
            ("rows_q4_fast", HIDDEN / 2, q4_fast),
            ("rows_q3", 3 * HIDDEN / 8 + 1, Arc::new(kernels.rows_q3)),
        ];
        for (name, stride, kernel) in formats {
            // From the cache on one thread; from memory on one and on all.
            for (from, rows, threads) in
                [("cache", 64, 1), (MEMORY, spread / stride, 1), (MEMORY, spread / stride, cpus)]
            {
                if from == MEMORY && kernels.name == "portable" || threads > 1 && name == "rows_q3" {
                    continue;
                }
                let (rows, kernel) = ((rows / 64).max(1) * 64, Arc::clone(&kernel));
                let (payload, scales) =
                    (repeated(&random_bytes(64 * stride), rows / 64)?, vec![scale; rows * HIDDEN / 128]);
                let (x, mut out) = (noise(HIDDEN), vec![0.0; rows]);
                let of = Of {
                    kernel: name.to_owned(),
                    set: kernels.name,
                    from,
                    threads,
                    bytes: payload.len() + 2 * scales.len(),
                    items: rows * HIDDEN,
                };
                list.add(of, move || {
                    let share = if threads == 1 { rows } else { 64 };
                    let parts =
                        payload.par_chunks(share * stride).zip(scales.par_chunks(share * HIDDEN / 128));
                    parts.zip(out.par_chunks_mut(share)).for_each(|((payload, scales), out)| {
                        kernel(black_box(payload), scales, &x, out);
                    });
                });
            }
        }
        type Decode = fn(&[u8], &[u16], &mut [f32]);
        let decoders: [(&str, usize, Decode); 3] = [
            ("decode_q8", HIDDEN, kernels.decode_q8),
            ("decode_q4", HIDDEN / 2, kernels.decode_q4),
            ("decode_q3", 3 * HIDDEN / 8 + 1, kernels.decode_q3),
        ];
        for (name, stride, decode) in decoders {
            let (payload, scales, mut out) =
                (random_bytes(stride), vec![scale; HIDDEN / 128], vec![0.0; HIDDEN]);
            list.add_simple(name, kernels.name, 4 * HIDDEN, move || {
                decode(black_box(&payload), &scales, &mut out);
            });
        }
        let (w, x, mut out) = (noise(32 * HIDDEN), noise(HIDDEN), vec![0.0; 32]);
        list.add_simple("rows_f32", kernels.name, 4 * 32 * HIDDEN, move || {
            (kernels.rows_f32)(black_box(&w), &x, &mut out);
        });
        let (w, x, mut out) = (vec![scale; 32 * HIDDEN], noise(HIDDEN), vec![0.0; 32]);
        let of = Of {
            kernel: "rows_f16".to_owned(),
            set: kernels.name,
            from: "cache",
            threads: 1,
            bytes: 2 * w.len(),
            items: w.len(),
        };
        list.add(of, move || (kernels.rows_f16)(black_box(&w), &x, &mut out));
        let (halves, mut out) = (vec![scale; HIDDEN], vec![0.0; HIDDEN]);
        list.add_simple("widen_f16", kernels.name, 4 * HIDDEN, move || {
            (kernels.widen_f16)(black_box(&halves), &mut out);
        });
    }
    Ok(())
}

fn products(list: &mut List, sets: &[&'static Kernels]) {
    for &kernels in sets {
        for (rows, tokens) in [(32, 8), (32, 256)] {
            // Without an instruction for multiply-adds, the large one takes a second.
            if tokens > 8 && kernels.name == "portable" && cfg!(target_arch = "x86_64") {
                continue;
            }
            let (w, x, mut out) = (noise(rows * HIDDEN), noise(tokens * HIDDEN), vec![0.0; rows * tokens]);
            let of = Of {
                kernel: format!("gemm {tokens}"),
                set: kernels.name,
                from: "cache",
                threads: 1,
                bytes: 4 * (w.len() + x.len()),
                items: rows * tokens * HIDDEN,
            };
            list.add(of, move || {
                (kernels.gemm)(black_box(&w), &x, HIDDEN, &mut Columns::new(&mut out, rows));
            });
        }
    }
}

fn state(list: &mut List, sets: &[&'static Kernels]) {
    for &kernels in sets {
        let (mut states, x, mut o) = (noise(8 * HEAD * HEAD), noise(HEAD), vec![0.0; HEAD]);
        let decay = vec![0.5; HEAD];
        list.add_simple("kda_step", kernels.name, 4 * 8 * HEAD * HEAD, move || {
            for state in states.chunks_exact_mut(HEAD * HEAD) {
                let head = KdaHead { q: &x, k: &x, v: &x, decay: &decay, beta: 0.1 };
                (kernels.kda_step)(state, head, &mut o);
            }
        });
        let (tile, mut mix) = (noise(64 * LATENT), vec![0.0; LATENT - 64]);
        let scores = noise(64);
        list.add_simple("attend_tile", kernels.name, 4 * 64 * LATENT, move || {
            let (mut scores, mut running) = (scores.clone(), RunningSoftmax::EMPTY);
            (kernels.attend_tile)(&mut scores, 0.1, black_box(&tile), LATENT, &mut running, &mut mix);
        });
        let (taps, weight, mut y) = (noise(4 * HIDDEN), noise(4 * HIDDEN), vec![0.0; HIDDEN]);
        list.add_simple("conv_silu", kernels.name, 4 * 8 * HIDDEN, move || {
            let taps: [&[f32]; 4] = std::array::from_fn(|i| &taps[i * HIDDEN..(i + 1) * HIDDEN]);
            (kernels.conv_silu)(black_box(&taps), &weight, &mut y);
        });
    }
}

fn elementwise(list: &mut List, sets: &[&'static Kernels]) {
    const N: usize = 1024;
    type InPlace = fn(&mut [f32]);
    type WithOther = fn(&mut [f32], &[f32]);
    type Other = Box<dyn Fn(&[f32], &mut [f32])>;
    for &kernels in sets {
        let in_place: [(&str, InPlace); 6] = [
            ("softmax", kernels.softmax),
            ("sigmoid", kernels.sigmoid),
            ("silu", kernels.silu),
            ("exp", kernels.exp),
            ("gelu_tanh", kernels.gelu_tanh),
            ("gelu_erf", kernels.gelu_erf),
        ];
        for (name, kernel) in in_place {
            let (x, mut y) = (noise(N), vec![0.0; N]);
            list.add_simple(name, kernels.name, 4 * N, move || {
                y.copy_from_slice(black_box(&x));
                kernel(&mut y);
            });
        }
        let with_other: [(&str, WithOther); 2] = [("gate", kernels.gate), ("silu_mul", kernels.silu_mul)];
        for (name, kernel) in with_other {
            let (x, mut y) = (noise(N), vec![0.0; N]);
            list.add_simple(name, kernels.name, 8 * N, move || {
                y.copy_from_slice(black_box(&x));
                kernel(&mut y, &x);
            });
        }
        let other = |name: &str, list: &mut List, kernel: Other| {
            let (x, mut y) = (noise(N), noise(N));
            list.add_simple(name, kernels.name, 8 * N, move || kernel(black_box(&x), &mut y));
        };
        other("dot", list, Box::new(|x, y| y[0] = (kernels.dot)(x, y)));
        other("axpy", list, Box::new(|x, y| (kernels.axpy)(1e-9, x, y)));
        other("rms_norm", list, Box::new(|x, y| (kernels.rms_norm)(x, x, 1e-5, y)));
        other("situ_mul", list, Box::new(|x, y| (kernels.situ_mul)(y, x, 4.0, 25.0)));
        other("decay_softplus", list, Box::new(|x, y| (kernels.decay_softplus)(y, x, 1.5)));
        other("decay_bounded", list, Box::new(|x, y| (kernels.decay_bounded)(y, x, 1.5, -5.0)));
    }
}
