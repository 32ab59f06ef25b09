//! Where a patch lies: the learned table, resized to the grid, and the rotation of queries and keys.

use crate::compute::Compute;
use crate::matrix::Matrix;

/// One coordinate's place between two of the table's.
struct Between {
    low: usize,
    high: usize,
    fraction: f32,
}

fn axis(stored: usize, wanted: usize) -> Vec<Between> {
    let place = |i: usize| {
        let source = ((i as f64 + 0.5) * (stored as f64 / wanted as f64) - 0.5).max(0.0);
        let low = (source as usize).min(stored - 1);
        Between { low, high: (low + 1).min(stored - 1), fraction: (source - low as f64) as f32 }
    };
    (0..wanted).map(place).collect()
}

/// Adds the position table ([rows · columns, width], `stored` rows and columns) to a grid of patches `x`
/// ([rows · columns, width]): bilinear, half-pixel centres, edges clamped; itself where the sizes are the same.
pub fn add_positions(
    compute: &Compute,
    table: &Matrix,
    stored: (usize, usize),
    grid: (usize, usize),
    x: &mut [f32],
) {
    let (rows, columns) = (axis(stored.0, grid.0), axis(stored.1, grid.1));
    let width = table.cols;
    compute.tokens(x, width, |patch, x| {
        let (row, column) = (&rows[patch / grid.1], &columns[patch % grid.1]);
        let mut corners = vec![0.0; 4 * width];
        for (i, corner) in corners.chunks_exact_mut(width).enumerate() {
            let y = if i < 2 { row.low } else { row.high };
            let x = if i % 2 == 0 { column.low } else { column.high };
            table.decode_row(compute.kernels, y * stored.1 + x, corner);
        }
        let mix = |a: f32, b: f32, fraction: f32| a * (1.0 - fraction) + b * fraction;
        for (d, x) in x.iter_mut().enumerate() {
            let corner = |i: usize| corners[i * width + d];
            let top = mix(corner(0), corner(1), column.fraction);
            let bottom = mix(corner(2), corner(3), column.fraction);
            *x += mix(top, bottom, row.fraction);
        }
    });
}

/// The angle by which a coordinate turns its `i`th pair of a head of `dim`.
pub fn angle(coordinate: usize, i: usize, dim: usize) -> f64 {
    coordinate as f64 * 10_000f64.powf(-4.0 * i as f64 / dim as f64)
}

/// Sine and cosine of every angle of a grid.
pub struct Rotation {
    quarter: usize,
    /// [coordinate, dim / 4] of (sine, cosine); rows and columns turn alike.
    turns: Vec<(f32, f32)>,
}

impl Rotation {
    /// Angles for coordinates below `side` and heads of `dim`, a multiple of 4.
    pub fn new(side: usize, dim: usize) -> Self {
        let quarter = dim / 4;
        let turn = |j: usize| {
            let (sine, cosine) = angle(j / quarter, j % quarter, dim).sin_cos();
            (sine as f32, cosine as f32)
        };
        Rotation { quarter, turns: (0..side * quarter).map(turn).collect() }
    }

    /// Turns one head's query or key: of its pairs (2j, 2j + 1) the even ones by the column, the odd ones by the row.
    pub fn rotate(&self, head: &mut [f32], row: usize, column: usize) {
        let turns = |coordinate: usize| &self.turns[coordinate * self.quarter..][..self.quarter];
        let angles = turns(column).iter().zip(turns(row));
        for (four, (by_column, by_row)) in head.chunks_exact_mut(4).zip(angles) {
            for (pair, &(sine, cosine)) in four.chunks_exact_mut(2).zip([by_column, by_row]) {
                let (a, b) = (pair[0], pair[1]);
                pair[0] = a * cosine - b * sine;
                pair[1] = a * sine + b * cosine;
            }
        }
    }
}
