"""The content of a data folder: which tasks it holds, and a fingerprint of each."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from quest_core.errors import ConfigError

from .worker import write_json

DERIVED = ("raw", "processed")
"""Frameworks write the second folder next to the first, and its content follows from it."""


def fingerprint(root: Path, files: Iterable[Path] | None = None) -> str:
    """Return a hash of names and content, the same for the same bytes at another place.

    The hash of each file is cached by path, size and the times of its last modification and change of status.

    Args:
        root: the data folder; names count relative to it. It may also be one file.
        files: the files of one task; None takes all below `root` except derived ones.
    """
    known = _read_cache()
    before = len(known)
    lines = []
    for path in sorted(files if files is not None else _walk(root)):
        try:
            stat = path.stat()
            key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}"
            if key not in known:
                with path.open("rb") as file:
                    known[key] = _sha256(file)
        except OSError as error:
            raise ConfigError(f"--data: {path} cannot be read: {error.strerror}") from None
        lines.append(f"{path.relative_to(root) if path != root else path.name} {known[key]}")
    if len(known) > before:
        with contextlib.suppress(OSError):  # without a cache the next start hashes again
            _cache_file().parent.mkdir(parents=True, exist_ok=True)
            write_json(_cache_file(), known)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _sha256(file: object) -> str:
    found = hashlib.sha256()
    while block := file.read(1 << 20):  # type: ignore[attr-defined]
        found.update(block)
    return found.hexdigest()


def _walk(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    found = []
    for folder, folders, names in os.walk(root, followlinks=True):
        left_out = {"__pycache__", DERIVED[1] if DERIVED[0] in folders else ""}
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return found


def _cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quest-bench" / "fingerprints.json"


def _read_cache() -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(_cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
