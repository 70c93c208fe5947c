"""WatchAttention: what mmengine's Runner writes to its own log."""

import json

import pytest
from test_checkpoint_matrix import run

from devtools.logits import check, clipped, recorded, scalars


@pytest.mark.parametrize("built", ["stock", "quest"])
def test_the_logs_of_the_runner_hold_what_attention_does(tmp_path, built):
    """And queries are clipped after every iteration."""
    hook = {"type": "quest_mmseg.WatchAttention", "every": 1, "clip": 1e-6}
    show = {"type": "Visualizer", "vis_backends": [{"type": f"{kind}VisBackend"} for kind in ("Local", "Tensorboard")]}
    hooks = {"logger": {"type": "LoggerHook", "interval": 1}}
    with recorded() as calls, clipped() as factors:
        run(built, tmp_path, hooks=hooks, custom_hooks=[hook], visualizer=show)
    values = {}
    for line in next(tmp_path.glob("*/vis_data/scalars.json")).read_text().splitlines():
        values |= json.loads(line)
    check(values, calls, rel=1e-4)
    check(scalars(tmp_path)[1], calls, rel=1e-4)
    assert values["max_logit"] == pytest.approx(values["attention/max_logit"])
    assert factors
    assert all(factors)
