"""The folder of a run: one folder a cell, whole files only, and the commands that ran into it.

::

    DIR/run.json                         every command that ran into DIR, with its machine and commit
    DIR/cells/NAME-HASH/cell.json        what determines the cell
                        result.json      what it found; exists only when it finished
                        error.txt        why it failed
                        log.txt          what it printed
                        progress.log     one line a step of its progress
                        claim            locked while the cell runs
                        origin.json      the commits and versions that began it
                        work/            the suite's own files
    DIR/results.parquet                  written by `report`: all cells in one table, which `report` can read again
"""

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quest_core
from quest_core.errors import ConfigError
from quest_suites.contract import Cell

from .plan import Plan, cell_id, describe_cell, write_value
from .worker import decode, encode, git_commit, whole, write_json, write_text

# The columns of results.parquet, next to those with a prefix; see `rows`.
SPEC_COLUMNS = ("suite", "task", "attention", "seed", "smoke", "data")
RESULT_COLUMNS = ("seconds", "peak_rss_mib", "device", "threads", "finished")
RESULT_KEYS = ("metrics", "series", "device")  # that every result.json has
JSON_COLUMNS = ("details", "versions", "commits", "machine")


@dataclass(frozen=True)
class Stored:
    """One cell as it lies on disk."""

    folder: Path
    spec: Mapping[str, Any]  # of cell.json: what determines the cell; see `quest_bench.plan.describe_cell`
    result: Mapping[str, Any] | None  # of result.json
    error: str | None  # of error.txt

    @property
    def state(self) -> str:
        """ "done", "failed", or "unfinished" (interrupted, or running now)."""
        return "done" if self.result is not None else "failed" if self.error is not None else "unfinished"


def read_json(path: Path, fix: str, *keys: str) -> Any:
    """Read a mapping with these keys from a file; raises ConfigError with its name if that is not possible."""
    try:
        found = decode(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is torn ({error}); {fix}") from None
    if lacks := [key for key in keys if not isinstance(found, Mapping) or key not in found]:
        raise ConfigError(f"{path} is not a file of quest-bench, because it lacks {', '.join(lacks)}; {fix}")
    return found


def prepare(cell: Cell, metric: str) -> Path:
    """Make a cell's folder ready for a worker and return the path of its cell.json.

    `metric` is the one that the suite must return; the worker refuses a result without it.
    """
    folder = cell.workdir.parent
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cell.json"
    place = str(cell.data) if cell.data else None
    write_json(path, {"id": cell_id(cell), "metric": metric, **describe_cell(cell), "data_path": place})
    return path


def load(folder: Path) -> Stored:
    """Read one cell's folder. A torn or foreign result counts as a failure, with its file's name."""
    again = "delete it, and the same `quest bench run` command makes it again"
    spec = read_json(folder / "cell.json", again, *SPEC_COLUMNS, "options")
    error_path, result_path = folder / "error.txt", folder / "result.json"
    error = error_path.read_text(encoding="utf-8", errors="replace") if error_path.is_file() else None
    if not result_path.is_file():
        return Stored(folder, spec, None, error)
    try:
        return Stored(folder, spec, read_json(result_path, again, *RESULT_KEYS), error)
    except ConfigError as why:
        return Stored(folder, spec, None, str(why).removeprefix(f"{folder}/"))  # `causes` leaves out paths


def load_all(out: Path) -> list[Stored]:
    """Read every cell under a run's folder, in a stable order; without cells/, from its results.parquet."""
    return _load_cells(out) or _load_table(out)


def _load_cells(out: Path) -> list[Stored]:
    return [load(path.parent) for path in sorted(out.glob("cells/*/cell.json"))]


def rows(cells: Sequence[Stored]) -> list[dict[str, Any]]:
    """Return one row a cell: suite, task, attention, seed, state, error, ..., `option/*`, `metric/*` and `series/*`.

    `options` and JSON_COLUMNS hold JSON text. The columns `option/*` hold each option as text, because suites may use
    one name for different types. A row lacks what its cell lacks.
    """
    found = []
    for one in cells:
        row = {key: one.spec[key] for key in SPEC_COLUMNS}
        row |= {"state": one.state, "error": one.error, "folder": one.folder.name}
        row["options"] = json.dumps(encode(one.spec["options"]))
        row |= {f"option/{key}": write_value(value) for key, value in one.spec["options"].items()}
        if one.result is not None:
            row |= {key: one.result.get(key) for key in RESULT_COLUMNS}
            row |= {key: json.dumps(encode(one.result.get(key))) for key in JSON_COLUMNS}
            row |= {f"metric/{key}": float(value) for key, value in one.result["metrics"].items()}
            row |= {f"series/{key}": list(map(float, values)) for key, values in one.result["series"].items()}
        found.append(row)
    return found


def write_table(cells: Sequence[Stored], path: Path) -> None:
    """Write all cells into one parquet file. A value that a cell lacks is null, which differs from NaN."""
    import pyarrow
    import pyarrow.parquet

    table = rows(cells)
    names = dict.fromkeys(name for row in table for name in row)
    with whole(path) as neighbor:
        columns = {name: [row.get(name) for row in table] for name in names}
        pyarrow.parquet.write_table(pyarrow.table(columns), neighbor)


def _load_table(out: Path) -> list[Stored]:
    path = out / "results.parquet"
    if not path.is_file():
        return []
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as torn:
        raise ConfigError(f"{path} cannot be read ({torn}); copy it again from where it came") from None
    found = []
    for row in table:
        spec = {key: row[key] for key in SPEC_COLUMNS} | {"options": decode(row["options"])}
        result: dict[str, Any] | None = None
        if row["state"] == "done":
            result = {key: row.get(key) for key in RESULT_COLUMNS}
            result |= {key: decode(row.get(key) or "{}") for key in JSON_COLUMNS}
            for name, prefix in (("metrics", "metric/"), ("series", "series/")):
                own = {key: value for key, value in row.items() if key.startswith(prefix) and value is not None}
                result[name] = {key.removeprefix(prefix): value for key, value in own.items()}
        found.append(Stored(out / "cells" / row["folder"], spec, result, row["error"]))
    return found


def state(cell: Cell) -> str:
    """ "done", "failed" or "unfinished", as `Stored.state` without reading the result."""
    folder = cell.workdir.parent
    if (folder / "result.json").is_file() and (folder / "cell.json").is_file():
        return "done"
    return "failed" if (folder / "error.txt").is_file() else "unfinished"


def check_conflicts(out: Path, plan: Plan) -> None:
    """Refuse to mix settings or data in one folder by accident.

    An option's values must contain, or be contained in, those that the folder has for this suite, so that the same
    command resumes, a wider sweep extends, and a changed value is noticed. A task's data must have the same content.
    """
    ended = [cell.spec for cell in _load_cells(out) if cell.state != "unfinished"]
    earlier = [spec for spec in ended if spec["suite"] == plan.suite.name]
    if not earlier:
        return
    for spec in earlier:
        now = plan.tasks.get(spec["task"], spec["data"])
        if now != spec["data"]:
            place = plan.data or "the suite's own data"
            raise ConfigError(
                f"{out} holds cells of task '{spec['task']}' with data of content {spec['data']} "
                f"({spec.get('data_path')}), and {place} has content {now} now; choose another folder with --out"
            )
    pairs: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {"--smoke": ([s["smoke"] for s in earlier], [plan.smoke])}
    for key, values in plan.settings.items():
        pairs[f"--set {key}"] = ([s["options"].get(key) for s in earlier], values)
    for key, (had, asked) in pairs.items():
        before, wanted = ({json.dumps(encode(v), sort_keys=True) for v in values} for values in (had, asked))
        if not (before <= wanted or wanted <= before):
            sweep = f", or sweep: {key}={','.join(sorted(before | wanted))}" if key.startswith("--set") else ""
            raise ConfigError(
                f"{out} was run with {key} {' and '.join(sorted(before))}, and this command says "
                f"{' and '.join(sorted(wanted))}; choose another folder with --out{sweep}"
            )


def read_run(out: Path) -> list[dict[str, Any]]:
    """Return the runs that run.json records, oldest first."""
    path = out / "run.json"
    fix = "rename it; it only records the commands, and the next `quest bench run` starts a new one"
    runs: list[dict[str, Any]] = read_json(path, fix, "runs")["runs"] if path.is_file() else []
    return runs


def write_run(out: Path, run: Mapping[str, Any]) -> None:
    """Record a command in run.json, in the place of an earlier record with the same `id`."""
    with lock(out):
        runs = read_run(out)
        places = [place for place, other in enumerate(runs) if other.get("id") == run["id"]]
        if places:
            runs[places[0]] = dict(run)
        else:
            runs.append(dict(run))
        write_json(out / "run.json", {"runs": runs})


def fail(folder: Path, reason: str) -> None:
    """Write error.txt."""
    write_text(folder / "error.txt", reason.strip() + "\n")


def last_line(folder: Path, reason: str) -> str:
    """Return the last line of a failed cell's log; empty if it only repeats the reason."""
    path = folder / "log.txt"
    text = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    return "" if not text or text.endswith(reason.strip()) else text.splitlines()[-1].strip()


def causes(cells: Iterable[Stored]) -> list[tuple[str, list[Stored]]]:
    """Failed cells by the first line of their reason without numbers and paths, the most frequent first."""
    found: dict[str, list[Stored]] = {}
    for cell in cells:
        if cell.state == "failed":
            line = ((cell.error or "").strip() or "no reason recorded").splitlines()[0]
            cause = re.sub(r"(/[^\s:'\"]+)|\b0x[0-9a-f]+\b|\b\d+(\.\d+)?\b", "…", line)
            found.setdefault(cause, []).append(cell)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def holder(folder: Path) -> str:
    """Return who runs a cell now; empty if nothing runs it."""
    with contextlib.suppress(FileNotFoundError), (folder / "claim").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "just begun"
    return ""


@contextlib.contextmanager
def lock(out: Path) -> Iterator[None]:
    """Hold the lock of a folder's run.json, which several orchestrators may share."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def merge(sources: Sequence[Path], out: Path) -> tuple[int, int]:
    """Copy the cells and commands of run folders into `out`.

    A finished cell replaces a failed one, and that one an unfinished one. The same finished cell may come from several
    folders if the suite's own metric is equal; the first one is kept. Checkpoints of unfinished cells stay behind.

    Returns:
        The number of copied cells and of cells that `out` had already.
    """
    chosen = _choose_cells(sources, out)
    copied = 0
    for name, cell in chosen.items():
        target = out / "cells" / name
        if cell.folder == target:
            continue
        neighbor = out / f"merge.{os.getpid()}.tmp"  # not in cells/, where a kill would leave half a cell
        shutil.rmtree(neighbor, ignore_errors=True)
        shutil.copytree(cell.folder, neighbor, ignore=shutil.ignore_patterns("work", "claim", "*.tmp"))
        target.parent.mkdir(exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        neighbor.rename(target)
        copied += 1
    for source in sources:
        for run in read_run(source):
            write_run(out, {"id": f"{run['command']}|{run['started']}", **run})
    return copied, len(chosen) - copied


def _choose_cells(sources: Sequence[Path], out: Path) -> dict[str, Stored]:
    """Return the cell to keep for each name of a folder; raises ConfigError for cells that do not belong together."""
    rank = {"done": 2, "failed": 1, "unfinished": 0}
    chosen: dict[str, Stored] = {}
    first_by_smoke: dict[bool, Path] = {}
    first_by_task: dict[tuple[str, str], Stored] = {}
    for source in dict.fromkeys([*([out] if out.is_dir() else []), *sources]):
        cells = _load_cells(source)
        if not cells and source != out:
            raise ConfigError(f"{source} holds no cells; name folders of `quest bench run --out`")
        for cell in cells:
            first_by_smoke.setdefault(bool(cell.spec["smoke"]), cell.folder)
            if len(first_by_smoke) == 2:
                raise ConfigError(
                    f"{first_by_smoke[True]} is a smoke run, whose numbers mean nothing, and {first_by_smoke[False]} "
                    "is not; merge them into different folders"
                )
            task = cell.spec["task"]
            first = first_by_task.setdefault((cell.spec["suite"], task), cell)
            if first.spec["data"] != cell.spec["data"]:
                raise ConfigError(f"{first.folder} and {cell.folder} ran task '{task}' on data of different content")
            other = chosen.get(cell.folder.name)
            if other is not None and other.result and cell.result and not _equal(other, cell):
                raise ConfigError(
                    f"{other.folder} and {cell.folder} are the same cell with different results; delete the wrong one"
                )
            if other is None or rank[cell.state] > rank[other.state]:
                chosen[cell.folder.name] = cell
    return chosen


def _equal(a: Stored, b: Stored) -> bool:
    """Whether two results agree in the suite's own metric; times differ between machines."""
    metric = a.spec["metric"]
    mine, other = ((one.result or {})["metrics"][metric] for one in (a, b))
    return bool(mine == other or (math.isnan(mine) and math.isnan(other)))


def commit() -> str | None:
    """The commit of the checkout that quest_core is imported from; see :func:`quest_bench.worker.git_commit`."""
    return git_commit(Path(quest_core.__file__))
