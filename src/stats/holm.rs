//! Many tests at once.

/// Adjusted p values, in the order given: with all of them at most α rejected, the chance of any false
/// rejection is at most α.
///
/// Of m values the i-th smallest (from 0) becomes max over j <= i of min(1, (m − j) p₍j₎). Source: Holm 1979.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let mut adjusted = vec![0.0; p.len()];
    let mut largest = 0.0f64;
    for (i, &at) in order.iter().enumerate() {
        largest = largest.max((p[at] * (p.len() - i) as f64).min(1.0));
        adjusted[at] = largest;
    }
    adjusted
}
