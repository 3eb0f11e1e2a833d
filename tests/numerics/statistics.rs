//! `goldens/statistics`: answers of scipy, statsmodels and mpmath.

use std::path::Path;

use serde_json::Value;

use tqc::stats::{
    Binomial, Interval, PairedCluster, Pairs, RESAMPLES, clustered_mean, holm, items_to_prove, items_to_see,
    normal_quantile, normal_tail, paired_bootstrap, power, quantile_of_sorted, smallest_difference,
    student_quantile, student_tail, tost_ratio, wilson,
};

/// What `src/stats/distribution.rs` promises of the normal's tails and quantiles; of Student's up to 100 000
/// degrees.
const TAIL: f64 = 1e-9;

/// What it promises of Student's.
fn student(freedom: f64) -> f64 {
    1e-12 + 1e-14 * freedom
}

/// The cases of one function.
fn cases(name: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/statistics/statistics.json");
    let all: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = all[name].as_array().unwrap_or_else(|| panic!("no cases of `{name}`")).clone();
    assert!(!cases.is_empty(), "`{name}` has no case");
    cases
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

fn rows<const N: usize>(list: &Value) -> Vec<[f64; N]> {
    list.as_array().unwrap().iter().map(|row| numbers(row).try_into().unwrap()).collect()
}

/// Panics if `found` is off by more than `relative` of `expected` and `absolute`.
#[track_caller]
fn close(found: f64, expected: f64, relative: f64, absolute: f64, what: &Value) {
    let off = (found - expected).abs();
    let allowed = relative * expected.abs() + absolute;
    assert!(off <= allowed, "found {found}, needed {expected}, off by {off:e} of {allowed:e}: {what}");
}

#[track_caller]
fn close_ends(found: Interval, expected: &Value, absolute: f64, what: &Value) {
    let expected = numbers(expected);
    close(found.low, expected[0], 0.0, absolute, what);
    close(found.high, expected[1], 0.0, absolute, what);
}

#[test]
fn tails_and_quantiles_are_scipys() {
    for case in cases("normal_quantile") {
        let [p, x] = numbers(&case)[..] else { panic!("{case}") };
        close(normal_quantile(p), x, TAIL, 1e-15, &case);
    }
    for case in cases("normal_tail") {
        let [x, p] = numbers(&case)[..] else { panic!("{case}") };
        close(normal_tail(x), p, TAIL, 0.0, &case);
    }
    for case in cases("student_quantile") {
        let [p, freedom, x] = numbers(&case)[..] else { panic!("{case}") };
        close(student_quantile(p, freedom), x, student(freedom), 0.0, &case);
    }
    for case in cases("student_tail") {
        let [x, freedom, p] = numbers(&case)[..] else { panic!("{case}") };
        close(student_tail(x, freedom), p, student(freedom), 0.0, &case);
    }
}

#[test]
fn the_binomial_is_scipys_up_to_a_million() {
    for case in cases("binomial") {
        let [n, k, p, below, above] = numbers(&case)[..] else { panic!("{case}") };
        let binomial = Binomial::new(n as u64, p);
        // A term takes four roundings from its neighbour, and is at most k steps away from the mode.
        let steps = (k - n * p).abs() + 20.0 * n.sqrt();
        let relative = 4.0 * steps * f64::EPSILON + 1e-12;
        close(binomial.at_most(k as u64), below, relative, 0.0, &case);
        close(binomial.at_least(k as u64), above, relative, 0.0, &case);
    }
}

#[test]
fn clustered_means_are_those_of_a_regression_in_statsmodels() {
    for case in cases("clustered_mean") {
        let name = &case["name"];
        let clusters: Vec<(f64, u64)> =
            rows::<2>(&case["clusters"]).iter().map(|&[s, n]| (s, n as u64)).collect();
        let found = clustered_mean(&clusters, 0.95).unwrap();
        let error = found.standard_error.unwrap();
        let n = found.observations as f64;
        // sum - m · count of a cluster loses four roundings of its sum; the mean one for each cluster.
        let squares: f64 = clusters.iter().map(|c| c.0 * c.0).sum();
        let lost = 4.0 * f64::EPSILON * squares.sqrt() / n;
        let [mean, standard_error, p] =
            ["mean", "standard_error", "p_of_zero"].map(|k| case[k].as_f64().unwrap());
        let rounded = n * f64::EPSILON * mean.abs();
        close(found.mean, mean, 0.0, rounded, name);
        close(error, standard_error, 1e-12, 2.0 * lost, name);
        let quantile = student_quantile(0.975, found.clusters as f64 - 1.0);
        let absolute = rounded + quantile * (TAIL * error + 2.0 * lost);
        close_ends(found.interval.unwrap(), &case["interval"], absolute, name);
        // The tail falls like a power of t: clusters times as fast.
        let relative = TAIL + 4.0 * n * lost / standard_error.max(1e-300);
        close(found.p_of_zero().unwrap(), p, relative, 1e-30, name);
    }
}

#[test]
fn one_cluster_has_a_mean_and_no_error_and_none_has_nothing() {
    let one = clustered_mean(&[(3.0, 4), (0.0, 0)], 0.95).unwrap();
    assert_eq!((one.mean, one.clusters, one.standard_error, one.interval), (0.75, 1, None, None));
    assert_eq!(one.p_of_zero(), None);
    assert_eq!(clustered_mean(&[], 0.95), None);
    assert_eq!(clustered_mean(&[(0.0, 0)], 0.95), None);
}

#[test]
fn quantiles_are_numpys() {
    for case in cases("quantile") {
        let mut values = numbers(&case["values"]);
        values.sort_by(f64::total_cmp);
        let largest = values.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        for [q, expected] in rows::<2>(&case["q"]) {
            let found = quantile_of_sorted(&values, q).unwrap();
            close(found, expected, 0.0, 4.0 * f64::EPSILON * largest, &case);
        }
    }
    assert_eq!(quantile_of_sorted::<f32>(&[], 0.5), None);
}

#[test]
fn wilsons_interval_is_that_of_statsmodels() {
    for case in cases("wilson") {
        let [k, n, confidence, low, high] = numbers(&case)[..] else { panic!("{case}") };
        let found = wilson(k as u64, n as u64, confidence);
        // Its width follows z.
        close(found.low, low, 4.0 * f64::EPSILON, TAIL * (high - low), &case);
        close(found.high, high, 4.0 * f64::EPSILON, TAIL * (high - low), &case);
        assert!(k > 0.0 || found.low == 0.0, "{case}");
        assert!(k < n || found.high == 1.0, "{case}");
    }
    assert_eq!(wilson(0, 0, 0.95), Interval { low: 0.0, high: 1.0 });
}

fn pairs(table: &Value) -> Pairs {
    let [both, only_a, only_b, neither] = numbers(table)[..] else { panic!("{table}") };
    Pairs { both: both as u64, only_a: only_a as u64, only_b: only_b as u64, neither: neither as u64 }
}

#[test]
fn paired_tests_and_intervals_are_those_of_statsmodels_and_of_tango() {
    for case in cases("pairs") {
        let (pairs, table) = (pairs(&case["table"]), &case["table"]);
        close(pairs.mcnemar(), case["mcnemar"].as_f64().unwrap(), 1e-11, 0.0, table);
        for (name, confidence) in [("interval_95", 0.95), ("interval_90", 0.9)] {
            let found = pairs.interval(confidence);
            close_ends(found, &case[name], TAIL * (found.high - found.low) + 1e-14, table);
        }
        for [margin, lower, upper] in rows::<3>(&case["tost"]) {
            let found = pairs.tost(margin);
            // A tail at z follows an error of z by z² times; z = 39 is where f64 ends. Beside p = 0:
            // subnormal.
            close(found.p_lower, lower, TAIL, 1e-300, table);
            close(found.p_upper, upper, TAIL, 1e-300, table);
            assert_eq!(found.p, found.p_lower.max(found.p_upper));
        }
    }
}

#[test]
fn a_table_without_items_says_nothing() {
    let none = Pairs::default();
    assert_eq!((none.mcnemar(), none.difference()), (1.0, 0.0));
    let all = none.interval(0.95);
    assert!(all.low < -1.0 + 1e-12 && all.high > 1.0 - 1e-12, "{all:?}");
    assert_eq!(none.tost(0.02).p, 0.5);
}

#[test]
fn equivalence_is_proved_exactly_if_the_ninety_percent_interval_is_inside_the_margin() {
    for case in cases("pairs") {
        let pairs = pairs(&case["table"]);
        let interval = pairs.interval(0.9);
        for margin in [0.005, 0.01, 0.02, 0.05, 0.1, 0.3] {
            let inside = interval.low > -margin && interval.high < margin;
            assert_eq!(pairs.tost(margin).p < 0.05, inside, "{} {margin} {interval:?}", case["table"]);
        }
    }
}

fn paired_clusters(list: &Value) -> Vec<PairedCluster> {
    rows::<3>(list).iter().map(|&[a, b, count]| PairedCluster { a, b, count: count as u64 }).collect()
}

#[test]
fn equivalence_of_a_ratio_is_that_of_two_regressions() {
    for case in cases("tost_ratio") {
        let clusters = paired_clusters(&case["clusters"]);
        let margin = case["margin"].as_f64().unwrap();
        let found = tost_ratio(&clusters, margin).unwrap();
        close(found.p_lower, case["p_lower"].as_f64().unwrap(), TAIL, 1e-30, &case["margin"]);
        close(found.p_upper, case["p_upper"].as_f64().unwrap(), TAIL, 1e-30, &case["margin"]);
        assert_eq!(tost_ratio(&clusters[..1], margin), None);
    }
    // Clusters that agree leave no doubt, whichever way.
    let exact = |b: f64| tost_ratio(&[PairedCluster { a: 1.0, b, count: 8 }; 2], 0.25).unwrap().p;
    assert_eq!((exact(1.0), exact(1.5)), (0.0, 1.0));
}

#[test]
fn holm_is_that_of_statsmodels() {
    for case in cases("holm") {
        for (found, expected) in holm(&numbers(&case[0])).into_iter().zip(numbers(&case[1])) {
            close(found, expected, 2.0 * f64::EPSILON, 0.0, &case);
        }
    }
}

#[test]
fn the_bootstrap_is_scipys_up_to_its_own_noise() {
    for case in cases("bootstrap") {
        let clusters = paired_clusters(&case["clusters"]);
        let found = paired_bootstrap(&clusters, 0.95, RESAMPLES, 1).unwrap();
        let spread = case["spread"].as_f64().unwrap();
        // Five standard errors of a quantile, √(q (1 − q) / R) / density, here and in scipy's 200 000.
        let resamples = f64::from(RESAMPLES);
        let quantile = (0.025f64 * 0.975 / resamples + 0.025 * 0.975 / 2e5).sqrt() / (0.058 / spread);
        let what = &case["interval"];
        close_ends(found.interval, what, 5.0 * quantile, what);
        let shares = ["share_not_above", "share_not_below"].map(|k| case[k].as_f64().unwrap());
        let share = shares[0].min(shares[1]);
        let noise = 5.0 * (share * (1.0 - share) * (1.0 / resamples + 1.0 / 2e5)).sqrt() + 2.0 / resamples;
        close(found.p / 2.0, share, 0.0, noise, what);
        assert_eq!(paired_bootstrap(&clusters, 0.95, RESAMPLES, 1), Some(found));
        assert_eq!(paired_bootstrap(&clusters[..1], 0.95, RESAMPLES, 1), None);
    }
}

#[test]
fn power_is_that_of_a_plain_sum_and_close_to_it_where_approximated() {
    for case in cases("power") {
        let [n, discordance, difference, expected] = numbers(&case)[..] else { panic!("{case}") };
        // Beyond 300 discordant items the normal approximation: half a percent of power.
        let allowed = if n * discordance > 300.0 { 5e-3 } else { 1e-11 };
        close(power(n as u64, discordance, difference), expected, 0.0, allowed, &case);
    }
    for case in cases("smallest") {
        let [n, discordance, expected] = numbers(&case)[..] else { panic!("{case}") };
        let found = smallest_difference(n as u64, discordance).unwrap();
        close(found, expected, 0.0, 1e-10, &case);
        // As many items see it, and hardly fewer: exact power is a saw-tooth in n.
        let items = items_to_see(found * (1.0 + 1e-9), discordance).unwrap() as f64;
        assert!(items <= n && items >= 0.97 * n, "{items}: {case}");
    }
    assert_eq!(smallest_difference(5, 0.0), None);
    assert_eq!((items_to_see(0.0, 0.1), items_to_prove(0.0, 0.1)), (None, None));
}

#[test]
fn the_items_that_prove_equality_are_as_many_as_the_test_needs() {
    // Without any disagreement z² (1 − m) / m items pass: 132.6 at two points.
    assert_eq!(items_to_prove(0.02, 0.0), Some(133));
    let agreed = |n| Pairs { both: n, ..Pairs::default() };
    assert!(agreed(133).tost(0.02).p <= 0.05 && agreed(132).tost(0.02).p > 0.05);
    // With ten percent the textbook's n = (z + z)² ψ / m², and a little for the restricted variance.
    let textbook = (1.6449f64 + 1.2816).powi(2) * 0.1 / 0.02f64.powi(2);
    let found = items_to_prove(0.02, 0.1).unwrap() as f64;
    assert!(found > textbook && found < 1.02 * textbook, "{found} {textbook}");
}
