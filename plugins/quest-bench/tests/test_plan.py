"""What a command line means: suites, attentions, seeds, sweeps, cells; and what it says when it is wrong."""

import json
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest

from quest_bench import worker
from quest_bench.data import fingerprint
from quest_bench.plan import (
    Plan,
    catalogue,
    cell_id,
    parse_attentions,
    parse_seeds,
    parse_settings,
    reproduce,
    select,
    split_list,
    write_seeds,
)
from quest_bench.plan import describe_cell as describe
from quest_core.errors import ConfigError, PluginError


@pytest.fixture
def suite(fake):
    return catalogue().suites["fake/suite"]


def test_lists_split_outside_brackets_and_quotes():
    found = split_list('standard, quest+gqa(kv_heads=4, b=2),"a,b",[1,2],')
    assert found == ["standard", "quest+gqa(kv_heads=4, b=2)", "a,b", "[1,2]"]


def test_attentions_are_canonical_and_unique():
    assert parse_attentions("standard,quest,{'name': 'quest'},quest+softmax".replace("'", '"')) == ["standard", "quest"]


@pytest.mark.parametrize(("text", "seeds"), [("0-4", [0, 1, 2, 3, 4]), ("3", [3]), ("0-2, 7,1", [0, 1, 2, 7])])
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds
    assert parse_seeds(write_seeds(seeds)) == sorted(seeds)


@pytest.mark.parametrize("text", ["", "a", "4-1", "0..3", "-1", "1.5"])
def test_bad_seeds(text):
    with pytest.raises(ConfigError, match="--seeds is .*write 0-4"):
        parse_seeds(text)


def test_settings_fill_defaults_and_sweep(suite):
    assert parse_settings(suite, []) == {"mode": ["ok"], "scale": [1.0], "steps": [3], "fast": [False]}
    whole = replace(suite, options={**suite.options, "scale": {**suite.options["scale"], "default": 1}})
    assert [type(x) for x in parse_settings(whole, ["scale=1.0,2"])["scale"]] == [int, float]  # as the default's cell
    found = parse_settings(suite, ["scale=0.5,2,null,2.0", "fast=true,false", "steps=7"])
    assert found == {"mode": ["ok"], "scale": [0.5, 2.0, None], "steps": [7], "fast": [True, False]}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("step=3", r"no option 'step'; did you mean 'steps'\? Choose from: fast, mode, scale, steps"),
        ("steps=2.5", "option 'steps' is '2.5'; it takes a whole number of at least 1"),
        ("steps=0", "at least 1"),
        ("scale=nan", "takes a number of at least 0 or null"),
        ("scale=-1", "at least 0"),
        ("fast=1", "true or false"),
        ("mode=hanq", r"did you mean 'hang'\? Choose from: "),
        ("mode", "not key=value"),
        ("steps=", "whole number"),
    ],
)
def test_bad_settings(suite, setting, message):
    with pytest.raises(ConfigError, match=message):
        parse_settings(suite, [setting])


def test_all_bad_settings_are_told_at_once(suite):
    with pytest.raises(ConfigError, match=r"'a'.*'steps' is 'x'.*fast is given twice"):
        parse_settings(suite, ["a=1", "steps=x", "fast=true", "fast=false"])


def test_a_suite_of_two_distributions_is_an_error(fake, monkeypatch):
    records = worker.describe()
    twice = [one | {"name": "other", "distribution": "quest-other"} for one in records if "fake/suite" in one["suites"]]
    monkeypatch.setattr(worker, "describe", lambda: records + twice)
    with pytest.raises(PluginError, match=r"'fake/suite' is provided by both .* and quest-other; fix: pip uninstall"):
        catalogue()


def test_select(fake):
    found = catalogue()
    assert list(select(found, "fake/suite")[1]) == ["one", "two"]
    assert select(found, "fake/suite/two")[1] == {"two": None}
    assert list(select(found, "fake/suite/two,one")[1]) == ["two", "one"]
    with pytest.raises(ConfigError, match=r"no suite 'fake/siute/one'.*did you mean 'fake/suite'"):
        select(found, "fake/siute/one")


def test_the_tasks_are_those_of_the_data_folder(fake):
    found = catalogue()
    folder = fake / "data"
    folder.mkdir()
    with pytest.raises(
        ConfigError, match=r"data holds no task of suite 'fake/suite', which expects there: a folder with"
    ):
        select(found, "fake/suite", folder)
    (folder / "three.txt").write_text("3")
    (folder / "four.txt").write_text("4")
    tasks = select(found, "fake/suite", folder)[1]
    assert list(tasks) == ["four", "three"]
    assert select(found, "fake/suite/three", folder)[1] == {"three": tasks["three"]}
    with pytest.raises(
        ConfigError, match=r"has no task 'thre'; did you mean 'three'\? Choose from: .*valid tasks there"
    ):
        select(found, "fake/suite/thre", folder)
    (folder / "five.txt").write_text("")
    with pytest.raises(ConfigError, match=r"task 'five': .*five\.txt is empty; valid tasks there: four, three"):
        select(found, "fake/suite", folder)
    assert list(select(found, "fake/suite/three", folder)[1]) == ["three"]
    with pytest.raises(ConfigError, match="no task 'three'; .*others are read from --data DIR"):
        select(found, "fake/suite/three")
    (folder / "needs-more").touch()
    with pytest.raises(ConfigError, match="^suite 'fake/suite', --data .*data: the reader needs numpoems; pip install"):
        select(found, "fake/suite", folder)


def test_a_fingerprint_is_of_the_content(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "x.txt").write_text("same")
    first = fingerprint(tmp_path / "a")
    assert first == fingerprint(tmp_path / "b")
    (tmp_path / "a" / "processed").mkdir()
    (tmp_path / "a" / "processed" / "y.pt").write_text("the data of this suite")
    assert first != fingerprint(tmp_path / "a")
    (tmp_path / "a" / "raw").mkdir()  # from which a framework has derived it
    assert first == fingerprint(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr("quest_bench.data._sha256", lambda _: pytest.fail("read again"))
        assert first == fingerprint(tmp_path / "a")
    changed = tmp_path / "a" / "sub" / "x.txt"
    times = changed.stat().st_atime_ns, changed.stat().st_mtime_ns
    time.sleep(0.05)  # the clock of the file system ticks
    changed.write_text("samE")
    os.utime(changed, ns=times)  # as a copy that keeps the times
    assert first != fingerprint(tmp_path / "a")


def test_suites_that_cannot_be_read_break_only_their_plugin(fake):
    (fake.parent / "site" / "fakebench" / "suites.py").write_text("raise ImportError('no luck')")
    found = catalogue()
    assert "fake/suite" not in found.suites
    assert "toy/spurious" in found.suites
    with pytest.raises(ConfigError, match=r"'fake' is broken: its suites cannot be read: .*no luck.*fix"):
        select(found, "fake/suite")


def test_python_of_a_plugin(fake, monkeypatch):
    with pytest.raises(ConfigError, match="PLUGIN=PATH"):
        catalogue(["python"])
    monkeypatch.setenv("QUEST_PYTHON_FAKE", "/elsewhere/python")
    with pytest.raises(ConfigError, match="QUEST_PYTHON_FAKE: "):
        catalogue()


def test_another_environments_plugins_are_asked_for(fake, monkeypatch):
    """A plugin that only the other environment has: here, a script that prints what one printed."""
    records = json.dumps([record for record in worker.describe() if record["name"] == "fake"])
    python = fake / "python"
    python.write_text(f"#!/bin/sh\n[ \"$2\" = describe ] && echo '{records}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(worker, "describe", lambda: [])
    assert "fake/suite" not in catalogue().suites
    for given, variable in (([f"fake={python}"], ""), ([], str(python))):
        monkeypatch.setenv("QUEST_PYTHON_FAKE", variable) if variable else None
        found = catalogue(given)
        assert found.suites["fake/suite"].record.version == "1.2"
        assert found.python(found.suites["fake/suite"]) == str(python)
    with pytest.raises(PluginError, match=r"has no plugin 'fak'; .*did you mean 'fake'"):
        catalogue([f"fak={python}"])


def test_cells_are_the_grid_and_their_folders_are_stable(suite):
    settings = parse_settings(suite, ["scale=1,2"])
    plan = Plan(suite, {"one": None, "two": None}, ["standard", "quest+gqa(kv_heads=1)"], [0, 1], settings)
    cells = plan.cells(Path("out"))
    assert len(cells) == 16
    assert len({cell.workdir for cell in cells}) == 16
    assert [c.workdir for c in cells] == [c.workdir for c in plan.cells(Path("out"))]
    assert cells[1].workdir.parent.name == f"one-quest+gqa_kv_heads=1_-seed0-{cell_id(cells[1])[:8]}"
    smoke = Plan(suite, {"one": None, "two": None}, ["standard"], [0, 1], settings, smoke=True)
    assert not {c.workdir for c in smoke.cells(Path("out"))} & {c.workdir for c in cells}


def test_reproduce_reads_back(suite):
    settings = parse_settings(suite, ["scale=null", "steps=4"])
    plan = Plan(suite, {"one": None}, ["quest+gqa(kv_heads=1)"], [0, 1, 5], settings)
    words = shlex.split(reproduce(describe(plan.cells(Path("out"))[0]), [5, 0, 1], suite))
    assert words[:4] == ["quest", "bench", "run", "fake/suite/one"]
    assert parse_attentions(words[words.index("--attention") + 1]) == ["quest+gqa(kv_heads=1)"]
    assert words[words.index("--seeds") + 1] == "0-1,5"
    given = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert given == ["scale=null", "steps=4"]
    assert parse_settings(suite, given) == settings
