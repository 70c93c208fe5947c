"""Speed and scaling: what is measured is what is named, ratios and exponents are right, mistakes are named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import quest_core
from quest_bench import scaling, speed
from quest_bench.cli import app_main
from quest_core.errors import ConfigError
from quest_core.mechanisms import reference_aft


def test_contenders_compute_what_their_names_say() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    made = speed.contenders(["quest", "qknorm-hs"], (2, 4, 5, 8))
    assert list(made) == [speed.PEER, speed.LAYER_PEER]
    alone = made[speed.PEER]
    assert list(alone) == [speed.PEER, speed.FORMULA, speed.FLEX, "quest", "qknorm-hs"]
    torch.testing.assert_close(alone[speed.PEER](q, k, v), quest_core.attention(q, k, v, "standard"))
    torch.testing.assert_close(alone[speed.FORMULA](q, k, v), alone["quest"](q, k, v))
    assert isinstance(alone["qknorm-hs"], quest_core.Mechanism)
    with pytest.raises(ConfigError, match="a grouping has fewer keys"):
        speed.contenders(["quest+gqa(kv_heads=2)"], (2, 4, 5, 8))


def test_layers_have_the_projections_of_their_peer() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    torch.manual_seed(1)
    first = speed.contenders(["standard"], (2, 4, 5, 8))[speed.LAYER_PEER]
    torch.manual_seed(1)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = q.transpose(1, 2).flatten(2)
    torch.testing.assert_close(first[speed.LAYER_PEER](q, k, v), layer(x, x, x)[0])
    assert list(first) == [speed.LAYER_PEER, "standard in MultiheadAttention"]
    assert first["standard in MultiheadAttention"](q, k, v).shape == (2, 5, 32)


def test_the_broadcast_formula_is_that_of_the_reference() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    w = torch.randn(5, 5)
    flat = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    want = reference_aft.aft(*flat, w, torch.ones(1, 5, 5, dtype=torch.bool)).unflatten(2, (4, 8)).transpose(1, 2)
    torch.testing.assert_close(speed.broadcast_aft(q, k, v, w).double(), want, rtol=1e-5, atol=1e-5)
    assert speed.BROADCAST in speed.contenders(["aft-simple"], (2, 4, 5, 8))[speed.PEER]
    assert speed.BROADCAST not in speed.contenders(["aft-simple"], (1, 8, 2048, 64))[speed.PEER]
    assert speed.BROADCAST not in speed.contenders(["quest"], (2, 4, 5, 8))[speed.PEER]


def test_what_cannot_run_leaves_its_cell_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(speed, "_flex", lambda: broken)
    rows = speed.measure(["quest"], ((1, 1, 4, 4),), rounds=2, slice_seconds=0)
    assert speed.FLEX not in {row.contender for row in rows}
    assert "FlexAttention is left out" in capsys.readouterr().err
    monkeypatch.setattr(speed, "_flex", lambda: torch.nn.functional.scaled_dot_product_attention)
    rows = speed.measure(["quest"], ((1, 1, 4, 4),), rounds=2, slice_seconds=0)
    assert {row.direction for row in rows if row.contender == speed.FLEX} == {"forward"}  # of a CPU


def test_ratios_are_taken_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine slows down fourfold half-way; a contender that always takes twice the peer's time shows 2."""
    calls = iter(range(10_000))
    peer = torch.nn.functional.scaled_dot_product_attention

    def clock(attend: object, tensors: object, backward: bool, repeats: int, clock: object = None) -> float:
        slow = 4 if next(calls) > 20 else 1
        return slow * (1.0 if attend is peer else 2.0)

    monkeypatch.setattr(speed, "_time", clock)
    rows = speed.measure(["quest"], ((1, 1, 4, 4),), rounds=9)
    assert {(row.contender, row.ratio) for row in rows if row.contender == "quest"} == {("quest", 2.0)}
    assert {row.ratio for row in rows if row.contender in (speed.PEER, speed.LAYER_PEER)} == {1.0}
    text = speed.markdown(rows)
    assert text.count("| (1, 1, 4, 4) |") == 4
    rows = [row for row in rows if (row.contender, row.direction) != ("quest", "forward")]
    rows += [dataclasses.replace(row, shape=(2, 2, 2, 2)) for row in rows if row.contender != speed.FORMULA]
    assert " – |" in speed.markdown(rows)


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

    assert scaling.peak_memory(call, "cpu") == pytest.approx(4 * (2**20 + 2**18), rel=0.01)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(
    "attention", ["linear", "cosine", "aft-simple", "aft-local(max_length=4096)", "aft-full(max_length=4096)"]
)
def test_peak_memory_grows_with_an_exponent_of_at_most_1_1(attention: str, is_causal: bool) -> None:
    """At d = 256, forward and backward; docs/results/scaling-cpu goes on to 16384 tokens."""
    points = []
    for tokens in (1024, 2048, 4096):
        call = scaling.prepare(attention, tokens, "cpu", is_causal)
        points.append(scaling.Point(attention, tokens, 0, 0, 0, scaling.peak_memory(call, "cpu")))
    assert scaling.exponent(points, lambda p: p.peak_bytes) <= 1.1


def test_the_commands_write_their_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "scaling",
        "--attention",
        "linear,aft-simple",
        "--longest",
        "512",
        "--out",
        str(tmp_path),
        "--threads",
        "1",
    ]
    assert app_main([*command, "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"scaling.json", "scaling.md", "scaling.png"}
    points = json.loads((tmp_path / "scaling.json").read_text())["points"]
    assert {(p["contender"], p["tokens"]) for p in points} == {
        (name, n) for name in (speed.PEER, speed.BROADCAST, "linear", "aft-simple") for n in (256, 512)
    }
    assert all(p["seconds"] > 0 and p["peak_bytes"] > 0 for p in points)
    assert "quest bench scaling --attention linear,aft-simple" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed", "--dtype", "float8"], "--dtype is 'float8'; choose from: float32"),
        (["speed", "--cpu-time", "--threads", "2"], "--cpu-time counts the processor's work"),
        (["speed", "--attention", "qest"], "did you mean 'quest'"),
        (["scaling", "--longest", "100"], "--longest is 100; the shortest length is 256"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app_main(arguments) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that the error is about")
def test_a_missing_gpu_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert app_main(["speed", "--device", "cuda"]) == 2
    assert "sees no GPU" in capsys.readouterr().err
