"""The documentation says what the code does: generated tables are current, links lead somewhere, examples read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import quest_core
from quest_core import AttentionConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "plugins/quest-*/README.md")
    for path in ROOT.glob(pattern)
)


def test_generated_tables_are_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_attentions_in_examples_are_valid(page: Path) -> None:
    text = page.read_text()
    for spec in re.findall(r"attention[\"']?\s*[:=]\s*[\"']([^\"'\n]+)[\"']", text):
        AttentionConfig.parse(spec)
    for line in re.findall(r"^\s*attention: ([a-z][^\n{#]*)", text, re.MULTILINE):
        AttentionConfig.parse(line.strip())


def test_the_example_of_a_cache_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "concepts.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "Cache(" in block]
    names: dict[str, Any] = {"torch": torch, "quest_core": quest_core}
    exec(example, names)
    assert len(names["cache"]) == 0
    assert len(names["draft"]) == 21
    assert names["y"].shape == (4, 1, 256)
