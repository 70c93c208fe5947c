"""Parts that the microbenchmarks share: attentions that they can call, and the page and JSON that they write."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quest_bench.store import commit
from quest_bench.worker import machine, write_text
from quest_core.config import AttentionConfig, AttentionSpec
from quest_core.errors import ConfigError


def check_calls(attentions: Iterable[AttentionSpec], command: str) -> None:
    """Raise ConfigError for an attention that cannot be called on its own with q, k and v of one shape."""
    for config in map(AttentionConfig.parse, attentions):
        for part in config.components:
            why = "reads what the attention layer before it left behind" if part.chained else ""
            if part.reshapes or part.key_features is not None:
                why = "takes keys of another shape than the queries"
            if why:
                raise ConfigError(
                    f"attention '{config}': {command} calls one layer with q, k and v of one shape, and '{part.name}' "
                    f"{why}; leave it out of --attention"
                )


def shortened(config: AttentionConfig, longest: int) -> AttentionConfig:
    """Return an attention whose tables of positions, if it has them, end at `longest` tokens."""
    if config.option("max_length") is None:
        return config
    return AttentionConfig.parse({**config.to_dict(), "max_length": longest})


def start(threads: int) -> None:
    """Set the threads of a measuring process, and let glibc keep freed memory.

    Without it a process that holds little else gives every freed tensor back to the system and faults it in again,
    page by page, at the next call: up to 600 faults for one tensor of 1 MB, more than the attention itself takes.
    A training process, whose heap is large, does not do that. Without glibc, only the threads are set.
    """
    torch.set_num_threads(threads)
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**30)
        mallopt(mmap_threshold, 2**30)


def instruction_set() -> str:
    """Return the instruction set that PyTorch uses on this processor."""
    forced = os.environ.get("ATEN_CPU_CAPABILITY")
    return torch.backends.cpu.get_cpu_capability() + (f" (ATEN_CPU_CAPABILITY={forced})" if forced else "")


def measurement(
    title: str,
    paragraphs: Sequence[str],
    *,
    command: str,
    started: float,
    place: str,
    out: Path | None,
    name: str,
    content: Mapping[str, Any],
) -> str:
    """Write what a microbenchmark has measured, and return the report as Markdown.

    Args:
        title: the heading of the report.
        paragraphs: the report below its command and machine.
        command: what was typed.
        started: time.monotonic() when it began.
        place: the conditions besides the machine: PyTorch, threads.
        out: the folder that gets NAME.md and NAME.json; it is made. None writes nothing.
        name: of both files.
        content: the JSON besides command, seconds, commit, machine and torch.
    """
    here, found, seconds = machine(), commit(), math.ceil(time.monotonic() - started)
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
        write_text(out / f"{name}.md", text)
        write_text(out / f"{name}.json", json.dumps({**facts, **content}, indent=1))
    return text
