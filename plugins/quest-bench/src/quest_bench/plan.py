"""From a command line to cells: which suites exist, what was asked for, and the grid of it."""

import contextlib
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError, PluginError, QuestError, one_of
from quest_core.mechanism import count_kv_heads
from quest_suites.contract import Cell

from . import worker
from .data import fingerprint


@dataclass(frozen=True)
class Record:
    """An installed plugin: whether its suites can run, and what they are."""

    name: str  # "timm" of quest-timm
    distribution: str
    version: str
    status: str = "ok"  # or "not installed", "unsupported" (host cannot be used), "broken" (suites cannot be read)
    detail: str = ""  # the cause, unless ok
    fix: str = ""  # the command that fixes it, unless ok
    suites: Mapping[str, Any] = field(default_factory=dict)  # suite -> its declaration


@dataclass(frozen=True)
class Suite:
    """A benchmark suite as its plugin declares it, with the record of that plugin."""

    name: str
    record: Record
    info: Mapping[str, Any]  # the mapping this was read from
    summary: str
    tasks: Sequence[str]
    metric: str
    unit: str = ""
    higher_is_better: bool = True
    paper: Mapping[str, Any] = field(default_factory=dict)
    """Source, table, protocol, difference, spread and values of a paper's table, or empty."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plots: str | None = None  # "module:function": (results.parquet, cells with results) -> titles, captions, figures
    data: str = ""  # the content of a data folder, in words; empty if the suite reads none
    data_required: bool = False
    data_files: Sequence[str] = ()  # patterns below a data folder, one of which has a match; empty: not checked
    also: Sequence[Mapping[str, Any]] = ()  # further metrics of the same cells, with what differs from the first
    tasks_from_data: str | None = None  # "module:function": lists the tasks of a data folder

    @property
    def measured(self) -> str:
        """The metric, with its unit unless that says the same."""
        return self.metric if self.unit in ("", self.metric) else f"{self.metric} ({self.unit})"

    def views(self) -> "Iterator[Suite]":
        """The suite once for each metric that a report shows, its own first."""
        yield self
        for other in self.also:
            changed = {key: other.get(key, getattr(self, key)) for key in ("unit", "higher_is_better")}
            yield replace(self, metric=other["metric"], **changed)

    def changes(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a cell's options that are not at their default; an option that the suite has lost is left out."""
        return {k: v for k, v in options.items() if k in self.options and self.options[k]["default"] != v}

    def paper_value(self, task: str, attention: str) -> Mapping[str, float | None]:
        """The "value" and the "spread" of this metric in the paper's table; empty if it has none."""
        values: Mapping[str, float | None] = (
            self.paper.get("values", {}).get(self.metric, {}).get(task, {}).get(attention, {})
        )
        return values

    @classmethod
    def read(cls, info: Mapping[str, Any], record: Record) -> "Suite":
        """A declaration and its name under "suite"; raises PluginError naming the keys that are missing."""
        missing = [key for key in ("summary", "tasks", "metric") if key not in info]
        if missing:
            raise PluginError(
                f"plugin '{record.name}' ({record.distribution} {record.version}) declares suite '{info['suite']}' "
                f"without {', '.join(missing)}; fix: pip install --upgrade {record.distribution}"
            )
        given = {one.name: info[one.name] for one in fields(cls) if one.name in info}
        given["options"] = {option["name"]: option for option in info.get("options", ())}
        return cls(name=info["suite"], record=record, info=info, **given)


@dataclass(frozen=True)
class Catalogue:
    """Every plugin record and suite at hand, by name."""

    records: Mapping[str, Record]  # where `--python` names an environment, as seen from there
    suites: Mapping[str, Suite]  # also those whose plugin is not ok
    pythons: Mapping[str, str] = field(default_factory=dict)  # plugin -> the interpreter that its cells run with

    def python(self, suite: Suite) -> str:
        return self.pythons.get(suite.record.name, sys.executable)


def catalogue(pythons: Sequence[str] = ()) -> Catalogue:
    """Discover plugins here and in the environments named by `PLUGIN=PATH` or QUEST_PYTHON_<PLUGIN>."""
    chosen = {
        key.removeprefix("QUEST_PYTHON_").lower().replace("_", "-"): (path, key)
        for key, path in os.environ.items()
        if key.startswith("QUEST_PYTHON_")
    }
    for text in pythons:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--python is {text!r}; write PLUGIN=PATH, such as --python tsai=~/envs/tsai/bin/python")
        chosen[name] = (path, "--python")
    records = {one["name"]: Record(**one) for one in worker.describe()}
    paths: dict[str, str] = {}
    for name, (text, source) in chosen.items():
        python = Path(text).expanduser().absolute()  # not resolved: a virtual environment's python is a link
        if not python.is_file() or not os.access(python, os.X_OK):
            raise ConfigError(f"{source}: the python of plugin '{name}' is {text!r}, which is not an executable file")
        try:
            there = {one["name"]: Record(**one) for one in _ask(str(python), "describe")}
        except QuestError as error:
            fix = f"{python} -m pip install quest-core quest-{name}"
            raise PluginError(
                f"{source}: asking {python} for the plugin '{name}' failed: {error}; fix: {fix}"
            ) from None
        if name not in there:
            raise PluginError(
                f"{source}: {text} has no plugin '{name}'; {one_of(name, there)}; "
                f"fix: {text} -m pip install quest-{name}"
            )
        records[name] = there[name]
        paths[name] = str(python)
    suites: dict[str, Suite] = {}
    for record in records.values():
        for name, info in record.suites.items():
            if name in suites:
                raise PluginError(
                    f"suite '{name}' is provided by both {suites[name].record.distribution} and {record.distribution}; "
                    f"fix: pip uninstall {record.distribution}"
                )
            suites[name] = Suite.read({"suite": name, **info}, record)
    return Catalogue(records, dict(sorted(suites.items())), paths)


def _ask(python: str, *arguments: str) -> Any:
    """The answer of a plugin's own python to `worker.py`; raises QuestError with the last line of its errors."""
    words = [python, worker.__file__, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise QuestError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def suite_of(available: Catalogue, selector: str) -> Suite:
    """Return the suite that "ts/uea" or "ts/uea/JapaneseVowels" names; raises ConfigError with the nearest spelling."""
    suites = available.suites
    name = next((n for n in suites if selector == n or selector.startswith(n + "/")), None)
    if name is not None:
        return suites[name]
    broken = [r for r in available.records.values() if r.status != "ok" and not r.suites]
    hint = "".join(f"; plugin '{r.name}' is {r.status}: {r.detail}; fix: {r.fix}" for r in broken)
    if importlib.util.find_spec("quest_research") is None:
        hint += "; suites of the published studies come with a clone: pip install -e research"
    without_task = "/".join(selector.split("/")[:2])
    raise ConfigError(f"no suite '{selector}'; {one_of(without_task, suites)}{hint}")


def select(available: Catalogue, selector: str, data: Path | None = None) -> tuple[Suite, dict[str, str | None]]:
    """'ts/uea' -> (the suite, all its tasks); 'ts/uea/JapaneseVowels,BasicMotions' -> (the suite, those tasks).

    With a data folder, the tasks of a suite that declares ``tasks_from_data`` are the ones that the folder holds.

    Returns:
        The suite, and its tasks with the fingerprint of their data; None without `data`.
    """
    suite = suite_of(available, selector)
    name = suite.name
    asked = list(dict.fromkeys(filter(None, selector[len(name) + 1 :].split(","))))
    from_data = suite.tasks_from_data
    if not (from_data and data):
        hint = "; others are read from --data DIR" if from_data else ""
        unknown = [
            f"suite '{name}' has no task '{t}'; {one_of(t, suite.tasks)}{hint}" for t in asked if t not in suite.tasks
        ]
        if unknown:
            raise ConfigError("; ".join(unknown))
    record = suite.record
    if record.status != "ok":
        raise PluginError(
            f"suite '{name}': plugin '{record.name}' is {record.status}: {record.detail}; "
            f"fix: {record.fix}, or name its environment with --python {record.name}=PATH"
        )
    if data is None:
        return suite, dict.fromkeys(asked or suite.tasks)
    if not from_data:
        return suite, dict.fromkeys(asked or suite.tasks, fingerprint(data))
    return _tasks_of(suite, from_data, available.python(suite), asked, data)


def _tasks_of(
    suite: Suite, function: str, python: str, asked: Sequence[str], data: Path
) -> tuple[Suite, dict[str, str | None]]:
    """The chosen tasks of a data folder with their fingerprints; invalid ones are refused, all in one message.

    A task may name its own metric and direction (a config of a framework). All chosen tasks must agree in them.
    """
    try:
        found: dict[str, dict[str, Any]] = _ask(python, "tasks", function, str(data))
    except QuestError as error:
        raise ConfigError(f"suite '{suite.name}', --data {data}: {error}") from None
    if not found:
        raise ConfigError(f"--data: {data} holds no task of suite '{suite.name}', which expects there: {suite.data}")
    wrong = [f"--data: {data} has no task '{task}'; {one_of(task, found)}" for task in asked if task not in found]
    tasks = [task for task in asked or sorted(found) if task in found]
    wrong += [f"--data: task '{task}': {found[task]['problem']}" for task in tasks if found[task].get("problem")]
    if wrong:
        rest = [task for task in sorted(found) if not found[task].get("problem")]
        valid = f"; valid tasks there: {', '.join(rest) or 'none'}"
        raise ConfigError("; ".join(wrong) + valid)
    keys = ("metric", "higher_is_better", "selection")
    own = {task: {key: found[task][key] for key in keys if key in found[task]} for task in tasks}
    own = {task: facts for task, facts in own.items() if facts}
    if len({tuple(facts.items()) for facts in own.values()}) > 1:
        raise ConfigError(f"the tasks have different metrics, so run them one by one: {own}")
    if own:
        suite = Suite.read({**suite.info, **next(iter(own.values()))}, suite.record)
    return suite, {task: fingerprint(data, map(Path, found[task]["files"])) for task in tasks}


_ITEM = re.compile(r"""\s*("[^"]*"|'[^']*'|(?:\([^)]*\)|\[[^]]*\]|\{[^}]*\}|[^,])+)""")


def split_list(text: str) -> list[str]:
    """Split at commas that stand outside brackets and quotes; quotes around a whole item are dropped.

    >>> split_list('standard,quest+gqa(kv_heads=4, groups=2),"a,b"')
    ['standard', 'quest+gqa(kv_heads=4, groups=2)', 'a,b']
    """
    items = (match[1].strip() for match in _ITEM.finditer(text))
    return [
        item[1:-1] if len(item) >= 2 and item[0] == item[-1] and item[0] in "\"'" else item for item in items if item
    ]


def parse_attentions(text: str) -> list[str]:
    """The canonical texts of a comma-separated list of attentions; all that is wrong comes in one ConfigError."""
    chosen: list[str] = []
    problems: list[str] = []
    for item in split_list(text):
        try:
            chosen.append(str(AttentionConfig.parse(item)))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("--attention: " + "; ".join(dict.fromkeys(problems)))
    if not chosen:
        raise ConfigError("--attention is empty; write for example --attention standard,quest")
    return list(dict.fromkeys(chosen))


def parse_seeds(text: str) -> list[int]:
    """'0-4,7' -> [0, 1, 2, 3, 4, 7]; raises ConfigError for anything else."""
    seeds: list[int] = []
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigError(
                f"--seeds is {text!r}: {item!r} is neither a number nor a rising range; write 0-4 or 0,3,7"
            )
        seeds.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not seeds:
        raise ConfigError("--seeds is empty; write 0-4 or 0,3,7")
    return list(dict.fromkeys(seeds))


def parse_settings(suite: Suite, settings: Sequence[str]) -> dict[str, list[Any]]:
    """Read `--set key=value[,value...]`: return every option of a suite with the values to run, defaults filled in."""
    values = {name: [option["default"]] for name, option in suite.options.items()}
    problems: list[str] = []
    given: set[str] = set()
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals:
            problems.append(f"--set {setting!r} is not key=value")
        elif key not in suite.options:
            problems.append(f"suite '{suite.name}' has no option '{key}'; {one_of(key, suite.options)}")
        elif key in given:
            problems.append(f"--set {key} is given twice; write several values as {key}=a,b")
        else:
            given.add(key)
            try:
                read = [_read_value(suite, key, item) for item in split_list(text) or [""]]
                default = values[key][0]  # 0 and 0.0 are one value, and one cell
                values[key] = list(dict.fromkeys(default if value == default else value for value in read))
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(problems))
    return values


def _read_value(suite: Suite, key: str, text: str) -> Any:
    option = suite.options[key]
    kind = option["kind"] if isinstance(option["kind"], str) else option["kind"].__name__
    minimum, choices = option.get("minimum"), option.get("choices") or ()
    if option.get("nullable") and text.lower() in ("null", "none"):
        return None
    value: Any = None
    if kind == "bool":
        value = {"true": True, "false": False}.get(text.lower())
    elif kind == "str":
        value = text
    else:
        with contextlib.suppress(ValueError):
            value = int(text) if kind == "int" else float(text)
        value = value if value is None or math.isfinite(value) else None
    if value is not None and (minimum is None or value >= minimum) and (not choices or value in choices):
        return value
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}[kind]
    words += f" of at least {minimum:g}" if minimum is not None else ""
    tail = one_of(text, map(str, choices)) if choices else f"it takes {words}"
    tail += " or null" if option.get("nullable") else ""
    raise ConfigError(f"suite '{suite.name}': option '{key}' is {text!r}; {tail}")


@dataclass(frozen=True)
class Plan:
    """A grid of cells of one suite."""

    suite: Suite
    tasks: Mapping[str, str | None]  # with the fingerprint of their data; None without `data`
    attentions: Sequence[str]
    seeds: Sequence[int]
    settings: Mapping[str, Sequence[Any]]  # option -> the values to run; several make a sweep
    smoke: bool = False
    data: Path | None = None

    def cells(self, out: Path) -> list[Cell]:
        """Every cell with its folder under `out`; all attentions of a seed come before the next seed."""
        grid = itertools.product(self.seeds, self.tasks, itertools.product(*self.settings.values()), self.attentions)
        found = []
        for seed, task, values, attention in grid:
            options = dict(zip(self.settings, values, strict=True))
            cell = Cell(self.suite.name, task, attention, seed, self.smoke, self.data, options, out, self.tasks[task])
            found.append(replace(cell, workdir=out / "cells" / _folder_name(cell) / "work"))
        return found


def describe_cell(cell: Cell) -> dict[str, Any]:
    """What determines a cell's numbers, as plain JSON types. Data counts by its content, not by its place."""
    return {
        "suite": cell.suite,
        "task": cell.task,
        "attention": cell.attention,
        "seed": cell.seed,
        "smoke": cell.smoke,
        "data": cell.data_fingerprint,
        "options": dict(cell.options),
    }


def cell_id(cell: Cell) -> str:
    """A hash of everything that determines the cell, so that the same command finds the same folders."""
    text = json.dumps(worker.encode(describe_cell(cell)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _folder_name(cell: Cell) -> str:
    readable = re.sub(r"[^\w.+=-]+", "_", f"{cell.task}-{cell.attention}-seed{cell.seed}")
    readable = readable[:80].encode()[:200].decode(errors="ignore")  # a file name has at most 255 bytes
    return f"{readable}-{cell_id(cell)[:8]}"


def check_data(suite: Suite, data: str | None) -> Path | None:
    """The data folder, made absolute; raises ConfigError if it is missing, not read, or needed and not given."""
    if data is None:
        if suite.data_required:
            raise ConfigError(f"suite '{suite.name}' needs --data DIR: {suite.data}")
        return None
    if not suite.data:
        raise ConfigError(f"--data is {data!r}, and suite '{suite.name}' reads no data; leave it out")
    path = Path(data).expanduser().resolve()
    wanted = f"suite '{suite.name}' expects there: {suite.data}"
    if not path.exists():
        raise ConfigError(f"--data is {data!r}, which does not exist; {wanted}")
    if suite.data_files and not any(next(path.glob(pattern), None) for pattern in suite.data_files):
        raise ConfigError(f"--data is {data!r}, which has no {' and no '.join(suite.data_files)}; {wanted}")
    return path


def check_heads(suite: Suite, attentions: Sequence[str], settings: Mapping[str, Sequence[Any]]) -> None:
    """Raise ConfigError for kv_heads that do not divide the heads of the suite's model, if the suite declares them."""
    for heads in filter(None, settings.get("heads", [suite.info.get("heads")])):
        for attention in attentions:
            try:
                count_kv_heads(attention, heads)
            except ConfigError as error:
                raise ConfigError(f"--attention {attention} in suite '{suite.name}': {error}") from None


def reproduce(cell: Mapping[str, Any], seeds: Iterable[int], suite: Suite) -> str:
    """The command that runs one row of a report again, of what :func:`describe_cell` gives."""
    words = ["quest", "bench", "run", f"{cell['suite']}/{cell['task']}", "--attention", cell["attention"]]
    words += ["--seeds", write_seeds(seeds)]
    words += ["--smoke"] if cell["smoke"] else []
    words += ["--data", cell.get("data_path") or "FOLDER"] if cell["data"] else []
    for key, value in suite.changes(cell["options"]).items():
        words += ["--set", f"{key}={write_value(value)}"]
    return portable(words)


def write_seeds(seeds: Iterable[int]) -> str:
    """[0, 1, 2, 3, 7] -> '0-3,7'; what :func:`parse_seeds` reads."""
    ordered = sorted(set(seeds))
    runs: list[list[int]] = []
    for seed in ordered:
        if runs and seed == runs[-1][1] + 1:
            runs[-1][1] = seed
        else:
            runs.append([seed, seed])
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)


def write_value(value: Any) -> str:
    """An option's value as `--set` reads it."""
    if isinstance(value, str):
        return f'"{value}"' if split_list(value) != [value] else value
    return json.dumps(value)


def portable(command: Sequence[str]) -> str:
    """The words of a command in one line, without the user's home folder in it, because reports are shared."""
    home = re.escape(str(Path.home()))
    return shlex.join(re.sub(rf"(^|=){home}(?=/|$)", r"\1~", word) for word in command)
