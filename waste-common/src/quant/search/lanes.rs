//! Sixteen f32 at a time: as an array, which defines the operations, and as the registers of x86-64.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::{Group, LANES};

/// Sixteen f32.
pub trait Lanes: Copy {
    /// One truth per lane.
    type Mask: Copy;
    /// The same number in each lane.
    fn splat(value: f32) -> Self;
    /// From memory.
    fn load(group: &Group) -> Self;
    /// To memory.
    fn store(self) -> Group;
    /// `self + other`
    fn plus(self, other: Self) -> Self;
    /// `sum − self · other`, rounded once.
    fn minus_product(self, other: Self, sum: Self) -> Self;
    /// `self < other`
    fn below(self, other: Self) -> Self::Mask;
    /// `other` where the mask is true.
    fn replaced(self, mask: Self::Mask, other: Self) -> Self;
    /// A bit for each lane where `self <= other`.
    fn not_above(self, other: Self) -> u32;
}

impl Lanes for Group {
    type Mask = [bool; LANES];

    #[inline(always)]
    fn splat(value: f32) -> Self {
        [value; LANES]
    }

    #[inline(always)]
    fn load(group: &Group) -> Self {
        *group
    }

    #[inline(always)]
    fn store(self) -> Group {
        self
    }

    #[inline(always)]
    fn plus(mut self, other: Self) -> Self {
        self.iter_mut().zip(other).for_each(|(a, b)| *a += b);
        self
    }

    #[inline(always)]
    fn minus_product(self, other: Self, mut sum: Self) -> Self {
        for lane in 0..LANES {
            sum[lane] = (-self[lane]).mul_add(other[lane], sum[lane]);
        }
        sum
    }

    #[inline(always)]
    fn below(self, other: Self) -> [bool; LANES] {
        std::array::from_fn(|lane| self[lane] < other[lane])
    }

    #[inline(always)]
    fn replaced(mut self, mask: [bool; LANES], other: Self) -> Self {
        for lane in 0..LANES {
            self[lane] = if mask[lane] { other[lane] } else { self[lane] };
        }
        self
    }

    #[inline(always)]
    fn not_above(self, other: Self) -> u32 {
        (0..LANES).fold(0, |bits, lane| bits | u32::from(self[lane] <= other[lane]) << lane)
    }
}

/// One register of AVX-512.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub struct Avx512(__m512);

// Whoever names the type runs in a function compiled for its features: see `compiled!`.
#[cfg(target_arch = "x86_64")]
impl Lanes for Avx512 {
    type Mask = __mmask16;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: the CPU has AVX-512 F, see above.
        Avx512(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    fn load(group: &Group) -> Self {
        // SAFETY: as above; a group is 64 readable bytes.
        Avx512(unsafe { _mm512_loadu_ps(group.as_ptr()) })
    }

    #[inline(always)]
    fn store(self) -> Group {
        let mut group = [0.0; LANES];
        // SAFETY: as above; a group is 64 writable bytes.
        unsafe { _mm512_storeu_ps(group.as_mut_ptr(), self.0) };
        group
    }

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        // SAFETY: as above.
        Avx512(unsafe { _mm512_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn minus_product(self, other: Self, sum: Self) -> Self {
        // SAFETY: as above.
        Avx512(unsafe { _mm512_fnmadd_ps(self.0, other.0, sum.0) })
    }

    #[inline(always)]
    fn below(self, other: Self) -> __mmask16 {
        // SAFETY: as above.
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0) }
    }

    #[inline(always)]
    fn replaced(self, mask: __mmask16, other: Self) -> Self {
        // SAFETY: as above.
        Avx512(unsafe { _mm512_mask_mov_ps(self.0, mask, other.0) })
    }

    #[inline(always)]
    fn not_above(self, other: Self) -> u32 {
        // SAFETY: as above.
        u32::from(unsafe { _mm512_cmp_ps_mask::<_CMP_LE_OQ>(self.0, other.0) })
    }
}

/// Two registers of AVX.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub struct Avx2([__m256; 2]);

// As above.
#[cfg(target_arch = "x86_64")]
impl Lanes for Avx2 {
    type Mask = [__m256; 2];

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: the CPU has AVX, see above.
        Avx2([unsafe { _mm256_set1_ps(value) }; 2])
    }

    #[inline(always)]
    fn load(group: &Group) -> Self {
        // SAFETY: as above; a group is twice 32 readable bytes.
        Avx2(unsafe { [_mm256_loadu_ps(group.as_ptr()), _mm256_loadu_ps(group.as_ptr().add(8))] })
    }

    #[inline(always)]
    fn store(self) -> Group {
        let mut group = [0.0f32; LANES];
        // SAFETY: as above; a group is twice 32 writable bytes.
        unsafe {
            _mm256_storeu_ps(group.as_mut_ptr(), self.0[0]);
            _mm256_storeu_ps(group.as_mut_ptr().add(8), self.0[1]);
        }
        group
    }

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        // SAFETY: as above.
        Avx2(std::array::from_fn(|i| unsafe { _mm256_add_ps(self.0[i], other.0[i]) }))
    }

    #[inline(always)]
    fn minus_product(self, other: Self, sum: Self) -> Self {
        // SAFETY: the CPU has FMA, see above.
        Avx2(std::array::from_fn(|i| unsafe { _mm256_fnmadd_ps(self.0[i], other.0[i], sum.0[i]) }))
    }

    #[inline(always)]
    fn below(self, other: Self) -> [__m256; 2] {
        // SAFETY: as above.
        std::array::from_fn(|i| unsafe { _mm256_cmp_ps::<_CMP_LT_OQ>(self.0[i], other.0[i]) })
    }

    #[inline(always)]
    fn replaced(self, mask: [__m256; 2], other: Self) -> Self {
        // SAFETY: as above.
        Avx2(std::array::from_fn(|i| unsafe { _mm256_blendv_ps(self.0[i], other.0[i], mask[i]) }))
    }

    #[inline(always)]
    fn not_above(self, other: Self) -> u32 {
        let half = |i: usize| {
            // SAFETY: as above.
            unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(self.0[i], other.0[i])) as u32 }
        };
        half(0) | half(1) << 8
    }
}
