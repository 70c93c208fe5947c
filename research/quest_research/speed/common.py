"""Parts that the microbenchmarks share: attentions that they can call, and the page and JSON that they write."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quest_bench.store import commit
from quest_bench.worker import machine, write_text
from quest_core.config import AttentionConfig, AttentionSpec
from quest_core.errors import ConfigError


def check_calls(attentions: Iterable[AttentionSpec], command: str, *, equal_shapes: bool = False) -> None:
    """Raise ConfigError for an attention that a command cannot call on its own, or, if asked, with equal shapes."""
    for config in map(AttentionConfig.parse, attentions):
        for part in config.components:
            why = "reads what the attention layer before it left behind" if part.chained else ""
            if equal_shapes and (part.reshapes or part.key_features is not None):
                why = "takes keys of another shape than the queries"
            if why:
                raise ConfigError(
                    f"attention '{config}': {command} calls one layer{' with q, k and v of one shape' * equal_shapes}, "
                    f"and '{part.name}' {why}; leave it out of --attention"
                )


def shortened(config: AttentionConfig, longest: int) -> AttentionConfig:
    """Return an attention whose tables of positions, if it has them, end at `longest` tokens."""
    if config.option("max_length") is None:
        return config
    return AttentionConfig.parse({**config.to_dict(), "max_length": longest})


def measurement(
    title: str,
    paragraphs: Sequence[str],
    *,
    command: str,
    seconds: float,
    place: str,
    out: Path | None,
    names: tuple[str, str],
    content: Mapping[str, Any],
) -> str:
    """Write what `speed`, `scaling` or `decode` has measured, and return the report as Markdown.

    Args:
        title: the heading of the report.
        paragraphs: the report below its command and machine.
        command: what was typed.
        seconds: how long it took.
        place: the conditions besides the machine: PyTorch, device, threads.
        out: the folder to write into, which is made; None writes nothing.
        names: of the Markdown and the JSON in it.
        content: the JSON besides command, seconds, commit, machine and torch.
    """
    here, found, seconds = machine(), commit(), math.ceil(seconds)
    text = "\n\n".join(
        [
            f"# {title}",
            f"Command: `{command}` ({seconds} s), commit {found or 'unknown'}.",
            f"Machine: {', '.join(f'{key} {value}' for key, value in here.items())}; {place}.",
            *filter(None, map(str.rstrip, paragraphs)),
        ]
    )
    text += "\n"
    if out is not None:
        facts = {"command": command, "seconds": seconds, "commit": found, "machine": here, "torch": torch.__version__}
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / names[0], text)
        write_text(out / names[1], json.dumps({**facts, **content}, indent=1))
    return text
