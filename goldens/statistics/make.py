"""Tables, tests and intervals computed with scipy, statsmodels, numpy and mpmath.

statistics.json: for each function a list of cases, arguments and answers. `python make.py --check` compares
with what is stored. Where a package has the function, it is asked; where none has, the answer comes by another
road than the program's: Tango's interval as the roots of the quartic equation of Yang, Sun and Hardin 2013 (mpmath)
and its z from a likelihood maximised numerically, the exact power as a plain double sum over scipy's binomial.
"""

import json
import pathlib
import sys

import mpmath as mp
import numpy as np
import statsmodels.api as sm
from scipy import optimize, stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

HERE = pathlib.Path(__file__).parent
mp.mp.dps = 50


def distributions():
    freedoms = [1, 2, 3, 10, 49, 199, 10_000, 1_000_000]
    half = [(0, 0), (1, 0), (1, 1), (2, 0), (5, 1), (10, 3), (40, 12), (100, 50), (1000, 300), (1000, 450),
            (100_000, 49_700), (1_000_000, 498_500), (1_000_000, 499_999)]
    return {
        "normal_quantile": [[p, stats.norm.ppf(p)] for p in [1e-10, 0.025, 0.5, 0.6, 0.8, 0.9, 0.95, 0.975, 0.9995]],
        "normal_tail": [[x, stats.norm.sf(x)] for x in [-8.0, -3.0, -1.0, 0.0, 0.1, 0.5, 1.0, 1.96, 3.0, 5.0, 10.0, 30.0]],
        "student_quantile": [[p, f, stats.t.ppf(p, f)] for f in freedoms for p in [0.01, 0.025, 0.6, 0.95, 0.975, 0.9995]],
        "student_tail": [[x, f, stats.t.sf(x, f)] for f in freedoms for x in [-2.0, 0.0, 0.1, 1.0, 2.0, 5.0, 40.0]
                         if stats.t.sf(x, f) > 1e-300],
        # P(X <= k), P(X >= k)
        "binomial": [[n, k, 0.5, stats.binom.cdf(k, n, 0.5), stats.binom.sf(k - 1, n, 0.5)] for n, k in half]
        + [[n, k, p, stats.binom.cdf(k, n, p), stats.binom.sf(k - 1, n, p)] for n, k, p in
           [(100, 6, 0.08), (1000, 120, 0.1), (30, 25, 0.7), (2000, 1100, 0.53), (100, 0, 0.0), (100, 1, 0.0),
            (100, 100, 1.0), (100, 3, 1.0), (100_000, 10_100, 0.1), (20, 0, 1e-9)]],
    }


def means():
    rng = np.random.default_rng(1)
    made = lambda g, low, high: [rng.exponential(0.05, rng.integers(low, high)).tolist() for _ in range(g)]
    cases = {
        "two clusters": made(2, 3, 6),
        "thirty clusters of unequal size": made(30, 1, 60),
        "clusters of one": made(12, 1, 2),
        "equal means": [[0.25, 0.75], [0.5], [0.125, 0.875]],
        "far from zero": [[1e6 + x for x in c] for c in made(20, 5, 9)],
        "three hundred clusters": made(300, 20, 21),
    }
    out = []
    for name, clusters in cases.items():
        y = np.concatenate(clusters)
        group = np.repeat(np.arange(len(clusters)), [len(c) for c in clusters])
        fit = sm.OLS(y, np.ones_like(y)).fit(cov_type="cluster", cov_kwds={"groups": group}, use_t=True)
        low, high = fit.conf_int(0.05)[0]
        out.append({"name": name, "clusters": [[float(np.sum(c)), len(c)] for c in clusters], "mean": fit.params[0],
                    "standard_error": fit.bse[0], "interval": [low, high], "p_of_zero": fit.pvalues[0]})
    return out


def quantiles():
    rng = np.random.default_rng(2)
    cases = [[3.5], [1.0, 2.0], [2.0] * 7, [5.0, 1.0, 3.0, 3.0, 2.0], np.round(rng.exponential(1, 997), 2).tolist(),
             rng.normal(0, 1, 10).tolist()]
    return [{"values": v, "q": [[q, float(np.quantile(v, q))] for q in [0, 0.5, 0.9, 0.99, 0.999, 1]]} for v in cases]


def likelihood_z(b, c, n, d):
    """z of Tango's score test; b only in B, c only in A. The restricted maximum is searched, not solved for."""
    if d < 0:
        return -likelihood_z(c, b, n, -d)
    if b - c == n * mp.mpf(d):
        return 0.0
    rest = n - b - c
    slope = lambda q: b / (q + d) + c / q - 2 * rest / (1 - 2 * q - d)
    low, high = mp.mpf(10) ** -40, (1 - mp.mpf(d)) / 2 - mp.mpf(10) ** -40
    if c == 0 and (d == 0 and b == 0 or d > 0 and b / mp.mpf(d) <= 2 * rest / (1 - mp.mpf(d))):
        q = mp.mpf(0)
    elif rest == 0:
        q = (1 - mp.mpf(d)) / 2
    else:
        q = mp.findroot(slope, (low, high), solver="anderson", tol=1e-60, maxsteps=2000, verify=False)
    variance = 2 * q + d - mp.mpf(d) ** 2
    return float((b - c - n * mp.mpf(d)) / mp.sqrt(n * variance))


def tango(b, c, n, confidence):
    """Roots of the quartic of Yang, Sun and Hardin, Statistics in Medicine 32 (2013)."""
    g = mp.mpf(stats.norm.ppf(0.5 + confidence / 2)) ** 2
    N, D, S = mp.mpf(n), mp.mpf(b - c), mp.mpf(b + c)
    m = [N**2 * (N / g + 1) ** 2, -N * D * (N / g + 1) * (4 * N / g + 1),
         2 * N * D**2 * (3 * N / g + 2) / g - N**2 * (S / g + 1), N * D * (2 * S / g + 1) - D**3 * (4 * N / g + 1) / g,
         D**2 * (D**2 / g - S) / g]
    roots = mp.polyroots(m, maxsteps=2000, extraprec=2000)
    real = sorted({float(r.real) for r in map(mp.mpmathify, roots) if abs(mp.im(r)) < 1e-12})
    # Squaring adds roots that the test itself does not have.
    z = float(mp.sqrt(g))
    true = [r for r in real if -1 < r < 1 and abs(abs(likelihood_z(b, c, n, r)) - z) < 1e-6]
    low = min(true) if c < n and true else -1.0
    high = max(true) if b < n and true else 1.0
    return [low, high]


def paired():
    # both, only A, only B, neither
    tables = [[43, 1, 0, 0], [1, 7, 1, 12], [50, 20, 40, 50], [59, 16, 6, 80],
              [565, 28, 25, 0], [0, 0, 0, 1], [1, 0, 0, 0], [100, 0, 0, 0],
              [0, 0, 0, 133], [0, 1, 0, 0], [0, 3, 5, 0], [90, 0, 6, 4], [700, 55, 45, 200], [5000, 500, 500, 8000],
              [800_000, 49_500, 50_500, 100_000], [10, 30, 2, 8]]
    out = []
    for both, only_a, only_b, neither in tables:
        n = both + only_a + only_b + neither
        test = mcnemar([[both, only_a], [only_b, neither]], exact=True)
        case = {"table": [both, only_a, only_b, neither], "mcnemar": float(test.pvalue),
                "interval_95": tango(only_b, only_a, n, 0.95), "interval_90": tango(only_b, only_a, n, 0.9),
                "tost": [[m, float(stats.norm.sf(likelihood_z(only_b, only_a, n, -m))),
                          float(stats.norm.cdf(likelihood_z(only_b, only_a, n, m)))] for m in [0.01, 0.02, 0.1]]}
        out.append(case)
    return out


def wilson():
    cases = [(0, 1), (1, 1), (0, 10), (10, 10), (5, 10), (1, 100), (99, 100), (512, 1000), (0, 10**6), (123_456, 10**6),
             (10**9 - 1, 10**9)]
    return [[k, n, c, *map(float, proportion_confint(k, n, 1 - c, method="wilson"))] for k, n in cases for c in [0.9, 0.95]]


def ratios():
    """The two one-sided tests on b - (1 -+ margin) a, each a regression on a constant with clustered errors."""
    rng = np.random.default_rng(4)
    out = []
    for g, factor, margin in [(2, 1.0, 0.1), (40, 1.01, 0.05), (40, 1.1, 0.05), (250, 0.99, 0.02)]:
        counts = rng.integers(5, 40, g)
        a = [rng.exponential(0.05, k) for k in counts]
        b = [x * factor * rng.lognormal(0, 0.1, len(x)) for x in a]
        group = np.repeat(np.arange(g), counts)

        def p(sign, by):
            y = sign * (np.concatenate(b) - by * np.concatenate(a))
            fit = sm.OLS(y, np.ones_like(y)).fit(cov_type="cluster", cov_kwds={"groups": group}, use_t=True)
            return float(stats.t.sf(fit.tvalues[0], g - 1))

        out.append({"clusters": [[float(x.sum()), float(y.sum()), len(x)] for x, y in zip(a, b)], "margin": margin,
                    "p_lower": p(1, 1 - margin), "p_upper": p(-1, 1 + margin)})
    return out


def holms():
    cases = [[], [0.03], [0.01, 0.04, 0.03, 0.005], [0.02, 0.02, 0.02], [1.0, 0.9, 0.5], [0.0, 0.5, 0.5, 1e-12], [0.2, 0.04, 0.04]]
    return [[p, multipletests(p, method="holm")[1].tolist() if p else []] for p in cases]


def bootstraps():
    """scipy's percentile interval of the ratio of sums over documents, 200 000 resamples, and its p."""
    rng = np.random.default_rng(5)
    out = []
    for g, shift in [(20, 0.0), (60, 0.004), (300, -0.002)]:
        counts = rng.integers(20, 200, g)
        a = rng.exponential(0.05, g) * counts
        b = a + (shift + rng.normal(0, 0.01, g)) * counts
        ratio = lambda d, n, axis=-1: d.sum(axis) / n.sum(axis)
        answer = stats.bootstrap((b - a, counts), ratio, paired=True, n_resamples=200_000, method="percentile", batch=1000,
                                 vectorized=True, rng=np.random.default_rng(6))
        d = answer.bootstrap_distribution
        out.append({"clusters": [[float(x), float(y), int(k)] for x, y, k in zip(a, b, counts)], "spread": float(d.std()),
                    "interval": [float(answer.confidence_interval.low), float(answer.confidence_interval.high)],
                    "share_not_above": float((d <= 0).mean()), "share_not_below": float((d >= 0).mean())})
    return out


def critical(d):
    k = np.arange(d + 1)
    significant = 2 * stats.binom.sf(k - 1, d, 0.5) <= 0.05
    return int(np.argmax(significant)) if significant.any() else None


def exact_power(n, discordance, difference):
    total = 0.0
    for d in range(n + 1):
        if (k := critical(d)) is not None:
            p = min(0.5 + difference / discordance / 2, 1.0)
            total += stats.binom.pmf(d, n, discordance) * (stats.binom.sf(k - 1, d, p) + stats.binom.cdf(d - k, d, p))
    return float(total)


def powers():
    cases = [(5, 1.0, 1.0), (6, 1.0, 1.0), (20, 0.5, 0.4), (100, 0.08, 0.08), (100, 0.2, 0.1), (100, 0.2, 0.0), (500, 0.1, 0.05),
             (1000, 0.29, 0.05), (1000, 0.35, 0.05), (1500, 0.4, 0.03)]
    smallest = []
    for n, discordance in [(6, 0.0), (20, 0.0), (100, 0.0), (100, 0.2), (400, 0.1)]:
        f = lambda d: exact_power(n, max(discordance, d), d) - 0.8
        smallest.append([n, discordance, float(optimize.brentq(f, 1e-6, 1, xtol=1e-13))])
    return {"power": [[*c, exact_power(*c)] for c in cases], "smallest": smallest}


def main():
    made = {**distributions(), "clustered_mean": means(), "quantile": quantiles(), "wilson": wilson(), "pairs": paired(),
            "tost_ratio": ratios(), "holm": holms(), "bootstrap": bootstraps(), **powers()}
    made = json.loads(json.dumps(made))
    path = HERE / "statistics.json"
    if "--check" in sys.argv:
        sys.exit(0 if json.loads(path.read_text()) == made else "statistics.json is not what this script makes")
    rows = [f"  {json.dumps(k)}: [\n    " + ",\n    ".join(json.dumps(c) for c in v) + "\n  ]" for k, v in made.items()]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")


main()
