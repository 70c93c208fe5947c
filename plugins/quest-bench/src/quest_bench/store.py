"""The folder of a run: one folder a cell, whole files only, and what the folder was run with.

::

    DIR/run.json                         every command that ran into DIR, with versions and the machine
    DIR/cells/NAME-HASH/cell.json        what determines the cell
                        result.json      what it found; exists only when it finished
                        error.txt        why it failed
                        log.txt          what it printed
                        work/            the suite's own files
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import quest_core
from quest_core.benchmarks import Cell
from quest_core.errors import ConfigError

from .plan import Plan, cell_id, describe_cell
from .worker import decode, encode, write_json, write_text


@dataclass(frozen=True)
class Stored:
    """One cell as it lies on disk.

    Attributes:
        folder: the cell's folder.
        cell: what :func:`quest_bench.plan.describe_cell` wrote.
        result: the decoded result.json, or None.
        error: the text of error.txt, or None.
    """

    folder: Path
    cell: Mapping[str, Any]
    result: Mapping[str, Any] | None
    error: str | None

    @property
    def state(self) -> str:
        """ "done", "failed", or "unfinished" (interrupted, or running now)."""
        return "done" if self.result is not None else "failed" if self.error is not None else "unfinished"


def prepare(cell: Cell, metric: str) -> Path:
    """Make a cell's folder ready for a worker, without the traces of an earlier try; the path of its cell.json.

    `metric` is the one the suite must return; the worker refuses a result without it.
    """
    folder = cell.workdir.parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "error.txt").unlink(missing_ok=True)
    path = folder / "cell.json"
    write_json(path, {"id": cell_id(cell), "metric": metric, **describe_cell(cell)})
    return path


def load(folder: Path) -> Stored:
    """One cell's folder."""

    def text(name: str) -> str | None:
        path = folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    result = text("result.json")
    return Stored(
        folder,
        decode((folder / "cell.json").read_text(encoding="utf-8")),
        decode(result) if result is not None else None,
        text("error.txt"),
    )


def load_all(out: Path) -> list[Stored]:
    """Every cell under a run's folder, in a stable order; empty when there is none."""
    return [load(path.parent) for path in sorted(out.glob("cells/*/cell.json"))]


def state(cell: Cell) -> str:
    """ "done", "failed" or "new", without reading the result."""
    folder = cell.workdir.parent
    if (folder / "result.json").is_file():
        return "done"
    return "failed" if (folder / "error.txt").is_file() else "new"


def check_conflicts(out: Path, plan: Plan) -> None:
    """Refuse to mix settings in one folder by accident.

    An option's values must contain, or be contained in, those the folder has for this suite: so that the same
    command resumes, a wider sweep extends, and a changed value is noticed.

    Raises:
        ConfigError: naming the key, both values and what to do.
    """
    earlier = [s.cell for s in load_all(out) if s.state != "unfinished" and s.cell["suite"] == plan.suite.name]
    if not earlier:
        return
    pairs: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
        "--smoke": ([c["smoke"] for c in earlier], [plan.smoke]),
        "--data": ([c["data"] for c in earlier], [str(plan.data) if plan.data else None]),
    }
    for key, values in plan.settings.items():
        pairs[f"--set {key}"] = ([c["options"].get(key) for c in earlier], values)
    for key, (had, asked) in pairs.items():
        before, now = ({json.dumps(encode(v), sort_keys=True) for v in values} for values in (had, asked))
        if not (before <= now or now <= before):
            sweep = f", or sweep: {key}={','.join(sorted(before | now))}" if key.startswith("--set") else ""
            raise ConfigError(
                f"{out} was run with {key} {' and '.join(sorted(before))}, and this command says "
                f"{' and '.join(sorted(now))}; choose another folder with --out{sweep}"
            )


def read_run(out: Path) -> list[dict[str, Any]]:
    """The runs that run.json records, oldest first."""
    path = out / "run.json"
    runs: list[dict[str, Any]] = decode(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []
    return runs


def write_run(out: Path, earlier: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> None:
    """Record a command in run.json after those that were there before it."""
    write_json(out / "run.json", {"runs": [*earlier, run]})


def fail(folder: Path, reason: str) -> None:
    """Write error.txt."""
    write_text(folder / "error.txt", reason.strip() + "\n")


def last_line(folder: Path, reason: str) -> str:
    """The last line of a failed cell's log; empty when it only repeats the reason."""
    path = folder / "log.txt"
    text = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    return "" if not text or text.endswith(reason.strip()) else text.splitlines()[-1].strip()


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep a second `quest bench run` out of the same folder while this one works.

    The lock belongs to the process and vanishes with it, however it ends. Without fcntl (Windows) it does nothing.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another `quest bench run` is writing to {out}; wait for it, or choose another folder with --out"
            ) from None
        yield


def versions(plan: Plan) -> dict[str, str]:
    """Versions in the orchestrator's environment, and of the plugin and host in the one the cells run in."""
    found = {"python": platform.python_version()}
    for distribution in ("torch", "quest-core", "quest-bench"):
        with contextlib.suppress(PackageNotFoundError):
            found[distribution] = version(distribution)
    record = plan.suite.record
    found[record.distribution] = record.version
    if record.host_version:
        found[record.host_name or str(record.info.get("host", record.name))] = record.host_version
    return found


def machine() -> dict[str, Any]:
    """The machine in general words: processor, cores, memory and accelerator; no names of hosts or users."""
    import torch

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    memory = None
    with contextlib.suppress(ValueError, OSError, AttributeError):  # not on every system
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "cpu": cpu,
        "cores": cores(),
        "memory_gib": memory,
        "device": device,
        "system": f"{platform.system()} {platform.machine()}",
    }


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def git_commit() -> str | None:
    """The commit of the quest-core checkout that is imported, with "+changes" when its tree is not clean."""
    here = str(Path(quest_core.__file__).parent)

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # an installed package may lie inside some other repository's folder: only a tracked file is that repository's
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}+changes" if commit and git("status", "--porcelain", "--", ".") else commit
