"""Means with t-intervals over seeds, and comparisons paired by seed.

A seed maps to a number. A seed that failed or diverged maps to NaN, and is a loss for its attention. A seed that has
not finished is absent.
"""

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats
from scipy.optimize import brentq

LEVEL = 0.95
POWER = 0.8
ROUNDING = 1e-9
"""Differences that lie closer than this share of the values are equal: accuracies of 30 samples differ by 100/30."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its two-sided 95% t-interval, in the unit of the values."""

    n: int  # finite values; without any, all others are NaN
    mean: float
    low: float  # the ends of the interval are NaN when n < 2, because one value has no spread
    high: float
    minimum: float
    maximum: float

    @property
    def has_interval(self) -> bool:
        return self.n >= 2


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean ± t(0.975, n-1) · s / √n with the sample standard deviation s (Student, 1908)."""
    finite = [float(v) for v in values if math.isfinite(v)]
    n = len(finite)
    if n == 0:
        return Estimate(0, *[math.nan] * 5)
    mean = statistics.fmean(finite)
    half = math.nan
    if n >= 2:
        half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * statistics.stdev(finite) / math.sqrt(n)
    return Estimate(n, mean, mean - half, mean + half, min(finite), max(finite))


@dataclass(frozen=True)
class Comparison:
    """One attention against the baseline, paired by seed."""

    difference: Estimate  # ours - baseline over the seeds that are finite for both
    wins: int  # seeds on which ours is better; a failed seed loses against one that did not fail
    losses: int
    ties: int
    failed: int  # seeds that are not finite, among those that both have
    baseline_failed: int
    test: str  # "paired t"; "sign" if a seed failed or the differences have no spread; "" if nothing can be tested
    p: float  # two-sided; NaN without a test
    better: bool | None  # whether the seeds speak for ours, given the direction of the metric; None for neither
    adjusted: float = math.nan  # p after Holm's correction; set by :func:`correct`
    detectable: float = math.nan
    """The smallest mean difference that a paired t-test finds with a power of 80%, given spread and correction."""

    @property
    def seeds(self) -> int:
        """How many seeds both have, failed ones included."""
        return self.wins + self.losses + self.ties

    @property
    def significant(self) -> bool:
        return self.adjusted < 1 - LEVEL

    @property
    def mark(self) -> str:
        """ "▲" for better and "▼" for worse than the baseline after correction, else ""."""
        return "" if not self.significant or self.better is None else "▲" if self.better else "▼"


def compare(ours: Mapping[int, float], baseline: Mapping[int, float], higher_is_better: bool) -> Comparison:
    """Compare two attentions over the seeds that both have.

    Pairing removes the part of the noise that a seed adds to both (initial weights, order of data). Where all seeds are
    finite, the test is the paired t-test. Where a seed failed, a mean over the survivors says nothing about the
    attention, so the test is the exact sign test, in which a failed seed is a loss.
    """
    seeds = sorted(ours.keys() & baseline.keys())
    pairs = [(float(ours[seed]), float(baseline[seed])) for seed in seeds]
    failed = sum(not math.isfinite(a) for a, _ in pairs)
    baseline_failed = sum(not math.isfinite(b) for _, b in pairs)
    sign = 1 if higher_is_better else -1
    apart = [(_worth(a, sign), _worth(b, sign)) for a, b in pairs if not math.isclose(a, b, rel_tol=ROUNDING)]
    wins, losses = sum(a > b for a, b in apart), sum(a < b for a, b in apart)
    ties = len(pairs) - wins - losses
    differences = [a - b for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    difference = estimate(differences)
    rounding = ROUNDING * max((abs(value) for pair in pairs for value in pair if math.isfinite(value)), default=0.0)
    test, p, gain = "", math.nan, 0.0
    if failed or baseline_failed or (len(differences) > 1 and np.ptp(differences) <= rounding):
        test, gain = "sign", float(wins - losses)
        p = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    elif len(differences) > 1:
        test, gain = "paired t", sign * difference.mean
        p = float(stats.ttest_1samp(differences, 0.0).pvalue)
    better = None if gain == 0 else gain > 0
    return Comparison(difference, wins, losses, ties, failed, baseline_failed, test, p, better)


def _worth(value: float, sign: int) -> float:
    return sign * value if math.isfinite(value) else -math.inf


def correct(family: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with `adjusted` and `detectable` set, by Holm's method over all that have a p.

    Holm's method bounds the probability of one or more false marks in the whole family, under any dependence of the
    comparisons. The detectable difference uses Bonferroni's level, the strictest step of Holm's.
    """
    tested = [one for one in family if one.test]
    p = np.array([one.p for one in tested])
    order = np.argsort(p)
    holm = np.empty(len(p))
    holm[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    adjusted = iter(holm)
    return [
        replace(one, adjusted=float(next(adjusted)), detectable=_detectable(one, len(tested))) if one.test else one
        for one in family
    ]


def _detectable(one: Comparison, family: int) -> float:
    if one.test != "paired t":
        return math.nan
    found = one.difference
    spread = (found.high - found.mean) / float(stats.t.ppf((1 + LEVEL) / 2, found.n - 1)) * math.sqrt(found.n)
    return _effect(found.n, family) * spread


@functools.cache
def _effect(n: int, family: int) -> float:
    """Return the mean in standard deviations that a paired t-test at level 5%/family finds with a power of 80%."""
    critical = stats.t.isf((1 - LEVEL) / family / 2, n - 1)
    # scipy's noncentral t gives NaN in the tails, so average over the distribution of the standard deviation
    deviation = np.sqrt(stats.chi2.ppf((np.arange(2000) + 0.5) / 2000, n - 1) / (n - 1))

    def short(effect: float) -> float:
        shift = effect * math.sqrt(n)
        found = stats.norm.cdf(shift - critical * deviation) + stats.norm.cdf(-shift - critical * deviation)
        return POWER - float(found.mean())

    high = 1.0
    while short(high) > 0:
        high *= 2
    return float(brentq(short, 0.0, high))


def verdict(found: Comparison, baseline: str) -> str:
    """Return what a comparison shows, in words."""
    if not found.seeds:
        return f"no seed in common with {baseline}"
    if not found.test:
        return "one seed in common: no test"
    counts = f"{found.wins} won, {found.losses} lost" + (f", {found.ties} tied" if found.ties else "")
    lost = [f"{found.failed} of {found.seeds} seeds failed"] if found.failed else []
    lost += [f"{baseline} failed on {found.baseline_failed}"] if found.baseline_failed else []
    reason = f"p = {write_p(found.adjusted)}" + (f", sign test: {counts}" if found.test == "sign" else "")
    if found.test == "sign" and not found.wins + found.losses:
        head = f"equal to {baseline} on every seed" if not lost else f"no seed differs from {baseline}"
        return "; ".join([head, *lost])
    if not found.mark:
        return "; ".join([f"no significant difference from {baseline} ({reason})", *lost])
    return "; ".join([f"{'better' if found.better else 'worse'} than {baseline} ({reason})", *lost])


def write_p(value: float) -> str:
    """A p-value as text; one below 0.001 as a bound that also reads after "p = "."""
    return "–" if math.isnan(value) else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"
