use super::*;
use crate::quant::golden::noise;
use proptest::prelude::*;

fn vectors(seed: u64, count: usize) -> Vec<Vector> {
    noise(seed, count * VEC_DIM).as_chunks().0.to_vec()
}

/// The definition of the greedy search, without lanes.
fn plain_greedy(books: &Codebooks, x: &Vector) -> Vec<u8> {
    let mut rest = *x;
    let stage = |stage: &Stage| {
        let mut best = (f32::INFINITY, 0);
        for (e, c) in stage.entries.iter().enumerate() {
            let norm = c.iter().fold(0.0f32, |sum, c| c.mul_add(*c, sum));
            let score = rest.iter().zip(c).fold(0.5 * norm, |score, (x, c)| (-x).mul_add(*c, score));
            if score < best.0 {
                best = (score, e);
            }
        }
        rest.iter_mut().zip(&stage.entries[best.1]).for_each(|(x, c)| *x -= c);
        best.1 as u8
    };
    books.stages.iter().map(stage).collect()
}

/// The definition of the beam search: all continuations, sorted.
fn plain_beam(books: &Codebooks, width: usize, x: &Vector) -> Vec<u8> {
    let dot = |a: &Vector, b: &Vector| a.iter().zip(b).fold(0.0f32, |sum, (a, b)| a.mul_add(*b, sum));
    let mut paths: Vec<(f32, Vec<u8>)> = vec![(0.0, Vec::new())];
    for stage in &books.stages {
        let mut next = Vec::new();
        for (score, path) in &paths {
            for (e, c) in stage.entries.iter().enumerate() {
                let mut sum = x.iter().zip(c).fold(0.5 * dot(c, c), |sum, (x, c)| (-x).mul_add(*c, sum));
                for (earlier, index) in books.stages.iter().zip(path) {
                    sum += dot(&earlier.entries[usize::from(*index)], c);
                }
                next.push((score + sum, [&path[..], &[e as u8]].concat()));
            }
        }
        next.sort_by(|a, b| a.0.total_cmp(&b.0));
        next.truncate(width);
        paths = next;
    }
    paths.swap_remove(0).1
}

fn distance(books: &Codebooks, x: &Vector, indices: &[u8]) -> f32 {
    books.sum(indices).iter().zip(x).map(|(a, b)| (a - b) * (a - b)).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Every kernel finds what the definitions find, ties included.
    #[test]
    fn every_kernel_gives_the_indices_of_the_definition(
        stages in 1usize..=4,
        entries in 1usize..=256,
        width in 1usize..=WIDTH_MAX,
        count in 0usize..70,
        doubled: bool,
        coarse: bool,
        seed: u64,
    ) {
        let mut books: Vec<Vec<Vector>> =
            (0..stages).map(|stage| vectors(seed ^ stage as u64, entries)).collect();
        let mut vectors = vectors(seed ^ 77, count);
        if doubled {
            let half = entries / 2;
            books.iter_mut().for_each(|book| book.copy_within(..half, entries - half));
        }
        if coarse {
            // Many equal scores.
            let round = |x: &mut f32| *x = (*x * 2.0).round() / 2.0;
            books.iter_mut().for_each(|book| book.as_flattened_mut().iter_mut().for_each(round));
            vectors.as_flattened_mut().iter_mut().for_each(round);
        }
        let books = Codebooks::new(books);
        let greedy: Vec<u8> = vectors.iter().flat_map(|x| plain_greedy(&books, x)).collect();
        let beam: Vec<u8> = vectors.iter().flat_map(|x| plain_beam(&books, width, x)).collect();
        for kernels in available() {
            let mut found = vec![0; count * stages];
            (kernels.greedy)(&books, &vectors, &mut found);
            prop_assert_eq!(&found, &greedy);
            (kernels.beam)(&books, width, &vectors, &mut found);
            prop_assert_eq!(&found, &beam);
        }
    }
}

/// More candidates at the bound than have room at a time: the first ones count.
#[test]
fn where_all_entries_are_equal_the_first_ones_are_taken() {
    let book = || vec![[0.25; VEC_DIM]; 256];
    let books = Codebooks::new(vec![book(), book(), book()]);
    let vectors = vectors(3, 9);
    for kernels in available() {
        let mut found = vec![1; 27];
        for width in [1, 4, WIDTH_MAX] {
            (kernels.beam)(&books, width, &vectors, &mut found);
            assert_eq!(found, [0; 27]);
        }
    }
}

#[test]
fn a_wider_beam_comes_nearer() {
    let books = Codebooks::new((0..3).map(|stage| vectors(stage, 64)).collect());
    let vectors = vectors(9, 400);
    let mut indices = vec![0; 1200];
    let mut total = |search: &dyn Fn(&mut [u8])| {
        search(&mut indices);
        vectors.iter().zip(indices.chunks(3)).map(|(x, i)| distance(&books, x, i)).sum::<f32>()
    };
    let greedy = total(&|indices| books.greedy(&vectors, indices));
    let four = total(&|indices| books.beam(4, &vectors, indices));
    let sixteen = total(&|indices| books.beam(16, &vectors, indices));
    assert!(four < 0.95 * greedy && sixteen < four, "{greedy} {four} {sixteen}");
}
