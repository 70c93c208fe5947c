"""Speed and scaling: what is measured is what is named, ratios and exponents are right, mistakes are named."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

import quest_core
from quest_core.errors import InputError
from quest_research.speed import scaling, speed, versions
from quest_research.speed.__main__ import app_main

SHAPE = (2, 4, 5, 8)


def test_contenders_compute_what_their_names_say() -> None:
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


def test_the_broadcast_formula_is_aft_full() -> None:
    q, k, v = torch.randn(3, *SHAPE)
    w = torch.randn(5, 5)
    full = quest_core.Mechanism("aft-full(rank=null, max_length=5)", num_heads=4, head_dim=8)
    with torch.no_grad():
        full.family.table.copy_(w)
    torch.testing.assert_close(scaling.broadcast_aft(q, k, v, w), full(q, k, v))
    assert [scaling.broadcast_fits(n) for n in (512, 1024)] == [True, False]


def test_every_call_gets_fresh_tensors_in_the_layout_that_is_named() -> None:
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


def tiny(**changes: object) -> speed.Plan:
    return dataclasses.replace(TINY, **{"slice_seconds": 0.0, **changes})


def test_ratios_are_taken_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine slows down fourfold half-way; a contender that always takes twice the peer's time shows 2."""
    calls = iter(range(10_000))
    peers = (torch.nn.functional.scaled_dot_product_attention, speed.naive_linear)

    def clock(attend: object, make: object, backward: bool, repeats: int) -> float:
        slow = 4 if next(calls) > 20 else 1
        return slow * (1.0 if attend in peers else 2.0)

    monkeypatch.setattr(speed, "_time", clock)
    rows = speed.measure(tiny(rounds=9), 3)
    assert {row.ratio for row in rows if row.peer in (speed.PEER, speed.NAIVE) and row.contender != row.peer} == {2.0}
    assert {row.ratio for row in rows if row.contender == row.peer} == {1.0}
    assert {row.ratio for row in rows if row.peer == speed.FORMULA} == {1.0}
    assert {row.threads for row in rows} == {3}
    text = speed.markdown(rows)
    assert text.count("| (1, 1, 4, 4) | packed | 3 |") == 2
    assert text.count("###") == 4


def test_the_report_and_every_record_say_where_they_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    text = speed.run(tiny(), tmp_path, threads=[1], command="the command")
    assert {path.name for path in tmp_path.iterdir()} == {"speed.md", "speed.json"}
    assert (tmp_path / "speed.md").read_text() == text
    found = json.loads((tmp_path / "speed.json").read_text())
    assert found["command"] == "the command"
    assert {row["threads"] for row in found["rows"]} == {1}
    assert {row["layout"] for row in found["rows"]} == {"contiguous", "packed"}
    assert found["machine"]["cpu"] in text
    assert found["torch"] == torch.__version__
    assert found["instruction_set"].endswith(" (ATEN_CPU_CAPABILITY=default)")
    for row in found["rows"]:
        assert row["milliseconds"] > 0


def test_an_attention_that_refuses_its_inputs_says_so_from_its_process() -> None:
    with pytest.raises(InputError, match="max_length"):
        speed.measure_apart(tiny(attentions=("aft-full(max_length=2)",)), 1)


def test_exponents_of_known_curves() -> None:
    points = [scaling.Point("x", n, 1e-6 * n**2, 0, 0, 50 * n) for n in (256, 512, 1024, 2048, 4096)]
    points[0] = scaling.Point("x", 256, 1.0, 0, 0, 1)  # below 1024 tokens nothing is fitted
    assert scaling.exponent(points, lambda p: p.seconds) == pytest.approx(2)
    assert scaling.exponent(points, lambda p: p.peak_bytes) == pytest.approx(1)


def test_peak_memory_counts_what_is_held_at_once() -> None:
    def call() -> None:
        kept = torch.empty(1 << 20)
        for _ in range(3):
            torch.empty(1 << 18).fill_(0)
        del kept

    assert scaling.peak_memory(call) == pytest.approx(4 * (2**20 + 2**18), rel=0.01)


@pytest.mark.parametrize(
    "attention", ["linear", "cosine", "aft-simple", "aft-local(max_length=4096)", "aft-full(max_length=4096)"]
)
def test_peak_memory_grows_with_an_exponent_of_at_most_1_1(attention: str) -> None:
    """At d = 256, forward and backward; research/results/scaling-cpu goes on to 16384 tokens."""
    points = []
    for tokens in (1024, 2048, 4096):
        call = scaling.prepare(attention, tokens)
        points.append(scaling.Point(attention, tokens, 0, 0, 0, scaling.peak_memory(call)))
    assert scaling.exponent(points, lambda p: p.peak_bytes) <= 1.1


def test_the_commands_write_their_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["scaling", "--attention", "linear,aft-simple", "--longest", "256", "--threads", "1"]
    assert app_main([*command, "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"scaling.json", "scaling.md", "scaling.png"}
    points = json.loads((tmp_path / "scaling.json").read_text())["points"]
    assert {(p["contender"], p["tokens"]) for p in points} == {
        (name, 256) for name in (speed.PEER, scaling.BROADCAST, "linear", "aft-simple")
    }
    assert all(p["seconds"] > 0 and p["peak_bytes"] > 0 for p in points)
    assert "python -m quest_research.speed scaling --attention linear,aft-simple" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed", "--threads", "two"], "--threads is 'two'; write numbers"),
        (["speed", "--threads", "1,9999"], "--threads has 9999; this process may use 1 to"),
        (["speed", "--attention", "quest+gqa(kv_heads=2)"], "'gqa' takes keys of another shape than the queries"),
        (
            ["speed", "--attention", "quest,aft-conv"],
            "speed calls one layer with q, k and v of one shape, and 'aft-conv'",
        ),
        (["speed", "--attention", "elliptical"], "'elliptical' reads what the attention layer before it left behind"),
        (["scaling", "--attention", "aft-conv"], "'aft-conv' takes keys of another shape"),
        (["scaling", "--attention", "elliptical-quest"], "'elliptical-quest' reads what the attention layer before"),
        (["scaling", "--attention", "quest+mqa"], "'mqa' takes keys of another shape"),
        (["speed", "--attention", "qest"], "did you mean 'quest'"),
        (["scaling", "--longest", "100"], "--longest is 100; the shortest length is 256"),
        (["scaling", "--longest", "100", "--smoke"], "--longest is 100; the shortest length is 256"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app_main(arguments) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
def test_two_versions_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This version against itself, in two cells of all."""
    chosen = [cell for cell in versions.cells() if cell["kind"] in ("function", "decode")][:2]
    monkeypatch.setattr(versions, "cells", lambda: chosen)
    text = versions.run(sys.executable, tmp_path, threads=[1], rounds=2, command="a test")
    rows = json.loads((tmp_path / "versions.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == ["function", "decode"]
    assert all(0.01 < row["low"] <= row["ratio"] <= row["high"] < 100 for row in rows)
    assert "of 2 cells" in text
