"""Speed: what is measured is what is named, ratios are right, mistakes are named."""

import dataclasses
import re
import sys

import pytest
import torch

import quest_core
from quest_core.errors import InputError
from quest_research.speed import speed, versions

SHAPE = (2, 4, 5, 8)


def test_contenders_compute_what_their_names_say():
    q, k, v = torch.randn(3, *SHAPE)
    plan = speed.Plan(attentions=("quest", "qknorm-hs"))
    alone = speed.contenders(plan, speed.PEER, SHAPE)
    assert list(alone) == [speed.PEER, speed.FORMULA, "quest", "qknorm-hs"]
    torch.testing.assert_close(alone[speed.PEER](q, k, v), quest_core.attention(q, k, v, "standard"))
    torch.testing.assert_close(alone[speed.FORMULA](q, k, v), alone["quest"](q, k, v))
    linear = speed.contenders(plan, speed.NAIVE, SHAPE)
    assert list(linear) == [speed.NAIVE, "linear"]
    want = speed.naive_linear(q.double(), k.double(), v.double())
    for attend in linear.values():
        torch.testing.assert_close(attend(q, k, v).double(), want, rtol=1e-5, atol=1e-5)


def test_every_call_gets_fresh_tensors_in_the_layout_that_is_named():
    for layout, leaves, stride in (("padded", 3, (160, 40, 8, 1)), ("packed", 1, (480, 8, 96, 1))):
        make = speed.fresh(layout, SHAPE)
        (mine, inputs, gradient), (others, _, _) = make(True), make(True)
        assert len(mine) == leaves
        assert {tuple(x.shape) for x in inputs} == {SHAPE}
        assert {x.stride() for x in inputs} == {stride}
        assert all(x.data_ptr() != y.data_ptr() for x, y in zip(mine, others, strict=True))
        out = torch.nn.functional.scaled_dot_product_attention(*inputs)
        assert all(g.any() for g in torch.autograd.grad(out, mine, gradient))


TINY = speed.Plan(attentions=("quest", "standard"), shapes=((1, 1, 4, 4),), linear_shape=(1, 1, 8, 4), rounds=2)


def tiny(**changes):
    return dataclasses.replace(TINY, **{"slice_seconds": 0.0, **changes})


def test_ratios_are_taken_round_by_round(monkeypatch):
    """The machine slows down fourfold half-way; a contender that always takes twice the peer's time shows 2."""
    calls = iter(range(10_000))
    peers = (torch.nn.functional.scaled_dot_product_attention, speed.naive_linear)

    def clock(attend, make, backward, how, repeats):
        slow = 4 if next(calls) > 20 else 1
        return slow * (1.0 if attend in peers else 2.0)

    monkeypatch.setattr(speed, "_time", clock)
    rows = speed.measure(tiny(rounds=9), 3)
    found = {name: quartiles for row in rows for name, quartiles in row.ratios.items()}
    assert found == dict.fromkeys((speed.FORMULA, "quest", "standard", "linear"), [2.0] * 3)
    assert {row.milliseconds for row in rows} == {4000}
    assert {row.where[-1] for row in rows} == {3}
    text = speed.markdown(rows)
    assert text.count("| (1, 1, 4, 4) | packed | 3 |") == 2
    assert text.count("###") == 4


def test_the_report_and_every_record_say_where_they_were_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    text = speed.run(tiny(), tmp_path, threads=[1], command="the command")
    assert (tmp_path / "speed.md").read_text() == text
    assert "`the command`" in text
    assert f"(ATEN_CPU_CAPABILITY=default), torch {torch.__version__}" in text
    assert text.count("| contiguous | 1 |") == text.count("| packed | 1 |") == 4


def test_an_attention_that_refuses_its_inputs_says_so_from_its_process():
    with pytest.raises(InputError, match="max_length"):
        speed.measure_apart(tiny(attentions=("aft-full(max_length=2)",)), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "two"], "--threads: invalid whole_numbers value: 'two'"),
        (["--threads", "1,9999"], "--threads has 9999; this process may use 1 to"),
        (["--shape", "1,2,3"], "--shape: invalid shape value: '1,2,3'"),
        (["--shape", "1,4,8,8", "--attention", "quest+gqa(kv_heads=2)"], "kv_heads is 2, but k has 4 heads"),
        (["--attention", "qest"], "did you mean 'quest'"),
    ],
)
def test_mistakes_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        speed.main(arguments)
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_the_interval_of_a_median_has_the_ranks_of_the_sign_test():
    """Of 31 values the 10th and the 22nd: a coin shows 10 to 21 heads in 31 throws with a probability of 97 %."""
    assert versions.median([float(x) for x in range(31)]) == (9, 15, 21)
    assert versions.median([2.0]) == (2, 2, 2)


@pytest.mark.slow
def test_two_versions_take_turns(monkeypatch, tmp_path):
    """This version against itself, in two cells of all."""
    chosen = [cell for cell in versions.cells() if cell["kind"] in ("function", "decode")][:2]
    monkeypatch.setattr(versions, "cells", lambda: chosen)
    versions.main([sys.executable, "--out", str(tmp_path), "--threads", "1", "--rounds", "2"])
    text = (tmp_path / "versions.md").read_text()
    ratios = [[float(x) for x in row] for row in re.findall(r"\| ([\d.]+) \(([\d.]+) to ([\d.]+)\) \|", text)]
    assert len(ratios) == 2
    assert all(0.01 < low <= middle <= high < 100 for middle, low, high in ratios)
    assert "of 2 cells" in text
