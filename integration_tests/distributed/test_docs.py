"""The snippets of docs/distributed.md run as they stand."""

import re
from pathlib import Path

import pytest
import torch

from .test_context_parallel import enter_cpu_kernel

pytestmark = pytest.mark.distributed

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
SNIPPETS = re.findall(r"<!-- tested -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(rank, code, folder):
    enter_cpu_kernel()  # missing in context_parallel on a CPU
    scope = {"device": "cpu", "folder": folder}
    exec(compile(code, PAGE.name, "exec"), scope)
    return "model" in scope or torch.is_tensor(scope["out"])


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(ranks, snippet, tmp_path):
    assert ranks.run(run, snippet, str(tmp_path)) == [True, True]


def test_every_snippet_is_tested():
    assert len(SNIPPETS) == PAGE.read_text().count("```python") == 4
