"""Means with t-intervals over seeds, and differences paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import t as student

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its two-sided 95% t-interval, in the unit of the values.

    Attributes:
        n: how many finite values there were.
        lost: how many values were NaN or infinite; they are counted here and in nothing else.
        mean, minimum, maximum: NaN when n is 0.
        low, high: the interval; NaN when n < 2, since one value says nothing about its spread.
    """

    n: int
    lost: int
    mean: float
    low: float
    high: float
    minimum: float
    maximum: float

    @property
    def has_interval(self) -> bool:
        return self.n >= 2

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval exists and lies on one side of zero."""
        return self.has_interval and (self.low > 0 or self.high < 0)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean ± t(0.975, n-1) · s / √n with the sample standard deviation s (Student, 1908)."""
    finite = [float(v) for v in values if math.isfinite(v)]
    n, lost = len(finite), len(values) - len(finite)
    if n == 0:
        return Estimate(0, lost, *[math.nan] * 5)
    mean = statistics.fmean(finite)
    half = math.nan
    if n >= 2:
        half = float(student.ppf((1 + LEVEL) / 2, n - 1)) * statistics.stdev(finite) / math.sqrt(n)
    return Estimate(n, lost, mean, mean - half, mean + half, min(finite), max(finite))


def paired(ours: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate:
    """The estimate of ours[seed] - baseline[seed] over the seeds that both have.

    Pairing removes what a seed does to both (initial weights, order of data), so the interval is usually
    narrower than that of two independent means.
    """
    return estimate([ours[seed] - baseline[seed] for seed in sorted(ours.keys() & baseline.keys())])


def verdict(difference: Estimate, higher_is_better: bool, baseline: str) -> str:
    """What a paired difference shows, in words."""
    if difference.n == 0:
        return f"no seed in common with {baseline}"
    if not difference.has_interval:
        return "one seed in common: no interval"
    if not difference.excludes_zero:
        if difference.low == difference.high == 0:
            return f"equal to {baseline} on every seed"
        return "not told apart: the interval contains zero"
    better = (difference.mean > 0) == higher_is_better
    return f"{'better' if better else 'worse'} than {baseline}: the interval excludes zero"
