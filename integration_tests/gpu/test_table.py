"""The command that writes docs/results/gpu.md: right ratios, nothing hidden, mistakes named; at toy sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import quest_core

from . import measure, table

TOY = ["--lengths", "8,20", "--tokens", "20", "--heads", "4", "--dim", "8", "--rounds", "3", "--slice", "0.0005"]


def test_the_command_writes_the_page_and_its_data(
    tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = tmp_path / "steps"
    steps.mkdir()
    timing = {"milliseconds": 3.0, "ratio": 1.25, "low": 1.2, "high": 1.3, "rounds": 3}
    row = {"attention": "quest", "precision": "bf16", "timing": timing}
    host = {
        "host": "a framework",
        "version": "1.0",
        "model": "tiny",
        "versions": measure.versions(device),
        "rows": [row],
    }
    (steps / "a.json").write_text(json.dumps(host))
    case = '<testcase classname="integration_tests.gpu.test_backends" name="a">{}</testcase>'
    (steps / "gpu.xml").write_text(f"<testsuite>{case.format('')}{case.format('<skipped/>')}</testsuite>")
    out = tmp_path / "gpu.md"
    assert table.main([*TOY, "--device", device, "--dtype", "float32", "--out", str(out), "--steps", str(steps)]) == 0
    text = out.read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert text.count("### ") == 4
    for name in (*table.FULL, *table.GROUPED):
        assert f" {name} |" in text
    assert (f" {table.FLEX} |" if device == "cuda" else f"{table.FLEX} (measured on a GPU only)") in text
    assert "| `test_backends.py` |" in text
    assert "| 1 | 0 | 1 |" in text
    assert "Not yet measured: fairseq, graphgps, mmseg, pointcept, tsai." in text
    assert f"torch {torch.__version__}" in text
    assert "| quest | 3.00 | 1.25 (1.20–1.30) |" in text
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert {(r["tokens"], r["batch"]) for r in rows} == {(8, 2), (20, 1)}
    assert all(r["timing"]["milliseconds"] > 0 and r["timing"]["rounds"] == 3 for r in rows)
    assert all(r["timing"]["ratio"] == 1 for r in rows if r["contender"].startswith("sdpa "))
    assert len([r for r in rows if r["contender"] == "quest"]) == 4


def test_contenders_compute_what_their_names_say() -> None:
    for groups, name, spec in ((4, "quest", "quest"), (2, "quest+gqa", "quest+gqa(kv_heads=2)")):
        q, k, v = torch.randn(1, 4, 6, 8), *torch.randn(2, 1, groups, 6, 8)
        made = table.contender(name, 6, 4, groups, 8, "cpu", torch.float32)
        torch.testing.assert_close(made(q, k, v), quest_core.attention(q, k, v, spec))
    q, k, v = torch.randn(3, 1, 4, 6, 8)
    attend = table.quest_by_flex(flex_attention)
    torch.testing.assert_close(attend(q, k, v), quest_core.attention(q, k, v, "quest"))


def test_every_back_end_runs_in_its_context() -> None:
    q, k, v = torch.randn(3, 1, 4, 6, 8)
    assert table.peers(6, "cuda") == ["sdpa flash", "sdpa cudnn", "sdpa efficient", "sdpa math"]
    for name in table.peers(6, "cpu"):
        with table.surroundings(name):
            used = measure.back_ends(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
        assert used == {name.removeprefix("sdpa ")}


def test_the_committed_page_is_what_the_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Until there are measurements: every contender, framework and test is on it as not yet measured."""
    text = table.not_measured()
    for name in (*table.FULL, table.FLEX, *table.GROUPED):
        assert f"- {name}" in text
    assert {file.host for file in table.suite()} == {None, "fairseq", "graphgps", "mmseg", "pointcept", "tsai"}
    marked = {path.name for path in Path(table.__file__).parent.glob("test_*.py")}
    assert marked == {file.name for file in table.suite()}
    assert all(f"| `{file.name}` |" in text for file in table.suite())
    page = Path(__file__).parents[2] / "docs" / "results" / "gpu.md"
    if not page.with_suffix(".json").exists():
        assert page.read_text() == text, "./dev gpu --table writes it"
    (tmp_path / "gpu.json").write_text("{}")
    with pytest.raises(SystemExit):
        table.main(["--not-measured", "--out", str(tmp_path / "gpu.md")])
    assert "holds measurements" in capsys.readouterr().err


def test_ratios_are_taken_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine slows down fourfold half-way; a contender that always takes twice the peer's time shows 2."""
    clock = iter(range(10_000))

    def seconds(call: object, device: str, repeats: int = 1) -> float:
        return (4.0 if next(clock) > 12 else 1.0) * (1.0 if call == "peer" else 2.0)

    monkeypatch.setattr(measure, "seconds", seconds)
    times = measure.in_turns({"peer": "peer", "own": "own"}, "cpu", rounds=9, slice_seconds=0.1)  # type: ignore[dict-item]
    assert len(set(times["peer"])) == 2
    found = measure.against(times["own"], times["peer"])
    assert found.ratio == pytest.approx(2, rel=0.01)


def test_no_back_end_at_all_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no back-end of scaled_dot_product_attention runs N = 8 on cpu"):
        table.measure((8,), device="cpu", dtype=torch.float32, heads=4, groups=1, dim=8, tokens_a_call=8, budget=0.0)


def test_what_fails_or_is_slow_is_left_out_by_name() -> None:
    why: dict[str, str] = {}

    def broken() -> None:
        raise RuntimeError("no kernel")

    assert not table.fits(broken, "cpu", 1.0, why, "broken")
    assert not table.fits(lambda: None, "cpu", 0.0, why, "slow")
    assert table.fits(lambda: None, "cpu", 1.0, why, "good")
    assert why["broken"] == "does not take these inputs"
    assert why["slow"].endswith("s a call")
    text = table.markdown([], {"N = 8, forward": why})
    assert "- N = 8, forward: broken (does not take these inputs), slow (0.0 s a call)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--heads", "6", "--device", "cpu"], "--heads is 6"), (["--dtype", "float8"], "choose from")],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        table.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that the error is about")
def test_a_missing_gpu_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        table.main([])
    assert "sees no GPU" in capsys.readouterr().err
