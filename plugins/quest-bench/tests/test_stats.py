"""Means, intervals and comparisons against scipy, values by hand, and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from quest_bench.stats import compare, correct, estimate, verdict

NAN = math.nan


def test_interval_equals_scipy():
    values = [61.2, 58.9, 63.0, 60.4, 57.7]
    found = estimate(values)
    low, high = stats.t.interval(0.95, len(values) - 1, loc=sum(values) / 5, scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert (found.n, found.mean, found.minimum, found.maximum) == (5, pytest.approx(60.24), 57.7, 63.0)


def test_one_finite_value_has_no_interval():
    found = estimate([4.0, NAN, math.inf])
    assert (found.n, found.mean, found.has_interval) == (1, 4.0, False)
    assert math.isnan(found.low)
    assert estimate([NAN]).n == 0


def test_paired_difference_equals_scipys_paired_test():
    ours, base = {0: 5.0, 1: 7.0, 2: 6.5, 9: 100.0}, {0: 4.0, 1: 5.5, 2: 5.8, 3: -50.0}
    found = compare(ours, base, True)
    reference = stats.ttest_rel([5.0, 7.0, 6.5], [4.0, 5.5, 5.8])
    interval = reference.confidence_interval(0.95)
    assert (found.seeds, found.wins, found.test) == (3, 3, "paired t")
    assert (found.difference.low, found.difference.high) == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(reference.pvalue)


@pytest.mark.parametrize(
    ("ours", "higher", "words"),
    [
        ([2.0, 2.1, 1.9], True, "better than standard (p = 8.3e-04)"),
        ([2.0, 2.1, 1.9], False, "worse than standard (p = 8.3e-04)"),
        ([-2.0, -2.1, -1.9], False, "better than standard (p = 8.3e-04)"),
        ([-1.0, 1.0, 0.5], True, "no significant difference from standard (p = 0.808)"),
        ([0.0, 0.0], True, "equal to standard on every seed"),
        ([0.1, 0.1], True, "no significant difference from standard (p = 0.500, sign test: 2 won, 0 lost)"),
        ([1.0], True, "one seed in common: no test"),
        ([], True, "no seed in common with standard"),
    ],
)
def test_verdict(ours, higher, words):
    (found,) = correct([compare(dict(enumerate(ours)), dict.fromkeys(range(9), 0.0), higher)])
    assert verdict(found, "standard") == words


def test_differences_that_are_equal_but_for_rounding_have_no_spread():
    """28, 27 and 29 of 30 against one less: a t-test would find p = 1e-30."""
    ours, base = ({seed: 100 * (right - less) / 30 for seed, right in enumerate((28, 27, 29))} for less in (0, 1))
    assert len({ours[seed] - base[seed] for seed in ours}) > 1
    found = compare(ours, base, True)
    assert (found.test, found.p) == ("sign", 0.25)


def test_seeds_that_are_equal_but_for_rounding_are_neither_won_nor_lost():
    ours, base = ({seed: value} | {9: 50.0} for seed, value in ((0, 0.1 * 3), (0, 0.3)))
    found = compare(ours | {1: 41.0}, base | {1: 40.0}, True)
    assert (found.wins, found.losses, found.ties) == (1, 0, 2)
    found = compare({0: 1.0, 1: 2.0, 2: math.inf}, {0: 2.0, 1: 3.0, 2: 1e12}, False)  # one far value hides no win
    assert (found.wins, found.losses, found.ties) == (2, 1, 0)
    (found,) = correct([compare(dict.fromkeys(range(8), 0.1 * 3), dict.fromkeys(range(8), 0.3), True)])
    assert (found.p, found.mark) == (1, "")
    assert verdict(found, "standard") == "equal to standard on every seed"


def test_a_failed_seed_is_a_loss():
    """Eight seeds of which five crashed: the three survivors are better, the attention is not."""
    base = {seed: 50.0 + seed / 10 for seed in range(8)}
    ours = {seed: 60.0 + seed / 7 if seed < 3 else NAN for seed in range(8)}
    (found,) = correct([compare(ours, base, True)])
    assert (found.wins, found.losses, found.failed, found.test) == (3, 5, 5, "sign")
    assert found.difference.low > 0
    assert found.mark == ""
    said = "no significant difference from standard (p = 0.727, sign test: 3 won, 5 lost)"
    assert verdict(found, "standard").startswith(said)
    (found,) = correct([compare(dict.fromkeys(range(8), NAN), base, False)])
    assert (found.mark, verdict(found, "standard").split(" (")[0]) == ("▼", "worse than standard")
    (found,) = correct([compare(base, dict.fromkeys(range(8), NAN), False)])
    assert found.mark == "▲"
    (found,) = correct([compare({0: NAN, 1: NAN}, {0: NAN, 1: NAN}, True)])
    assert verdict(found, "standard") == ("no seed differs from standard; 2 of 2 seeds failed; standard failed on 2")


def test_holm_by_hand():
    """The sorted p-values times 3, 2 and 1."""
    cases = [[1.0, 1.2, 0.7, 1.1], [0.2, 0.5, -0.1, 0.3], [-1.0, 1.1, 0.4, -0.6]]
    found = correct([compare(dict(enumerate(case)), dict.fromkeys(range(4), 0.0), True) for case in cases])
    first, second, third = sorted(one.p for one in found)
    adjusted = [3 * first, max(3 * first, 2 * second), max(3 * first, 2 * second, third)]
    assert sorted(one.adjusted for one in found) == pytest.approx(adjusted)


def test_the_detectable_difference_is_found_with_a_power_of_80_percent():
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, 6)
    values = (values - values.mean()) / values.std(ddof=1)
    one, _ = correct([compare(dict(enumerate(values)), dict.fromkeys(range(6), 0.0), True)] * 2)
    draws = rng.normal(one.detectable, 1, (4000, 6))
    assert np.mean(stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.025) == pytest.approx(0.8, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0.0, 0.15])
def test_reports_of_equal_attentions_find_a_difference_in_at_most_5_percent(failing):
    """1,000 reports of two tasks, four attentions that are all alike, and eight seeds, of which some may fail."""
    rng = np.random.default_rng(20)
    marked = 0
    for _ in range(1000):
        scores = rng.normal(0, 1, (2, 4, 8)) + rng.normal(0, 1, (2, 1, 8))  # a seed moves all attentions
        scores[rng.random(scores.shape) < failing] = NAN
        tasks = [[dict(enumerate(values)) for values in task] for task in scores.tolist()]
        found = correct([compare(ours, base, True) for base, *others in tasks for ours in others])
        marked += any(one.mark for one in found)
    assert marked <= 50
