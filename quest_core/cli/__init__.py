"""The `quest` command: what exists here, whether it works, and the commands that plugins add."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .. import __version__
from ..catalogue import parts
from ..config import AttentionConfig
from ..errors import PluginError, QuestError
from ..hosts.discovery import API_VERSION, Record, discover, load_adapter
from ..hosts.launching import main as run
from ..mechanisms.part import AXES
from .template import new_mechanism, new_plugin

AXIS_TITLES = {
    "score": "Scores: how queries and keys meet",
    "normaliser": "Normalisers: logits to weights",
    "grouping": "Groupings: which key/value head a query head uses",
    "family": "Families that never form the weights",
}

EPILOG = """examples:
  quest list                                  every mechanism, with its formula, options and source
  quest check "quest+gqa(kv_heads=4)"         is this text valid, and what does it mean?
  quest doctor                                which plugins work here, and how to mend the others
  quest run -- python train.py ...            a training script as it is, with the plugins installed
  quest new-plugin timm --attention-class timm.layers.attention:Attention
  quest new-mechanism power --axis score      a mechanism of your own, with its reference and tests
  quest bench run toy/spurious --attention standard,quest     (with quest-bench installed)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 well, 1 something is not, 2 a mistake in the arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {entry.name: entry for entry in importlib.metadata.entry_points(group="quest.commands")}
    if arguments and arguments[0] in (*commands, "run"):
        try:
            command = run if arguments[0] == "run" else _plugin_command(commands[arguments[0]])
            return command(arguments[1:])
        except QuestError as error:
            print(f"quest: {error}", file=sys.stderr)
            return 2

    parser = argparse.ArgumentParser(
        prog="quest",
        description="QUEST attention and its relatives, in the frameworks you already train with.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quest-core {__version__}")
    choose = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    choose.add_parser("list", help="every mechanism, with its formula, options and source")
    check = choose.add_parser("check", help="read an attention specification and say what it means")
    check.add_argument("attention", help="a name, name(key=value) or JSON, as in a framework's config")
    choose.add_parser("doctor", help="which plugins work here, and how to mend the others")
    choose.add_parser("run", help="start a training command with the plugins installed (quest run --help)")
    new = choose.add_parser("new-plugin", help="write a plugin for another framework, with tests that pass at once")
    new.add_argument("name", metavar="NAME", help="the plugin becomes quest-NAME")
    new.add_argument("--host-distribution", metavar="DIST", help="the framework for pip: timm or 'timm>=1.0,<2'")
    new.add_argument("--host-module", metavar="MOD", help="its module: timm")
    new.add_argument("--attention-class", metavar="MOD:CLASS", help="its attention: timm.layers.attention:Attention")
    new.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="where the folder is made (default: here)")
    own = choose.add_parser("new-mechanism", help="write a mechanism of your own, with a reference and tests that pass")
    own.add_argument("name", metavar="NAME", help="what users will write, as in attention=NAME")
    own.add_argument("--axis", choices=AXES, default="score", help="what kind of mechanism (default: score)")
    own.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="where the folder is made (default: here)")
    for name, entry in sorted(commands.items()):
        owner = entry.dist.metadata["Summary"] if entry.dist else ""
        choose.add_parser(name, help=f"{owner} (quest {name} --help)", add_help=False)
    chosen = parser.parse_args(arguments)
    try:
        return COMMANDS[chosen.command](chosen)
    except QuestError as error:
        print(f"quest: {error}", file=sys.stderr)
        return 2


def _plugin_command(entry: importlib.metadata.EntryPoint) -> Callable[[list[str]], int]:
    try:
        command: Callable[[list[str]], int] = entry.load()
    except Exception as error:
        owner = entry.dist.metadata["Name"] if entry.dist else "an unknown distribution"
        message = (
            f"quest: the command '{entry.name}' of {owner} fails to import: {error!r}; pip install --upgrade {owner}"
        )
        return lambda _: print(message, file=sys.stderr) or 2
    return command


def _list(_: argparse.Namespace) -> int:
    for axis, title in AXIS_TITLES.items():
        rows = [part for part in parts().values() if part.axis == axis]
        if not rows:
            continue
        print(title)
        for part in rows:
            marks = ", ".join(
                word
                for word, holds in (
                    ("learnable", part.learnable),
                    ("changes projection shapes", part.reshapes),
                    ("not causal", not part.causal),
                    ("ordered tokens only", part.ordered),
                )
                if holds
            )
            print(f"  {part.name:<16} {part.summary:<42} {part.source}" + (f"  [{marks}]" if marks else ""))
            for option in part.options:
                print(f"    {option.name} = {option.default if option.default is not None else 'null'}: {option.doc}")
        print()
    print("Join one of each with '+': quest+gqa(kv_heads=4). What is left out is standard, softmax, mha.")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    config = AttentionConfig.parse(arguments.attention)
    print(f"valid: {config}")
    for (axis, name), part in zip(config.parts, config.specs(), strict=True):
        print(f"  {axis:<11} {name:<12} {part.summary}")
        for option in part.options:
            print(f"    {option.name} = {config.option(option.name)}")
    return 0


def _doctor(_: argparse.Namespace) -> int:
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["CPU"]
    print(
        f"quest-core {__version__} (plugin API {'.'.join(map(str, API_VERSION))}), Python {platform.python_version()}, "
        f"torch {torch.__version__}, {', '.join(devices)}"
    )
    records = discover()
    if not records:
        print("no plugins installed; for time series: pip install 'quest-tsai[host]'")
    well = True
    for record in records:
        status, detail, fix = _diagnose(record)
        host = f" with {record.host_name} {record.host_version}" if record.host_version and status == "ok" else ""
        print(
            f"  {record.name:<12} {record.distribution} {record.version}: {status}{host}"
            + (f" - {detail}" if detail else "")
        )
        if fix:
            print(f"    fix: {fix}")
        well = well and status == "ok"
    return 0 if well else 1


def _new_plugin(arguments: argparse.Namespace) -> int:
    folder = new_plugin(
        arguments.name,
        host_distribution=arguments.host_distribution,
        host_module=arguments.host_module,
        attention_class=arguments.attention_class,
        out=arguments.out,
    )
    print(f"wrote {folder}; next:")
    print(f"  pip install -e {shlex.quote(f'{folder}[host,test]')}")
    print(f"  python -m pytest {shlex.quote(str(folder))}")
    print(f"  grep -rn 'Host [1-6]' {shlex.quote(str(folder))}      # what to say about your framework")
    return 0


def _new_mechanism(arguments: argparse.Namespace) -> int:
    folder = new_mechanism(arguments.name, axis=arguments.axis, out=arguments.out)
    print(f"wrote {folder}; next:")
    print(f"  pip install -e {shlex.quote(f'{folder}[test]')}")
    print(f"  python -m pytest {shlex.quote(str(folder))}")
    print("  quest list      # it is there")
    return 0


def _diagnose(record: Record) -> tuple[str, str, str]:
    """Like the record, but the adapter of an ok plugin is imported for real."""
    if record.status == "ok" and "module" in record.info:
        try:
            load_adapter(record)
        except PluginError as error:
            return "broken", str(error), ""
    return record.status, record.detail, record.fix


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "check": _check,
    "doctor": _doctor,
    "new-plugin": _new_plugin,
    "new-mechanism": _new_mechanism,
}
