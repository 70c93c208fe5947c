"""What the command line says: lists, help and errors."""

import re
import sys
from pathlib import Path

import pytest

from quest_bench import cli


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "fake/suite", "--attention", "qest,sinkhorn,standrad"], ["mean 'quest'", "did you mean 'standard'"]),
        (["run", "fake/suite", "--attention", " , "], ["empty"]),
        (["run", "fake/suite", "--data", "missing"], ["--data is 'missing', which does not exist"]),
        (["run", "toy/spurious", "--data", "."], ["--data is '.', and suite 'toy/spurious' reads no data"]),
        (["run", "images/recipes", "--data", "."], ["has no train-images-idx3-ubyte* and no *.bin", "expects there"]),
        (["run", "fake/suite", "--python", "fake=/no/python"], ["'/no/python', which is not an executable file"]),
        (["run", "fake/suite", "--attention", "qest", "--seeds", "x", "--set", "a=1"], ["qest", "--seeds", "'a'"]),
        (["report", "missing"], ["missing does not exist", "quest bench run SUITE --out missing"]),
        (["report", "no run"], ["no run does not exist", "quest bench run SUITE --out 'no run'"]),
        (["report", "."], [". holds no results"]),
    ],
)
def test_errors_are_one_red_line(fake, bench, arguments, words):
    error = bench(*arguments, status=2)
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1
    for word in words:
        assert word in error
    assert not Path("runs").exists()


def test_wrong_usage_is_2_and_help_teaches(fake, bench):
    for wrong in ("run", "rum"):
        bench(wrong, status=2)
    assert "--attention standard,quest --seeds 0-4" in bench("run", "--help")


def test_ls_shows_suites_and_broken_plugins(fake, bench, monkeypatch):
    monkeypatch.setattr(cli.console, "width", 80)
    shown = bench("ls")
    assert "fake/suite" in shown
    assert "--set steps=3" not in shown
    assert re.search(r"^fake/suite .* fake: ok", shown, re.MULTILINE)  # one line per suite
    one = bench("ls", "fake/suite")
    assert "fake/suite" in one
    assert "--set steps=3" in one
    assert "toy/spurious" not in one
    assert "did you mean 'fake/suite'" in bench("ls", "fake/siute", status=2)
    (fake.parent / "site" / "fakebench" / "suites.py").write_text("1 / 0")
    monkeypatch.delitem(sys.modules, "fakebench.suites")
    assert "plugin 'fake' is broken" in bench("ls")
