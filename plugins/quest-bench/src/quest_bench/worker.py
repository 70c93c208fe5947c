"""Runs one cell inside a plugin's own environment. Standard library only, so that it is started by path there::

    python worker.py run CELL/cell.json        train and evaluate; writes CELL/result.json
    python worker.py describe                  print the plugins this environment has, as JSON

Protocol of ``run``: standard output carries JSON lines, ``{"progress": 0.4, "text": "epoch 12"}`` while running and
``{"error": "ValueError: ..."}`` at most once. Whatever the suite itself prints goes to standard error. Standard input
is a life line: when it closes, the orchestrator is gone and the worker ends, so that nothing trains unattended.

Numbers: JSON has no NaN and no infinities; they are written as ``{"$float": "nan"}``, ``"inf"`` or ``"-inf"`` and
:func:`decode` reads them back exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

FLOAT = "$float"


def encode(value: Any, where: str = "value") -> Any:
    """`value` as strict JSON types. Arrays, tensors and their scalars become lists and numbers.

    Raises:
        TypeError: naming the place of what JSON cannot carry.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(float(value))}
    if isinstance(value, float):
        return float(value)  # numpy.float64 is a float whose repr is not JSON
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): encode(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return encode(value.tolist(), where)
    raise TypeError(f"{where} is {type(value).__name__}; a result holds numbers, texts, lists and mappings")


def decode(text: str) -> Any:
    """The value that was written with :func:`encode`; NaN and infinities come back."""
    return json.loads(text, object_hook=lambda d: float(d[FLOAT]) if d.keys() == {FLOAT} else d)


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON whole or not at all: into a neighbour file first, then renamed over `path`."""
    write_text(path, json.dumps(encode(value), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all. A crash can leave a ``.tmp`` neighbour, never half of `path`."""
    neighbour = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with neighbour.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(neighbour, path)
    finally:
        neighbour.unlink(missing_ok=True)


def entry_point(suite: str) -> importlib.metadata.EntryPoint:
    """The entry point that runs a suite in this environment; raises LookupError naming those there are."""
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group="quest.benchmarks")}
    if suite not in found:
        raise LookupError(
            f"no suite '{suite}' is installed for {sys.executable}; it has: {', '.join(sorted(found)) or 'none'}"
        )
    return found[suite]


def describe() -> list[dict[str, Any]]:
    """Return the plugin records of this environment as `quest_core.hosts.discovery.discover` does, with their suites.

    ``info["suites"]`` then is the mapping that a plugin's info names: suite -> declaration. A plugin whose suites
    cannot be read is broken.
    """
    from quest_core.hosts.discovery import discover, load_info

    found = []
    for record in map(dataclasses.asdict, discover()):
        name = record["info"].get("suites")
        try:
            suites = load_info(name) if name else {}
        except Exception as error:
            suites = {}
            if record["status"] == "ok":
                fix = f"pip install --force-reinstall {record['distribution']}"
                record |= {"status": "broken", "detail": f"its suites cannot be read: {error!r}", "fix": fix}
        found.append(record | {"info": {**record["info"], "suites": suites} if record["info"] else {}})
    return found


def run(path: Path, send: Callable[[dict[str, Any]], None]) -> None:
    """Run the cell of one cell.json and write result.json beside it."""
    from quest_core.benchmarks import Cell

    given = decode(path.read_text(encoding="utf-8"))
    workdir = path.parent / "work"
    workdir.mkdir(exist_ok=True)
    cell = Cell(
        suite=given["suite"],
        task=given["task"],
        attention=given["attention"],
        seed=given["seed"],
        smoke=given["smoke"],
        data=Path(given["data"]) if given["data"] else None,
        options=given["options"],
        workdir=workdir,
    )
    entry = entry_point(cell.suite)
    suite_run = entry.load()
    sent = 0.0

    def progress(fraction: float, text: str) -> None:
        nonlocal sent
        now = time.monotonic()
        if now - sent >= 0.1 or fraction >= 1:  # a suite may call this every step
            sent = now
            send({"progress": min(max(float(fraction), 0.0), 1.0), "text": str(text)})

    started = time.perf_counter()
    result = suite_run(cell, progress)
    seconds = time.perf_counter() - started
    if given["metric"] not in result.metrics:
        raise ValueError(
            f"suite '{cell.suite}' returned no '{given['metric']}', its own metric; "
            f"it returned {', '.join(result.metrics) or 'none'}"
        )
    write_json(
        path.with_name("result.json"),
        {
            "id": given["id"],
            "metrics": result.metrics,
            "series": result.series,
            "details": result.details,
            "seconds": seconds,
            "peak_rss_mib": _peak_rss_mib(),
            "device": _device(),
            "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or None,
            "versions": _versions(entry),
            "finished": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + " UTC",
        },
    )


def _peak_rss_mib() -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak / 2**20 if sys.platform == "darwin" else peak / 2**10)  # bytes there, KiB elsewhere


def _device() -> str:
    """The accelerator this process used, or "cpu"."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return str(torch.cuda.get_device_name())
    return "cpu"


def _versions(entry: importlib.metadata.EntryPoint) -> dict[str, str]:
    """Versions of what took part, as installed in this environment: python, torch, quest-core, plugin, host."""
    from quest_core.hosts.discovery import discover

    plugin = entry.dist.metadata["Name"] if entry.dist else None
    found = {"python": platform.python_version()}
    for distribution in ("torch", "quest-core", plugin):
        if distribution:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[distribution] = importlib.metadata.version(distribution)
    for record in discover():
        if record.distribution == plugin and record.host_version:
            found[record.host_name or str(record.info.get("host", record.name))] = record.host_version
    return found


def _end_with_orchestrator(life_line: int) -> None:
    """Wait until the other end closes, then end this process and what it started, at once."""
    with contextlib.suppress(OSError):
        while os.read(life_line, 1024):
            pass
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


@contextlib.contextmanager
def _channel() -> Iterator[TextIO]:
    """Standard output for the protocol alone; prints of the suite, from Python or C, go to standard error."""
    threading.Thread(target=_end_with_orchestrator, args=(os.dup(0),), daemon=True).start()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)
        yield channel


def main(argv: list[str]) -> int:
    if argv == ["describe"]:
        print(json.dumps(encode(describe())))
        return 0
    if len(argv) != 2 or argv[0] != "run":
        print(__doc__, file=sys.stderr)
        return 2
    with _channel() as channel:

        def send(message: dict[str, Any]) -> None:
            print(json.dumps(message), file=channel, flush=True)

        try:
            run(Path(argv[1]), send)
        except Exception as error:
            traceback.print_exc()
            send({"error": f"{type(error).__name__}: {error}"})
            return 1
    return 0


if __name__ == "__main__":
    # started by path, Python puts this folder first on sys.path, where `run` or `report` would hide other modules
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    sys.exit(main(sys.argv[1:]))
