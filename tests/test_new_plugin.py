"""`quest new-plugin`: a copy of the example passes its tests, and the guide shows its code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from distributions import write_distribution

from quest_core import cli

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "third_party_plugin"


@pytest.mark.slow
def test_a_copy_is_a_plugin_of_another_name(tmp_path, capsys):
    assert cli.main(["new-plugin", "my-lab", "--out", str(tmp_path)]) == 0
    copy = tmp_path / "quest-my-lab"
    assert f"pip install -e '{copy}[host,test]'" in capsys.readouterr().out
    assert "toy" not in "".join(f"{path}{path.read_text()}" for path in copy.rglob("*") if path.is_file()).lower()
    site, adapters = tmp_path / "site", {"stand_in": "quest_my_lab.adapter:MyLabAdapter"}
    write_distribution(site, "quest-my-lab", {}, {"quest.adapters": adapters})
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (site, copy / "src", ROOT))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", copy]
    done = subprocess.run(command, cwd=site, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert int(re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)[0]) > 50


def test_the_page_shows_the_example():
    written = {
        line.strip()
        for kind in ("py", "toml")
        for path in EXAMPLE.rglob(f"*.{kind}")
        for line in path.read_text().splitlines()
    }
    written |= {line.partition("  # type: ignore")[0] for line in written}
    page = (ROOT / "docs" / "writing-an-adapter.md").read_text()
    shown = "\n".join(re.findall(r"```(?:python|toml)\n(.*?)```", page, re.DOTALL))
    lines = {line.strip() for line in shown.splitlines()} - {""}
    assert len(lines) > 40
    assert lines - written == set()
