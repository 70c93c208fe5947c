"""WatchAttention: what mmengine's Runner writes to its own log."""

import json

import pytest
from test_checkpoint_matrix import quick, run  # noqa: F401 - a fixture

from devtools.logits import clipped, recorded

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("built", ["stock", "quest"])
def test_the_log_of_the_runner_holds_logits(tmp_path, built):
    hook = {"type": "quest_mmseg.WatchAttention", "every": 1}
    with recorded() as calls:
        run(built, tmp_path, hooks={"logger": {"type": "LoggerHook", "interval": 1}}, custom_hooks=[hook])
    log = next(tmp_path.glob("*/vis_data/scalars.json")).read_text().splitlines()
    values = {}
    for line in log:
        values |= json.loads(line)
    assert values["max_logit"] == pytest.approx(values["attention/max_logit"])
    assert values["max_logit"] == pytest.approx(max(top for top, _ in calls), rel=1e-4)
    layers = [key for key in values if key.endswith("/max_logit/max")]
    assert layers
    assert values["attention/max_logit"] == pytest.approx(max(values[key] for key in layers))


def test_queries_are_clipped_after_every_iteration(tmp_path):
    with clipped() as factors:
        run("quest", tmp_path, custom_hooks=[{"type": "quest_mmseg.WatchAttention", "clip": 1e-6}])
    assert factors
    assert all(factors)
