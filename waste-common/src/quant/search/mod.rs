//! Which entries of some codebooks, one per stage, sum up to something near a given vector of eight weights.
//!
//! [`Codebooks::greedy`] takes the nearest entry of each stage after the other; [`Codebooks::beam`] carries several
//! candidates through the stages. Both are defined by the source in [`kernel`], in f32 with fused multiply-adds in a
//! fixed order. It is compiled for the instructions that CPUs have; the indices are the same everywhere.
#![allow(unsafe_code)]

mod kernel;
mod lanes;

use super::vq::{ENTRIES_MAX, STAGES_MAX, VEC_DIM};

/// Numbers that are worked on together.
const LANES: usize = 16;
/// Widest beam.
pub const WIDTH_MAX: usize = LANES;

/// Eight consecutive weights.
pub type Vector = [f32; VEC_DIM];
/// The numbers of one dimension, or of one score, of sixteen entries.
///
/// Aligned to what a register holds: a load that crosses a cache line takes twice as long.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Group([f32; LANES]);

/// The codebooks of one matrix, ready to be searched.
#[derive(Debug, Clone)]
pub struct Codebooks {
    stages: Vec<Stage>,
}

/// One codebook. Groups are padded with entries that are infinitely far away.
#[derive(Debug, Clone)]
struct Stage {
    entries: Vec<Vector>,
    /// Half the squared norm of each entry.
    half_norms: Vec<Group>,
    /// The entries, transposed: `[group][dimension]`.
    columns: Vec<[Group; VEC_DIM]>,
    /// Dot products with the entries of each earlier stage: `[stage][entry][group]`.
    products: Vec<Vec<Group>>,
}

/// The kernels compiled for one instruction set.
#[derive(Clone, Copy)]
struct Kernels {
    greedy: fn(&Codebooks, &[Vector], &mut [u8]),
    beam: fn(&Codebooks, usize, &[Vector], &mut [u8]),
    products: fn(&[Vector], &[[Group; VEC_DIM]]) -> Vec<Group>,
}

impl Codebooks {
    /// One codebook per stage.
    ///
    /// # Panics
    /// If there is no stage or more than 8, or a codebook has no entry or more than 256.
    pub fn new(books: Vec<Vec<Vector>>) -> Self {
        assert!((1..=STAGES_MAX).contains(&books.len()), "{} stages", books.len());
        let mut stages: Vec<Stage> = Vec::with_capacity(books.len());
        for entries in books {
            let stage = Stage::new(entries, &stages);
            stages.push(stage);
        }
        Codebooks { stages }
    }

    /// The same codebooks with each dimension multiplied by a factor: distances are weighted by its square.
    pub fn scaled(&self, by: &Vector) -> Self {
        let scaled = |entry: &Vector| std::array::from_fn(|d| entry[d] * by[d]);
        Codebooks::new(self.stages.iter().map(|stage| stage.entries.iter().map(scaled).collect()).collect())
    }

    /// Number of codebooks.
    pub fn stages(&self) -> usize {
        self.stages.len()
    }

    /// The entries of a stage.
    pub fn entries(&self, stage: usize) -> &[Vector] {
        &self.stages[stage].entries
    }

    /// The sum of the entries that `indices`, one per stage, name: as a reader adds them up.
    ///
    /// # Panics
    /// If an index is out of range.
    #[inline]
    pub fn sum(&self, indices: &[u8]) -> Vector {
        let mut sum = self.stages[0].entries[usize::from(indices[0])];
        for (stage, index) in self.stages.iter().zip(indices).skip(1) {
            for (sum, term) in sum.iter_mut().zip(&stage.entries[usize::from(*index)]) {
                *sum += term;
            }
        }
        sum
    }

    /// The nearest entry of each stage to what the stages before leave over; of equally near ones the first. Indices
    /// are `[vectors][stages]`.
    ///
    /// # Panics
    /// If `indices` has another length.
    pub fn greedy(&self, vectors: &[Vector], indices: &mut [u8]) {
        (best().greedy)(self, vectors, self.checked(vectors, indices));
    }

    /// The best sum that a beam of `width` candidates finds; ties go to the candidate that came first, then to the
    /// first entry. Indices are `[vectors][stages]`.
    ///
    /// # Panics
    /// If `width` is 0 or more than 16, or `indices` has another length.
    pub fn beam(&self, width: usize, vectors: &[Vector], indices: &mut [u8]) {
        assert!((1..=WIDTH_MAX).contains(&width), "a beam of {width}");
        (best().beam)(self, width, vectors, self.checked(vectors, indices));
    }

    fn checked<'a>(&self, vectors: &[Vector], indices: &'a mut [u8]) -> &'a mut [u8] {
        assert_eq!(indices.len(), vectors.len() * self.stages(), "indices");
        indices
    }
}

impl Stage {
    fn new(entries: Vec<Vector>, earlier: &[Stage]) -> Self {
        assert!((1..=ENTRIES_MAX).contains(&entries.len()), "{} entries", entries.len());
        let dot = |a: &Vector, b: &Vector| a.iter().zip(b).fold(0.0, |sum: f32, (a, b)| a.mul_add(*b, sum));
        // A power of two, and whole chunks.
        let groups = entries.len().div_ceil(LANES).next_power_of_two().max(kernel::CHUNK);
        let grouped = |value: &dyn Fn(&Vector) -> f32, padding: f32| {
            let mut groups = vec![Group([padding; LANES]); groups];
            for (i, entry) in entries.iter().enumerate() {
                groups[i / LANES].0[i % LANES] = value(entry);
            }
            groups
        };
        let half_norms = grouped(&|entry| 0.5 * dot(entry, entry), f32::INFINITY);
        let mut columns = vec![[Group([0.0; LANES]); VEC_DIM]; groups];
        for (i, entry) in entries.iter().enumerate() {
            for (column, value) in columns[i / LANES].iter_mut().zip(entry) {
                column.0[i % LANES] = *value;
            }
        }
        let products = earlier.iter().map(|other| (best().products)(&other.entries, &columns)).collect();
        Stage { entries, half_norms, columns, products }
    }

    fn groups(&self) -> usize {
        self.half_norms.len()
    }
}

mod portable {
    super::kernel::kernels! { super::lanes::Portable }

    pub(super) const KERNELS: super::Kernels = super::Kernels { greedy, beam, products };
}

#[cfg(target_arch = "x86_64")]
macro_rules! compiled {
    ($module:ident, $lanes:ty, $features:literal) => {
        mod $module {
            super::kernel::kernels! { $lanes, $features }

            pub(super) const KERNELS: super::Kernels = super::Kernels {
                // SAFETY: `available` hands these out only after it has seen the CPU report these features.
                greedy: |books, vectors, indices| unsafe { greedy(books, vectors, indices) },
                // SAFETY: as above.
                beam: |books, width, vectors, indices| unsafe { beam(books, width, vectors, indices) },
                // SAFETY: as above.
                products: |entries, columns| unsafe { products(entries, columns) },
            };
        }
    };
}

#[cfg(target_arch = "x86_64")]
compiled! { avx512, super::lanes::Avx512, "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,popcnt" }
#[cfg(target_arch = "x86_64")]
compiled! { avx2, super::lanes::Avx2, "avx2,fma,popcnt" }

/// The kernels this CPU can run, the best last.
fn available() -> Vec<Kernels> {
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
    let mut all = vec![portable::KERNELS];
    #[cfg(target_arch = "x86_64")]
    let detected = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("popcnt");
    #[cfg(target_arch = "x86_64")]
    if detected {
        all.push(avx2::KERNELS);
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
        {
            all.push(avx512::KERNELS);
        }
    }
    all
}

fn best() -> Kernels {
    static BEST: std::sync::OnceLock<Kernels> = std::sync::OnceLock::new();
    *BEST.get_or_init(|| available().pop().unwrap_or(portable::KERNELS))
}

#[cfg(test)]
mod tests;
