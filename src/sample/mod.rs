//! Chooses the next token from logits.
//!
//! ```text
//! l[v]     logits, all finite                                                        l: [V]
//! l[v]  <- l[v] / r if l[v] > 0 else l[v] · r       for each v seen before           repetition penalty r
//! w[v]   = exp((l[v] - max l) / t)                                                   temperature t
//! keep the k largest                                                                 top k
//! keep the fewest largest whose sum is at least p of what is left                    top p
//! keep w[v] >= m · max w = m                                                         min p
//! draw v with probability w[v] / Σ w
//! ```
//! Temperature 0 takes the largest logit. Equals count as larger the lower their id. A choice is off at
//! `k = 0`, `p = 1`, `m = 0`, `r = 1`.
//!
//! The order is that of `transformers` (generation/utils.py, `_get_logits_processor`). Differs: of equals at the
//! edge of the top k exactly k are kept, so that `k = 1` is the largest logit.
//!
//! Weights are f32, from our own `exp`; sums are f64 in a fixed order. Random numbers: ChaCha with 8 rounds, key
//! = the seed's eight bytes from the lowest, then zeros, stream 0. Each drawn token takes the next 64 bits x and
//! has `u = (x >> 11) / 2^53`; the greedy choice takes none. So the same seed and logits give the same tokens on
//! every machine.
//!
//! Each step is linear in V but for a sort of the weights near the edge of the top p, and allocates only while the
//! scratch grows. At V = 248 320 on one core: greedy 0.01 ms, top k 40 0.4 ms, top p 0.95 1 ms, and 5 ms if all
//! tokens are about equal.

use std::cmp::Ordering;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::failure::{Exit, Failure};
use crate::isa::Isa;
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::numeric::math::exp;

/// How to choose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; above 1 flattens.
    pub temperature: f64,
    /// The share of the probability to keep, above 0; 1 is off.
    pub top_p: f64,
    /// The number of tokens to keep; 0 is off.
    pub top_k: usize,
    /// The least probability to keep, as a share of the largest; 0 is off.
    pub min_p: f64,
    /// Divides the positive logits of tokens seen before, and multiplies the others; 1 is off.
    pub repetition_penalty: f64,
    /// Of the random numbers.
    pub seed: u64,
}

impl Sampling {
    /// The largest logit, always.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }

    /// Whether every option is in its range.
    ///
    /// # Errors
    /// [`SampleError::Option`] for the first that is not.
    pub fn check(&self) -> Result<(), SampleError> {
        let rules = [
            ("temperature", self.temperature, self.temperature >= 0.0, "a finite number from 0 on"),
            ("top-p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "above 0 and at most 1"),
            ("min-p", self.min_p, (0.0..=1.0).contains(&self.min_p), "from 0 to 1"),
            (
                "repetition-penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0.0,
                "a finite number above 0",
            ),
        ];
        for (option, found, holds, needed) in rules {
            if !holds || !found.is_finite() {
                return Err(SampleError::Option { option, found: found.to_string(), needed });
            }
        }
        Ok(())
    }
}

/// Why no token was chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// An option out of its range.
    #[error("`{option}` is {found}, but must be {needed}")]
    Option {
        /// As on the command line, without the dashes.
        option: &'static str,
        /// Its value.
        found: String,
        /// Its range.
        needed: &'static str,
    },
    /// A model that computes no number.
    #[error("{count} of {vocabulary} logits are not finite: the first is {value}, of token {token}")]
    NonFinite {
        /// How many.
        count: usize,
        /// Of how many.
        vocabulary: usize,
        /// The first one's id.
        token: usize,
        /// The first one.
        value: f32,
    },
    /// A model that computes nothing.
    #[error("there are no logits to choose from")]
    NoLogits,
    /// A token seen that is none.
    #[error("token {token} was seen, but the logits are of {vocabulary} tokens")]
    Seen {
        /// The id.
        token: u32,
        /// Tokens that have logits.
        vocabulary: usize,
    },
}

impl Failure for SampleError {
    fn exit(&self) -> Exit {
        match self {
            SampleError::Option { .. } => Exit::Request,
            _ => Exit::Input,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            SampleError::Option { option, .. } => {
                format!("give `--{option}` a value in this range, or leave it out")
            }
            SampleError::NonFinite { .. } => {
                "the weights or their scales are damaged or overflow in this precision; \
                 run `tqc verify` on the model"
                    .to_owned()
            }
            SampleError::NoLogits | SampleError::Seen { .. } => {
                "the tokenizer and the weights are not of one model; fetch both again at one revision"
                    .to_owned()
            }
        })
    }
}

/// Chooses one token after another.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    isa: Isa,
    random: ChaCha8Rng,
    /// Tokens seen before, each once.
    seen: Vec<u32>,
    /// A bit a token.
    seen_bits: Vec<u64>,
    /// Logits after the penalty.
    penalized: Vec<f32>,
    /// Tokens under consideration, ascending; empty means all.
    ids: Vec<u32>,
    /// Their weights; 0 if not kept.
    weights: Vec<f32>,
    /// Sums of weights by their size.
    buckets: Vec<f64>,
    /// Positions in the bucket at the edge of the top p.
    edge: Vec<u32>,
    /// Sums of weights by their place.
    sums: Vec<f64>,
}

/// Weights that are summed before one is looked for among them.
const SPAN: usize = 1024;
/// A weight from 0 to 1 is put into a bucket by its exponent and this many bits after it.
const BUCKET_BITS: u32 = 4;
const BUCKET_SHIFT: u32 = f32::MANTISSA_DIGITS - 1 - BUCKET_BITS;
const BUCKETS: usize = (1.0f32.to_bits() >> BUCKET_SHIFT) as usize + 1;

impl Sampler {
    /// Starts the stream of random numbers.
    ///
    /// # Errors
    /// [`SampleError::Option`].
    pub fn new(sampling: Sampling) -> Result<Self, SampleError> {
        sampling.check()?;
        let mut key = [0; 32];
        key[..8].copy_from_slice(&sampling.seed.to_le_bytes());
        Ok(Self {
            sampling,
            isa: Isa::best(),
            random: ChaCha8Rng::from_seed(key),
            seen: Vec::new(),
            seen_bits: Vec::new(),
            penalized: Vec::new(),
            ids: Vec::new(),
            weights: Vec::new(),
            buckets: Vec::new(),
            edge: Vec::new(),
            sums: Vec::new(),
        })
    }

    /// Notes tokens for the repetition penalty: the prompt, and what was not chosen here. Tokens that
    /// [`Sampler::choose`] gave are noted already.
    pub fn see(&mut self, tokens: &[u32]) {
        if self.sampling.repetition_penalty == 1.0 {
            return;
        }
        for &token in tokens {
            let (word, bit) = (token as usize / 64, 1 << (token % 64));
            if self.seen_bits.len() <= word {
                self.seen_bits.resize(word + 1, 0);
            }
            if self.seen_bits[word] & bit == 0 {
                self.seen_bits[word] |= bit;
                self.seen.push(token);
            }
        }
    }

    /// The next token. `logits`: \[V\].
    ///
    /// # Errors
    /// [`SampleError::NonFinite`], [`SampleError::NoLogits`], [`SampleError::Seen`]; nothing is drawn then.
    pub fn choose(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let token = if self.sampling.repetition_penalty == 1.0 {
            self.choose_from(logits)?
        } else {
            let mut penalized = std::mem::take(&mut self.penalized);
            let token = self.penalize(logits, &mut penalized).and_then(|()| self.choose_from(&penalized));
            self.penalized = penalized;
            token?
        };
        self.see(&[token]);
        Ok(token)
    }

    fn penalize(&self, logits: &[f32], penalized: &mut Vec<f32>) -> Result<(), SampleError> {
        penalized.clear();
        penalized.extend_from_slice(logits);
        let penalty = self.sampling.repetition_penalty as f32;
        for &token in &self.seen {
            let Some(logit) = penalized.get_mut(token as usize) else {
                return Err(SampleError::Seen { token, vocabulary: logits.len() });
            };
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        Ok(())
    }

    fn choose_from(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let greatest = greatest(self.isa, logits)?;
        if self.sampling.temperature == 0.0 {
            let at = logits.iter().position(|logit| *logit == greatest).expect("the greatest is one of them");
            return Ok(id(at));
        }
        self.weigh(logits, greatest);
        let unit = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let at = self.draw(unit);
        Ok(if self.ids.is_empty() { id(at) } else { self.ids[at] })
    }

    /// Sets `ids` and `weights`.
    fn weigh(&mut self, logits: &[f32], greatest: f32) {
        self.ids.clear();
        self.weights.clear();
        // Below the least normal number the quotients would be the same.
        let temperature = (self.sampling.temperature as f32).max(f32::MIN_POSITIVE);
        if (1..logits.len()).contains(&self.sampling.top_k) {
            largest(logits, self.sampling.top_k, &mut self.ids);
            self.ids.sort_unstable();
            self.weights.extend(self.ids.iter().map(|id| logits[*id as usize]));
        } else {
            self.weights.extend_from_slice(logits);
        }
        dispatch(self.isa, Weigh { weights: &mut self.weights, greatest, temperature });
        if self.sampling.top_p < 1.0 {
            self.keep_top_p(logits);
        }
        if self.sampling.min_p > 0.0 {
            let least = self.sampling.min_p;
            self.weights
                .iter_mut()
                .filter(|weight| f64::from(**weight) < least)
                .for_each(|weight| *weight = 0.0);
        }
    }

    /// Sets the weights outside the top p to 0.
    fn keep_top_p(&mut self, logits: &[f32]) {
        // Only the weights near the edge need an order: whole buckets are in or out.
        let bucket = |weight: f32| (weight.to_bits() >> BUCKET_SHIFT) as usize;
        self.buckets.clear();
        self.buckets.resize(BUCKETS, 0.0);
        for weight in &self.weights {
            self.buckets[bucket(*weight)] += f64::from(*weight);
        }
        let wanted = self.sampling.top_p * self.buckets.iter().sum::<f64>();
        let mut sum = 0.0;
        let mut edge = 0;
        for at in (0..BUCKETS).rev() {
            if sum + self.buckets[at] >= wanted {
                edge = at;
                break;
            }
            sum += self.buckets[at];
        }
        self.edge.clear();
        for (at, weight) in self.weights.iter_mut().enumerate() {
            match bucket(*weight).cmp(&edge) {
                Ordering::Less => *weight = 0.0,
                Ordering::Equal => self.edge.push(id(at)),
                Ordering::Greater => {}
            }
        }
        // By logit, not by weight: many logits may round to one weight.
        let ids = &self.ids;
        let logit = |at: &u32| logits[if ids.is_empty() { *at } else { ids[*at as usize] } as usize];
        self.edge.sort_unstable_by(|a, b| descending(logit(a), logit(b)).then(a.cmp(b)));
        for at in &self.edge {
            let weight = &mut self.weights[*at as usize];
            // Exactly as in the loop above, nothing is added once the sum is enough.
            if sum >= wanted {
                *weight = 0.0;
            } else {
                sum += f64::from(*weight);
            }
        }
    }

    /// The position whose share of the weights holds `unit`, from 0 to below 1.
    fn draw(&mut self, unit: f64) -> usize {
        self.sums.clear();
        self.sums.extend(self.weights.chunks(SPAN).map(sum));
        let mut rest = unit * self.sums.iter().sum::<f64>();
        // Rounding may carry `rest` past the last span or weight; the last that is not 0 is taken then.
        let mut start = 0;
        for (span, sum) in self.sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
            start = span * SPAN;
            if rest < *sum {
                break;
            }
            rest -= sum;
        }
        let mut chosen = start;
        for (at, weight) in self.weights[start..].iter().take(SPAN).enumerate() {
            if *weight > 0.0 {
                chosen = start + at;
                rest -= f64::from(*weight);
                if rest < 0.0 {
                    break;
                }
            }
        }
        chosen
    }
}

/// Token ids are positions of logits, of which there are fewer than 2^32.
fn id(at: usize) -> u32 {
    u32::try_from(at).expect("a vocabulary has fewer than 2^32 tokens")
}

/// The larger first.
fn descending(a: f32, b: f32) -> Ordering {
    b.partial_cmp(&a).expect("finite numbers have an order")
}

/// The sum in eight interleaved parts, f64.
fn sum(weights: &[f32]) -> f64 {
    let mut parts = [0.0; 8];
    for chunk in weights.chunks(8) {
        for (part, weight) in parts.iter_mut().zip(chunk) {
            *part += f64::from(*weight);
        }
    }
    parts.iter().sum()
}

/// The ids of the `k` largest logits, equals by their ids, in no order. `k` is below the number of logits.
fn largest(logits: &[f32], k: usize, ids: &mut Vec<u32>) {
    // Larger first, then lower id first: `a` is before `b`.
    let order = |a: &u32, b: &u32| descending(logits[*a as usize], logits[*b as usize]).then(a.cmp(b));
    // Enough room that a cut, which is linear, is rare.
    let room = (2 * k).max(256);
    ids.clear();
    let mut least = f32::NEG_INFINITY;
    for (at, logit) in logits.iter().enumerate() {
        // Ids ascend, so an equal of the least kept one comes after it.
        if *logit <= least {
            continue;
        }
        ids.push(id(at));
        if ids.len() == room {
            let (_, kth, _) = ids.select_nth_unstable_by(k - 1, order);
            least = logits[*kth as usize];
            ids.truncate(k);
        }
    }
    if ids.len() > k {
        ids.select_nth_unstable_by(k - 1, order);
        ids.truncate(k);
    }
}

/// The greatest logit, if all are finite.
fn greatest(isa: Isa, logits: &[f32]) -> Result<f32, SampleError> {
    if logits.is_empty() {
        return Err(SampleError::NoLogits);
    }
    if let Some(greatest) = dispatch(isa, Greatest(logits)) {
        return Ok(greatest);
    }
    let mut wrong = logits.iter().enumerate().filter(|(_, logit)| !logit.is_finite());
    let (token, value) = wrong.next().expect("one is not finite");
    Err(SampleError::NonFinite { count: 1 + wrong.count(), vocabulary: logits.len(), token, value: *value })
}

/// The greatest value; `None` if one is not finite.
struct Greatest<'a>(&'a [f32]);

impl Kernel for Greatest<'_> {
    type Output = Option<f32>;

    #[inline(always)]
    fn run<V: Lanes>(self) -> Option<f32> {
        let (vectors, rest) = self.0.as_chunks::<LANES>();
        let mut greatest = V::splat(f32::NEG_INFINITY);
        // x - x is 0 for a finite x, else NaN, and NaN stays.
        let mut zero = V::splat(0.0);
        let mut padded = [rest.first().or(self.0.first()).copied().unwrap_or(0.0); LANES];
        padded[..rest.len()].copy_from_slice(rest);
        for vector in vectors.iter().chain([&padded]) {
            let x = V::load(vector);
            greatest = x.max(greatest);
            zero = zero.add(x.sub(x));
        }
        (zero.sum() == 0.0).then(|| greatest.greatest())
    }
}

/// `w <- exp((w - greatest) / temperature)`.
struct Weigh<'a> {
    weights: &'a mut [f32],
    greatest: f32,
    temperature: f32,
}

impl Kernel for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let (greatest, temperature) = (V::splat(self.greatest), V::splat(self.temperature));
        let (vectors, rest) = self.weights.as_chunks_mut::<LANES>();
        for vector in vectors {
            weigh(V::load(vector), greatest, temperature).store(vector);
        }
        if !rest.is_empty() {
            let mut padded = [self.greatest; LANES];
            padded[..rest.len()].copy_from_slice(rest);
            weigh(V::load(&padded), greatest, temperature).store(&mut padded);
            rest.copy_from_slice(&padded[..rest.len()]);
        }
    }
}

#[inline(always)]
fn weigh<V: Lanes>(logit: V, greatest: V, temperature: V) -> V {
    // e^-200 is 0 in f32; the difference itself may overflow.
    exp(logit.sub(greatest).div(temperature).max(V::splat(-200.0)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sampling(temperature: f64, top_p: f64, top_k: usize, min_p: f64) -> Sampling {
        Sampling { temperature, top_p, top_k, min_p, ..Sampling::greedy() }
    }

    /// Weights of all tokens, 0 where one is not kept.
    fn weights(sampling: Sampling, logits: &[f32]) -> Vec<f32> {
        let mut sampler = Sampler::new(sampling).unwrap();
        let greatest = greatest(sampler.isa, logits).unwrap();
        sampler.weigh(logits, greatest);
        let mut all = vec![0.0; logits.len()];
        if sampler.ids.is_empty() {
            all.copy_from_slice(&sampler.weights);
        } else {
            sampler.ids.iter().zip(&sampler.weights).for_each(|(id, weight)| all[*id as usize] = *weight);
        }
        all
    }

    /// The definition in f64 with a full sort: weights, and for each token how far it is from the edges of the
    /// choices (so that a test need not depend on the last bits).
    fn reference(sampling: Sampling, logits: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let count = logits.len();
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight: Vec<f64> = logits
            .iter()
            .map(|l| ((f64::from(*l) - f64::from(greatest)) / sampling.temperature).exp())
            .collect();
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).unwrap().then(a.cmp(b)));
        if sampling.top_k > 0 {
            order.truncate(sampling.top_k);
        }
        let total: f64 = order.iter().map(|at| weight[*at]).sum();
        let (mut kept, mut margin) = (vec![0.0; count], vec![f64::INFINITY; count]);
        let mut before = 0.0;
        for at in order {
            let share = before / total;
            let edge = if sampling.top_p < 1.0 { (share - sampling.top_p).abs() } else { f64::INFINITY };
            margin[at] = edge.min((weight[at] - sampling.min_p).abs());
            if (sampling.top_p == 1.0 || share < sampling.top_p) && weight[at] >= sampling.min_p {
                kept[at] = weight[at];
            }
            before += weight[at];
        }
        (kept, margin)
    }

    fn any_logits() -> impl Strategy<Value = Vec<f32>> {
        prop_oneof![
            prop::collection::vec(-20.0f32..20.0, 1..200),
            // Many equals.
            prop::collection::vec((-3i8..3).prop_map(f32::from), 1..200),
            prop::collection::vec(-0.01f32..0.01, 1..3000),
        ]
    }

    fn any_sampling() -> impl Strategy<Value = Sampling> {
        let top_p = prop_oneof![Just(1.0), 0.001f64..1.0];
        let min_p = prop_oneof![Just(0.0), 0.0f64..1.0];
        let top_k = prop_oneof![Just(0usize), 1usize..50, 1usize..4000];
        (0.05f64..4.0, top_p, top_k, min_p).prop_map(|(t, p, k, m)| sampling(t, p, k, m))
    }

    proptest! {
        #[test]
        fn weights_are_those_of_the_definition(logits in any_logits(), sampling in any_sampling()) {
            let found = weights(sampling, &logits);
            let (expected, margin) = reference(sampling, &logits);
            for at in 0..logits.len() {
                // At an edge, f32 weights may put a token on the other side.
                if margin[at] < 1e-4 {
                    continue;
                }
                // An ulp of the f32 quotient, at most 160 wide, is 2^-17; e^x passes it on as a relative error.
                let slack = 2e-5 * expected[at] + 1e-37;
                prop_assert!(
                    (f64::from(found[at]) - expected[at]).abs() <= slack,
                    "token {at}: {} is not {}", found[at], expected[at]
                );
            }
        }

        #[test]
        fn what_is_chosen_has_been_kept(logits in any_logits(), mut sampling in any_sampling(), seed: u64) {
            sampling.seed = seed;
            let kept = weights(sampling, &logits);
            let mut sampler = Sampler::new(sampling).unwrap();
            for _ in 0..8 {
                prop_assert!(kept[sampler.choose(&logits).unwrap() as usize] > 0.0);
            }
        }

        #[test]
        fn the_largest_alone_is_the_greedy_choice(logits in any_logits(), seed: u64, temperature in 0.01f64..9.0) {
            let first = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = logits.iter().position(|l| *l == first).unwrap() as u32;
            for sampling in [
                Sampling::greedy(),
                Sampling { seed, ..sampling(temperature, 1.0, 1, 0.0) },
                Sampling { seed, ..sampling(temperature, 1e-9, 0, 0.0) },
            ] {
                prop_assert_eq!(Sampler::new(sampling).unwrap().choose(&logits).unwrap(), first);
            }
        }

        #[test]
        fn names_do_not_matter(
            logits in prop::collection::btree_set(-2000i32..2000, 2..200), sampling in any_sampling(), seed: u64,
        ) {
            // Different logits: equals are told apart by their names.
            let logits: Vec<f32> = logits.into_iter().map(|l| l as f32 / 100.0).collect();
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by_key(|at| (*at as u64 + 1).wrapping_mul(seed | 1));
            let shuffled: Vec<f32> = order.iter().map(|at| logits[*at]).collect();
            let (plain, moved) = (weights(sampling, &logits), weights(sampling, &shuffled));
            let margin = reference(sampling, &logits).1;
            for (to, from) in order.into_iter().enumerate() {
                // The sums are of another order, so a token at the edge may fall on its other side.
                prop_assert!(moved[to] == plain[from] || margin[from] < 1e-6);
            }
        }

        #[test]
        fn a_tighter_choice_keeps_fewer(logits in any_logits(), sampling in any_sampling(), by in 0.0f64..1.0) {
            let loose = weights(sampling, &logits);
            let tighter = [
                Sampling { top_p: sampling.top_p * (1.0 - by).max(1e-6), ..sampling },
                Sampling { min_p: sampling.min_p + (1.0 - sampling.min_p) * by, ..sampling },
            ];
            for tight in tighter {
                let tight = weights(tight, &logits);
                prop_assert!(tight.iter().any(|weight| *weight > 0.0));
                prop_assert!(tight.iter().zip(&loose).all(|(tight, loose)| *tight == 0.0 || tight == loose));
            }
        }
    }

    /// Pearson's statistic of 40 000 draws; with d degrees of freedom it has mean d and variance 2 d.
    #[test]
    fn tokens_come_as_often_as_their_weights_say() {
        let logits: Vec<f32> = (0..40).map(|i| ((i * 7) % 40) as f32 * 0.11).collect();
        for (seed, options) in [
            (1, sampling(1.0, 1.0, 0, 0.0)),
            (2, sampling(0.6, 0.9, 0, 0.0)),
            (3, sampling(1.7, 1.0, 11, 0.0)),
            (4, sampling(1.0, 0.95, 20, 0.1)),
        ] {
            let mut sampler = Sampler::new(Sampling { seed, ..options }).unwrap();
            let mut counts = vec![0u32; logits.len()];
            const DRAWS: u32 = 40_000;
            for _ in 0..DRAWS {
                counts[sampler.choose(&logits).unwrap() as usize] += 1;
            }
            let (expected, _) = reference(options, &logits);
            let total: f64 = expected.iter().sum();
            let mut statistic = 0.0;
            let mut freedom = -1.0;
            for (count, weight) in counts.iter().zip(&expected) {
                if *weight == 0.0 {
                    assert_eq!(*count, 0);
                    continue;
                }
                let mean = f64::from(DRAWS) * weight / total;
                statistic += (f64::from(*count) - mean).powi(2) / mean;
                freedom += 1.0;
            }
            assert!(
                statistic < freedom + 5.0 * f64::sqrt(2.0 * freedom),
                "{options:?}: {statistic} with {freedom} degrees of freedom"
            );
        }
    }

    /// The key stream of ChaCha with 8 rounds, a key of zeros and stream 0 begins 3e 00 ef 2f 89 5f 40 d6 7f 5b b8
    /// e8 1f 09 a5 a1 (draft-strombergson-chacha-test-vectors-01, TC1, 256-bit key).
    #[test]
    fn the_random_numbers_are_the_published_ones() {
        let mut sampler = Sampler::new(Sampling { seed: 0, ..sampling(1.0, 1.0, 0, 0.0) }).unwrap();
        // Of 2^16 equals, the one whose number is the first 16 bits.
        let logits = vec![0.5; 1 << 16];
        assert_eq!(sampler.choose(&logits).unwrap(), 0xd640);
        assert_eq!(sampler.choose(&logits).unwrap(), 0xa1a5);
    }

    #[test]
    fn a_seen_token_is_penalized_once() {
        let options = Sampling { repetition_penalty: 2.0, ..Sampling::greedy() };
        let mut sampler = Sampler::new(options).unwrap();
        sampler.see(&[2, 2, 70]);
        let mut logits = vec![-8.0; 71];
        logits[1] = 1.9;
        logits[2] = 4.0;
        // 4 / 2 is still above 1.9; seen again it is not divided again.
        assert_eq!(sampler.choose(&logits), Ok(2));
        assert_eq!(sampler.choose(&logits), Ok(2));
        logits[2] = 3.7;
        assert_eq!(sampler.choose(&logits), Ok(1));
        assert_eq!(sampler.choose(&logits[..3]), Err(SampleError::Seen { token: 70, vocabulary: 3 }));
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::greedy() };
        let mut negative = Sampler::new(sampling).unwrap();
        negative.see(&[0]);
        assert_eq!(negative.choose(&[-1.0, -1.5]), Ok(1), "a negative logit is multiplied");
    }

    #[test]
    fn logits_that_are_no_numbers_are_refused_and_draw_nothing() {
        let options = sampling(1.0, 0.9, 0, 0.0);
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 15, 16, 36] {
                let (mut sampler, mut other) =
                    (Sampler::new(options).unwrap(), Sampler::new(options).unwrap());
                let good: Vec<f32> = (0..37).map(|i| i as f32 / 9.0).collect();
                let mut bad = good.clone();
                bad[at] = wrong;
                let error = sampler.choose(&bad).unwrap_err();
                assert!(
                    matches!(error, SampleError::NonFinite { count: 1, vocabulary: 37, token, .. } if token == at),
                    "{error}"
                );
                assert_eq!(error.exit(), Exit::Input);
                assert_eq!(sampler.choose(&good), other.choose(&good));
            }
        }
        assert_eq!(Sampler::new(options).unwrap().choose(&[]), Err(SampleError::NoLogits));
    }

    #[test]
    fn extreme_options_still_choose() {
        let logits = [f32::MAX, f32::MIN, 0.0, f32::MAX];
        for options in [
            sampling(1e-300, 1.0, 0, 0.0),
            sampling(1e300, 0.5, 0, 0.0),
            sampling(f64::MIN_POSITIVE, 1e-300, 3, 1.0),
            sampling(1.0, 1.0 - 1e-16, usize::MAX, 0.0),
        ] {
            let token = Sampler::new(options).unwrap().choose(&logits).unwrap();
            assert!(token < 4);
        }
        assert_eq!(Sampler::new(sampling(1e-300, 1.0, 0, 1.0)).unwrap().choose(&[1.0, 2.0]), Ok(1));
    }

    #[test]
    fn options_out_of_range_are_named() {
        let good = sampling(0.7, 0.9, 40, 0.05);
        assert_eq!(good.check(), Ok(()));
        for (options, name) in [
            (Sampling { temperature: -0.1, ..good }, "temperature"),
            (Sampling { temperature: f64::NAN, ..good }, "temperature"),
            (Sampling { temperature: f64::INFINITY, ..good }, "temperature"),
            (Sampling { top_p: 0.0, ..good }, "top-p"),
            (Sampling { top_p: 1.1, ..good }, "top-p"),
            (Sampling { min_p: -0.1, ..good }, "min-p"),
            (Sampling { min_p: f64::NAN, ..good }, "min-p"),
            (Sampling { repetition_penalty: 0.0, ..good }, "repetition-penalty"),
        ] {
            let error = Sampler::new(options).expect_err("it is out of range");
            assert!(error.to_string().starts_with(&format!("`{name}` is ")), "{error}");
            assert_eq!(error.exit(), Exit::Request);
        }
    }

    #[test]
    fn a_token_of_a_large_vocabulary_allocates_nothing_after_the_first() {
        let mut logits: Vec<f32> =
            (0..50_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 20) as f32 / 300.0).collect();
        let mut sampler = Sampler::new(sampling(1.0, 0.95, 0, 0.01)).unwrap();
        let room =
            |s: &Sampler| [s.ids.capacity(), s.weights.capacity(), s.buckets.capacity(), s.sums.capacity()];
        sampler.choose(&logits).unwrap();
        let first = room(&sampler);
        for _ in 0..20 {
            logits.rotate_left(1234);
            sampler.choose(&logits).unwrap();
        }
        assert_eq!(room(&sampler), first);
    }
}
