//! Causal attention over a paged cache.
//!
//! For query head h of token t at position p, over the positions s in max(0, p - window + 1) ..= p:
//!
//! score[s] = dot(q, k[s]) · scale;  w[s] = exp(score[s] - max);  o[d] = (Σ_s w[s] · v[s, d]) / Σ_s w[s]
//!
//! The sum of w takes sixteen lanes by s mod 16, then halves. The sum over values goes page by page: in the
//! order of s inside a page, then pages in order. Weights outside the window are exact zeros, so a result does not
//! depend on which queries are computed together.

use super::Cpu;
use super::combine::{Matrix, combine};
use crate::backend::Columns;
use crate::numeric::dot;
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::numeric::math::exp;

/// Tokens in a page of cached keys and values.
pub const PAGE: usize = 64;

/// Keys and values of up to [`PAGE`] tokens.
#[derive(Debug, Clone)]
pub struct Page {
    /// [PAGE, G · Dh]
    pub keys: Box<[f32]>,
    /// [PAGE, G · Dv] with Dv a multiple of sixteen.
    pub values: Box<[f32]>,
}

/// Queries of consecutive positions and what they look at.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// [T, H · Dh], rotated.
    pub queries: &'a [f32],
    /// H.
    pub q_heads: usize,
    /// G.
    pub kv_heads: usize,
    /// Dh.
    pub head_dim: usize,
    /// Position of the first query; the cache holds this many tokens and the queries' own.
    pub position: usize,
    /// Tokens seen by a query; none means all.
    pub window: Option<usize>,
    /// The cache.
    pub pages: &'a [Page],
}

/// The most tokens whose queries are computed together: enough to use a loaded key several times.
const TOGETHER: usize = 8;

/// Scores that a part may hold, unless one token has more.
const SCORES: usize = 1 << 19;

impl Cpu {
    /// out[t, h · Dh + d] for all queries.
    pub fn attention(&self, heads: Heads<'_>, out: &mut [f32]) {
        let width = heads.q_heads * heads.head_dim;
        let tokens = heads.queries.len() / width;
        let columns = Columns::new(out, width);
        let seen =
            (heads.position + tokens).min(heads.window.unwrap_or(usize::MAX).saturating_add(TOGETHER + PAGE));
        let scores = heads.q_heads / heads.kv_heads * seen;
        let together = (SCORES / scores).clamp(1, TOGETHER);
        let groups = tokens.div_ceil(together);
        self.threads.run(groups * heads.kv_heads, &|part| {
            // The last tokens have the most to do, so they go first.
            let (t, g) = (groups - 1 - part / heads.kv_heads, part % heads.kv_heads);
            let tokens = t * together..tokens.min((t + 1) * together);
            dispatch(self.isa, Group { heads, tokens, g, out: &columns });
        });
    }
}

/// All query heads of one key head, for some tokens.
struct Group<'a> {
    heads: Heads<'a>,
    tokens: std::ops::Range<usize>,
    g: usize,
    out: &'a Columns<'a>,
}

impl Kernel for Group<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Heads { q_heads, kv_heads, head_dim, position, window, pages, queries } = self.heads;
        let share = q_heads / kv_heads;
        let rows = self.tokens.len() * share;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let first = |t: usize| (position + t + 1).saturating_sub(window.unwrap_or(usize::MAX));
        // Whole pages from the first that any query sees.
        let start = first(self.tokens.start) / PAGE * PAGE;
        let end = position + self.tokens.end;
        let span = (end - start).next_multiple_of(LANES);

        let mut q = vec![0.0; rows * head_dim];
        for (r, q) in q.chunks_exact_mut(head_dim).enumerate() {
            let (t, h) = (self.tokens.start + r / share, self.g * share + r % share);
            q.copy_from_slice(&queries[(t * q_heads + h) * head_dim..][..head_dim]);
        }
        let stride = kv_heads * head_dim;
        let mut scores = vec![0.0; rows * span];
        for at in (start..end).step_by(PAGE) {
            let keys = &pages[at / PAGE].keys[self.g * head_dim..];
            let count = PAGE.min(end - at);
            let out = &mut scores[at - start..];
            dot::products::<V>(&q, head_dim, rows, keys, stride, count, head_dim, out, span);
        }
        let mut sums = vec![0.0; rows];
        for (r, (scores, sum)) in scores.chunks_exact_mut(span).zip(&mut sums).enumerate() {
            let t = self.tokens.start + r / share;
            let seen = first(t) - start..position + t + 1 - start;
            *sum = weights::<V>(scores, seen, scale);
        }
        let wide = head_dim.next_multiple_of(LANES);
        let value_stride = kv_heads * wide;
        let mut total = vec![0.0; rows * wide];
        let mut page_sum = vec![0.0; rows * wide];
        for at in (start..end).step_by(PAGE) {
            let values = Matrix { values: &pages[at / PAGE].values[self.g * wide..], stride: value_stride };
            let weights = Matrix { values: &scores[at - start..], stride: span };
            page_sum.fill(0.0);
            combine::<V>(weights, values, (rows, PAGE.min(end - at), wide), &mut page_sum, wide);
            total.iter_mut().zip(&page_sum).for_each(|(total, sum)| *total += sum);
        }
        for (r, (total, sum)) in total.chunks_exact(wide).zip(&sums).enumerate() {
            let (t, h) = (self.tokens.start + r / share, self.g * share + r % share);
            // SAFETY: this part alone has these tokens and these heads.
            let out = unsafe { self.out.row(t, h * head_dim..(h + 1) * head_dim) };
            out.iter_mut().zip(total).for_each(|(out, total)| *out = total / sum);
        }
    }
}

/// Turns scores into weights, zero outside `seen`, and returns their sum.
#[inline(always)]
fn weights<V: Lanes>(scores: &mut [f32], seen: std::ops::Range<usize>, scale: f32) -> f32 {
    scores[..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..].fill(f32::NEG_INFINITY);
    let scale = V::splat(scale);
    let mut most = V::splat(f32::NEG_INFINITY);
    for lanes in scores.as_chunks_mut::<LANES>().0 {
        let scaled = V::load(lanes).mul(scale);
        scaled.store(lanes);
        most = most.max(scaled);
    }
    let most = V::splat(most.greatest());
    let mut sum = V::splat(0.0);
    for lanes in scores.as_chunks_mut::<LANES>().0 {
        let weight = exp(V::load(lanes).sub(most));
        weight.store(lanes);
        sum = sum.add(weight);
    }
    sum.sum()
}
