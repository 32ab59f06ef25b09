//! A matrix of results that several threads fill, each its own columns.

use std::marker::PhantomData;

/// Columns of a row-major matrix: `width` of every row's elements, rows `stride` apart. Splitting gives disjoint
/// columns, so the parts can be written from different threads.
pub struct Columns<'a> {
    first: *mut f32,
    rows: usize,
    stride: usize,
    width: usize,
    matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: a part has its elements to itself, like a `&mut [f32]`.
unsafe impl Send for Columns<'_> {}

impl<'a> Columns<'a> {
    /// All columns of a matrix of rows of `stride` elements.
    ///
    /// # Panics
    /// If the elements are not whole rows.
    pub fn new(matrix: &'a mut [f32], stride: usize) -> Self {
        assert!(
            stride > 0 && matrix.len().is_multiple_of(stride),
            "{} elements, {stride} a row",
            matrix.len()
        );
        let rows = matrix.len() / stride;
        Columns { first: matrix.as_mut_ptr(), rows, stride, width: stride, matrix: PhantomData }
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns in this part.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Sets one element.
    ///
    /// # Panics
    /// If it is not in this part.
    #[inline(always)]
    pub fn set(&mut self, row: usize, column: usize, value: f32) {
        assert!(
            row < self.rows && column < self.width,
            "element {row}, {column} of {} x {}",
            self.rows,
            self.width
        );
        // SAFETY: the element lies in the matrix that `new` was given, in a column only this part has.
        unsafe { *self.first.add(row * self.stride + column) = value };
    }

    /// This part's elements of a row.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: they lie in the matrix that `new` was given, in columns only this part has, and are borrowed with it.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(row * self.stride), self.width) }
    }

    /// The first `width` columns and the rest.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn split_at(self, width: usize) -> (Self, Self) {
        assert!(width <= self.width, "{width} of {} columns", self.width);
        // Only a part with rows and columns is ever written through, so an empty one may point anywhere.
        let rest = self.first.wrapping_add(width);
        (
            Columns { width, matrix: PhantomData, ..self },
            Columns { first: rest, width: self.width - width, matrix: PhantomData, ..self },
        )
    }

    /// Parts of `width` columns each, the last one perhaps narrower.
    pub fn chunks(self, width: usize) -> Vec<Self> {
        let mut parts = Vec::with_capacity(self.width.div_ceil(width.max(1)));
        let mut rest = self;
        while rest.width > 0 {
            let width = width.clamp(1, rest.width);
            let (part, tail) = rest.split_at(width);
            parts.push(part);
            rest = tail;
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_and_cover_all() {
        let mut matrix = vec![0.0; 5 * 7];
        std::thread::scope(|scope| {
            for (i, mut part) in Columns::new(&mut matrix, 7).chunks(3).into_iter().enumerate() {
                scope.spawn(move || {
                    for row in 0..part.rows() {
                        let value = |column| (100 * i + 10 * row + column) as f32;
                        part.set(row, 0, value(0));
                        for (column, element) in part.row(row).iter_mut().enumerate().skip(1) {
                            *element = value(column);
                        }
                    }
                });
            }
        });
        for (i, value) in matrix.iter().enumerate() {
            let (row, column) = (i / 7, i % 7);
            assert_eq!(*value, (100 * (column / 3) + 10 * row + column % 3) as f32);
        }
    }

    #[test]
    #[should_panic(expected = "element")]
    fn a_part_cannot_reach_beyond_itself() {
        let mut matrix = vec![0.0; 12];
        let (mut left, _) = Columns::new(&mut matrix, 4).split_at(2);
        left.set(0, 2, 1.0);
    }
}
