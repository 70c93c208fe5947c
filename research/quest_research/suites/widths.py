"""Suites widths/*: how the width of a head decides what an attention is worth, on a small model of characters.

A task "D=16" gives the heads 16 features each; the width of the model stays, so that every task has the same parameters
and the same products. A cell trains one attention at each of several learning rates, half a decade apart, and reports
the one that is best in validation. All attentions see the same pieces of the text in the same order.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from quest_suites.contract import Cell, Progress, Result, Trained, observe, sweep

from .images import Split
from .language import CONTEXT, TOPICS, LanguageModel, bits, corpus, heads_of, pieces, token_loss, windows
from .training import fit


def run(cell: Cell, progress: Progress) -> Result:
    """Train one attention with heads of one width and one seed.

    Returns:
        Metrics ``bits`` per character of the test, at the rate that is best in validation, ``bits/lr=R`` at each rate,
        and at the best rate ``entropy`` of the weights (nats), ``max_logit``, ``query_norm`` and ``key_norm``.
    """
    options = dict(cell.options)
    if cell.smoke:
        options |= {"steps": 4, "layers": 1, "rates": 2}
    options["heads"] = heads_of(cell.task, options["width"])
    train, validation, test, vocabulary = texts(cell, options)

    def once(rate: float, name: str, progress: Progress) -> Trained:
        torch.manual_seed(cell.seed)
        model = LanguageModel(cell.attention, vocabulary, options)
        found = fit(
            cell,
            name,
            model,
            lambda picked: token_loss(model, (train[0][picked], train[1][picked])),
            len(train[0]),
            {**options, "epochs": 1, "rate": rate},
            measure=lambda: {"validation": bits(model, validation)},
            progress=progress,
        )
        if found.diverged:
            return Trained(math.nan, math.inf, {}, diverged=True)
        seen = observe(model, validation[0][:64])
        return Trained(bits(model, test), found.series["validation"][-1], {}, details=seen)

    done = sweep(options["lowest"], options["rates"], once, progress)
    best = min(done, key=lambda name: done[name].validation)
    every = {f"bits/{name}": one.accuracy for name, one in done.items()}
    return Result({"bits": done[best].accuracy, **every, "rate": done[best].rate, **done[best].details})


def texts(cell: Cell, options: Mapping[str, Any]) -> tuple[Split, Split, Split, int]:
    """Return random pieces of the training text, both halves of the held-out text, and the size of the vocabulary."""
    written = TOPICS
    if cell.data:
        brown = cell.suite == "widths/brown"
        written = untagged(cell.data / "brown.zip") if brown else (cell.data / "input.txt").read_text(encoding="utf-8")
    text, rest, vocabulary = corpus(written)
    draw = torch.Generator().manual_seed(cell.seed)
    train = windows(text, options["steps"] * options["batch"], CONTEXT, draw)
    held = [pieces(half, CONTEXT) for half in rest.tensor_split(2)]
    if cell.smoke:
        held = [(x[:8], y[:8]) for x, y in held]
    return train, held[0], held[1], vocabulary


def untagged(archive: Path) -> str:
    """Return the Brown corpus without its tags, a sentence a line; texts whose number ends on 0, of all kinds, last."""
    with ZipFile(archive) as file:
        names = [name for name in file.namelist() if re.fullmatch(r"brown/c[a-r]\d\d", name)]
        texts = [file.read(name).decode() for name in sorted(names, key=lambda name: (name[-1] == "0", name))]
    lines = (line.split() for line in "\n".join(texts).splitlines())
    return "\n".join(" ".join(word.rpartition("/")[0] for word in line) for line in lines if line)
