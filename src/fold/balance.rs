//! Factors and orders of the channels inside a layer, from the sizes of the weights that give and read them.
//!
//! A factor s on what gives a channel and 1/s on what reads it cancel, as does a permutation of both. Rows are coded
//! on their own, so a row's size costs nothing; groups run along the input axis, so columns of like size in a group
//! cost less. So s is the size of the reading column. Keys are cached in groups of channels: there s is the inverse of
//! the channel's own size. Factors of a head, or of an MLP, have a geometric mean of 1.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::data::{Gains, vector};
use super::sample::{squares, values};
use super::{FoldError, Watch};
use crate::arch::Part;
use crate::arch::decoder::AttentionConfig;
use crate::numeric::math::{exp64, ln64};
use crate::plan::{Channels, Module, Plan, What};
use crate::transform::{Axis, Scale};

/// What was measured.
#[derive(Debug, Clone, Default)]
pub(super) struct Balances {
    /// s of each channel: [G · Dh] of keys and values, [Dh] of keys with norms, [I] of an MLP.
    factors: BTreeMap<(Channels, String), Vec<f64>>,
    /// Which channel of its head comes where: [G · Dh].
    orders: BTreeMap<String, Vec<u32>>,
}

/// Measures all channels that the plan's steps name.
pub(super) fn measure(plan: &Plan, gains: &Gains, watch: Watch<'_>) -> Result<Balances, FoldError> {
    let mut balances = Balances::default();
    let Some(fold) = &plan.fold else { return Ok(balances) };
    let attention = &fold.decoder.attention;
    let find = |of: &str, part: Part, vector: bool| {
        plan.modules.iter().find(|module| {
            let inside = module.output.module.strip_prefix(of).is_some_and(|rest| rest.starts_with('.'));
            let is_vector = module.output.shape.0.len() == 1;
            inside && module.output.seat.part == Some(part) && is_vector == vector
        })
    };
    // Parameters that share a set of channels have steps of the same name.
    for step in plan.modules.iter().flat_map(|module| &module.steps) {
        match &step.what {
            What::Balance { channels, of } if !balances.factors.contains_key(&(*channels, of.clone())) => {
                watch.check()?;
                (watch.tell)(&format!("measuring {of}"));
                let s = match channels {
                    Channels::Keys if attention.qk_norm => {
                        let gain = find(of, Part::KeyGain, true).expect("this family has key norms");
                        key_factors(&vector(plan, gain)?.iter().map(|g| g * g).collect::<Vec<_>>(), attention)
                    }
                    Channels::Keys => {
                        let weight = find(of, Part::Key, false).expect("an attention has keys");
                        let mut sizes = rows(plan, weight, gains)?;
                        if let Some(bias) = find(of, Part::Key, true) {
                            let bias = self::values(plan, bias, &bias.work)?;
                            let squares = bias.iter().map(|b| f64::from(*b) * f64::from(*b));
                            sizes.iter_mut().zip(squares).for_each(|(size, square)| *size += square);
                        }
                        key_factors(&sizes, attention)
                    }
                    Channels::Values => {
                        let reader = find(of, Part::Attended, false).expect("an attention has an output");
                        let columns = columns(plan, reader)?;
                        even(&by_kv_head(&columns, attention), attention.head_dim)
                    }
                    Channels::Inner => {
                        let reader = find(of, Part::Down, false).expect("an MLP has an output");
                        let columns = columns(plan, reader)?;
                        even(&columns, columns.len())
                    }
                };
                balances.factors.insert((*channels, of.clone()), s);
            }
            What::Order { of } if !balances.orders.contains_key(of) => {
                watch.check()?;
                (watch.tell)(&format!("measuring {of}"));
                let reader = find(of, Part::Attended, false).expect("an attention has an output");
                let sizes = by_kv_head(&columns(plan, reader)?, attention);
                balances.orders.insert(of.clone(), descending(&sizes, attention.head_dim));
            }
            _ => {}
        }
    }
    Ok(balances)
}

/// Squared sizes of a reader's rows, with the gain that its input has.
fn rows(plan: &Plan, module: &Module, gains: &Gains) -> Result<Vec<f64>, FoldError> {
    let mut work = module.work.clone();
    if let crate::arch::Stand::Reads(norm) = &module.output.seat.stream {
        work.transforms.push(Arc::new(Scale::new(Axis::Input, gains[norm].clone())));
    }
    Ok(squares(&values(plan, module, &work)?, module.work.row_elements).0)
}

/// Squared sizes of a writer's columns.
fn columns(plan: &Plan, module: &Module) -> Result<Vec<f64>, FoldError> {
    Ok(squares(&values(plan, module, &module.work)?, module.work.row_elements).1)
}

/// The sums over query heads that share a key and value head: [H · Dh] to [G · Dh].
fn by_kv_head(columns: &[f64], attention: &AttentionConfig) -> Vec<f64> {
    let dim = attention.head_dim;
    let group = attention.q_heads / attention.kv_heads;
    let mut sums = vec![0.0; attention.kv_heads * dim];
    for (head, columns) in columns.chunks_exact(dim).enumerate() {
        let sums = &mut sums[head / group * dim..][..dim];
        sums.iter_mut().zip(columns).for_each(|(sum, column)| *sum += column);
    }
    sums
}

/// Sizes from their squares, over the geometric mean of their run; 1 for a channel of zeros.
fn even(squares: &[f64], run: usize) -> Vec<f64> {
    let halves = |run: &[f64]| -> Vec<Option<f64>> {
        run.iter().map(|square| (*square > 0.0 && square.is_finite()).then(|| 0.5 * ln64(*square))).collect()
    };
    let runs = squares.chunks_exact(run).flat_map(|run| {
        let logs = halves(run);
        let known: Vec<f64> = logs.iter().copied().flatten().collect();
        let mean = known.iter().sum::<f64>() / known.len().max(1) as f64;
        logs.into_iter().map(move |log| log.map_or(1.0, |log| exp64(log - mean)))
    });
    runs.collect()
}

/// Factors of keys: the inverse of a channel's size, one for both channels of a rotary pair.
fn key_factors(squares: &[f64], attention: &AttentionConfig) -> Vec<f64> {
    let (dim, half) = (attention.head_dim, attention.rope.dims / 2);
    let mut paired = squares.to_vec();
    for head in paired.chunks_exact_mut(dim) {
        for i in 0..half {
            let mean = 0.5 * (head[i] + head[i + half]);
            (head[i], head[i + half]) = (mean, mean);
        }
    }
    even(&paired, dim).into_iter().map(|size| 1.0 / size).collect()
}

/// The channels of each head from the largest on; equal ones keep their order.
fn descending(squares: &[f64], dim: usize) -> Vec<u32> {
    let heads = squares.chunks_exact(dim).flat_map(|head| {
        let mut order: Vec<u32> = (0..dim as u32).collect();
        order.sort_by(|a, b| head[*b as usize].total_cmp(&head[*a as usize]));
        order
    });
    heads.collect()
}

impl Balances {
    /// Factors of one parameter's axis.
    pub fn factors(
        &self,
        channels: Channels,
        of: &str,
        part: Part,
        attention: &AttentionConfig,
    ) -> Option<Arc<[f64]>> {
        let s = self.factors.get(&(channels, of.to_owned()))?;
        let factors: Vec<f64> = match part {
            Part::Key | Part::KeyGain | Part::Value | Part::Up => s.clone(),
            Part::QueryGain | Part::Down => s.iter().map(|s| 1.0 / s).collect(),
            Part::Attended => by_q_head(attention, |g, i| 1.0 / s[g * attention.head_dim + i]),
            // The gates beside the queries, if there are any, are left alone.
            Part::Query => {
                let queries = by_q_head(attention, |g, i| 1.0 / s[g * attention.head_dim + i]);
                let gates = if attention.gated { attention.head_dim } else { 0 };
                let heads = queries.chunks_exact(attention.head_dim);
                heads.flat_map(|head| head.iter().copied().chain(std::iter::repeat_n(1.0, gates))).collect()
            }
            Part::Gate => return None,
        };
        Some(factors.into())
    }

    /// The order of one parameter's axis.
    pub fn order(&self, of: &str, part: Part, attention: &AttentionConfig) -> Option<Arc<[u32]>> {
        let (order, dim) = (self.orders.get(of)?, attention.head_dim);
        let of_head = |g: usize, i: usize| order[g * dim + i];
        let whole: Vec<u32> = match part {
            Part::Value => {
                (0..order.len()).map(|at| of_head(at / dim, at % dim) + (at / dim * dim) as u32).collect()
            }
            Part::Attended => {
                let heads = by_q_head(attention, of_head);
                heads.iter().enumerate().map(|(at, from)| from + (at / dim * dim) as u32).collect()
            }
            // [queries | gates] of each head: only the gates follow the values.
            Part::Query if attention.gated => {
                let gates = by_q_head(attention, of_head);
                let heads = gates.chunks_exact(dim).enumerate();
                let heads = heads.flat_map(|(head, gates)| {
                    let start = (2 * head * dim) as u32;
                    let queries = start..start + dim as u32;
                    queries.chain(gates.iter().map(move |from| start + dim as u32 + from))
                });
                heads.collect()
            }
            _ => return None,
        };
        Some(whole.into())
    }
}

/// A value of each query head's channels, from its key and value head g and the channel i: [H · Dh].
fn by_q_head<T>(attention: &AttentionConfig, of: impl Fn(usize, usize) -> T) -> Vec<T> {
    let group = attention.q_heads / attention.kv_heads;
    let heads =
        (0..attention.q_heads).flat_map(|head| (0..attention.head_dim).map(move |i| (head / group, i)));
    heads.map(|(g, i)| of(g, i)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::decoder::{Rope, RopeScaling};

    fn attention(gated: bool) -> AttentionConfig {
        let rope = Rope { theta: 1e4, dims: 2, scaling: RopeScaling::None };
        AttentionConfig { q_heads: 4, kv_heads: 2, head_dim: 3, gated, qk_norm: false, rope }
    }

    #[test]
    fn factors_of_a_run_have_a_geometric_mean_of_one_and_zeros_are_left_alone() {
        let s = even(&[4.0, 0.0, 16.0, 9.0, 9.0, 9.0], 3);
        assert!((s[0] * s[2] - 1.0).abs() < 1e-15 && (s[2] / s[0] - 2.0).abs() < 1e-14, "{s:?}");
        assert_eq!(s[1], 1.0);
        assert!(s[3..].iter().all(|s| (s - 1.0).abs() < 1e-15));
    }

    #[test]
    fn both_channels_of_a_rotary_pair_have_one_factor() {
        // One pair, (0, 1), and a channel that is not rotated.
        let s = key_factors(&[1.0, 7.0, 4.0, 1.0, 1.0, 1.0], &attention(false));
        assert_eq!(s[0], s[1]);
        assert!((s[0] - 1.0).abs() < 1e-15 && (s[2] - 1.0).abs() < 1e-15, "{s:?}");
    }

    #[test]
    fn query_heads_follow_their_key_and_value_head() {
        let mut balances = Balances::default();
        balances.factors.insert((Channels::Keys, "a".into()), vec![1.0, 2.0, 4.0, 8.0, 16.0, 32.0]);
        balances.orders.insert("a".into(), vec![2, 0, 1, 0, 2, 1]);
        let factors = |part, gated| balances.factors(Channels::Keys, "a", part, &attention(gated)).unwrap();
        let (first, second) = ([1.0, 0.5, 0.25], [0.125, 0.0625, 0.03125]);
        assert_eq!(*factors(Part::Query, false), [first, first, second, second].concat());
        let gate = [1.0; 3];
        let gated = [first, gate, first, gate, second, gate, second, gate].concat();
        assert_eq!(*factors(Part::Query, true), gated);
        let order = |part, gated| balances.order("a", part, &attention(gated)).unwrap();
        assert_eq!(*order(Part::Value, false), [2, 0, 1, 3, 5, 4]);
        assert_eq!(*order(Part::Attended, false), [2, 0, 1, 5, 3, 4, 6, 8, 7, 9, 11, 10]);
        assert_eq!(
            *order(Part::Query, true),
            [0, 1, 2, 5, 3, 4, 6, 7, 8, 11, 9, 10, 12, 13, 14, 15, 17, 16, 18, 19, 20, 21, 23, 22]
        );
    }
}
