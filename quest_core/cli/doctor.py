"""`quest doctor`: every package that adds something to QUEST, whether it works, and how to mend it."""

from __future__ import annotations

import json
import platform
from collections.abc import Collection
from dataclasses import replace

import torch

from .. import __version__
from ..hosts.discovery import API_VERSION, Record, discover, duplicate
from ..packages import entries, remedy
from .child import Answer, Job, ask
from .mechanisms import added

TITLES = {"plugin": "Plugins", "mechanisms": "Packages with mechanisms", "command": "Commands"}


def doctor(commands: Collection[str], *, as_json: bool, limit: float) -> int:
    """Import everything that other packages add, in a child process, and print what works.

    Args:
        commands: the names of quest-core's own commands.
        as_json: print one JSON object, in which "ok" says whether all is well.
        limit: seconds that one import may take.

    Returns:
        0 if all of it works, else 1.
    """
    records = [*_plugins(limit), *_mechanisms(limit), *_commands(commands, limit)]
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
        print("no plugins installed; for time series: pip install 'quest-tsai[host]'")
    return 0 if well else 1


def _plugins(limit: float) -> list[Record]:
    records = discover()
    asked = [record for record in records if record.status == "ok" and "module" in record.info]
    answers = dict(zip((r.name for r in asked), ask([_job("plugin", r) for r in asked], limit), strict=True))
    found = [_judge(record, answers[record.name]) if record.name in answers else record for record in records]
    described = {(entry.name, entry.distribution) for entry in entries("quest.adapter_info")}
    for entry in entries("quest.adapters"):
        if (entry.name, entry.distribution) not in described:
            problem = (
                "it has an adapter but nothing under the entry-point group quest.adapter_info, so it is never used"
            )
            found.append(Record(entry.name, entry.distribution, entry.version, "broken", problem, entry.fix))
    return found


def _judge(record: Record, answer: Answer) -> Record:
    if not answer.problem:
        return record
    if answer.at == "host":
        name = record.host_name or str(record.info.get("host", record.name))
        return replace(
            record,
            status="broken host",
            detail=f"{record.distribution} is in order, but its host {name} {record.host_version or ''}".rstrip()
            + f" cannot be imported: {answer.problem}",
            fix=f"python -c 'import {record.info['module']}' shows the whole error; "
            + (f"pip install --force-reinstall {record.host_name}" if record.host_name else "mend the checkout"),
        )
    return replace(
        record,
        status="broken",
        detail=f"its adapter cannot be imported: {answer.problem}",
        fix=remedy(record.distribution),
    )


def _mechanisms(limit: float) -> list[Record]:
    return [
        Record(
            entry.name,
            entry.distribution,
            entry.version,
            "broken" if answer.problem else "ok",
            answer.problem,
            entry.fix if answer.problem else "",
            kind="mechanisms",
        )
        for entry, answer in added(limit)
    ]


def _commands(own: Collection[str], limit: float) -> list[Record]:
    owners = dict.fromkeys(own, "quest-core")
    found: dict[int, Record] = {}
    asked = []
    for i, entry in enumerate(entries("quest.commands")):
        if entry.name in owners:
            found[i] = duplicate(entry, owners[entry.name], "command")
        else:
            owners[entry.name] = entry.owner
            asked.append((i, entry))
    answers = ask([Job("command", entry.name, entry.distribution) for _, entry in asked], limit)
    for (i, entry), answer in zip(asked, answers, strict=True):
        status, fix = ("broken", entry.fix) if answer.problem else ("ok", "")
        found[i] = Record(entry.name, entry.distribution, entry.version, status, answer.problem, fix, kind="command")
    return [found[i] for i in sorted(found)]


def _job(kind: str, record: Record) -> Job:
    return Job(kind, record.name, record.distribution)
