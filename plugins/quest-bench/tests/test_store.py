"""The table of a run's folder holds what its cells hold."""

import dataclasses
import json
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quest_bench import store
from quest_bench.compare import _key
from quest_bench.groups import read_groups
from quest_bench.plan import Plan, catalogue, parse_settings
from quest_bench.report import mixtures, write_report
from quest_bench.store import Stored
from quest_bench.worker import write_json

NAMES = st.sampled_from(["a", "b/c", "d=1 ", "é"])
NUMBERS, WHOLE = st.floats(width=64), st.integers(-(2**53), 2**53)
VALUES = st.none() | st.booleans() | NUMBERS | WHOLE | NAMES | st.lists(st.integers(), max_size=2)
MAPPINGS = st.dictionaries(NAMES, VALUES, max_size=2)


@st.composite
def stored(draw):
    """A cell of any suite: done, failed or unfinished."""
    cell = {key: draw(NAMES) for key in ("suite", "task", "attention")}
    cell |= {"seed": draw(st.integers(0, 2**40)), "smoke": draw(st.booleans()), "data": draw(st.none() | NAMES)}
    cell["options"] = draw(MAPPINGS)
    result = None
    if draw(st.booleans()):
        result = {"seconds": draw(NUMBERS), "peak_rss_mib": draw(st.none() | NUMBERS), "device": draw(NAMES)}
        result |= {"threads": draw(st.none() | st.integers(1, 99)), "finished": draw(NAMES)}
        result |= {key: draw(MAPPINGS) for key in store.JSON_COLUMNS}
        result["metrics"] = draw(st.dictionaries(NAMES, NUMBERS, max_size=3))
        result["series"] = draw(st.dictionaries(NAMES, st.lists(NUMBERS, max_size=3), max_size=3))
    return Stored(Path(draw(NAMES)), cell, result, draw(st.none() | NAMES))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(stored(), max_size=3))
def test_what_is_written_is_read(cells):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        store.write_table(cells, out / "results.parquet")
        wanted = [dataclasses.replace(one, folder=out / "cells" / one.folder.name) for one in cells]
        assert _text(store.load_all(out)) == _text(wanted)


def _text(cells):
    """Cells as a text, in which NaN equals NaN and the order of keys does not matter."""
    return json.dumps([dataclasses.asdict(cell) for cell in cells], sort_keys=True, default=str)


def test_a_table_of_mixed_cells_compares_with_their_folder(fake):
    """Cells with and without data, failed ones, and a metric that only one task has."""
    suite = catalogue().suites["fake/suite"]
    for task, data in (("one", None), ("two", "a1b2")):
        plan = Plan(suite, {task: data}, ["standard", "quest"], [0, 1], parse_settings(suite, []))
        for cell in plan.cells(Path("out")):
            cell.workdir.mkdir(parents=True)
            path = store.prepare(cell, suite.metric)
            if task == "two" and cell.seed:
                store.fail(path.parent, "out of memory")
                continue
            metrics = {"score": 1.0 + cell.seed, **({"score/part": 2.0} if data else {})}
            facts = {"seconds": 1.0, "peak_rss_mib": None, "device": "cpu", "threads": 1, "finished": ""}
            write_json(path.with_name("result.json"), {"metrics": metrics, "series": {}, **facts})
    cells = store.load_all(Path("out"))
    groups = read_groups(Path("out"), "standard")
    write_report(Path("out"), "standard")
    Path("out/cells").rename("elsewhere")
    again, table = store.load_all(Path("out")), read_groups(Path("out"), "standard")
    keys = [{_key(group, row) for group in found for row in group.rows} for found in (groups, table)]
    assert keys[0] == keys[1]
    everyone = ["quest", "standard"]
    assert mixtures(again) == mixtures(cells) == {"threads": {"1": everyone}, "device": {"cpu": everyone}}
    found, wanted = ([one.result and one.result["metrics"] for one in each] for each in (again, cells))
    assert found == wanted
