//! Dense Hadamard matrices whose order is 4 times something, by their classical constructions.
//!
//! M Mᵀ = m I, entries ±1. χ is the quadratic character modulo the prime q, 0 at 0.
//!
//! ```text
//! S: [q + 1, q + 1]   S₀₀ = 0, S₀ⱼ = 1, S₁₊ᵢ,₁₊ⱼ = χ(i − j)
//! Paley I          m = q + 1,   q ≡ 3 mod 4   Sᵢ₀ = −1   M = I + S
//! Paley II         m = 2 q + 2, q ≡ 1 mod 4   Sᵢ₀ = 1    M = S ⊗ [[1, 1], [1, −1]] + I ⊗ [[1, −1], [−1, −1]]
//!
//!                             A   B   C   D                               A   BR    CR    DR
//! Williamson       m = 4 p   −B   A  −D   C     Goethals-Seidel  m = 4 p −BR  A     DᵀR  −CᵀR
//!                            −C   D   A  −B                              −CR −DᵀR   A     BᵀR
//!                            −D  −C   B   A                              −DR  CᵀR  −BᵀR   A
//! ```
//!
//! A, B, C and D are circulants of order p, of which [`TABLES`] holds the first rows; row i is the first
//! shifted right by i. R reverses the columns. Sources: Paley 1933; Williamson 1944; Goethals and Seidel
//! 1970. Only primes serve as q, so prime powers (order 28 from 27, say) are not used.

/// Whether there is a core of this order.
pub(super) fn exists(order: usize) -> bool {
    construction(order).is_some()
}

/// The core of an order, row-major, as ±1; `None` if no construction here gives one.
///
/// [`Size`](super::Size) composes an order of the smallest that fit, so it does not use them all.
pub fn core(order: usize) -> Option<Vec<i8>> {
    Some(match construction(order)? {
        Construction::PaleyI(q) => paley_i(q),
        Construction::PaleyII(q) => paley_ii(q),
        Construction::Table(table) => table.matrix(),
    })
}

enum Construction {
    PaleyI(usize),
    PaleyII(usize),
    Table(&'static Table),
}

fn construction(order: usize) -> Option<Construction> {
    if order == 0 || !order.is_multiple_of(4) {
        return None;
    }
    let (first, second) = (order - 1, order / 2 - 1);
    if is_prime(first) {
        // 4 | order, so q ≡ 3 mod 4.
        Some(Construction::PaleyI(first))
    } else if second % 4 == 1 && is_prime(second) {
        Some(Construction::PaleyII(second))
    } else {
        TABLES.iter().find(|table| table.order == order).map(Construction::Table)
    }
}

fn is_prime(q: usize) -> bool {
    q > 1 && (2..).take_while(|d| d * d <= q).all(|d| !q.is_multiple_of(d))
}

/// The quadratic character of 0 to q − 1 modulo the odd prime q.
fn character(q: usize) -> Vec<i8> {
    let mut chi = vec![-1; q];
    chi[0] = 0;
    for x in 1..q {
        chi[x * x % q] = 1;
    }
    chi
}

/// S: `[q + 1, q + 1]`, with Sᵢ₀ = `first_column`.
fn bordered(q: usize, first_column: i8) -> Vec<i8> {
    let chi = character(q);
    let entry = |i: usize, j: usize| match (i, j) {
        (0, 0) => 0,
        (0, _) => 1,
        (_, 0) => first_column,
        (i, j) => chi[(i + q - j) % q],
    };
    square(q + 1, entry)
}

fn paley_i(q: usize) -> Vec<i8> {
    let s = bordered(q, -1);
    square(q + 1, |i, j| s[i * (q + 1) + j] + i8::from(i == j))
}

fn paley_ii(q: usize) -> Vec<i8> {
    let c = bordered(q, 1);
    let (off, on) = ([[1, 1], [1, -1]], [[1, -1], [-1, -1]]);
    square(2 * (q + 1), |i, j| {
        let (a, b) = (i / 2, j / 2);
        c[a * (q + 1) + b] * off[i % 2][j % 2] + i8::from(a == b) * on[i % 2][j % 2]
    })
}

fn square(order: usize, entry: impl Fn(usize, usize) -> i8) -> Vec<i8> {
    (0..order * order).map(|at| entry(at / order, at % order)).collect()
}

/// Four circulants and how they are put together.
struct Table {
    order: usize,
    array: Array,
    /// First rows of A, B, C and D.
    rows: [&'static str; 4],
}

#[derive(Clone, Copy)]
enum Array {
    Williamson,
    GoethalsSeidel,
}

impl Table {
    fn matrix(&self) -> Vec<i8> {
        let p = self.order / 4;
        let rows =
            self.rows.map(|row| row.bytes().map(|b| if b == b'+' { 1 } else { -1 }).collect::<Vec<i8>>());
        let [a, b, c, d] = [0, 1, 2, 3];
        let circulant = |which: usize, i: usize, j: usize| rows[which][(j + p - i) % p];
        // XR[i][j] = X[i][p − 1 − j].
        let reversed = |which: usize, i: usize, j: usize| circulant(which, i, p - 1 - j);
        let transposed_reversed = |which: usize, i: usize, j: usize| circulant(which, p - 1 - j, i);
        square(self.order, |row, column| {
            let (i, j) = (row % p, column % p);
            match self.array {
                Array::Williamson => {
                    let (sign, which) = [
                        [(1, a), (1, b), (1, c), (1, d)],
                        [(-1, b), (1, a), (-1, d), (1, c)],
                        [(-1, c), (1, d), (1, a), (-1, b)],
                        [(-1, d), (-1, c), (1, b), (1, a)],
                    ][row / p][column / p];
                    sign * circulant(which, i, j)
                }
                Array::GoethalsSeidel => match (row / p, column / p) {
                    (r, s) if r == s => circulant(a, i, j),
                    (0, s) => reversed(s, i, j),
                    (r, 0) => -reversed(r, i, j),
                    (r, s) => {
                        // The one of B, C and D that is in neither this row nor this column of the border.
                        let (sign, which) = match (r, s) {
                            (1, 2) => (1, d),
                            (1, 3) => (-1, c),
                            (2, 1) => (-1, d),
                            (2, 3) => (1, b),
                            (3, 1) => (1, c),
                            _ => (-1, b),
                        };
                        sign * transposed_reversed(which, i, j)
                    }
                },
            }
        })
    }
}

/// Found by a search over sequences that are invariant under a group of multipliers.
const TABLES: [Table; 5] = [
    Table {
        order: 52,
        array: Array::Williamson,
        rows: ["+--++++++++--", "+++-+-++-+-++", "+-++--++--++-", "+-+++----+++-"],
    },
    Table {
        order: 92,
        array: Array::Williamson,
        rows: [
            "+--+-+-++++++++++-+-+--",
            "+--++-+-+-++++-+-+-++--",
            "+++---++--++++--++---++",
            "+--+--+++------+++--+--",
        ],
    },
    Table {
        order: 116,
        array: Array::Williamson,
        rows: [
            "+--+-++---++++++++++---++-+--",
            "+-+-++---+--++++++--+---++-+-",
            "+++-++-++++---++---++++-++-++",
            "+-+-+----++-++--++-++----+-+-",
        ],
    },
    Table {
        order: 156,
        array: Array::GoethalsSeidel,
        rows: [
            "+------++--++-+--+-+++-++-+-++++-++++++",
            "+-----+++--++--+-+++++-++-+-+-++-++-+++",
            "+-----++-----+++-+++-+-++-+-++-+-+++-++",
            "++----+++--++-+++-+-+++-+-+--++--+++++-",
        ],
    },
    Table {
        order: 172,
        array: Array::Williamson,
        rows: [
            "+---++--++++-+-+++-++--++-+++-+-++++--++---",
            "++---++++-+--+--++--------++--+--+-++++---+",
            "+++-+-++--+-+-++++-+----+-++++-+-+--++-+-++",
            "++-++++++----+-+--++-++-++--+-+----++++++-+",
        ],
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_core_up_to_512_is_a_hadamard_matrix_in_integers() {
        let mut found = 0;
        for order in (4..=512).step_by(4).filter(|order| exists(*order)) {
            let m = core(order).unwrap();
            assert!(m.iter().all(|entry| entry.abs() == 1), "order {order}: an entry is not ±1");
            for i in 0..order {
                for j in 0..=i {
                    let rows = m[i * order..][..order].iter().zip(&m[j * order..][..order]);
                    let dot: i32 = rows.map(|(a, b)| i32::from(*a) * i32::from(*b)).sum();
                    let needed = if i == j { order as i32 } else { 0 };
                    assert_eq!(dot, needed, "order {order}: rows {i} and {j}");
                }
            }
            found += 1;
        }
        assert!(found > 33, "{found} orders");
    }

    #[test]
    fn the_smallest_paley_matrices_are_those_worked_by_hand() {
        // q = 3: χ = 0, 1, −1, and row i of the inner part is χ(i), χ(i − 1), χ(i − 2).
        let by_hand = [1, 1, 1, 1, -1, 1, -1, 1, -1, 1, 1, -1, -1, -1, 1, 1];
        assert_eq!(core(4).unwrap(), by_hand);
        // Row 0 of C for q = 5 is 0, 1, 1, 1, 1, 1.
        assert_eq!(paley_ii(5)[..12], [1, -1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn orders_without_a_construction_have_no_core() {
        for order in [0, 1, 2, 3, 6, 10, 14, 100, 188, 1023] {
            assert!(!exists(order) && core(order).is_none(), "{order}");
        }
    }
}
