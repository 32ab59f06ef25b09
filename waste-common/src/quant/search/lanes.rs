//! Sixteen f32 at a time: as an array, which defines the operations, and as the registers of x86-64.
//!
//! `minus_product` is `sum − self · other`, rounded once; `lower` is `self` of equal ones; `replaced` takes `other`
//! where the mask is true; `least` is the least lane; `not_above` has a bit for each lane where `self <= other`;
//! `inserted` puts a value, behind those that are equal, into ascending lanes, and its place among theirs; the last one
//! drops out.

use super::{Group, LANES};

/// An array.
#[derive(Clone, Copy)]
pub struct Portable(Group);

#[allow(clippy::needless_range_loop)]
impl Portable {
    #[inline]
    pub fn splat(value: f32) -> Self {
        Portable([value; LANES])
    }

    #[inline]
    pub fn load(group: &Group) -> Self {
        Portable(*group)
    }

    #[inline]
    pub fn store(self, group: &mut Group) {
        *group = self.0;
    }

    #[inline]
    pub fn plus(mut self, other: Self) -> Self {
        for lane in 0..LANES {
            self.0[lane] += other.0[lane];
        }
        self
    }

    #[inline]
    pub fn minus_product(self, other: Self, mut sum: Self) -> Self {
        for lane in 0..LANES {
            sum.0[lane] = (-self.0[lane]).mul_add(other.0[lane], sum.0[lane]);
        }
        sum
    }

    #[inline]
    pub fn lower(self, other: Self) -> Self {
        self.replaced(other.below(self), other)
    }

    #[inline]
    pub fn least(self) -> f32 {
        self.0.into_iter().fold(f32::INFINITY, f32::min)
    }

    #[inline]
    pub fn below(self, other: Self) -> [bool; LANES] {
        let mut mask = [false; LANES];
        for lane in 0..LANES {
            mask[lane] = self.0[lane] < other.0[lane];
        }
        mask
    }

    #[inline]
    pub fn replaced(mut self, mask: [bool; LANES], other: Self) -> Self {
        for lane in 0..LANES {
            self.0[lane] = if mask[lane] { other.0[lane] } else { self.0[lane] };
        }
        self
    }

    #[inline]
    pub fn not_above(self, other: Self) -> u32 {
        let mut bits = 0;
        for lane in 0..LANES {
            bits |= u32::from(self.0[lane] <= other.0[lane]) << lane;
        }
        bits
    }

    #[inline]
    pub fn inserted(self, value: Self, places: Self, place: Self) -> (Self, Self) {
        let (mut lanes, mut at) = (self, places);
        for lane in 0..LANES {
            let before = if lane == 0 { f32::NEG_INFINITY } else { self.0[lane - 1] };
            if self.0[lane] > value.0[lane] {
                let here = before <= value.0[lane];
                lanes.0[lane] = if here { value.0[lane] } else { before };
                at.0[lane] = if here { place.0[lane] } else { places.0[lane.saturating_sub(1)] };
            }
        }
        (lanes, at)
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Group, LANES};

    const _: () = assert!(LANES == 16);

    /// One register of AVX-512.
    #[derive(Clone, Copy)]
    pub struct Avx512(__m512);

    impl Avx512 {
        #[inline]
        #[target_feature(enable = "avx512f")]
        pub fn splat(value: f32) -> Self {
            Avx512(_mm512_set1_ps(value))
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        pub fn load(group: &Group) -> Self {
            // SAFETY: a group is 64 readable bytes.
            Avx512(unsafe { _mm512_loadu_ps(group.as_ptr()) })
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        pub fn store(self, group: &mut Group) {
            // SAFETY: a group is 64 writable bytes.
            unsafe { _mm512_storeu_ps(group.as_mut_ptr(), self.0) };
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        pub fn plus(self, other: Self) -> Self {
            Avx512(_mm512_add_ps(self.0, other.0))
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        pub fn minus_product(self, other: Self, sum: Self) -> Self {
            Avx512(_mm512_fnmadd_ps(self.0, other.0, sum.0))
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        pub fn lower(self, other: Self) -> Self {
            // Of equal ones the instruction gives its second operand.
            Avx512(_mm512_min_ps(other.0, self.0))
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        pub fn least(self) -> f32 {
            _mm512_reduce_min_ps(self.0)
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        pub fn below(self, other: Self) -> __mmask16 {
            _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0)
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        pub fn replaced(self, mask: __mmask16, other: Self) -> Self {
            Avx512(_mm512_mask_mov_ps(self.0, mask, other.0))
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        pub fn not_above(self, other: Self) -> u32 {
            u32::from(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(self.0, other.0))
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        pub fn inserted(self, value: Self, places: Self, place: Self) -> (Self, Self) {
            let order = _mm512_setr_epi32(0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14);
            let first = _mm512_set1_ps(f32::NEG_INFINITY);
            let before = _mm512_mask_permutexvar_ps(first, 0xfffe, order, self.0);
            let moved = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, value.0);
            let here = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(before, value.0);
            let lanes = _mm512_mask_mov_ps(self.0, moved, _mm512_mask_mov_ps(before, here, value.0));
            let shifted = _mm512_permutexvar_ps(order, places.0);
            let at = _mm512_mask_mov_ps(places.0, moved, _mm512_mask_mov_ps(shifted, here, place.0));
            (Avx512(lanes), Avx512(at))
        }
    }

    /// Two registers of AVX.
    #[derive(Clone, Copy)]
    pub struct Avx2(__m256, __m256);

    impl Avx2 {
        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn splat(value: f32) -> Self {
            Avx2(_mm256_set1_ps(value), _mm256_set1_ps(value))
        }

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn load(group: &Group) -> Self {
            // SAFETY: a group is twice 32 readable bytes.
            unsafe { Avx2(_mm256_loadu_ps(group.as_ptr()), _mm256_loadu_ps(group.as_ptr().add(8))) }
        }

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn store(self, group: &mut Group) {
            // SAFETY: a group is twice 32 writable bytes.
            unsafe {
                _mm256_storeu_ps(group.as_mut_ptr(), self.0);
                _mm256_storeu_ps(group.as_mut_ptr().add(8), self.1);
            }
        }

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn plus(self, other: Self) -> Self {
            Avx2(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1))
        }

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn minus_product(self, other: Self, sum: Self) -> Self {
            Avx2(_mm256_fnmadd_ps(self.0, other.0, sum.0), _mm256_fnmadd_ps(self.1, other.1, sum.1))
        }

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn lower(self, other: Self) -> Self {
            // Of equal ones the instruction gives its second operand.
            Avx2(_mm256_min_ps(other.0, self.0), _mm256_min_ps(other.1, self.1))
        }

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn least(self) -> f32 {
            let eight = _mm256_min_ps(self.0, self.1);
            let four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_min_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)))
        }

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn below(self, other: Self) -> (__m256, __m256) {
            let low = _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0);
            (low, _mm256_cmp_ps::<_CMP_LT_OQ>(self.1, other.1))
        }

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn replaced(self, mask: (__m256, __m256), other: Self) -> Self {
            let low = _mm256_blendv_ps(self.0, other.0, mask.0);
            Avx2(low, _mm256_blendv_ps(self.1, other.1, mask.1))
        }

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn not_above(self, other: Self) -> u32 {
            let low = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(self.0, other.0)) as u32;
            let high = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(self.1, other.1)) as u32;
            low | high << 8
        }

        /// Each lane the one before it; the first keeps its own.
        #[inline]
        #[target_feature(enable = "avx2,fma")]
        fn shifted(self) -> Self {
            let order = _mm256_setr_epi32(0, 0, 1, 2, 3, 4, 5, 6);
            let carried = _mm256_permutevar8x32_ps(self.0, _mm256_set1_epi32(7));
            let high = _mm256_permutevar8x32_ps(self.1, order);
            Avx2(_mm256_permutevar8x32_ps(self.0, order), _mm256_blend_ps::<1>(high, carried))
        }

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn inserted(self, value: Self, places: Self, place: Self) -> (Self, Self) {
            let mut before = self.shifted();
            before.0 = _mm256_blend_ps::<1>(before.0, _mm256_set1_ps(f32::NEG_INFINITY));
            let (moved, here) = (value.below(self), value.below(before));
            // `here` is true where the one before is greater: there it moves on.
            let lanes = self.replaced(moved, value.replaced(here, before));
            (lanes, places.replaced(moved, place.replaced(here, places.shifted())))
        }
    }
}
