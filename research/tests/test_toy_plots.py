"""The toy's own plots, from made-up results of the shape that the suite returns; and its declared options."""

from importlib.metadata import entry_points

import matplotlib as mpl
import pandas as pd
import pytest

from quest_bench.plan import Record, Suite, parse_settings, write_value
from quest_bench.report import STYLE
from quest_research.suites.toy_plots import KINDS, OUTCOMES, plots


def made_up(attention, outcomes):
    models = [
        {"learning_rate": 0.001 * (1 + i % 2), "weight_decay": 0.01 * (i // 2), "weight_seed": 0, "outcome": outcome}
        for i, outcome in enumerate(outcomes)
    ]
    series = {f"key_norm_{kind}": [1.0, 2.0] for kind in KINDS}
    series |= {f"key_norm_{kind}/{name}": [1.0, 2.0] for kind in KINDS for name in set(outcomes)}
    return {"attention": attention, "series": series, "details": {"models": models}}


def test_plots_show_success_outcomes_and_norms():
    results = [
        made_up("standard", ["biased", "biased", "other", "degenerate"]),
        made_up("quest", ["correct", "correct", "correct", "biased"]),
    ]
    rows = pd.DataFrame({"attention": [cell["attention"] for cell in results]})
    with mpl.rc_context(STYLE):
        heat, bars, norms = (figure for _, _, figure in plots(rows, results))
    assert [axes.get_title(loc="left") for axes in heat.axes] == ["standard", "quest"]
    assert [text.get_text() for text in heat.axes[0].texts] == ["0"] * 4
    assert [text.get_text() for text in heat.axes[1].texts] == ["100", "100", "100", "0"]
    widths = [[bar.get_width() for bar in bars.axes[0].containers[i]] for i in range(len(OUTCOMES))]
    assert widths == [[0.0, 75.0], [50.0, 25.0], [25.0, 0.0], [25.0, 0.0]]
    titles = [axes.get_title(loc="left") for axes in norms.axes]
    assert titles == [f"{a}\n{o} models" for o in ("correct", "biased") for a in ("standard", "quest")]
    assert [text.get_text() for text in norms.axes[0].texts] == ["no such model"]


@pytest.mark.parametrize("point", entry_points(group="quest.suites"), ids=lambda point: point.name)
def test_declared_defaults_are_allowed_values(point):
    for name, info in point.load().items():
        suite = Suite.read({"suite": name, **info}, Record("bench", "quest-bench", "0"))
        given = [f"{name}={write_value(option['default'])}" for name, option in suite.options.items()]
        assert parse_settings(suite, given) == parse_settings(suite, [])
