"""--watch-attention: what fairseq-train writes to its own log."""

import json
import re
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fairseq.logging import progress_bar

import quest_core
from devtools.logits import check, clipped, recorded, scalars
from quest_fairseq import watching


@pytest.mark.parametrize("attention", ["standard", "quest"])
def test_the_log_and_tensorboard_hold_every_layer_at_every_nth_update(tools, lm_data, tmp_path, attention, monkeypatch):
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", {})  # of the process
    given = ("--attention", attention, "--save-dir", tmp_path, "--no-save", "--log-format", "json")
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


@contextmanager
def before_steps(note):
    """Call `note` with the Watch before each of its steps."""
    step = quest_core.Watch.step
    with mock.patch.object(quest_core.Watch, "step", lambda self: (note(self), step(self))[1]):
        yield


def test_a_run_that_goes_on_measures_the_same_updates(tools, lm_data, tmp_path):
    given = ("--save-dir", tmp_path, "--watch-attention", "4")
    tools.train(lm_data, *given, updates=6)
    measured = []
    with before_steps(lambda watch: measured.append(watch.steps + 1) if watch._monitor is not None else None):
        tools.train(lm_data, *given, updates=16)
    assert measured == [7, 8, 12, 16]  # the first, and every fourth


def test_weights_in_half_precision_stay_clipped():
    """fairseq copies its weights in float32, which are one vector, back after every update."""
    weights = [torch.nn.Parameter(torch.randn(shape).half()) for shape in ((3, 4), (4,), (2, 2))]
    exact = [weight.detach().float() + 1e-5 for weight in weights]
    master = torch.cat([x.flatten() for x in exact])
    optimizer = SimpleNamespace(fp16_params=weights, fp32_params={0: master}, has_flat_params=True)
    with torch.no_grad():
        for weight, x in zip(weights, exact, strict=True):
            weight.copy_(x)
        weights[0][1] *= 0.5
    watching.keep_clipped(optimizer)
    exact[0][1] = weights[0][1].detach().float()
    assert torch.equal(master, torch.cat([x.flatten() for x in exact]))


def test_queries_stay_clipped_in_half_precision(tools, lm_data, tmp_path):
    given = ("--save-dir", tmp_path, "--no-save", "--qk-clip", "1e-3", "--fp16", "--fp16-no-flatten-grads")
    norms = []
    with before_steps(lambda w: norms.append(float(w.model.decoder.layers[0].self_attn.q_proj.weight.norm()))):
        tools.train(lm_data, *given, "--lr", "1e-6", updates=3)
    assert norms[1] < norms[0] / 2
