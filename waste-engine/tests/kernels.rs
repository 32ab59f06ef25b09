//! Every kernel set gives the bits of the portable definition, and the definition is right.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use waste_common::container::{ExpertFmt, ExpertQuant, Geometry};
use waste_common::quant::{Encoded, half, q3g, q4g, q8g, vq};
use waste_common::tensors::ExpertKind;
use waste_engine::kernels::columns::Columns;
use waste_engine::kernels::portable::{FastTables, KdaHead, RunningSoftmax, VqShape, whole_len, words_len};
use waste_engine::kernels::{Kernels, Many, RowsMany, RowsQuant};

/// Numbers in −1 .. 1 from a seed: splitmix64.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) >> 40
    };
    (0..n).map(|_| next() as f32 / (1u64 << 23) as f32 - 1.0).collect()
}

fn portable() -> &'static Kernels {
    Kernels::named("portable").unwrap()
}

fn others() -> Vec<&'static Kernels> {
    Kernels::NAMES
        .iter()
        .filter(|&&name| name != "portable")
        .filter_map(|name| Kernels::named(name).ok())
        .collect()
}

/// Runs `f` with every set and demands the same bits.
fn same_bits(f: impl Fn(&Kernels) -> Vec<f32>) -> Vec<f32> {
    let expected = f(portable());
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for kernels in others() {
        assert_eq!(bits(&f(kernels)), bits(&expected), "{}", kernels.name);
    }
    expected
}

fn close(found: &[f32], expected: &[f64], tolerance: f64) {
    for (f, e) in found.iter().zip(expected) {
        assert!((f64::from(*f) - e).abs() <= tolerance, "{f} {e}");
    }
}

fn products(weights: &[f32], x: &[f32]) -> Vec<f64> {
    let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
    weights.chunks_exact(x.len()).map(dot).collect()
}

type ToWhole = fn(&[f32], &mut [f32]);

/// A format of the *fast* arithmetic.
struct Fast {
    encode: fn(&[f32], usize, usize) -> Encoded,
    exact: fn(&Kernels) -> RowsQuant,
    len: fn(usize) -> usize,
    input: fn(&Kernels) -> ToWhole,
    rows: fn(&Kernels) -> RowsQuant,
    many: fn(&Many) -> RowsMany,
}

const FAST: [Fast; 2] = [
    Fast {
        encode: |w, rows, cols| q4g::encode_rows(w, rows, cols).unwrap(),
        exact: |k| k.rows_q4,
        len: whole_len,
        input: |k| k.to_whole,
        rows: |k| k.rows_q4_fast,
        many: |many| many.rows_q4_fast,
    },
    Fast {
        encode: |w, rows, cols| q8g::encode_rows(w, rows, cols).unwrap(),
        exact: |k| k.rows_q8,
        len: words_len,
        input: |k| k.to_words,
        rows: |k| k.rows_q8_fast,
        many: |many| many.rows_q8_fast,
    },
];

impl Fast {
    fn products(&self, kernels: &Kernels, encoded: &Encoded, x: &[f32], rows: usize) -> Vec<f32> {
        let mut whole = vec![f32::NAN; (self.len)(x.len())];
        let mut out = vec![0.0; rows];
        (self.input)(kernels)(x, &mut whole);
        (self.rows)(kernels)(&encoded.payload, &encoded.scales, &whole, &mut out);
        out
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn rows_of_every_format(rows in 1usize..11, cols in 1usize..400, seed: u64) {
        let (w, x) = (noise(seed, rows * cols), noise(seed ^ 1, cols));
        let run = |f: &dyn Fn(&Kernels, &mut [f32])| same_bits(|kernels| {
            let mut out = vec![0.0; rows];
            f(kernels, &mut out);
            out
        });
        close(&run(&|k, out| (k.rows_f32)(&w, &x, out)), &products(&w, &x), 1e-4);

        let halves: Vec<u16> = w.iter().map(|&w| half::f32_to_f16(w)).collect();
        let widened: Vec<f32> = halves.iter().map(|&h| half::f16_to_f32(h)).collect();
        close(&run(&|k, out| (k.rows_f16)(&halves, &x, out)), &products(&widened, &x), 1e-4);

        type Decode = fn(&[u8], &[u16], &mut [f32]);
        type Kernel = fn(&Kernels) -> RowsQuant;
        let formats: [(_, Decode, Kernel); 3] = [
            (q8g::encode_rows(&w, rows, cols).unwrap(), q8g::decode_row, |k| k.rows_q8),
            (q4g::encode_rows(&w, rows, cols).unwrap(), q4g::decode_row, |k| k.rows_q4),
            (q3g::encode_rows(&w, rows, cols).unwrap(), q3g::decode_row, |k| k.rows_q3),
        ];
        for (encoded, decode, kernel) in formats {
            let stride = encoded.payload.len() / rows;
            let groups = encoded.scales.len() / rows;
            let mut decoded = vec![0.0; rows * cols];
            for (r, out) in decoded.chunks_exact_mut(cols).enumerate() {
                decode(&encoded.payload[r * stride..(r + 1) * stride], &encoded.scales[r * groups..(r + 1) * groups], out);
            }
            let found = run(&|k, out| kernel(k)(&encoded.payload, &encoded.scales, &x, out));
            close(&found, &products(&decoded, &x), 1e-4);
        }
    }

    #[test]
    fn rows_times_whole_numbers(rows in 1usize..7, cols in 1usize..700, seed: u64, exponent in -20i32..20) {
        let (w, x) = (noise(seed, rows * cols), noise(seed ^ 1, cols));
        let x: Vec<f32> = x.iter().map(|x| x * (exponent as f32).exp2()).collect();
        for fast in FAST {
            let encoded = (fast.encode)(&w, rows, cols);
            let found = same_bits(|k| fast.products(k, &encoded, &x, rows));
            let exact = same_bits(|k| {
                let mut out = vec![0.0; rows];
                (fast.exact)(k)(&encoded.payload, &encoded.scales, &x, &mut out);
                out
            });
            // Half a unit an element, times a weight of at most 1.1.
            let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let exact: Vec<f64> = exact.iter().map(|&y| f64::from(y)).collect();
            close(&found, &exact, f64::from(largest) * cols as f64 * (0.6 / 32639.0 + 1e-6) + 1e-30);
        }
    }

    #[test]
    fn several_inputs_give_the_bits_of_each(rows in 1usize..12, cols in 1usize..700, inputs in 1usize..11, seed: u64) {
        let (w, x) = (noise(seed, rows * cols), noise(seed ^ 1, inputs * cols));
        for fast in FAST {
            let encoded = (fast.encode)(&w, rows, cols);
            for kernels in others() {
                let Some(many) = kernels.many else { continue };
                let len = (fast.len)(cols);
                let mut wholes = vec![f32::NAN; inputs * len];
                for (x, whole) in x.chunks_exact(cols).zip(wholes.chunks_exact_mut(len)) {
                    (fast.input)(kernels)(x, whole);
                }
                let mut found = vec![f32::NAN; inputs * rows];
                (fast.many)(&many)(&encoded.payload, &encoded.scales, &wholes, len, &mut Columns::new(&mut found, rows));
                let expected: Vec<f32> =
                    x.chunks_exact(cols).flat_map(|x| fast.products(kernels, &encoded, x, rows)).collect();
                let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{}", kernels.name);
            }
        }
    }

    #[test]
    fn elementwise_functions(n in 1usize..70, seed: u64) {
        let x: Vec<f32> = noise(seed, n).iter().map(|x| x * 30.0).collect();
        let up: Vec<f32> = noise(seed ^ 2, n).iter().map(|x| x * 30.0).collect();
        let apply = |f: &dyn Fn(&Kernels, &mut [f32])| same_bits(|k| { let mut y = x.clone(); f(k, &mut y); y });
        apply(&|k, y| (k.sigmoid)(y));
        apply(&|k, y| (k.silu)(y));
        apply(&|k, y| (k.gelu_tanh)(y));
        apply(&|k, y| (k.gelu_erf)(y));
        apply(&|k, y| (k.exp)(y));
        apply(&|k, y| (k.gate)(y, &up));
        apply(&|k, y| (k.silu_mul)(y, &up));
        apply(&|k, y| (k.situ_mul)(y, &up, 4.0, 25.0));
        apply(&|k, y| (k.situ_mul)(y, &up, 1.0, f32::INFINITY));
        apply(&|k, y| (k.decay_softplus)(y, &up, 1.7));
        apply(&|k, y| (k.decay_bounded)(y, &up, 1.7, -5.0));
        apply(&|k, y| (k.axpy)(0.3, &up, y));
        let weight = noise(seed ^ 3, n);
        same_bits(|k| { let mut y = vec![0.0; n]; (k.rms_norm)(&x, &weight, 1e-5, &mut y); y });
        same_bits(|k| vec![(k.dot)(&x, &up)]);
        let taps: Vec<&[f32]> = vec![&x, &up, &weight];
        let conv = noise(seed ^ 4, 3 * n);
        same_bits(|k| { let mut y = vec![0.0; n]; (k.conv_silu)(&taps, &conv, &mut y); y });
        let softmax = apply(&|k, y| (k.softmax)(y));
        close(&[softmax.iter().sum()], &[1.0], 1e-5);
    }

    #[test]
    fn attention_over_tiles(n in 1usize..130, latents in 1usize..50, seed: u64) {
        let cached = latents + 3;
        let (cache, scores) = (noise(seed, n * cached), noise(seed ^ 1, n));
        let found = same_bits(|k| {
            let (mut running, mut mix) = (RunningSoftmax::EMPTY, vec![0.0; latents]);
            for (scores, tile) in scores.chunks(64).zip(cache.chunks(64 * cached)) {
                (k.attend_tile)(&mut scores.to_vec(), 20.0, tile, cached, &mut running, &mut mix);
            }
            mix.iter().map(|x| x / running.sum).collect()
        });
        let weights: Vec<f64> = scores.iter().map(|&s| (20.0 * f64::from(s)).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut expected = vec![0.0; latents];
        for (weight, row) in weights.iter().zip(cache.chunks_exact(cached)) {
            for (out, x) in expected.iter_mut().zip(row) {
                *out += weight / sum * f64::from(*x);
            }
        }
        close(&found, &expected, 1e-5);
    }

    #[test]
    fn kda_step(dim in prop_oneof![Just(16usize), Just(32), Just(128), 1usize..40], seed: u64) {
        let [q, k, v] = [1, 2, 3].map(|i| noise(seed ^ i, dim));
        let decay: Vec<f32> = noise(seed ^ 4, dim).iter().map(|x| x.abs()).collect();
        let state = noise(seed ^ 5, dim * dim);
        let head = KdaHead { q: &q, k: &k, v: &v, decay: &decay, beta: 0.6 };
        same_bits(|kernels| {
            let (mut state, mut o) = (state.clone(), vec![f32::NAN; dim]);
            (kernels.kda_step)(&mut state, head, &mut o);
            state.extend(o);
            state
        });
    }

    #[test]
    fn vector_quantised_rows(rows in 1u64..400, vectors in 1u64..75, format in 0usize..4, seed: u64) {
        let (fmt, stages, entries) =
            [(ExpertFmt::Vq3r, 3, 256), (ExpertFmt::Vq2r, 2, 256), (ExpertFmt::Vq4p, 4, 64), (ExpertFmt::Vq3r, 3, 100)][format];
        let cols = 8 * vectors;
        // The gate matrix is [rows, cols] when the expert's inner width is `rows`; it must be a multiple of 8 itself.
        let rows = rows.next_multiple_of(8);
        let geometry = Geometry::new(&ExpertQuant::new(fmt, stages, entries), rows, cols).unwrap();
        let layout = *geometry.layout(ExpertKind::Gate);
        let raw = noise(seed, (rows * vectors) as usize * stages as usize);
        let indices: Vec<u8> = raw.iter().map(|x| ((x.abs() * 1e6) as u32 % entries) as u8).collect();
        let payload = layout.pack(&indices).unwrap();
        let scales: Vec<u8> =
            noise(seed ^ 1, rows as usize).iter().flat_map(|&s| half::f32_to_f16(s).to_le_bytes()).collect();
        let books: Vec<Vec<f32>> = (0..stages).map(|s| noise(seed ^ (9 + u64::from(s)), entries as usize * 8)).collect();
        let tables: Vec<&[f32]> = books.iter().map(Vec::as_slice).collect();
        let mut truth = vec![0.0; (rows * cols) as usize];
        vq::Matrix::new(layout, &payload, &scales).decode(&tables, &mut truth).unwrap();

        let packed = fmt == ExpertFmt::Vq4p;
        let nameable = if packed { 64 } else { 256 };
        let shape = VqShape { stages: stages as usize, entries: nameable, packed, vectors: vectors as usize };
        let mut by_entry = vec![0.0; shape.codebook_len()];
        let mut by_dimension = vec![0.0; shape.codebook_len()];
        for (s, book) in books.iter().enumerate() {
            for (i, &value) in book.iter().enumerate() {
                by_entry[s * nameable * 8 + i] = value;
                by_dimension[s * nameable * 8 + i % 8 * nameable + i / 8] = value;
            }
        }
        let expanded = same_bits(|k| {
            let mut out = vec![0.0; truth.len()];
            for (block, out) in out.chunks_mut(64 * cols as usize).enumerate() {
                let indices = &payload[block * shape.block_bytes()..][..shape.block_bytes()];
                for (tile, out) in out.chunks_mut(8 * cols as usize).enumerate() {
                    let first = block * 64 + tile * 8;
                    (k.vq_expand)(indices, shape, tile * 8, &scales[2 * first..], &by_entry, out);
                }
            }
            out
        });
        prop_assert_eq!(&expanded, &truth);

        let x = noise(seed ^ 7, cols as usize);
        let found = same_bits(|k| {
            let mut tables = vec![0.0; shape.table_len()];
            (k.vq_tables)(&by_dimension, shape, &x, &mut tables);
            let mut out = vec![0.0; rows as usize];
            (k.vq_rows)(&payload, shape, &scales, &tables, &mut out);
            out
        });
        let products = products(&truth, &x);
        close(&found, &products, 1e-4);

        // 16-bit tables: half a unit an entry.
        let fast = same_bits(|k| {
            let (mut planes, mut units) = (vec![0; shape.fast_len()], vec![0.0; shape.fast_blocks()]);
            let mut scratch = vec![f32::NAN; shape.fast_scratch_len()];
            (k.vq_tables_fast)(&by_dimension, shape, &x, &mut scratch, &mut planes, &mut units);
            let mut out = vec![0.0; rows as usize];
            let tables = FastTables { planes: &planes, scales: &units };
            (k.vq_rows_fast)(&payload, shape, &scales, tables, &mut out);
            out.extend(units);
            out.extend(planes.iter().map(|&byte| f32::from(byte)));
            out
        });
        close(&fast[..rows as usize], &products, 2e-2);
    }
}

#[test]
fn tables_that_are_no_numbers_show_in_every_row() {
    let shape = VqShape { stages: 3, entries: 256, packed: false, vectors: 40 };
    let (books, indices) = (noise(1, shape.codebook_len()), vec![7u8; shape.block_bytes()]);
    let scales: Vec<u8> = [0x3c00u16; 64].iter().flat_map(|s| s.to_le_bytes()).collect();
    let run = |x: &[f32]| {
        same_bits(|k| {
            let (mut planes, mut units) = (vec![0; shape.fast_len()], vec![0.0; shape.fast_blocks()]);
            let mut scratch = vec![0.0; shape.fast_scratch_len()];
            (k.vq_tables_fast)(&books, shape, x, &mut scratch, &mut planes, &mut units);
            let mut out = vec![0.0; 64];
            (k.vq_rows_fast)(
                &indices,
                shape,
                &scales,
                FastTables { planes: &planes, scales: &units },
                &mut out,
            );
            out
        })
    };
    let mut x = noise(2, 320);
    assert!(run(&x).iter().all(|y| y.is_finite()));
    for bad in [f32::NAN, f32::INFINITY, f32::MAX] {
        x[300] = bad;
        assert!(run(&x).iter().all(|y| !y.is_finite() || bad == f32::MAX));
    }
    for tiny in [0.0, 1e-38, 1e-45] {
        x.fill(tiny);
        assert!(run(&x).iter().all(|&y| y == 0.0));
    }
}

#[test]
fn whole_numbers_of_what_is_no_number_show_in_every_row() {
    for fast in FAST {
        let encoded = (fast.encode)(&noise(3, 5 * 300), 5, 300);
        for (bad, at) in [(f32::NAN, 0), (f32::INFINITY, 130), (f32::NEG_INFINITY, 299)] {
            let mut x = noise(4, 300);
            x[at] = bad;
            let out = same_bits(|k| {
                let out = fast.products(k, &encoded, &x, 5);
                out.iter().map(|y| f32::from(u8::from(y.is_finite()))).collect()
            });
            assert!(out.iter().all(|&finite| finite == 0.0), "{bad}");
        }
    }
}

#[test]
fn the_largest_weights_and_inputs_do_not_overflow() {
    // A payload may hold −128, which no encoder writes.
    for (fast, payload, weight) in
        [(&FAST[0], [0u8; 128].as_slice(), -8.0f32), (&FAST[1], &[0x80; 256], -128.0)]
    {
        let encoded = Encoded { payload: payload.to_vec(), scales: vec![0x3c00; 2] };
        for x in [1.0f32, -1.0] {
            let found = same_bits(|k| fast.products(k, &encoded, &[x; 256], 1));
            close(&found, &[f64::from(256.0 * weight * x)], 1e-2);
        }
    }
}

#[test]
fn unknown_kernels_are_refused_by_name() {
    for name in ["sse9", "", "AVX2"] {
        let error = Kernels::named(name).map(|k| k.name).unwrap_err();
        assert!(error.to_string().contains("portable"), "{error}");
    }
    assert!(Kernels::NAMES.contains(&Kernels::detect().name));
}
