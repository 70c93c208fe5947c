"""--watch-attention: what fairseq-train writes to its own log."""

import re

import pytest

from devtools.logits import clipped, recorded


@pytest.mark.parametrize("attention", ["standard", "quest"])
def test_the_log_holds_logits_at_every_nth_update(tools, lm_data, tmp_path, attention):
    given = ("--attention", attention, "--save-dir", tmp_path)
    losses = r"train_inner.* loss=([\d.]+)"
    plain = re.findall(losses, tools.train(lm_data, *given, "--no-save", updates=4))
    with recorded() as calls:
        log = tools.train(lm_data, *given, "--no-save", "--watch-attention", "2", updates=4)
    assert re.findall(losses, log) == plain
    found = re.findall(r"train_inner.*num_updates=(\d).*max_logit=([\d.]+), entropy=([\d.]+)", log)
    assert [update for update, _, _ in found] == ["1", "2", "4"]
    layers = len(calls) // 4
    for update, top, entropy in found:
        now = calls[layers * (int(update) - 1) : layers * int(update)]
        assert float(top) == pytest.approx(max(top for top, _ in now), abs=1e-3)
        assert float(entropy) == pytest.approx(sum(entropy for _, entropy in now) / layers, abs=1e-3)


def test_queries_are_clipped_after_every_update(tools, lm_data, tmp_path):
    with clipped() as factors:
        given = ("--save-dir", tmp_path, "--no-save", "--attention", "quest", "--qk-clip", "1e-6")
        tools.train(lm_data, *given, updates=3)
    assert len(factors) == 3
    assert all(factors)
