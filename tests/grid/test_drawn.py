"""Hypothesis on top of the grid: specifications, sizes, strides, masks and wanted gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from devtools import versions

from .draws import Example, example, run, text
from .search import settle


class Drawn:
    """Choices by hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def choose(self, options: Sequence[Any]) -> Any:
        return self.data.draw(st.sampled_from(options))


@given(st.data())
def test_any_combination(data: st.DataObject) -> None:
    one = example(Drawn(data))
    try:
        run(one)
    except AssertionError as error:
        raise AssertionError(f"{text(one)}: {error}") from error
    except Exception as error:
        if versions.lacks(error) is None:
            raise


CHEAP = ["func.vmap", "func.grad", "func.jvp", "second derivative", "jit.trace", "make_fx"]


@given(st.data())
def test_any_combination_transformed(data: st.DataObject) -> None:
    one = example(Drawn(data), CHEAP)
    found = settle(one)
    assert found is None, f"{text(one)}: {found}"


def test_a_wrong_example_is_made_simpler() -> None:
    from .draws import simpler

    one = Example("quest", heads=8, groups=8, n=13, m=31, is_causal=True, mask="bias", mask_shape=(False, False))
    assert simpler(one, lambda other: other.is_causal) == Example(
        "quest", heads=1, groups=1, batch=1, n=0, m=0, dim=2, dim_v=2, key_dim=2, is_causal=True
    )
