//! Which orders have a Hadamard matrix, and what it is composed of.

use serde::Serialize;

use super::cores;

/// A core of at most this order is taken without looking for a product of smaller ones.
const LARGEST_UNSPLIT: usize = 512;

/// What the matrix of an order is composed of: H = M₁ ⊗ … ⊗ M_r ⊗ S.
///
/// M_i are cores (Paley, Williamson, Goethals-Seidel), the first with the slowest index; S is Sylvester's
/// matrix of order 2^`sylvester_log2`, S\[i]\[j] = (−1)^popcount(i & j).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Size {
    factors: Vec<u32>,
    sylvester_log2: u32,
}

impl Size {
    /// The composition for order `n`; `None` if there is none.
    ///
    /// With n = o · 2^v, o odd: Sylvester's matrix alone if o = 1. Otherwise the core of order o · 2^j with
    /// the least j ≥ 2 that has one, if it is at most 512 and j ≤ v. Otherwise o is written as a product of
    /// one or more odd factors, each with its own least j, the sum of which may not pass v: the product with
    /// the least sum of orders, then the fewest cores, then the first list of ascending orders. A core beyond
    /// 512 can come out; it costs as many products per value as its order.
    pub fn of(n: usize) -> Option<Size> {
        if n == 0 {
            return None;
        }
        let twos = n.trailing_zeros();
        let odd = n >> twos;
        let factors = match odd {
            1 => Vec::new(),
            _ => match smallest_core(odd, twos).filter(|core| *core <= LARGEST_UNSPLIT) {
                Some(core) => vec![core],
                None => best_split(odd, twos)?,
            },
        };
        let used: u32 = factors.iter().map(|core| core.trailing_zeros()).sum();
        Some(Size {
            factors: factors.into_iter().map(|core| core as u32).collect(),
            sylvester_log2: twos - used,
        })
    }

    /// Orders of the cores, slowest index first.
    pub fn factors(&self) -> &[u32] {
        &self.factors
    }

    /// log₂ of the order of Sylvester's matrix.
    pub fn sylvester_log2(&self) -> u32 {
        self.sylvester_log2
    }

    /// The order of H.
    pub fn order(&self) -> usize {
        self.factors.iter().map(|factor| *factor as usize).product::<usize>() << self.sylvester_log2
    }

    /// The rows of H, as ±1.
    pub fn rows(&self) -> impl Iterator<Item = Vec<i8>> + use<> {
        let cores = self.cores();
        let sylvester = 1usize << self.sylvester_log2;
        (0..self.order()).map(move |mut row| {
            let s = row % sylvester;
            row /= sylvester;
            let mut tail: Vec<i8> =
                (0..sylvester).map(|j| if (s & j).count_ones().is_multiple_of(2) { 1 } else { -1 }).collect();
            for (order, core) in cores.iter().rev() {
                let signs = &core[row % order * order..][..*order];
                row /= order;
                tail = signs.iter().flat_map(|sign| tail.iter().map(move |entry| sign * entry)).collect();
            }
            tail
        })
    }

    /// H, row-major, as ±1: n² bytes, so for tests and small orders.
    pub fn matrix(&self) -> Vec<i8> {
        self.rows().flatten().collect()
    }

    /// Each core's order and entries, row-major; slowest index first.
    pub(super) fn cores(&self) -> Vec<(usize, Vec<i8>)> {
        let core = |order: &u32| {
            let order = *order as usize;
            (order, cores::core(order).expect("`Size::of` takes only orders that have a core"))
        };
        self.factors.iter().map(core).collect()
    }
}

/// The order of the largest Hadamard matrix by which a vector of `n` values can be cut into equal parts.
///
/// # Panics
/// If `n` is 0.
pub fn largest_block(n: usize) -> usize {
    assert!(n > 0, "a rotation needs at least one value");
    let covered =
        |parts: usize| (n.is_multiple_of(parts)).then(|| n / parts).filter(|b| Size::of(*b).is_some());
    (1..=n).find_map(covered).expect("order 1 is covered")
}

/// The smallest core o · 2^j with 2 ≤ j ≤ `twos`.
fn smallest_core(odd: usize, twos: u32) -> Option<usize> {
    (2..=twos).map(|j| odd << j).find(|core| cores::exists(*core))
}

/// The best list of cores, ascending, for factors of `odd`.
fn best_split(odd: usize, twos: u32) -> Option<Vec<usize>> {
    let mut best: Option<(usize, usize, Vec<usize>)> = None;
    splits(odd, 3, &mut Vec::new(), &mut |odds| {
        let cores: Option<Vec<usize>> = odds.iter().map(|odd| smallest_core(*odd, twos)).collect();
        let Some(mut cores) = cores else { return };
        if cores.iter().map(|core| core.trailing_zeros()).sum::<u32>() > twos {
            return;
        }
        cores.sort_unstable();
        let candidate = (cores.iter().sum(), cores.len(), cores);
        if best.as_ref().is_none_or(|best| candidate < *best) {
            best = Some(candidate);
        }
    });
    best.map(|(_, _, cores)| cores)
}

/// Calls `found` with every ascending list of factors, each at least `least`, whose product is `odd`.
fn splits(odd: usize, least: usize, taken: &mut Vec<usize>, found: &mut impl FnMut(&[usize])) {
    let mut factor = least;
    while factor * factor <= odd {
        if odd.is_multiple_of(factor) {
            taken.push(factor);
            splits(odd / factor, factor, taken, found);
            taken.pop();
        }
        factor += 2;
    }
    taken.push(odd);
    found(taken);
    taken.pop();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_are_all_multiplicative_partitions() {
        let mut all = Vec::new();
        splits(105, 3, &mut Vec::new(), &mut |split| all.push(split.to_vec()));
        all.sort();
        assert_eq!(all, [vec![3, 5, 7], vec![3, 35], vec![5, 21], vec![7, 15], vec![105]]);
    }

    #[test]
    fn a_core_needs_its_powers_of_two_in_the_order() {
        // 9 · 4 = 36 is a core; 13 · 4 = 52 is, 25 · 4 is none and 25 · 8 = 200 is.
        assert_eq!(Size::of(36).unwrap().factors(), [36]);
        assert_eq!(Size::of(18), None);
        assert_eq!(Size::of(100), None);
        assert_eq!(Size::of(200).unwrap().factors(), [200]);
        for n in [0, 3, 5, 6, 7, 9, 10] {
            assert_eq!(Size::of(n), None, "{n}");
        }
        // 231 · 4 = 924 is beyond 512, and 4 · 3, 4 · 7 and 4 · 11 are cores of a smaller sum; they need six
        // twos.
        assert_eq!(Size::of(231 << 7).unwrap().factors(), [12, 28, 44]);
        assert_eq!(Size::of(231 << 5).unwrap().factors().len(), 2);
        // 131 is prime, and 131 · 4 − 1 = 523 too.
        assert_eq!(Size::of(524).unwrap().factors(), [524]);
    }

    #[test]
    fn rows_are_kronecker_products_of_the_parts() {
        // M ⊗ S: entry (i, j) is M[i / 4][j / 4] · S[i % 4][j % 4].
        let size = Size::of(48).unwrap();
        assert_eq!((size.factors(), size.sylvester_log2(), size.order()), (&[12][..], 2, 48));
        let (matrix, core) = (size.matrix(), cores::core(12).unwrap());
        for i in 0..48usize {
            for j in 0..48usize {
                let s = if ((i % 4) & (j % 4)).count_ones() == 1 { -1 } else { 1 };
                assert_eq!(matrix[i * 48 + j], core[i / 4 * 12 + j / 4] * s, "({i}, {j})");
            }
        }
    }

    #[test]
    fn the_largest_block_is_the_largest_covered_divisor() {
        for n in 1..=2000 {
            let divisors = (1..=n).filter(|b| n % b == 0 && Size::of(*b).is_some());
            assert_eq!(largest_block(n), divisors.max().unwrap(), "{n}");
        }
        // 59 · 64 is the first multiple of 64 that is not covered.
        assert_eq!(largest_block(3776), 64);
    }
}
