"""Hypothesis on top of the grid: specifications, sizes, strides, masks, wanted gradients and transforms."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devtools import versions

from .cases import BY_NAME, judge
from .draws import MadeOf, example, run, text
from .transforms import TRANSFORMS

TRANSFORMED = ("func.vmap", "func.grad", "func.jvp", "second derivative", "jit.trace", "make_fx")
"""Transforms that take no seconds."""
SHARE = settings.default.max_examples // len(TRANSFORMED)


def settle(one):
    """Raise if an example is neither right nor refused by name."""
    try:
        if one.transform == "eager":
            run(one)
        else:
            TRANSFORMS[one.transform](MadeOf(one))
    except AssertionError as error:
        raise AssertionError(f"{text(one)}: {error}") from error
    except Exception as error:
        if versions.lacks(error) is None:
            judge(BY_NAME["quest"], one.transform, error, one.spec)


@given(st.data())
def test_any_combination_is_right_or_refused(data):
    settle(example(functools.partial(draw, data)))


@pytest.mark.parametrize("transform", TRANSFORMED)
@settings(max_examples=SHARE)
@given(st.data())
def test_any_combination_transformed_is_right_or_refused(transform, data):
    settle(example(functools.partial(draw, data), transform))


def draw(data, options):
    return data.draw(st.sampled_from(options))
