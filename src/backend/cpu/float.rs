//! Rows of float storage.

use std::marker::PhantomData;

use super::rows::{Rows, STEP};
use crate::numeric::lanes::{LANES, Lanes};
use crate::numeric::{bf16_to_f32, f16_to_f32, prefetch_line};
use crate::tensor::Float;

/// Bytes asked for before they are needed.
const AHEAD: usize = 4096;

/// A stored type.
pub(super) trait Element: Copy {
    /// Which.
    const FLOAT: Float;
    /// Sixteen values from as many stored ones.
    fn load<V: Lanes>(stored: &[u8]) -> V;
    /// One value.
    fn one(stored: &[u8]) -> f32;
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Bf16;
#[derive(Debug, Clone, Copy)]
pub(super) struct F16;
#[derive(Debug, Clone, Copy)]
pub(super) struct F32;

impl Element for Bf16 {
    const FLOAT: Float = Float::Bf16;
    #[inline(always)]
    fn load<V: Lanes>(stored: &[u8]) -> V {
        V::load_bf16(stored.first_chunk().expect("sixteen values"))
    }
    fn one(stored: &[u8]) -> f32 {
        bf16_to_f32(u16::from_le_bytes(stored.try_into().expect("one value")))
    }
}

impl Element for F16 {
    const FLOAT: Float = Float::F16;
    #[inline(always)]
    fn load<V: Lanes>(stored: &[u8]) -> V {
        V::load_f16(stored.first_chunk().expect("sixteen values"))
    }
    fn one(stored: &[u8]) -> f32 {
        f16_to_f32(u16::from_le_bytes(stored.try_into().expect("one value")))
    }
}

impl Element for F32 {
    const FLOAT: Float = Float::F32;
    #[inline(always)]
    fn load<V: Lanes>(stored: &[u8]) -> V {
        let (values, _) = stored.as_chunks::<4>();
        V::load(&std::array::from_fn(|i| f32::from_le_bytes(values[i])))
    }
    fn one(stored: &[u8]) -> f32 {
        f32::from_le_bytes(stored.try_into().expect("one value"))
    }
}

/// The plane of a weight stored as `E`.
#[derive(Debug, Clone, Copy)]
pub(super) struct FloatRows<'a, E> {
    values: &'a [u8],
    in_features: usize,
    element: PhantomData<E>,
}

impl<'a, E: Element> FloatRows<'a, E> {
    /// # Panics
    /// Unless the plane holds `out_features` rows of `in_features`.
    pub fn new(values: &'a [u8], out_features: usize, in_features: usize) -> Self {
        assert_eq!(values.len(), out_features * in_features * E::FLOAT.bytes(), "bytes of `weight`");
        Self { values, in_features, element: PhantomData }
    }
}

impl<E: Element> Rows for FloatRows<'_, E> {
    type Group<V: Lanes> = ();

    #[inline(always)]
    fn group_len(&self) -> usize {
        STEP
    }

    #[inline(always)]
    unsafe fn group<V: Lanes>(&self, n: usize, g: usize) {
        let at = (n * self.in_features + g * STEP) * E::FLOAT.bytes();
        prefetch_line(self.values.as_ptr().wrapping_add(at + AHEAD));
    }

    #[inline(always)]
    unsafe fn step<V: Lanes>(&self, n: usize, k: usize, _group: ()) -> [V; 2] {
        let (at, half) = ((n * self.in_features + k) * E::FLOAT.bytes(), LANES * E::FLOAT.bytes());
        // SAFETY: the caller's word that these weights are there, and the length that `new` asserts.
        let stored = unsafe { self.values.get_unchecked(at..at + 2 * half) };
        [E::load(&stored[..half]), E::load(&stored[half..])]
    }

    #[inline(always)]
    fn rest<V: Lanes>(&self, n: usize, k: usize) -> [V; 2] {
        let row = |k: usize| (n * self.in_features + k) * E::FLOAT.bytes();
        let mut values = [0.0; STEP];
        let stored = &self.values[row(k)..row(self.in_features)];
        for (value, stored) in values.iter_mut().zip(stored.chunks_exact(E::FLOAT.bytes())) {
            *value = E::one(stored);
        }
        let (halves, _) = values.as_chunks();
        [V::load(&halves[0]), V::load(&halves[1])]
    }
}
