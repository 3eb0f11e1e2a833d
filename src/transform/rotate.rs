//! Rotations along an axis.

use std::sync::Arc;

use super::hadamard::SignedHadamard;
use super::{Axis, Dense, Panel, Transform};
use crate::isa::Isa;
use crate::quant::Grain;

/// An orthogonal matrix R [L, L].
#[derive(Debug, Clone)]
pub enum Rotation {
    /// Signs and Hadamard matrices.
    Hadamard(SignedHadamard),
    /// Any.
    Dense(Dense),
}

impl Rotation {
    /// L.
    pub fn len(&self) -> usize {
        match self {
            Rotation::Hadamard(rotation) => rotation.len(),
            Rotation::Dense(rotation) => rotation.len(),
        }
    }

    /// Whether L is 0, which it never is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// R, row-major.
    pub fn matrix(&self, isa: Isa) -> Vec<f32> {
        match self {
            Rotation::Hadamard(rotation) => rotation.matrix(isa),
            Rotation::Dense(rotation) => rotation.matrix().to_vec(),
        }
    }

    /// x becomes x R in every run of L values of every row.
    pub fn rotate_rows(&self, values: &mut [f32], row_elements: usize, isa: Isa, scratch: &mut Vec<f32>) {
        match self {
            Rotation::Hadamard(rotation) => rotation.rotate_rows(values, row_elements, isa, scratch),
            Rotation::Dense(rotation) => rotation.rotate_rows(values, row_elements, isa, scratch),
        }
    }

    /// x becomes x Rᵀ in every run of L values of every row.
    pub fn unrotate_rows(&self, values: &mut [f32], row_elements: usize, isa: Isa, scratch: &mut Vec<f32>) {
        match self {
            Rotation::Hadamard(rotation) => rotation.unrotate_rows(values, row_elements, isa, scratch),
            Rotation::Dense(rotation) => rotation.unrotate_rows(values, row_elements, isa, scratch),
        }
    }

    /// c becomes Rᵀ c for every column of every L rows.
    pub fn rotate_columns(&self, values: &mut [f32], row_elements: usize, isa: Isa, scratch: &mut Vec<f32>) {
        match self {
            Rotation::Hadamard(rotation) => rotation.rotate_columns(values, row_elements, isa, scratch),
            Rotation::Dense(rotation) => rotation.rotate_columns(values, row_elements, isa, scratch),
        }
    }

    /// c becomes R c for every column of every L rows.
    pub fn unrotate_columns(
        &self,
        values: &mut [f32],
        row_elements: usize,
        isa: Isa,
        scratch: &mut Vec<f32>,
    ) {
        match self {
            Rotation::Hadamard(rotation) => rotation.unrotate_columns(values, row_elements, isa, scratch),
            Rotation::Dense(rotation) => rotation.unrotate_columns(values, row_elements, isa, scratch),
        }
    }
}

/// W' = W R along the input axis, in every run of L columns; W' = Rᵀ W along the output axis, in every run of L rows.
#[derive(Debug, Clone)]
pub struct Rotate {
    axis: Axis,
    rotation: Arc<Rotation>,
}

impl Rotate {
    /// The rotation along that axis, whose length is a multiple of L.
    pub fn new(axis: Axis, rotation: Arc<Rotation>) -> Self {
        Self { axis, rotation }
    }
}

impl Transform for Rotate {
    fn id(&self) -> &'static str {
        "rotate"
    }

    fn grain(&self) -> Grain {
        match self.axis {
            Axis::Input => Grain::Rows,
            Axis::Output => Grain::Blocks(self.rotation.len() as u64),
        }
    }

    fn apply(&self, panel: Panel<'_>, isa: Isa, scratch: &mut Vec<f32>) {
        let Panel { values, row_elements, .. } = panel;
        match self.axis {
            Axis::Input => self.rotation.rotate_rows(values, row_elements, isa, scratch),
            Axis::Output => self.rotation.rotate_columns(values, row_elements, isa, scratch),
        }
    }

    fn invert(&self, panel: Panel<'_>, isa: Isa, scratch: &mut Vec<f32>) {
        let Panel { values, row_elements, .. } = panel;
        match self.axis {
            Axis::Input => self.rotation.unrotate_rows(values, row_elements, isa, scratch),
            Axis::Output => self.rotation.unrotate_columns(values, row_elements, isa, scratch),
        }
    }
}
