//! One walk over the columns of some rows, along a factor.
//!
//! Sixteen rows are worked on at once, one per lane. A panel of columns first takes the errors of all columns before
//! it as a product with rows of M; inside the panel each column takes those of the columns before it, in order.

use super::super::Rows;
use super::super::affine::{Parameters, nearest};
use super::super::refit::search;
use super::PANEL;
use crate::codec::affine::{pack, write_parameter};
use crate::isa::Isa;
use crate::linalg::Factor;
use crate::numeric::dot::{Strided, multiply};
use crate::numeric::lanes::{Kernel, LANES, Lanes};
use crate::tensor::Float;

/// What is known of some rows, row by row.
pub(super) struct State {
    /// w − decode, `[rows, K]`.
    pub(super) errors: Vec<f32>,
    /// `[rows, K]`
    pub(super) codes: Vec<u8>,
    /// As a decoder reads them, `[rows, K / group]`.
    pub(super) scales: Vec<f32>,
    /// As a decoder reads them, `[rows, K / group]`.
    pub(super) biases: Vec<f32>,
}

impl State {
    /// Nothing known.
    pub(super) fn new(rows: Rows<'_>, group: usize) -> Self {
        let count = rows.values.len();
        Self {
            errors: vec![0.0; count],
            codes: vec![0; count],
            scales: vec![0.0; count / group],
            biases: vec![0.0; count / group],
        }
    }

    /// Writes codes and parameters into planes.
    pub(super) fn store<'s, 'p, const BITS: u32>(
        &'s self,
        group: usize,
        float: Float,
        planes: &'s mut [&'p mut [u8]],
    ) -> Store<'s, 'p, BITS> {
        Store { state: self, group, float, planes }
    }
}

pub(super) struct Store<'s, 'p, const BITS: u32> {
    state: &'s State,
    group: usize,
    float: Float,
    planes: &'s mut [&'p mut [u8]],
}

impl<const BITS: u32> Kernel for Store<'_, '_, BITS> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let [weight, scales, biases] = self.planes else { unreachable!("sizes were checked") };
        let packed = weight.chunks_exact_mut(self.group * BITS as usize / 8);
        for (codes, packed) in self.state.codes.chunks_exact(self.group).zip(packed) {
            pack::<V, BITS>(codes, packed);
        }
        for (index, (scale, bias)) in self.state.scales.iter().zip(&self.state.biases).enumerate() {
            write_parameter(self.float, scales, index, *scale);
            write_parameter(self.float, biases, index, *bias);
        }
    }
}

/// How rows are walked.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    pub(super) group: usize,
    pub(super) factor: &'a Factor,
    /// Which column the factor's k-th is; each its own if none.
    pub(super) order: Option<&'a [usize]>,
    /// H[k, k]
    pub(super) diagonal: &'a [f32],
    /// Search parameters; if not, MLX's.
    pub(super) refit: bool,
    pub(super) isa: Isa,
}

impl<'a> Pass<'a> {
    /// The walk over `rows`.
    pub(super) fn of<const BITS: u32>(self, rows: Rows<'a>, state: &'a mut State) -> Walk<'a, BITS> {
        Walk { pass: self, rows, state }
    }
}

pub(super) struct Walk<'a, const BITS: u32> {
    pass: Pass<'a>,
    rows: Rows<'a>,
    state: &'a mut State,
}

/// Sixteen rows' values of some columns: a lane is a row.
type Columns = [[f32; LANES]; PANEL];

/// The parameters of one group of sixteen rows.
#[derive(Clone, Copy)]
struct Grid {
    /// code = (target − offset) / by
    by: [f32; LANES],
    offset: [f32; LANES],
    scale: [f32; LANES],
    bias: [f32; LANES],
}

impl Grid {
    /// Parameters for some columns, of which column c counts `weights[c]` if they are searched.
    #[inline(always)]
    fn choose<V: Lanes, const BITS: u32>(
        columns: &[[f32; LANES]],
        weights: &[f32],
        refit: bool,
        float: Float,
    ) -> Self {
        let (mut low, mut high) = (V::load(&columns[0]), V::load(&columns[0]));
        for column in &columns[1..] {
            low = V::load(column).min(low);
            high = V::load(column).max(high);
        }
        let mlx = Parameters::<V>::mlx::<BITS>(low, high, float);
        let mut grid =
            Self { by: [0.0; LANES], offset: [0.0; LANES], scale: [0.0; LANES], bias: [0.0; LANES] };
        if refit {
            let best = search::<V, BITS>(columns, Some(weights), low, high, mlx, float);
            best.scale.store(&mut grid.scale);
            best.bias.store(&mut grid.bias);
            (grid.by, grid.offset) = (grid.scale, grid.bias);
        } else {
            mlx.scale.store(&mut grid.by);
            mlx.bias.store(&mut grid.offset);
            mlx.stored_scale.store(&mut grid.scale);
            mlx.stored_bias.store(&mut grid.bias);
        }
        grid
    }
}

/// Values relative to their greatest, which are in the range of f32.
#[inline(always)]
fn relative(values: impl Iterator<Item = f64> + Clone, out: &mut [f32]) {
    let most = values.clone().fold(0.0, f64::max);
    for (out, value) in out.iter_mut().zip(values) {
        *out = if most > 0.0 { (value / most) as f32 } else { 1.0 };
    }
}

impl<const BITS: u32> Walk<'_, BITS> {
    /// Lanes ← rows: columns `places` of the sixteen rows from `row` on, and zeros for rows that are not there.
    #[inline(always)]
    fn gather(&self, row: usize, places: impl Iterator<Item = usize> + Clone, to: &mut Columns) {
        let k = self.rows.in_features;
        let rows = self.rows.values[row * k..].chunks_exact(k).take(LANES);
        for (lane, values) in rows.enumerate() {
            for (to, place) in to.iter_mut().zip(places.clone()) {
                to[lane] = values[place];
            }
        }
    }

    /// Keeps a group's parameters.
    #[inline(always)]
    fn keep(&mut self, row: usize, group: usize, grid: &Grid) {
        let groups = self.rows.in_features / self.pass.group;
        let rows = self.state.scales.len() / groups - row;
        for lane in 0..rows.min(LANES) {
            self.state.scales[(row + lane) * groups + group] = grid.scale[lane];
            self.state.biases[(row + lane) * groups + group] = grid.bias[lane];
        }
    }

    /// The parameters of each group of sixteen rows, group by group, from the weights as given.
    #[inline(always)]
    fn fixed<V: Lanes>(&mut self, count: usize) -> Vec<Grid> {
        let (k, group) = (self.rows.in_features, self.pass.group);
        let mut grids = Vec::new();
        let mut columns: Columns = [[0.0; LANES]; PANEL];
        let mut weights = [0.0; PANEL];
        for row in (0..count).step_by(LANES) {
            for g in 0..k / group {
                let places = g * group..(g + 1) * group;
                columns[..group].fill([0.0; LANES]);
                self.gather(row, places.clone(), &mut columns);
                relative(self.pass.diagonal[places].iter().map(|x| f64::from(*x)), &mut weights[..group]);
                let (refit, float) = (self.pass.refit, self.rows.float);
                let grid = Grid::choose::<V, BITS>(&columns[..group], &weights[..group], refit, float);
                self.keep(row, g, &grid);
                grids.push(grid);
            }
        }
        grids
    }
}

impl<const BITS: u32> Kernel for Walk<'_, BITS> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(mut self) {
        let Pass { group, factor, order, refit, isa, .. } = self.pass;
        let (k, float) = (self.rows.in_features, self.rows.float);
        let count = self.rows.values.len() / k;
        let fixed = if order.is_some() { Some(self.fixed::<V>(count)) } else { None };
        let mut feedback = vec![0.0; count * PANEL];
        let zeros = || -> Columns { [[0.0; LANES]; PANEL] };
        let (mut w, mut target, mut e, mut exact) = (zeros(), zeros(), zeros(), zeros());
        let mut weights = [0.0; PANEL];
        for first in (0..k).step_by(PANEL) {
            let width = PANEL.min(k - first);
            let m = factor.lower(first);
            let before = Strided { values: &self.state.errors, stride: k, rows: count };
            multiply(before, Strided { rows: width, ..m }, first, &mut feedback, PANEL, isa);
            // Column c's share of the errors of columns in the panel.
            let m_of = |c: usize| &m.values[c * m.stride + first..][..c];
            let place = |c: usize| order.map_or(first + c, |order| order[first + c]);
            for row in (0..count).step_by(LANES) {
                w.fill([0.0; LANES]);
                self.gather(row, (0..width).map(place), &mut w);
                target.copy_from_slice(&w);
                for (lane, feedback) in feedback[row * PANEL..].chunks_exact(PANEL).take(LANES).enumerate() {
                    for (target, feedback) in target[..width].iter_mut().zip(feedback) {
                        target[lane] += feedback;
                    }
                }
                let segment = if fixed.is_some() { width } else { group };
                for start in (0..width).step_by(segment) {
                    let end = start + segment;
                    for (c, target) in target[..end].iter_mut().enumerate().skip(start) {
                        errors_into::<V>(V::load(target), &e[..start], &m_of(c)[..start]).store(target);
                    }
                    let mut grid = None;
                    if fixed.is_none() {
                        // What these columns would be if they were stored exactly.
                        for c in start..end {
                            let value = V::load(&target[c]);
                            let value = errors_into::<V>(value, &e[start..c], &m_of(c)[start..]);
                            value.store(&mut exact[c]);
                            V::load(&w[c]).sub(value).store(&mut e[c]);
                        }
                        relative(
                            factor.d()[first + start..first + end].iter().copied(),
                            &mut weights[..segment],
                        );
                        let columns = &exact[start..end];
                        let chosen = Grid::choose::<V, BITS>(columns, &weights[..segment], refit, float);
                        self.keep(row, (first + start) / group, &chosen);
                        grid = Some(chosen);
                    }
                    for c in start..end {
                        let at = place(c);
                        let grid = match (&grid, &fixed) {
                            (Some(grid), _) => grid,
                            (None, Some(fixed)) => &fixed[row / LANES * (k / group) + at / group],
                            (None, None) => unreachable!("parameters were chosen before or just now"),
                        };
                        let wanted = errors_into::<V>(V::load(&target[c]), &e[start..c], &m_of(c)[start..]);
                        let position = wanted.sub(V::load(&grid.offset)).div(V::load(&grid.by));
                        let (code, raised) = nearest::<V, BITS>(position);
                        let decoded = code.mul(V::load(&grid.scale)).add(V::load(&grid.bias));
                        V::load(&w[c]).sub(decoded).store(&mut e[c]);
                        let codes = raised.low_bytes();
                        for (lane, code) in codes.iter().enumerate().take(count - row) {
                            self.state.codes[(row + lane) * k + at] = *code;
                        }
                    }
                }
                let rows = self.state.errors[row * k..].chunks_exact_mut(k).take(LANES);
                for (lane, errors) in rows.enumerate() {
                    for (error, e) in errors[first..first + width].iter_mut().zip(&e) {
                        *error = e[lane];
                    }
                }
            }
        }
        if let Some(order) = order {
            let mut row_in_order = vec![0.0; k];
            for errors in self.state.errors.chunks_exact_mut(k) {
                row_in_order.copy_from_slice(errors);
                for (error, place) in row_in_order.iter().zip(order) {
                    errors[*place] = *error;
                }
            }
        }
    }
}

/// value + Σ_i e_i m_i, in order.
#[inline(always)]
fn errors_into<V: Lanes>(value: V, e: &[[f32; LANES]], m: &[f32]) -> V {
    let mut sum = value;
    for (e, m) in e.iter().zip(m) {
        sum = V::load(e).fma(V::splat(*m), sum);
    }
    sum
}
