"""`python -m quest_research.speed decode`: both contenders decode the same, and the table says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import quest_core
from quest_research.speed import decode
from quest_research.speed.__main__ import app_main


def test_the_loop_by_hand_is_standard_attention() -> None:
    q = torch.randn(2, 4, 7, 8)
    k, v = torch.randn(2, 2, 2, 7, 8)
    step = decode.by_hand(k[:, :, :4], v[:, :, :4], 4, 7)
    got = [step(*(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(4, 7)]
    want = quest_core.attention(q, k, v, "standard+gqa", is_causal=True)
    torch.testing.assert_close(torch.cat(got, 2), want[:, :, 4:])


def test_every_kind_of_attention_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "quest,quest+mqa,linear,aft-local(max_length=64)"
    arguments = ["--attention", names, "--tokens", "40", "--rounds", "20", "--threads", "1", "--out", str(tmp_path)]
    assert app_main(["decode", *arguments]) == 0
    assert capsys.readouterr().out.count("| (1, 8, 64) |") == 4
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert [row["attention"] for row in rows[:4]] == names.split(",")
    assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in rows)
    assert "| (8, 8, 64) | quest |" in (tmp_path / "decode.md").read_text()
    assert app_main(["decode", "--tokens", "20", "--rounds", "20"]) == 2
