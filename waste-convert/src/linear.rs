//! Solving symmetric positive definite systems, in f64 and in one order of operations: the same bits everywhere.

/// Solves `matrix · x = right` for several right sides at once by Cholesky's decomposition. Of `matrix`, `[n][n]`, the
/// upper triangle is read, and overwritten; `right` is `[n][K]` and becomes the solution. False, with `right` spoilt, if the
/// matrix is not positive definite.
///
/// # Panics
/// If `matrix` has another size.
pub fn solve<const K: usize>(matrix: &mut [f64], right: &mut [[f64; K]]) -> bool {
    let n = right.len();
    assert_eq!(matrix.len(), n * n, "a square matrix for {n} unknowns");
    // The inner loops run along rows, so they vectorise without changing the order of any sum.
    for pivot in 0..n {
        let (above, below) = matrix.split_at_mut((pivot + 1) * n);
        let row = &mut above[pivot * n..];
        if !(row[pivot] > 0.0 && row[pivot].is_finite()) {
            return false;
        }
        let root = row[pivot].sqrt();
        row[pivot..].iter_mut().for_each(|value| *value /= root);
        for (i, lower) in (pivot + 1..n).zip(below.chunks_exact_mut(n)) {
            let factor = row[i];
            if factor != 0.0 {
                lower[i..].iter_mut().zip(&row[i..]).for_each(|(value, other)| *value -= factor * other);
            }
        }
        let (solved, open) = right.split_at_mut(pivot + 1);
        let solved = &mut solved[pivot];
        solved.iter_mut().for_each(|value| *value /= root);
        for (i, value) in (pivot + 1..n).zip(open) {
            value.iter_mut().zip(&*solved).for_each(|(value, solved)| *value -= row[i] * solved);
        }
    }
    for i in (0..n).rev() {
        let (open, solved) = right.split_at_mut(i + 1);
        let row = &matrix[i * n..][..n];
        let value = &mut open[i];
        for (factor, solved) in row[i + 1..].iter().zip(solved) {
            value.iter_mut().zip(&*solved).for_each(|(value, solved)| *value -= factor * solved);
        }
        value.iter_mut().for_each(|value| *value /= row[i]);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;

    #[test]
    fn a_solution_solves() {
        let n = 60;
        let mut random = SplitMix64::of(&[1]);
        let mut value = || (random.draw() >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
        let factor: Vec<f64> = (0..n * n).map(|_| value()).collect();
        let mut matrix = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..n {
                matrix[i * n + j] = (0..n).map(|k| factor[i * n + k] * factor[j * n + k]).sum();
            }
            matrix[i * n + i] += 1.0;
        }
        let wanted: Vec<[f64; 2]> = (0..n).map(|_| [value(), value()]).collect();
        let mut right: Vec<[f64; 2]> = (0..n)
            .map(|i| std::array::from_fn(|k| (0..n).map(|j| matrix[i * n + j] * wanted[j][k]).sum()))
            .collect();
        assert!(solve(&mut matrix, &mut right));
        for (found, wanted) in right.as_flattened().iter().zip(wanted.as_flattened()) {
            assert!((found - wanted).abs() < 1e-9, "{found} {wanted}");
        }
    }

    #[test]
    fn what_has_no_solution_is_told() {
        assert!(!solve(&mut [1.0, 2.0, 2.0, 1.0], &mut [[1.0], [1.0]]));
        assert!(!solve(&mut [0.0], &mut [[1.0]]));
        assert!(!solve(&mut [f64::NAN], &mut [[1.0]]));
    }
}
