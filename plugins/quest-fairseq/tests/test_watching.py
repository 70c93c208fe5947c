"""--watch-attention: what fairseq-train writes to its own log."""

import json
import re

import pytest
from fairseq.logging import progress_bar

from devtools.logits import check, clipped, recorded, scalars


@pytest.mark.parametrize("attention", ["standard", "quest"])
def test_the_log_and_tensorboard_hold_every_layer_at_every_nth_update(tools, lm_data, tmp_path, attention, monkeypatch):
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", {})  # of the process
    given = ("--attention", attention, "--save-dir", tmp_path)
    given += ("--no-save", "--log-format", "json")
    losses = r'train_inner.*"loss": "([\d.]+)'
    plain = re.findall(losses, tools.train(lm_data, *given, updates=4))
    with recorded() as calls:
        given += ("--watch-attention", "2", "--tensorboard-logdir", tmp_path)
        log = tools.train(lm_data, *given, updates=4)
    assert re.findall(losses, log) == plain != []
    lines = [json.loads(line) for line in re.findall(r"train_inner.* (\{.*\})", log)]
    board, layers = scalars(tmp_path / "train_inner"), len(calls) // 4
    for step in (1, 2, 4):
        values = {key: float(value) for key, value in lines[step - 1].items() if key.startswith("attention/")}
        check(values, calls[layers * (step - 1) : layers * step], abs=1e-3)
        assert values == pytest.approx({key: board[step][key] for key in values}, rel=1e-4)
    assert not [key for key in board[3] if key.startswith("attention/")]


def test_queries_are_clipped_after_every_update(tools, lm_data, tmp_path):
    with clipped() as factors:
        given = ("--save-dir", tmp_path, "--no-save", "--attention", "quest", "--qk-clip", "1e-6")
        log = tools.train(lm_data, *given, updates=3)
    assert re.search(r"train_inner.*attention/max_logit=[\d.]+, attention/entropy=[\d.]+, wall", log)  # and no layer
    assert len(factors) == 3
    assert all(factors)
