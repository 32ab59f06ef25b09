//! Sixteen f32 at a time: as an array, which defines the operations, and as the registers of x86-64.
//!
//! `minus_product` is `sum − self · other`, rounded once; `lower` is `self` of equal ones; `replaced` takes `other`
//! where the mask is true; `not_above` has a bit for each lane where `self <= other`; `bound` is a value that at least so
//! many lanes are not above; `appended` puts the lanes that are not above a bound behind `count` others, with their
//! places, which follow the first lane's, and counts on; `inserted` puts a value, behind those that are equal, into
//! ascending lanes, and its place among theirs; the last one drops out.

use super::kernel::ROOM;
use super::{Group, LANES};

/// An array.
#[derive(Clone, Copy)]
pub struct Portable([f32; LANES]);

#[allow(clippy::needless_range_loop)]
impl Portable {
    #[inline]
    pub fn splat(value: f32) -> Self {
        Portable([value; LANES])
    }

    #[inline]
    pub fn load(group: &Group) -> Self {
        Portable(group.0)
    }

    #[inline]
    pub fn store(self, group: &mut Group) {
        group.0 = self.0;
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
    pub fn bound(self, wanted: usize) -> Self {
        let mut lanes = self.0;
        lanes.sort_unstable_by(f32::total_cmp);
        Portable([lanes[(wanted - 1) % LANES]; LANES])
    }

    #[inline]
    pub fn appended(self, bound: Self, place: u32, to: &mut [[Group; ROOM]; 2], mut count: usize) -> usize {
        for lane in 0..LANES {
            to[0][count / LANES % ROOM].0[count % LANES] = self.0[lane];
            to[1][count / LANES % ROOM].0[count % LANES] = f32::from_bits(place + lane as u32);
            count += usize::from(self.0[lane] <= bound.0[lane]);
        }
        count
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

    use super::{Group, LANES, ROOM};

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
            Avx512(unsafe { _mm512_loadu_ps(group.0.as_ptr()) })
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        pub fn store(self, group: &mut Group) {
            // SAFETY: a group is 64 writable bytes.
            unsafe { _mm512_storeu_ps(group.0.as_mut_ptr(), self.0) };
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
        #[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
        pub fn bound(self, wanted: usize) -> Self {
            if wanted == 1 {
                return Avx512::splat(self.least());
            }
            let (low, high) = (_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            Avx512(_mm512_set1_ps(bound(low, high, wanted)))
        }

        #[inline]
        #[target_feature(enable = "avx512f,popcnt")]
        pub fn appended(self, bound: Self, place: u32, to: &mut [[Group; ROOM]; 2], count: usize) -> usize {
            let mask = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(self.0, bound.0);
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let places = _mm512_or_si512(lanes, _mm512_set1_epi32(place as i32));
            debug_assert!(count + LANES <= ROOM * LANES);
            if count <= (ROOM - 1) * LANES {
                // SAFETY: sixteen numbers behind the first `count` are writable.
                unsafe {
                    let (scores, at) = (to[0].as_mut_ptr().cast::<f32>(), to[1].as_mut_ptr().cast::<i32>());
                    _mm512_storeu_ps(scores.add(count), _mm512_maskz_compress_ps(mask, self.0));
                    _mm512_storeu_epi32(at.add(count), _mm512_maskz_compress_epi32(mask, places));
                }
            }
            count + mask.count_ones() as usize
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

    /// A value that at least `wanted` of sixteen lanes are not above.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn bound(low: __m256, high: __m256, wanted: usize) -> f32 {
        let lesser = _mm256_min_ps(low, high);
        let enough = if wanted <= LANES / 4 {
            // Nearly as low from the lesser one of each pair, at a quarter of the work.
            at_least(lesser, not_above(lesser, lesser), wanted)
        } else {
            let of_low = _mm256_add_epi32(not_above(low, low), not_above(high, low));
            let of_high = _mm256_add_epi32(not_above(low, high), not_above(high, high));
            _mm256_min_ps(at_least(low, of_low, wanted), at_least(high, of_high, wanted))
        };
        Avx2(enough, enough).least()
    }

    /// How many of `lanes` are not above each of `others`.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn not_above(mut lanes: __m256, others: __m256) -> __m256i {
        let next = _mm256_setr_epi32(1, 2, 3, 4, 5, 6, 7, 0);
        let mut count = _mm256_setzero_si256();
        for _ in 0..8 {
            count = _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LE_OQ>(lanes, others)));
            lanes = _mm256_permutevar8x32_ps(lanes, next);
        }
        count
    }

    /// The lanes whose count is at least `wanted`; infinity for others.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn at_least(lanes: __m256, count: __m256i, wanted: usize) -> __m256 {
        let few = _mm256_cmpgt_epi32(_mm256_set1_epi32(wanted as i32), count);
        _mm256_blendv_ps(lanes, _mm256_set1_ps(f32::INFINITY), _mm256_castsi256_ps(few))
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
            unsafe { Avx2(_mm256_loadu_ps(group.0.as_ptr()), _mm256_loadu_ps(group.0.as_ptr().add(8))) }
        }

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn store(self, group: &mut Group) {
            // SAFETY: a group is twice 32 writable bytes.
            unsafe {
                _mm256_storeu_ps(group.0.as_mut_ptr(), self.0);
                _mm256_storeu_ps(group.0.as_mut_ptr().add(8), self.1);
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

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn bound(self, wanted: usize) -> Self {
            if wanted == 1 {
                return Avx2::splat(self.least());
            }
            Avx2::splat(bound(self.0, self.1, wanted))
        }

        #[inline]
        #[target_feature(enable = "avx2,fma")]
        pub fn appended(
            self,
            bound: Self,
            place: u32,
            to: &mut [[Group; ROOM]; 2],
            mut count: usize,
        ) -> usize {
            let mut lanes = self.not_above(bound);
            if lanes != 0 {
                let mut group = Group([0.0; LANES]);
                self.store(&mut group);
                while lanes != 0 {
                    let lane = lanes.trailing_zeros();
                    lanes &= lanes - 1;
                    to[0][count / LANES % ROOM].0[count % LANES] = group.0[lane as usize % LANES];
                    to[1][count / LANES % ROOM].0[count % LANES] = f32::from_bits(place + lane);
                    count += 1;
                }
            }
            count
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
