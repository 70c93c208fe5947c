"""The suites of this plugin as data. Standard library only, because `quest bench ls` executes only this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PAPER: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
_METRICS = (
    "validation perplexity",
    "perplexity",
    "perplexity with 1.5 % swapped",
    "perplexity with 2.5 % swapped",
    "perplexity with 5 % swapped",
)


def _suite(**facts: Any) -> dict[str, Any]:
    """A suite whose report shows every metric, the test's perplexity first."""
    own, *others = sorted(_METRICS, key=lambda metric: (metric != "perplexity", _METRICS.index(metric)))
    return {
        "metric": own,
        "selection": "validation",
        "higher_is_better": False,
        "also": [{"metric": metric} for metric in others],
        **facts,
    }


_UPDATES = {
    "name": "updates",
    "kind": "int",
    "default": None,
    "nullable": True,
    "doc": "training steps; null: as many as the shipped yaml says",
    "minimum": 1,
}

SUITES: dict[str, dict[str, Any]] = {
    "lm/wikitext103": _suite(
        summary="the paper's language models on WikiText-103, clean and with test words swapped for AAA; the last "
        "position of a sliding window is scored",
        tasks=["small", "medium"],
        paper=_PAPER["lm/wikitext103"],
        data="a folder with wiki.{train,valid,test}.tokens and, to preprocess once, data-bin of fairseq-preprocess",
        data_files=["wiki.train.tokens"],
        data_required=True,
        options=[_UPDATES],
    ),
    "lm/pydocs": _suite(
        summary="a small language model of Python's documentation topics, clean and with test words swapped for "
        "AAA; perplexity a word, from byte pairs, with at least 64 pieces of context",
        tasks=["topics"],
        options=[
            _UPDATES,
            {
                "name": "merges",
                "kind": "int",
                "default": 500,
                "doc": "byte-pair merges learned from the training text",
                "minimum": 0,
            },
        ],
    ),
    "time/fairseq": {
        "summary": "a training step of a language model against fairseq's transformer_lm, in turns",
        "tasks": ["wikitext103-small", "pydocs"],
        "metric": "time of stock",
        "jobs": 1,
        "higher_is_better": False,
        "selection": "none",
        "also": [{"metric": "memory of stock"}],
        "options": [
            {"name": "batch", "kind": "int", "default": 4, "doc": "sequences a step", "minimum": 1},
            {"name": "rounds", "kind": "int", "default": 10, "doc": "how often each step is timed", "minimum": 2},
        ],
    },
}
