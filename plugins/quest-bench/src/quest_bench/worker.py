"""Runs cells inside a plugin's own environment. Standard library only, because it is started by path there::

    python worker.py cell PATH              run the cell of a cell.json and write result.json next to it
    python worker.py describe               print the plugins that this environment has, as JSON
    python worker.py tasks FUNCTION FOLDER  print the tasks that a data folder holds, as JSON

Protocol of ``cell``: the process leads a group of its own, and its stderr is the cell's log. Standard output carries
JSON lines: ``{"progress": 0.4, "text": "epoch 12"}`` while the cell runs, ``{"busy": true}`` if another process runs
it, and ``{"error": "ValueError: ..."}`` if it failed. If standard input closes, the orchestrator has ended, and the
process ends itself and those it started.

Claims: the process holds ``CELL/claim`` locked (flock). The system releases the lock when the process has ended,
however it ends, so a claim is never stale and no clock is involved.

Numbers: JSON has no NaN and no infinities; they are written as ``{"$float": "nan"}``, ``"inf"`` or ``"-inf"`` and
:func:`decode` reads them back exactly.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FLOAT = "$float"
REPORT_S = 0.5  # a suite may report its progress at every step; at most one report is sent in this time


def encode(value: Any, where: str = "value") -> Any:
    """`value` as strict JSON types. Arrays, tensors and their scalars become lists and numbers."""
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
    """Write strict JSON whole or not at all: into a neighbor file first, then renamed over `path`."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """The content of a file of :func:`write_json`."""
    return json.dumps(encode(value), indent=1, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; see :func:`whole`."""
    with whole(path) as neighbor:
        neighbor.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a neighbor to write into, which then replaces `path`. A crash can leave it, but never a part of `path`."""
    neighbor = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield neighbor
        with neighbor.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(neighbor, path)
    except OSError as error:  # of a full disk it does not name the file
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            neighbor.unlink(missing_ok=True)


def entry_point(suite: str) -> importlib.metadata.EntryPoint:
    """The entry point that runs a suite in this environment; raises LookupError naming those there are."""
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group="quest.benchmarks")}
    if suite not in found:
        raise LookupError(
            f"no suite '{suite}' is installed for {sys.executable}; it has: {', '.join(sorted(found)) or 'none'}"
        )
    return found[suite]


def describe() -> list[dict[str, Any]]:
    """Return the plugins of this environment, each the fields of `quest_bench.plan.Record`."""
    from quest_core.hosts.plugins import plugins

    found: dict[str, dict[str, Any]] = {}
    for plugin in plugins():
        found[plugin.name] = {"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version}
        if problem := plugin.problem():
            found[plugin.name] |= {"status": "unsupported", "detail": problem, "fix": plugin.fix}
    for point in importlib.metadata.entry_points(group="quest.suites"):
        assert point.dist is not None  # set for every entry point of an installed distribution
        about = {"name": point.name, "distribution": point.dist.name, "version": point.dist.version}
        if point.name not in found and point.dist.name == "quest-suites":  # the tasks of a host
            fix = f"pip install 'quest-{point.name}[host]'"
            about |= {"status": "not installed", "detail": f"its tasks need quest-{point.name}", "fix": fix}
        record = found.setdefault(point.name, about)
        try:
            record["suites"] = point.load()
        except Exception as error:
            fix = f"pip install --force-reinstall {point.dist.name}"
            record |= {"status": "broken", "detail": f"its suites cannot be read: {error!r}", "fix": fix}
    return list(found.values())


def run(path: Path, send: Callable[[dict[str, Any]], None]) -> None:
    """Run the cell of one cell.json and write result.json next to it."""
    from quest_suites.contract import STATE, Cell

    spec = decode(path.read_text(encoding="utf-8"))
    workdir = path.parent / "work"
    provenance = origin(spec["suite"], spec["attention"])
    begun_by = path.with_name("origin.json")
    with contextlib.suppress(FileNotFoundError):
        if begun_by.read_text(encoding="utf-8", errors="replace") != json_text(provenance):  # also if it is torn
            print("another commit or version began this cell, so it starts again", flush=True)
            shutil.rmtree(workdir, ignore_errors=True)
    write_json(begun_by, provenance)
    workdir.mkdir(exist_ok=True)
    resumes = any(workdir.iterdir())
    same = {name: spec[name] for name in ("suite", "task", "attention", "seed", "smoke", "options")}
    data = Path(spec["data_path"]) if spec["data_path"] else None
    cell = Cell(**same, data=data, workdir=workdir, data_fingerprint=spec["data"])
    suite_run = entry_point(cell.suite).load()
    started = time.perf_counter()
    sent = -math.inf  # when the last report was sent

    def progress(fraction: float, text: str) -> None:
        nonlocal sent
        now = time.perf_counter()
        if now - sent < REPORT_S and fraction < 1:
            return
        sent = now
        send({"progress": min(max(float(fraction), 0.0), 1.0), "text": str(text)})
        with contextlib.suppress(OSError), path.with_name("progress.log").open("a", encoding="utf-8") as log:
            log.write(f"{utc()}  {now - started:9.1f} s  {100 * fraction:5.1f} %  {text}\n")

    result = suite_run(cell, progress)
    seconds = time.perf_counter() - started
    metrics = {name: _number(f"metric '{name}'", x) for name, x in result.metrics.items()}
    series = {name: [_number(f"a value of series '{name}'", x) for x in xs] for name, xs in result.series.items()}
    if not all(map(math.isfinite, series.get("train_loss", [])[-1:])):  # diverged, also with a finite accuracy
        metrics = {name: x if name == "diverged" else math.nan for name, x in metrics.items()}
    if spec["metric"] not in metrics:
        raise ValueError(
            f"suite '{cell.suite}' returned no '{spec['metric']}', its own metric; "
            f"it returned {', '.join(metrics) or 'none'}"
        )
    write_json(
        path.with_name("result.json"),
        {
            "id": spec["id"],
            "metrics": metrics,
            "series": series,
            "details": result.details,
            "seconds": math.nan if resumes else seconds,  # a resumed cell took longer than this
            "peak_rss_mib": _peak_rss_mib(),
            "device": _device(),
            "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or None,
            **provenance,
            "machine": machine(),
            "finished": utc(),
        },
    )
    (workdir / STATE).unlink(missing_ok=True)


def _number(where: str, value: Any) -> float:
    """Return a value of a result, which may be a tensor or an array of one element, as a float."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{where} is {value!r:.80}, which is not a number") from None


def utc() -> str:
    """The time as "2026-01-31 12:00:00 UTC"."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + " UTC"


def _peak_rss_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak / 2**20 if sys.platform == "darwin" else peak / 2**10)  # bytes there, KiB elsewhere


def _device() -> str:
    """The accelerator that this process used, or "cpu"."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.max_memory_allocated() > 0:
        return str(torch.cuda.get_device_name())
    return "cpu"


def origin(suite: str, attention: str) -> dict[str, dict[str, str]]:
    """The versions of all that takes part in a cell, and the commits of what is imported from checkouts."""
    from quest_core.config import AttentionConfig
    from quest_core.hosts.plugins import plugins
    from quest_core.registry import owner

    entry = entry_point(suite)
    folder = entry.module.rpartition(".")[0]  # of the module that runs the suite, and of its declaration
    declared = importlib.metadata.entry_points(group="quest.suites")
    name = next((point.name for point in declared if point.module.rpartition(".")[0] == folder), "")
    hosts = [plugin for plugin in plugins() if plugin.name == name]
    parts = [part for part in AttentionConfig.parse(attention).components if owner(part) != "quest-core"]
    versions = {"python": platform.python_version()}
    for distribution in ("torch", "quest-core", "quest-suites", entry.dist.name if entry.dist else ""):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            versions[distribution] = importlib.metadata.version(distribution)
    for plugin in hosts:
        host, _, version = plugin.host().partition(" ")
        versions |= {plugin.distribution: plugin.version, **({host: version} if version else {})}
    versions |= dict(owner(part).split(" ") for part in parts)
    modules = ["quest_core", "quest_suites", entry.module]
    modules += [*(plugin.value for plugin in hosts), *(part.__module__ for part in parts)]
    return {"versions": versions, "commits": commits(modules)}


def commits(modules: Iterable[str]) -> dict[str, str]:
    """The commits of the checkouts that the packages of `modules` are imported from; those of wheels are absent."""
    found = {}
    for package in sorted({module.partition(".")[0] for module in modules}):
        spec = importlib.util.find_spec(package)
        commit = git_commit(Path(spec.origin)) if spec and spec.origin else None
        if commit:
            found[package.replace("_", "-")] = commit
    return found


def git_commit(module: Path) -> str | None:
    """The commit of the checkout of a module's file. With changes in its package it ends in "+" and a hash of them."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(module.parent), *words],
                capture_output=True,
                text=True,
                errors="surrogateescape",
                timeout=20,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # an installed package may lie inside some other repository's folder: only a tracked file is that repository's
    if git("ls-files", "--error-unmatch", module.name) is None:
        return None
    scope = "." if module.name == "__init__.py" else module.name
    code = (scope, ":(exclude,glob)**/__pycache__/**")
    commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", *code)
    if not commit or not status:
        return commit
    changes = hashlib.sha256(f"{status}{git('diff', 'HEAD', '--', scope)}".encode(errors="surrogateescape"))
    new = git("ls-files", "--others", "--exclude-standard", "-z", "--", *code) or ""
    for name in filter(None, new.split("\0")):  # files that are not added yet, which `git diff` leaves out
        with contextlib.suppress(OSError):
            changes.update((module.parent / name).read_bytes())
    return f"{commit}+{changes.hexdigest()[:8]}"


@functools.cache
def machine() -> dict[str, Any]:
    """The machine in general words. Its name enters only as a short hash."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    memory = None
    with contextlib.suppress(ValueError, OSError):
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {
        "cpu": cpu,
        "cores": cores(),
        "memory_gib": memory,
        "system": f"{platform.system()} {platform.machine()}",
        "id": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8],
    }


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- the process of a cell -------------------------------------------------------------------------------------------


def start(path: Path) -> None:
    """Claim a cell, run it, and end this process; see the protocol above."""
    channel, lifeline = os.dup(1), os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # prints of a suite, from Python or C, go to the log and never reach the protocol

    def send(message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the orchestrator has ended; the cell has not failed
            os.write(channel, (json.dumps(message) + "\n").encode())

    try:
        claim = os.open(path.with_name("claim"), os.O_RDWR | os.O_CREAT, 0o666)  # less the umask, as all files
        threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            send({"busy": True})
            os._exit(0)
        if not path.with_name("result.json").is_file():  # else another orchestrator was faster
            for old in ("error.txt", "progress.log"):
                path.with_name(old).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                os.ftruncate(2, 0)  # the log of an earlier try
            os.ftruncate(claim, 0)
            os.write(claim, f"machine {machine()['id']}, process {os.getpid()}, since {utc()}\n".encode())
            run(path, send)
    except BaseException as error:
        send({"error": describe_error(error)[:16384]})
        with contextlib.suppress(OSError):  # a full disk takes no traceback either
            traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # whatever threads the suite left behind


def _watch(lifeline: int) -> None:
    """Once the orchestrator has ended, end this process and those it started."""
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def describe_error(error: BaseException) -> str:
    """The error in a line, with a way on if there is a usual one."""
    if isinstance(error, OSError):
        return describe_os_error(error)
    text = f"{type(error).__name__}: {str(error).strip()}".rstrip(": ")  # only its first line is shown in tables
    if isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text:
        return f"{text.splitlines()[0]}; the cell ran out of memory: try fewer --jobs, or a smaller batch"
    return text


def describe_os_error(error: OSError) -> str:
    """One line with the file's name and the way on."""
    place = f" {error.filename}:" if error.filename else ""
    fixes = {errno.ENOSPC: "free some space", errno.EDQUOT: "free some space", errno.EROFS: "choose a writable folder"}
    fix = fixes.get(error.errno or 0)
    tail = f"; {fix}, then run the same command again" if fix else ""
    return f"{type(error).__name__}:{place} {error.strerror or error}{tail}"


def main(argv: list[str]) -> int:
    if argv == ["describe"]:
        print(json.dumps(encode(describe())))
        return 0
    if len(argv) == 3 and argv[0] == "tasks":
        module, _, name = argv[1].partition(":")
        try:  # task -> {"files": [...], "problem": ...}
            print(json.dumps(encode(getattr(importlib.import_module(module), name)(Path(argv[2])))))
        except Exception as error:
            from quest_core.errors import QuestError  # only here, because it imports PyTorch

            if isinstance(error, QuestError):
                sys.exit(str(error))  # the message is for users, without the class of the error
            raise
        return 0
    if len(argv) == 2 and argv[0] == "cell":
        start(Path(argv[1]))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    # started by path, Python puts this folder first on sys.path, where `run` or `report` would hide other modules
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    sys.exit(main(sys.argv[1:]))
