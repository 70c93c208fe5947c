"""The table of support: every mechanism of quest-core and quest-zoo, trained for one step in a host's default model.

A plugin's tests call `check` with a function that gives a loss. The outcomes lie in a file next to the tests, from
which docs/generate.py makes the table. QUEST_WRITE_SUPPORT=1 writes that file.
"""

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from quest_core.errors import QuestError
from quest_core.registry import AXES, Component, mechanisms, owner, temporary

Loss = Callable[..., torch.Tensor]


@functools.cache  # a class registers itself when its module is imported, so once
def zoo() -> list[type[Component]]:
    """Return the mechanisms of quest-zoo, which are registered only where it is installed."""
    sys.path.append(str(Path(__file__).parents[1] / "plugins" / "quest-zoo" / "src"))
    with temporary():
        return [part for part in vars(importlib.import_module("quest_zoo")).values() if isinstance(part, type)]


def specs() -> dict[str, str]:
    """Every mechanism but the defaults `softmax` and `mha`: its name and the shortest text that configures it."""
    ours = [part for part in mechanisms().values() if owner(part) == "quest-core"]
    both = (part for parts in (ours, zoo()) for part in sorted(parts, key=lambda part: AXES.index(part.axis)))
    shown = [part for part in both if part.name not in ("softmax", "mha")]
    needs_heads = {part.name for part in shown if any(o.name == "kv_heads" for o in part.options)}
    return {part.name: f"{part.name}(kv_heads=2)" if part.name in needs_heads else part.name for part in shown}


def outcomes(loss: Loss, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Train every mechanism in the default model, and if the host refuses it, with each setting in turn.

    Args:
        loss: builds the host's default model with an attention and the keywords of a setting, and returns a loss of
            it; raises QuestError if the host refuses.
        settings: keywords of `loss`, by what a user writes. The keyword `options` is a text of options for the
            mechanism, such as `"dims=1"`, and is not passed on.

    Returns:
        "works", "with <setting>" or "refused" for every mechanism.
    """
    found = {}
    tries: dict[str, Mapping[str, Any]] = {"": {}, **settings}
    for name, spec in specs().items():
        found[name] = "refused"
        for label, keywords in tries.items():
            others = {key: value for key, value in keywords.items() if key != "options"}
            text = f"{name}({keywords['options']})" if "options" in keywords else spec
            try:
                made = loss(text, **others)
                made.backward()
            except QuestError:
                continue
            assert made.isfinite(), text
            found[name] = f"with {label}" if label else "works"
            break
    return found


def check(path: Path, host: str, loss: Loss, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Assert that the `outcomes` are those of `path`, the support.json next to the tests, in the column of a host."""
    with temporary():
        mechanisms().update({part.name: part for part in zoo()})  # type: ignore[attr-defined]
        found = {"host": host, "mechanisms": outcomes(loss, settings)}
    if os.environ.get("QUEST_WRITE_SUPPORT") == "1":
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert json.loads(path.read_text()) == found, f"QUEST_WRITE_SUPPORT=1 writes {path.name}, then docs/generate.py"
