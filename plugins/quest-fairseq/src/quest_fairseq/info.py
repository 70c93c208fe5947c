"""What the plugin is and offers, as data. Standard library only: listing plugins executes this file alone."""

from __future__ import annotations

from typing import Any

# Perplexity on WikiText-103: the paper's name of a model -> attention -> validation, test, 1.5, 2.5, 5 % swapped
# (arXiv 2604.00199, table 10).
_PAPER = {
    "small": {
        "standard": (33.073, 34.076, 41.566, 46.380, 60.944),
        "quest": (32.966, 33.966, 41.522, 46.299, 61.062),
    },
    "medium": {
        "standard": (27.441, 28.851, 36.234, 40.866, 55.012),
        "qnorm": (27.233, 28.688, 36.262, 40.853, 55.451),
        "qknorm-ds": (27.376, 28.624, 36.018, 40.715, 54.899),
        "quest": (26.980, 28.478, 35.849, 40.499, 54.531),
    },
}
_METRICS = (
    "validation perplexity",
    "perplexity",
    "perplexity with 1.5 % swapped",
    "perplexity with 2.5 % swapped",
    "perplexity with 5 % swapped",
)


def _paper(metric: str) -> dict[str, dict[str, float]]:
    place = _METRICS.index(metric)
    return {task: {name: row[place] for name, row in rows.items()} for task, rows in _PAPER.items()}


def _suite(name: str, paper: bool, **facts: Any) -> dict[str, Any]:
    """A suite whose report shows every metric, the test's perplexity first."""
    own, *others = sorted(_METRICS, key=lambda metric: (metric != "perplexity", _METRICS.index(metric)))
    return {
        "suite": name,
        "metric": own,
        "higher_is_better": False,
        "paper": _paper(own) if paper else {},
        "also": [{"metric": metric, "paper": _paper(metric) if paper else {}} for metric in others],
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

INFO: dict[str, Any] = {
    "name": "fairseq",
    "host": "fairseq",
    "module": "fairseq",
    "api": (1, 0),
    "summary": "language models and translation with fairseq's Transformers",
    "capabilities": {"ordered": True, "causal": True, "cached": True},
    "architectures": ["quest_transformer_lm", "quest_transformer", "quest_transformer_xl"],
    "suites": [
        _suite(
            "lm/wikitext103",
            True,
            summary="the paper's language models on WikiText-103, clean and with test words swapped for AAA; the last "
            "position of a sliding window is scored",
            tasks=["small", "medium"],
            paper_source="QUEST (arXiv 2604.00199), table 10",
            data="a folder with wiki.{train,valid,test}.tokens and, to preprocess once, data-bin of fairseq-preprocess",
            data_required=True,
            options=[_UPDATES],
        ),
        _suite(
            "lm/pydocs",
            False,
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
    ],
}
