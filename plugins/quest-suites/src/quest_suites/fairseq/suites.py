"""The suites of this plugin as data."""

from __future__ import annotations

from typing import Any

from quest_suites.declaring import papers, timed, whole

_METRICS = ("validation perplexity", *(f"perplexity with {percent} % swapped" for percent in (1.5, 2.5, 5)))
_UPDATES = whole("updates", None, "training steps; null: as many as the shipped yaml says", nullable=True)


def _suite(**facts: Any) -> dict[str, Any]:
    """A suite whose report shows every metric, the test's perplexity first."""
    return {
        "metric": "perplexity",
        "selection": "validation",
        "higher_is_better": False,
        "also": [{"metric": metric} for metric in _METRICS],
        **facts,
    }


SUITES: dict[str, dict[str, Any]] = {
    "lm/wikitext103": _suite(
        summary="the paper's language models on WikiText-103, clean and with test words swapped for AAA; the last "
        "position of a sliding window is scored",
        tasks=["small", "medium"],
        paper=papers(__file__)["lm/wikitext103"],
        data="a folder with wiki.{train,valid,test}.tokens and, to preprocess once, data-bin of fairseq-preprocess",
        data_files=["wiki.train.tokens"],
        data_required=True,
        options=[_UPDATES],
    ),
    "lm/pydocs": _suite(
        summary="a small language model of Python's documentation topics, clean and with test words swapped for "
        "AAA; perplexity a word, from byte pairs, with at least 64 pieces of context",
        tasks=["topics"],
        options=[_UPDATES, whole("merges", 500, "byte-pair merges learned from the training text", 0)],
    ),
    "time/fairseq": timed(
        "a training step of a language model against fairseq's transformer_lm, in turns",
        ["wikitext103-small", "pydocs"],
        10,
        whole("batch", 4, "sequences a step"),
    ),
}
