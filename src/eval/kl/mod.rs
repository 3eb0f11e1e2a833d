//! KL(teacher || candidate), position by position.
//!
//! Over the whole vocabulary where the teacher gives all logits, in the form of [`crate::numeric::divergence`]; over
//! the likeliest tokens and one outcome for all others where it gives those ([`of_top`]), which is a lower bound.

pub mod layers;
pub mod run;
pub mod summary;

pub use run::{Candidate, Scoring, score};
pub use summary::{Summary, summarize};

use serde::Serialize;

use super::dump::Said;
use super::dump::topk::Top;
use crate::backend::cpu::Cpu;
use crate::isa::Isa;
use crate::numeric::divergence::{divergence, log_sum, partial};
use crate::numeric::math::{exp64, ln64};

/// Version of the instrument: raised when the same inputs may give other numbers.
pub const VERSION: u32 = 1;

/// What is known of a position: 24 bytes in the records.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Position {
    /// KL(teacher || candidate), nats; NaN if either side's logits are not finite.
    pub kl: f32,
    /// Probability that the teacher gives its likeliest token.
    pub confidence: f32,
    /// -ln p of the next token by the teacher; NaN where there is none, or where it is not known.
    pub teacher_nll: f32,
    /// -ln q of the next token by the candidate; NaN where there is none.
    pub candidate_nll: f32,
    /// The teacher's likeliest token.
    pub teacher_top: u32,
    /// The candidate's.
    pub candidate_top: u32,
}

impl Position {
    /// A position of which nothing can be said.
    pub const NOT_FINITE: Self = Self {
        kl: f32::NAN,
        confidence: f32::NAN,
        teacher_nll: f32::NAN,
        candidate_nll: f32::NAN,
        teacher_top: u32::MAX,
        candidate_top: u32::MAX,
    };

    /// Its bytes, in the order of the fields.
    pub fn to_bytes(self) -> [u8; 24] {
        let floats = [self.kl, self.confidence, self.teacher_nll, self.candidate_nll].map(f32::to_le_bytes);
        let ids = [self.teacher_top, self.candidate_top].map(u32::to_le_bytes);
        let mut bytes = [0; 24];
        let parts = floats.iter().chain(&ids);
        bytes.chunks_exact_mut(4).zip(parts).for_each(|(to, from)| to.copy_from_slice(from));
        bytes
    }

    /// The inverse of [`Position::to_bytes`].
    pub fn from_bytes(bytes: &[u8; 24]) -> Self {
        let words = bytes.as_chunks::<4>().0;
        let float = |i: usize| f32::from_le_bytes(words[i]);
        Self {
            kl: float(0),
            confidence: float(1),
            teacher_nll: float(2),
            candidate_nll: float(3),
            teacher_top: u32::from_le_bytes(words[4]),
            candidate_top: u32::from_le_bytes(words[5]),
        }
    }
}

/// A divergence, and each side of it.
#[derive(Debug, Clone, Copy)]
pub struct Side {
    /// Nats.
    pub kl: f64,
    /// ln Σ e^logit of the candidate.
    pub log_sum: f64,
    /// The candidate's likeliest token.
    pub top: u32,
}

/// KL over the tokens of `top` and one outcome for all others; none if a number is not finite.
///
/// Where the others' probability is not known (llama.cpp's files), their term is left out: it is not negative, so
/// this is a lower bound too.
pub fn of_top(top: &Top, candidate: &[f32], isa: Isa) -> Option<Side> {
    let (log_sum, best) = log_sum(candidate, isa)?;
    if top.log_probs.iter().any(|value| !value.is_finite()) {
        return None;
    }
    let b: Vec<f32> = top.ids.iter().map(|id| candidate[*id as usize]).collect();
    let (mut kl, known) = partial(&top.log_probs, &b, candidate[best as usize], log_sum, isa);
    if let Some(rest) = top.rest.map(f64::from) {
        // The candidate's others; where both are next to nothing the difference is rounding.
        let q = (1.0 - known).max(1e-12);
        let p = rest.max(1e-12);
        kl += (q - p + p * (ln64(p) - ln64(q))).max(0.0);
    }
    Some(Side { kl, log_sum, top: best })
}

/// Compares what the teacher says with the candidate's logits [rows, V]; `targets` are the next tokens.
///
/// # Panics
/// If the candidate's logits are not one row for each target.
pub fn positions(cpu: &Cpu, said: &Said, candidate: &[f32], targets: &[Option<u32>]) -> Vec<Position> {
    let vocab = candidate.len() / targets.len();
    assert_eq!(candidate.len(), vocab * targets.len(), "one row of logits for each position");
    let mut out = vec![Position::NOT_FINITE; targets.len()];
    cpu.threads.chunks(&mut out, 1, &|i, out| {
        let row = &candidate[i * vocab..(i + 1) * vocab];
        let found = match said {
            Said::Logits(logits) => whole(&logits[i * vocab..(i + 1) * vocab], row, targets[i], cpu.isa),
            Said::Top(tops) => merged(&tops[i], row, targets[i], cpu.isa),
        };
        if let Some(position) = found {
            out[0] = position;
        }
    });
    out
}

fn whole(teacher: &[f32], candidate: &[f32], target: Option<u32>, isa: Isa) -> Option<Position> {
    let d = divergence(teacher, candidate, isa)?;
    let nll = |row: &[f32], log_sum: f64| {
        target.map_or(f32::NAN, |id| (log_sum - f64::from(row[id as usize])) as f32)
    };
    Some(Position {
        kl: d.kl as f32,
        confidence: exp64(f64::from(teacher[d.a_top as usize]) - d.a_log_sum) as f32,
        teacher_nll: nll(teacher, d.a_log_sum),
        candidate_nll: nll(candidate, d.b_log_sum),
        teacher_top: d.a_top,
        candidate_top: d.b_top,
    })
}

fn merged(top: &Top, candidate: &[f32], target: Option<u32>, isa: Isa) -> Option<Position> {
    let side = of_top(top, candidate, isa)?;
    let best = (0..top.ids.len()).reduce(|a, b| if top.log_probs[b] > top.log_probs[a] { b } else { a })?;
    let teacher_nll =
        target.and_then(|id| top.ids.iter().position(|known| *known == id)).map(|i| -top.log_probs[i]);
    Some(Position {
        kl: side.kl as f32,
        confidence: exp64(f64::from(top.log_probs[best])) as f32,
        teacher_nll: teacher_nll.unwrap_or(f32::NAN),
        candidate_nll: target
            .map_or(f32::NAN, |id| (side.log_sum - f64::from(candidate[id as usize])) as f32),
        teacher_top: top.ids[best],
        candidate_top: side.top,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ln of probabilities: logits that sum to 1.
    fn ln(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn positions_agree_with_arithmetic_by_hand() {
        let (p, q) = (ln(&[0.5, 0.25, 0.25]), ln(&[0.25, 0.5, 0.25]));
        let cpu = Cpu::new(Isa::best(), 1, crate::backend::Precision::Exact);
        let said = Said::Logits([p.clone(), p.clone()].concat());
        let found = positions(&cpu, &said, &[q.clone(), q.clone()].concat(), &[Some(1), None]);
        // 0.5 ln 2 - 0.25 ln 2
        let kl = 0.25 * std::f32::consts::LN_2;
        assert!((found[0].kl - kl).abs() < 1e-6 && (found[0].confidence - 0.5).abs() < 1e-6, "{found:?}");
        assert!((found[0].teacher_nll - 4f32.ln()).abs() < 1e-6);
        assert!((found[0].candidate_nll - 2f32.ln()).abs() < 1e-6);
        assert_eq!((found[0].teacher_top, found[0].candidate_top), (0, 1));
        assert!(found[1].teacher_nll.is_nan() && found[1].candidate_nll.is_nan());

        // Tokens 1 and 2 merged: 0.5 ln 2 + 0.5 ln (0.5 / 0.75).
        let top = Top::of(&p, 1, Isa::best()).unwrap().0;
        let side = of_top(&top, &q, Isa::best()).unwrap();
        assert!((side.kl - (0.5 * 2f64.ln() + 0.5 * (0.5f64 / 0.75).ln())).abs() < 1e-6, "{side:?}");
        assert!(side.kl <= f64::from(found[0].kl));
    }

    #[test]
    fn a_position_keeps_its_bits_in_24_bytes() {
        let position = Position { kl: 1.5, confidence: 0.25, ..Position::NOT_FINITE };
        assert_eq!(Position::from_bytes(&position.to_bytes()).to_bytes(), position.to_bytes());
    }

    #[test]
    fn a_logit_that_is_not_finite_spoils_its_own_position_only() {
        let cpu = Cpu::new(Isa::best(), 2, crate::backend::Precision::Exact);
        let said = Said::Logits(vec![0.0, 1.0, 0.0, 1.0]);
        let found = positions(&cpu, &said, &[0.0, f32::INFINITY, 0.0, 1.0], &[None, None]);
        assert!(found[0].kl.is_nan());
        assert_eq!(found[1].kl, 0.0);
    }
}
