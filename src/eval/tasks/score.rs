//! The probability of a continuation.
//!
//! ```text
//! ln p(c | prompt) = Σ_i l_i[c_i] - ln Σ_v exp(l_i[v])          l_i: logits before token c_i, f32 [V]
//! ```
//! The sum over V is that of [`crate::numeric::divergence`]; the sum over tokens is in f64.

use serde::{Deserialize, Serialize};

use crate::isa::Isa;
use crate::numeric::divergence::log_sum;
use crate::runtime::{Model, Part, RuntimeError, State, Want};

/// Bytes of logits that are made at a time.
const LOGITS: usize = 16 << 20;

/// How likely a continuation is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// ln p, in nats.
    pub log_prob: f64,
    /// Whether each token is the likeliest one (of equals, the one with the lowest id).
    pub greedy: bool,
}

/// One continuation to score.
pub struct Ask<'a> {
    /// The state after the prompt; it is copied.
    pub state: &'a State,
    /// The logits of the prompt's last token.
    pub logits: &'a [f32],
    /// The continuation, at least one token.
    pub tokens: &'a [u32],
}

/// Scores continuations, `batch` at a time.
///
/// # Errors
/// As [`Model::forward`].
pub fn scores(model: &Model, asks: &[Ask<'_>], batch: usize) -> Result<Vec<Score>, RuntimeError> {
    let isa = model.cpu().isa;
    let mut scores: Vec<Score> = asks.iter().map(|ask| step(ask.logits, ask.tokens[0], isa)).collect();
    let longer: Vec<usize> = (0..asks.len()).filter(|i| asks[*i].tokens.len() > 1).collect();
    for wave in longer.chunks(batch) {
        let mut states: Vec<State> = wave.iter().map(|i| asks[*i].state.clone()).collect();
        let mut parts = Vec::with_capacity(wave.len());
        for (state, i) in states.iter_mut().zip(wave) {
            let tokens = asks[*i].tokens;
            parts.push(Part { state, tokens: &tokens[..tokens.len() - 1], want: Want::Hidden });
        }
        let passes = model.forward_many(&mut parts)?;
        for (i, pass) in wave.iter().zip(passes) {
            let Ask { state, tokens, .. } = asks[*i];
            follow(model, &pass.hidden, state.tokens(), &tokens[1..], &mut scores[*i])?;
        }
    }
    Ok(scores)
}

/// Adds the tokens after the first to a score: `hidden` [tokens, H] are the states before each.
fn follow(
    model: &Model,
    hidden: &[f32],
    position: usize,
    tokens: &[u32],
    score: &mut Score,
) -> Result<(), RuntimeError> {
    let config = model.config();
    let rows = (LOGITS / (4 * config.vocab)).max(1);
    for (i, (part, tokens)) in hidden.chunks(rows * config.hidden).zip(tokens.chunks(rows)).enumerate() {
        let logits = model.logits(part, position + i * rows)?;
        for (row, token) in logits.chunks_exact(config.vocab).zip(tokens) {
            let next = step(row, *token, model.cpu().isa);
            score.log_prob += next.log_prob;
            score.greedy &= next.greedy;
        }
    }
    Ok(())
}

/// One token's share.
fn step(logits: &[f32], token: u32, isa: Isa) -> Score {
    let (log_sum, greatest) = log_sum(logits, isa).expect("the runtime gives no logits that are not finite");
    Score { log_prob: f64::from(logits[token as usize]) - log_sum, greedy: greatest == token }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_the_log_of_a_softmax() {
        // softmax(ln 1, ln 2, ln 5) = 1/8, 2/8, 5/8
        let logits = [1.0f32, 2.0, 5.0].map(f32::ln);
        for (token, expected) in [(0, 0.125f64), (1, 0.25), (2, 0.625)] {
            let score = step(&logits, token, Isa::best());
            assert!((score.log_prob - expected.ln()).abs() < 1e-7, "{score:?}");
            assert_eq!(score.greedy, token == 2);
        }
    }

    #[test]
    fn of_equal_logits_the_first_is_the_greedy_one() {
        assert!(step(&[1.0, 3.0, 3.0], 1, Isa::best()).greedy);
        assert!(!step(&[1.0, 3.0, 3.0], 2, Isa::best()).greedy);
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let score = step(&[1e4, -3e38, 1e4], 0, Isa::best());
        assert!((score.log_prob + std::f64::consts::LN_2).abs() < 1e-11, "{score:?}");
        assert!(step(&[3e38, -3e38], 1, Isa::best()).log_prob.is_finite());
        assert_eq!(step(&[0.0], 0, Isa::best()).log_prob, 0.0);
    }
}
