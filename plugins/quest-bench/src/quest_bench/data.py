"""The content of a data folder: a fingerprint of what a task reads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from quest_core.errors import ConfigError

DERIVED = ("raw", "processed")
"""Frameworks write the second folder next to the first, and its content follows from it."""


def fingerprint(root: Path, files: Iterable[Path] | None = None) -> str:
    """Return a hash of names and content, the same for the same bytes at another place.

    Args:
        root: the data folder; names count relative to it. It may also be one file.
        files: the files of one task; None takes all below `root` except derived ones.
    """
    lines = []
    for path in sorted(files if files is not None else _walk(root)):
        found = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    found.update(block)
        except OSError as error:
            raise ConfigError(f"--data: {path} cannot be read: {error.strerror}") from None
        lines.append(f"{path.relative_to(root) if path != root else path.name} {found.hexdigest()}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _walk(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    found = []
    for folder, folders, names in os.walk(root, followlinks=True):
        left_out = {"__pycache__", DERIVED[1] if DERIVED[0] in folders else ""}
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return found
