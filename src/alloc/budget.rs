//! Bits under a budget: one choice for each tie of modules, least total cost, at most so many bytes.
//!
//! minimise Σ_t cost(t, j_t)  subject to  Σ_t bytes(t, j_t) ≤ B,  one choice j_t for each tie t
//!
//! a multiple-choice knapsack. [`exact`] keeps, from the last tie to the first, the list of (bytes, cost) that no other
//! choice of the same ties beats, and drops what cannot lead below the cost of [`greedy`] or [`uniform_control`], by the bound
//!
//! cost + Σ_{ties left} min_j (cost_j + λ · bytes_j) − λ · (B − bytes)
//!
//! with λ the slope at which the relaxed problem spends the budget. Sizes of a model's modules are multiples of a large
//! common number, so the list is short even without the bound. Of equally good choices the one of fewer bytes is taken,
//! then the lexicographically first.
//!
//! Costs are summed as whole multiples of 2^-80, so that no sum depends on its order. The method is textbook: Kellerer,
//! Pferschy and Pisinger, "Knapsack Problems" (2004), chapter 11.

use crate::codec::CodecSpec;

use super::cost::LARGEST;

/// One way to store all modules of a tie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Way {
    /// In which codec.
    pub codec: CodecSpec,
    /// The codec's place in the list of candidates, the narrowest first.
    pub level: usize,
    /// Stored bytes of all modules together.
    pub bytes: u64,
    /// Their costs together.
    pub cost: f64,
}

/// Modules that share their codec.
#[derive(Debug, Clone, PartialEq)]
pub struct Tie {
    /// The first module's path, for messages.
    pub name: String,
    /// At least one, by level.
    pub ways: Vec<Way>,
}

impl Tie {
    /// The same with other units of cost.
    fn times(&self, by: f64) -> Self {
        let ways = self.ways.iter().map(|way| Way { cost: way.cost * by, ..*way });
        Self { name: self.name.clone(), ways: ways.collect() }
    }
}

/// One way for each tie.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    /// Index of the way, for each tie.
    pub chosen: Vec<usize>,
    /// Their bytes together.
    pub bytes: u64,
    /// Their costs together.
    pub cost: f64,
}

/// How to look for the choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Method {
    /// [`exact`].
    Exact,
    /// [`greedy`].
    Greedy,
    /// [`uniform_control`].
    Uniform,
}

/// Why there is no solution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BudgetError {
    /// Even the smallest ways together are too large.
    #[error("the least that these modules can take is {least} bytes, but the budget leaves {budget}")]
    TooSmall {
        /// Bytes of the smallest ways.
        least: u64,
        /// Bytes there are.
        budget: u64,
    },
    /// More partial choices than fit in memory.
    #[error("an exact allocation would have to compare more than {limit} partial choices at once")]
    TooMany {
        /// The most that are compared.
        limit: usize,
    },
}

/// The most partial choices held for one tie, 48 bytes each while they are compared. Costs like a real model's need
/// fewer than ten thousand; costs that fall alike with each byte everywhere, some hundred thousand.
const MOST_STATES: usize = 1_000_000;

/// Solves by `method`.
///
/// # Errors
/// [`BudgetError`].
pub fn solve(method: Method, ties: &[Tie], budget: u64) -> Result<Solution, BudgetError> {
    let by = magnifier(ties);
    let magnified: Vec<Tie>;
    let ties = match by == 1.0 {
        true => ties,
        false => {
            magnified = ties.iter().map(|tie| tie.times(by)).collect();
            &magnified
        }
    };
    let found = match method {
        Method::Exact => exact(ties, budget),
        Method::Greedy => greedy(ties, budget),
        Method::Uniform => uniform_control(ties, budget),
    }?;
    Ok(Solution { cost: found.cost / by, ..found })
}

/// The power of two that brings costs which are all tiny to where sums in fixed point tell them apart; 1 for others.
fn magnifier(ties: &[Tie]) -> f64 {
    let largest = ties.iter().flat_map(|tie| &tie.ways).map(|way| way.cost.abs()).fold(0.0, f64::max);
    let mut by = 1.0;
    while largest > 0.0 && largest * by < SMALL && by < f64::MAX / 2.0 {
        by *= 2.0;
    }
    by
}

/// Costs of which none is as large as this are magnified: 2^-20 nats.
const SMALL: f64 = 1.0 / 1_048_576.0;

/// The smallest way of each tie; of equals, the cheapest.
pub fn least(ties: &[Tie]) -> Solution {
    let smallest = |tie: &Tie| {
        let order = |way: &Way| (way.bytes, fixed(way.cost));
        let ways = tie.ways.iter().enumerate();
        ways.min_by_key(|(_, way)| order(way)).expect("a tie has a way").0
    };
    total(ties, ties.iter().map(smallest).collect())
}

/// The least cost there is.
///
/// # Errors
/// [`BudgetError`].
pub fn exact(ties: &[Tie], budget: u64) -> Result<Solution, BudgetError> {
    let known = |solution: Solution| -> i128 {
        solution.chosen.iter().zip(ties).map(|(way, tie)| fixed(tie.ways[*way].cost)).sum()
    };
    let most = known(greedy(ties, budget)?).min(known(uniform_control(ties, budget)?));
    let lambda = slope(ties, budget);
    // Bound and least bytes of the ties before each.
    let mut before = vec![(0.0, 0u64)];
    for tie in ties {
        let (bound, bytes) = before[before.len() - 1];
        let relaxed = tie.ways.iter().map(|way| way.cost + lambda * way.bytes as f64);
        let smallest = tie.ways.iter().map(|way| way.bytes).min().expect("a tie has a way");
        before.push((bound + relaxed.fold(f64::INFINITY, f64::min), bytes + smallest));
    }
    let most_f64 = real(most);
    // Far above what rounding does to the bound, far below what costs differ by; and what fixed point rounds off.
    let rounded_off = (ties.len() + 1) as f64 * real(1);
    let margin = 1e-9 * (most_f64.abs() + before[ties.len()].0.abs() + lambda * budget as f64) + rounded_off;

    let mut states = vec![State { bytes: 0, cost: 0, way: 0, parent: 0 }];
    let mut back: Vec<Vec<(u32, u32)>> = Vec::with_capacity(ties.len());
    for (tie, (bound, smallest)) in ties.iter().zip(&before).rev() {
        let mut next = Vec::with_capacity(states.len() * tie.ways.len());
        for (index, way) in tie.ways.iter().enumerate() {
            let added = fixed(way.cost);
            for (parent, state) in states.iter().enumerate() {
                let (bytes, cost) = (state.bytes + way.bytes, state.cost + added);
                if bytes + smallest > budget {
                    break; // states are in order of bytes
                }
                let lower = real(cost) + bound - lambda * (budget - bytes) as f64;
                if lower <= most_f64 + margin {
                    next.push(State { bytes, cost, way: index as u32, parent: parent as u32 });
                }
            }
        }
        // Each way's states are in order already: a stable sort only merges them.
        next.sort_by_key(|state| (state.bytes, state.cost, state.way));
        let mut cheapest = i128::MAX;
        next.retain(|state| {
            let better = state.cost < cheapest;
            cheapest = cheapest.min(state.cost);
            better
        });
        if next.len() > MOST_STATES {
            return Err(BudgetError::TooMany { limit: MOST_STATES });
        }
        back.push(next.iter().map(|state| (state.way, state.parent)).collect());
        states = next;
    }
    // The last is the cheapest, and the smallest of that cost.
    let mut at = states.len() - 1;
    let chosen = back.iter().rev().map(|level| {
        let (way, parent) = level[at];
        at = parent as usize;
        way as usize
    });
    let chosen = chosen.collect();
    Ok(total(ties, chosen))
}

/// A choice for some of the ties.
struct State {
    bytes: u64,
    cost: i128,
    way: u32,
    parent: u32,
}

/// From the smallest ways on, always the step of the most gain for each byte that still fits.
///
/// # Errors
/// [`BudgetError::TooSmall`].
pub fn greedy(ties: &[Tie], budget: u64) -> Result<Solution, BudgetError> {
    let Solution { mut chosen, mut bytes, .. } = fitting(ties, budget)?;
    loop {
        // (gain for each byte, bytes, tie, way)
        let mut best: Option<(f64, u64, usize, usize)> = None;
        for (index, tie) in ties.iter().enumerate() {
            let now = tie.ways[chosen[index]];
            for (way, then) in tie.ways.iter().enumerate() {
                if then.bytes <= now.bytes || then.cost >= now.cost || bytes - now.bytes + then.bytes > budget
                {
                    continue;
                }
                let added = then.bytes - now.bytes;
                let gain = (now.cost - then.cost) / added as f64;
                if best.is_none_or(|(most, least, ..)| gain > most || (gain == most && added < least)) {
                    best = Some((gain, added, index, way));
                }
            }
        }
        let Some((_, added, index, way)) = best else { break };
        chosen[index] = way;
        bytes += added;
    }
    Ok(total(ties, chosen))
}

/// What one would do without knowing any cost: the widest codec that fits everywhere, then ties raised to the next
/// width in an evenly spread order until nothing more fits.
///
/// # Errors
/// [`BudgetError::TooSmall`].
pub fn uniform_control(ties: &[Tie], budget: u64) -> Result<Solution, BudgetError> {
    let mut best = fitting(ties, budget)?;
    let levels = ties.iter().flat_map(|tie| tie.ways.iter().map(|way| way.level)).max();
    for level in 0..=levels.unwrap_or(0) {
        // A tie without this width has the next below, or its narrowest.
        let at = |tie: &Tie| tie.ways.iter().rposition(|way| way.level <= level).unwrap_or(0);
        let uniform = total(ties, ties.iter().map(at).collect());
        if uniform.bytes <= budget {
            best = uniform;
        }
    }
    let Solution { mut chosen, mut bytes, .. } = best;
    let order = spread(ties.len());
    loop {
        let before = bytes;
        for &index in &order {
            let ways = &ties[index].ways;
            let now = ways[chosen[index]].bytes;
            if let Some(next) = ways.get(chosen[index] + 1)
                && bytes - now + next.bytes <= budget
            {
                bytes = bytes - now + next.bytes;
                chosen[index] += 1;
            }
        }
        // A way of no more bytes raises nothing; ways are few, so the walk ends.
        if bytes == before {
            break;
        }
    }
    Ok(total(ties, chosen))
}

/// 0..n in the order of their digits reversed in base two: any prefix is spread over all.
fn spread(n: usize) -> Vec<usize> {
    let bits = n.next_power_of_two().trailing_zeros();
    let reversed = |i: usize| if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) };
    (0..n.next_power_of_two()).map(reversed).filter(|i| *i < n).collect()
}

fn fitting(ties: &[Tie], budget: u64) -> Result<Solution, BudgetError> {
    let least = least(ties);
    match least.bytes <= budget {
        true => Ok(least),
        false => Err(BudgetError::TooSmall { least: least.bytes, budget }),
    }
}

fn total(ties: &[Tie], chosen: Vec<usize>) -> Solution {
    let ways = || chosen.iter().zip(ties).map(|(way, tie)| &tie.ways[*way]);
    let (bytes, cost) = (ways().map(|way| way.bytes).sum(), ways().map(|way| fixed(way.cost)).sum());
    Solution { bytes, cost: real(cost), chosen }
}

/// The slope, cost for each byte, of the step at which the relaxed problem runs out of budget; 0 if it never does.
fn slope(ties: &[Tie], budget: u64) -> f64 {
    let mut steps: Vec<(f64, u64)> = Vec::new();
    let mut bytes = 0;
    for tie in ties {
        let mut ways: Vec<(u64, f64)> = tie.ways.iter().map(|way| (way.bytes, way.cost)).collect();
        ways.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut now = ways[0];
        bytes += now.0;
        // The lower hull: from each corner, the steepest step down.
        loop {
            let down = ways.iter().filter(|then| then.0 > now.0 && then.1 < now.1);
            let steep = |then: &(u64, f64)| (now.1 - then.1) / (then.0 - now.0) as f64;
            // Of equally steep ones the longest, which is the last.
            let Some(next) = down.max_by(|a, b| steep(a).total_cmp(&steep(b))) else { break };
            steps.push((steep(next), next.0 - now.0));
            now = *next;
        }
    }
    steps.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (slope, added) in steps {
        bytes += added;
        if bytes > budget {
            return slope;
        }
    }
    0.0
}

/// Fraction bits of a cost in sums.
const FRACTION: i32 = 80;

fn fixed(cost: f64) -> i128 {
    debug_assert!(cost.abs() <= LARGEST * 1e6, "the readers of tables refuse larger costs");
    (cost * 2f64.powi(FRACTION)).round() as i128
}

fn real(cost: i128) -> f64 {
    cost as f64 / 2f64.powi(FRACTION)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn tiny_costs_are_told_apart_and_never_lose_every_choice() {
        let table = |by: f64| -> Vec<Tie> {
            let costs = [(3.0, 1.0, 0.2), (5.0, 4.0, 0.1), (2.0, 0.5, 0.4), (7.0, 2.0, 1.0)];
            let of = |(a, b, c): (f64, f64, f64)| tie(&[(10, a * by), (17, b * by), (29, c * by)]);
            costs.into_iter().map(of).collect()
        };
        for budget in 40..=116 {
            let expected = solve(Method::Exact, &table(1.0), budget).unwrap();
            for by in [1e-18, 1e-24, 1e-30, 1e-300] {
                let found = solve(Method::Exact, &table(by), budget).unwrap();
                assert_eq!(found.chosen, expected.chosen, "{budget} bytes, costs times {by}");
                assert!((found.cost / (expected.cost * by) - 1.0).abs() < 1e-9, "{found:?}");
            }
            for by in [1e-322, 0.0] {
                assert!(solve(Method::Exact, &table(by), budget).unwrap().bytes <= budget);
                assert!(exact(&table(by), budget).unwrap().bytes <= budget, "unmagnified too");
            }
            assert!(exact(&table(1e-30), budget).unwrap().bytes <= budget, "unmagnified too");
        }
    }

    fn tie(ways: &[(u64, f64)]) -> Tie {
        let ways = ways.iter().enumerate().map(|(level, (bytes, cost))| Way {
            codec: CodecSpec::Mxfp4,
            level,
            bytes: *bytes,
            cost: *cost,
        });
        Tie { name: "m".to_owned(), ways: ways.collect() }
    }

    /// Every choice, tried: the least (cost, bytes, choice) that fits.
    fn by_hand(ties: &[Tie], budget: u64) -> Option<(Vec<usize>, u64, f64)> {
        let mut choices: Vec<Vec<usize>> = vec![Vec::new()];
        for tie in ties {
            let longer = choices.iter().flat_map(|choice| {
                (0..tie.ways.len()).map(move |way| choice.iter().copied().chain([way]).collect())
            });
            choices = longer.collect();
        }
        let sums = choices.into_iter().map(|choice| {
            let bytes = choice.iter().zip(ties).map(|(way, tie)| tie.ways[*way].bytes).sum::<u64>();
            // Costs in these tests are small multiples of 2^-10: floats add them exactly.
            let cost = choice.iter().zip(ties).map(|(way, tie)| tie.ways[*way].cost).sum::<f64>();
            (choice, bytes, cost)
        });
        let order = |a: &(Vec<usize>, u64, f64), b: &(Vec<usize>, u64, f64)| {
            a.2.total_cmp(&b.2).then(a.1.cmp(&b.1)).then(a.0.cmp(&b.0))
        };
        sums.filter(|(_, bytes, _)| *bytes <= budget).min_by(order)
    }

    /// Few different sizes and costs, so that equals are common; costs need not fall with bytes.
    fn ties() -> impl Strategy<Value = Vec<Tie>> {
        let way = (1..20u64, -8..40i32).prop_map(|(bytes, cost)| (bytes, f64::from(cost) / 1024.0));
        let ways = prop::collection::vec(way, 1..5).prop_map(|ways| tie(&ways));
        prop::collection::vec(ways, 1..6)
    }

    proptest! {
        #[test]
        fn the_exact_choice_is_the_one_that_trying_all_finds(ties in ties(), budget in 0..100u64) {
            match (exact(&ties, budget), by_hand(&ties, budget)) {
                (Ok(found), Some((chosen, bytes, cost))) => {
                    prop_assert_eq!(found, Solution { chosen, bytes, cost });
                }
                (Err(BudgetError::TooSmall { least, .. }), None) => prop_assert!(least > budget),
                (found, by_hand) => prop_assert!(false, "{:?} {:?}", found, by_hand),
            }
        }

        #[test]
        fn neither_greed_nor_evenness_is_better_or_larger_than_allowed(ties in ties(), budget in 5..100u64) {
            let Ok(best) = exact(&ties, budget) else { return Ok(()) };
            for method in [Method::Greedy, Method::Uniform] {
                let other = solve(method, &ties, budget).expect("the same budget fits");
                prop_assert!(other.bytes <= budget);
                prop_assert!(other.cost >= best.cost, "{method:?}: {} < {}", other.cost, best.cost);
            }
        }
    }

    #[test]
    fn greed_can_be_beaten() {
        // The first gains 10 for 7 bytes, the most for each; then neither of the others fits, which together gain 16.
        let ties = [tie(&[(0, 10.0), (7, 0.0)]), tie(&[(0, 8.0), (6, 0.0)]), tie(&[(0, 8.0), (6, 0.0)])];
        assert_eq!(greedy(&ties, 12).unwrap().cost, 16.0);
        assert_eq!(exact(&ties, 12).unwrap(), Solution { chosen: vec![0, 1, 1], bytes: 12, cost: 10.0 });
    }

    #[test]
    fn the_control_is_the_widest_that_fits_and_then_every_other_tie() {
        let one = tie(&[(2, 9.0), (3, 5.0), (4, 1.0)]);
        let ties = vec![one; 8];
        let found = uniform_control(&ties, 8 * 3 + 4).unwrap();
        assert_eq!(found.chosen, [2, 1, 2, 1, 2, 1, 2, 1]);
        assert_eq!(found.bytes, 28);
        // Costs do not matter to it.
        let dear = vec![tie(&[(2, 0.0), (3, 5.0), (4, 9.0)]); 8];
        assert_eq!(uniform_control(&dear, 28).unwrap().chosen, found.chosen);
    }

    #[test]
    fn an_order_is_spread_from_its_start() {
        assert_eq!(spread(6), [0, 4, 2, 1, 5, 3]);
        assert_eq!(spread(1), [0]);
        assert_eq!(spread(0), [0usize; 0]);
    }

    #[test]
    fn a_large_model_takes_seconds_and_beats_the_others() {
        // 64 layers of 5 ties with 6 widths, of the sizes of a 27B; costs of no pattern.
        let sizes = [53_477_376u64, 31_457_280, 178_257_920, 89_128_960, 2_621_440];
        let mut state = 7u64;
        let mut draw = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let mut ties = Vec::new();
        for i in 0..320 {
            let weights = sizes[i % 5];
            let scale = (0.2 + draw()) * (0.2 + draw());
            let mut ways = Vec::new();
            for bits in [2u64, 3, 4, 5, 6, 8] {
                let cost = scale * (0.8 + 0.4 * draw()) * 0.25f64.powi(bits as i32);
                ways.push((weights / 8 * bits + weights / 64 * 4, cost));
            }
            ties.push(tie(&ways));
        }
        let all: u64 = (0..320).map(|i| sizes[i % 5]).sum();
        let budget = all / 8 * 4;
        let started = std::time::Instant::now();
        let best = exact(&ties, budget).unwrap();
        assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
        let (greed, even) = (greedy(&ties, budget).unwrap(), uniform_control(&ties, budget).unwrap());
        assert!(best.cost <= greed.cost && best.cost < 0.9 * even.cost, "{best:?} {greed:?} {even:?}");
        assert!(best.bytes <= budget && even.bytes <= budget);
    }
}
