"""Means, intervals and paired differences against scipy and values worked out by hand."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from quest_bench.stats import estimate, paired, verdict


def test_interval_equals_scipy() -> None:
    values = [61.2, 58.9, 63.0, 60.4, 57.7]
    found = estimate(values)
    low, high = stats.t.interval(0.95, len(values) - 1, loc=sum(values) / 5, scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert (found.n, found.mean, found.minimum, found.maximum) == (5, pytest.approx(60.24), 57.7, 63.0)


def test_interval_by_hand() -> None:
    # s = 1, t(0.975, 2) = 4.302653, so half = 4.302653 / sqrt(3)
    found = estimate([1.0, 2.0, 3.0])
    assert found.high - found.mean == pytest.approx(2.484138, abs=1e-6)


def test_one_value_has_no_interval() -> None:
    found = estimate([4.0])
    assert found.mean == 4.0
    assert not found.has_interval
    assert not found.excludes_zero
    assert math.isnan(found.low)


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    found = estimate([1.0, math.nan, 3.0, math.inf])
    assert (found.n, found.lost, found.mean) == (2, 2, 2.0)
    assert estimate([math.nan]).n == 0


def test_paired_difference_equals_scipys_paired_test() -> None:
    ours, base = {0: 5.0, 1: 7.0, 2: 6.5, 9: 100.0}, {0: 4.0, 1: 5.5, 2: 5.8, 3: -50.0}
    found = paired(ours, base)
    reference = stats.ttest_rel([5.0, 7.0, 6.5], [4.0, 5.5, 5.8])
    interval = reference.confidence_interval(0.95)
    assert found.n == 3
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.excludes_zero == (reference.pvalue < 0.05)


@pytest.mark.parametrize(
    ("ours", "higher", "words"),
    [
        ([2.0, 2.1, 1.9], True, "better than standard: the interval excludes zero"),
        ([2.0, 2.1, 1.9], False, "worse than standard: the interval excludes zero"),
        ([-2.0, -2.1, -1.9], False, "better than standard: the interval excludes zero"),
        ([-1.0, 1.0, 0.5], True, "not told apart: the interval contains zero"),
        ([0.0, 0.0], True, "equal to standard on every seed"),
        ([1.0], True, "one seed in common: no interval"),
        ([], True, "no seed in common with standard"),
    ],
)
def test_verdict(ours: list[float], higher: bool, words: str) -> None:
    difference = paired(dict(enumerate(ours)), dict.fromkeys(range(9), 0.0))
    assert verdict(difference, higher, "standard") == words
