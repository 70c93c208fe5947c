"""The suites of this plugin as data."""

from typing import Any

from quest_suites.declaring import choice, number, papers, timing_suite, whole

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
        options=[_UPDATES],
    ),
    "translation/multi30k": {
        "summary": "a small Transformer translates Multi30k's captions from English to German",
        "tasks": ["en-de"],
        "metric": "BLEU",
        "selection": "validation",
        "also": [{"metric": "validation loss", "higher_is_better": False}],
        "data": "the folder data/task1/raw of: git clone --depth 1 https://github.com/multi30k/dataset",
        "data_files": ["train.en.gz"],
        "data_required": True,
        "options": [
            whole("updates", 2000, "training steps"),
            whole("layers", 3, "layers of the encoder, and of the decoder"),
            whole("max_tokens", 2048, "pieces of a step in the longer of both languages, padding included"),
            number("lr", 0.002, "largest learning rate of Adam"),
            number("dropout", 0.1, "share of activations that are dropped"),
            whole("merges", 2000, "byte-pair merges learned from the training text of both languages", 0),
            choice("parts", ("all", "self", "cross"), "attention to replace; the rest stays standard"),
        ],
    },
    "time/fairseq": timing_suite(
        "a training step of a language model, and decoding 64 tokens, against fairseq's transformer_lm, in turns",
        ["wikitext103-small", "pydocs", "decode"],
        10,
    ),
}
