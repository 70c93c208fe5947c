"""`quest doctor`: every package that adds something to QUEST, whether it works, and how to mend it."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import platform
import re
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from .. import __version__
from ..errors import one_of
from ..hosts.discovery import API_VERSION, Record, discover, duplicate
from ..packages import Entry, cause, entries, facts
from .child import Answer, Job, ask
from .mechanisms import jobs, judge

GROUPS = ("quest.attention", "quest.adapters", "quest.adapter_info", "quest.benchmarks", "quest.commands")
TITLES = {"plugin": "Plugins", "mechanisms": "Packages with mechanisms", "command": "Commands", "other": "Entry points"}
REMEDIES = {
    "torchvision::nms": "install PyTorch and torchvision from one place: "
    "pip install --force-reinstall torch torchvision --index-url https://download.pytorch.org/whl/cpu",
}
"""A part of an error of any host -> what ends it, where a reinstall does not; plugins add theirs in their INFO."""


def doctor(commands: Collection[str], *, as_json: bool, limit: float) -> int:
    """Import everything that other packages add, in a child process, and print what works.

    Args:
        commands: the names of quest-core's own commands.
        as_json: print one JSON object, in which "ok" says whether all is well.
        limit: seconds that one import may take.

    Returns:
        0 if all of it works, else 1.
    """
    records = _examine(commands, limit)
    well = all(record.status == "ok" for record in records)
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["CPU"]
    api = ".".join(map(str, API_VERSION))
    if as_json:
        shown = [{key: value for key, value in vars(record).items() if key != "info"} for record in records]
        about = {"quest_core": __version__, "api": api, "python": platform.python_version(), "torch": torch.__version__}
        print(json.dumps({"ok": well, **about, "devices": devices, "packages": shown}, indent=2))
        return 0 if well else 1
    print(
        f"quest-core {__version__} (plugin API {api}), Python {platform.python_version()}, torch {torch.__version__}, "
        f"{', '.join(devices)}"
    )
    for kind, title in TITLES.items():
        chosen = [record for record in records if record.kind == kind]
        if chosen:
            print(title)
        for record in chosen:
            host = f" with {record.host_name} {record.host_version}" if record.host_version else ""
            said = record.detail if record.status != "ok" else ""
            print(
                f"  {record.name:<12} {record.distribution} {record.version}: {record.status}"
                + (host if record.status == "ok" else "")
                + (f" - {said}" if said else "")
            )
            if record.fix:
                print(f"    fix: {record.fix}")
    if not any(record.kind == "plugin" for record in records):
        print("no plugins installed; plain PyTorch needs none, a framework its own: pip install 'quest-tsai[host]'")
    return 0 if well else 1


def _examine(commands: Collection[str], limit: float) -> list[Record]:
    """Return a record of everything that other packages add, imported in one child process as long as that lives."""
    plugins, mechanisms, scripts = discover(), entries("quest.attention"), entries("quest.commands")
    asked = [record for record in plugins if record.status == "ok" and "module" in record.info]
    work = [Job("plugin", record.name, record.distribution) for record in asked]
    work += jobs(mechanisms)
    work += [Job("command", entry.name, entry.distribution) for entry in scripts]
    answers = ask(work, limit)
    judged = {record.name: _judge(record, next(answers)) for record in asked}
    records = [judged.get(record.name, record) for record in plugins]
    described = {(entry.name, entry.distribution) for entry in entries("quest.adapter_info")}
    for entry in entries("quest.adapters"):
        if (entry.name, entry.distribution) not in described:
            problem = "its adapter is never used, because it has nothing under the entry-point group quest.adapter_info"
            records.append(_record(entry, "plugin", problem))
    records += [
        _record(entry, "mechanisms", answer.problem)
        for entry, answer in judge(mechanisms, itertools.islice(answers, len(mechanisms)))
    ]
    owners = dict.fromkeys(commands, "quest-core")
    for entry, answer in zip(scripts, answers, strict=True):
        owner = owners.setdefault(entry.name, entry.owner)
        same = owner == entry.owner
        records.append(_record(entry, "command", answer.problem) if same else duplicate(entry, owner, "command"))
    return [*records, *_unread()]


def _unread() -> Iterator[Record]:
    """Give a record of what `entries` passes over: misspelt groups, and entry points that cannot be read."""
    groups = set()
    for distribution in importlib.metadata.distributions():
        try:
            groups |= {point.group for point in distribution.entry_points if point.group.startswith("quest.")}
        except Exception as error:
            problem = f"its entry_points.txt cannot be read: {cause(error.with_traceback(None))}"
            about = {key: value for key, value in facts(distribution).items() if key != "problem"}
            yield _record(Entry("", "entry points", "", **about), "other", problem)
    for group in sorted(groups - set(GROUPS)):
        for entry in entries(group):
            yield _record(entry, "other", f"quest-core reads no entry-point group '{group}'; {one_of(group, GROUPS)}")


def _record(entry: Entry, kind: str, problem: str) -> Record:
    status, fix = ("broken", entry.fix) if problem else ("ok", "")
    return Record(entry.name, entry.distribution, entry.version, status, problem, fix, kind=kind)


def _judge(record: Record, answer: Answer) -> Record:
    if not answer.problem:
        return record
    remedies = record.info.get("remedies", {})
    if not isinstance(remedies, dict):
        problem = f"'remedies' of its info is {remedies!r:.60}, not a mapping"
        return replace(record, status="broken", detail=problem, fix=_reinstall(record))
    known = next((str(fix) for part, fix in (remedies | REMEDIES).items() if str(part) in answer.problem), "")
    if answer.at == "host":
        name = record.host_name or str(record.info.get("host", record.name))
        imported = re.match(r"import ([\w.]+):", answer.problem)
        return replace(
            record,
            status="broken host",
            detail=f"{record.distribution} is in order, but its host {name} {record.host_version or ''}".rstrip()
            + f" cannot be imported: {answer.problem}",
            fix=known
            or f"python -c 'import {imported[1] if imported else record.info['module']}' shows the whole error; "
            + (f"pip install --force-reinstall {record.host_name}" if record.host_name else "mend the checkout"),
        )
    return replace(
        record,
        status="broken",
        detail=f"its adapter cannot be used: {answer.problem}",
        fix=known or _reinstall(record),
    )


def _reinstall(record: Record) -> str:
    return next(entry.fix for entry in entries("quest.adapter_info") if entry.distribution == record.distribution)
