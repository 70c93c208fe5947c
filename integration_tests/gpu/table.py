"""Writes research/results/gpu.md: the report of `quest bench run gpu/attention`, step times of hosts, and the tests.

  python -m integration_tests.gpu.table --run runs/gpu/attention --out research/results/gpu.md

`./dev gpu --table` runs the CUDA tests, the suite, and then this, which needs PyTorch only. From --steps it reads what
the tests have left there: step times (integration_tests/gpu/test_<host>.py), and which tests passed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import runpy
import shlex
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .command import SUITE
from .measure import Timing, versions

COMMAND = "path/to/python dev gpu --wheels wheels --table"
REPORT = ("report.md", "report.html", "report", "results.parquet", "run.json")


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the results of the frameworks' tests, by framework."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def steps_markdown(found: list[dict[str, Any]]) -> str:
    """A row for each framework, precision and attention."""
    if not found:
        return "Not yet measured: no framework's test has left its times.\n"
    lines = ["| framework | model | precision | attention | ms a step | of stock (middle half of the rounds) |"]
    lines.append("|---|---|---|---|---:|---|")
    for host in found:
        name = f"{host['host']} {host['version']}, torch {host['versions']['torch']}, {host['versions']['device']}"
        for row in host["rows"]:
            timing = Timing(**row["timing"])
            cells = (name, host["model"], row["precision"], row["attention"], f"{timing.milliseconds:.2f}")
            lines.append("| " + " | ".join((*cells, f"{timing.ratio:.2f} ({timing.low:.2f}–{timing.high:.2f})")) + " |")
    return "\n".join(lines) + "\n"


# --- what there is to measure: read from the tests, without importing the frameworks ----------------------------------

HERE = Path(__file__).parent


@dataclass(frozen=True)
class File:
    """A file of tests: what its first line says, the tests that want a GPU, and whose framework's model they train."""

    name: str
    about: str
    tests: tuple[str, ...]
    host: str | None = None
    model: str | None = None


def _cuda_tests(body: list[ast.stmt]) -> Iterator[str]:
    """Names of the test functions that take a `device` or are marked gpu, alone or with their whole file."""
    all_marked = any(isinstance(n, ast.Assign) and "mark.gpu" in ast.unparse(n.value) for n in body)
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = " ".join(map(ast.unparse, node.decorator_list))
            if all_marked or "mark.gpu" in marks or any(argument.arg == "device" for argument in node.args.args):
                yield node.name.removeprefix("test_").replace("_", " ")


@functools.cache
def suite() -> tuple[File, ...]:
    """The tests that run on a GPU."""
    base = next(
        node
        for node in ast.parse((HERE / "training.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "HostTraining"
    )
    files = []
    for path in sorted(HERE.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        about = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".:")
        hosts = [
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef) and any(ast.unparse(b) == "HostTraining" for b in node.bases)
        ]
        if not hosts:
            files.append(File(path.name, about, tuple(_cuda_tests(tree.body))))
        for host in hosts:
            said = {
                target.id: node.value.value
                for node in host.body
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            tests = tuple(_cuda_tests(base.body))
            files.append(File(path.name, about, tests, str(said["host"]), str(said["model"])))
    return tuple(file for file in files if file.tests)


def read_tests(folder: Path) -> dict[str, Counter[str]]:
    """What became of the CUDA tests, from the reports that ./dev gpu leaves: file -> passed, failed, skipped."""
    found: dict[str, Counter[str]] = {}
    for path in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            parts = [part for part in case.get("classname", "").split(".") if part.startswith("test_")]
            if parts:
                worst = [w for w in ("failure", "error", "skipped") if case.find(w) is not None]
                what = {"failure": "failed", "error": "failed", "skipped": "skipped"}[worst[0]] if worst else "passed"
                found.setdefault(f"{parts[0]}.py", Counter())[what] += 1
    return found


def tests_markdown(found: dict[str, Counter[str]]) -> str:
    lines = ["| file | what it holds to | passed | failed | skipped |", "|---|---|---:|---:|---:|"]
    for file in suite():
        counts = found.get(file.name)
        cells = ["not run", "", ""] if counts is None else [str(counts[w]) for w in ("passed", "failed", "skipped")]
        lines.append("| " + " | ".join((f"`{file.name}`", file.about, *cells)) + " |")
    return "\n".join(lines) + "\n"


def suite_command() -> str:
    """The command that measures attention, as a user writes it."""
    return shlex.join(["quest", "bench", *SUITE, "--out", "runs/gpu/attention"])


def not_measured() -> str:
    """Return the page without measurements: a list of those to make."""
    hosts = [file for file in suite() if file.host is not None]
    declared = runpy.run_path(str(HERE.parents[1] / "research/quest_research/suites/suites.py"))["SUITES"]
    lengths = ", ".join(task.removeprefix("N=") for task in declared["gpu/attention"]["tasks"])
    lines = [
        "# Results on a GPU",
        "",
        "**Not yet measured: there was no GPU at hand.** Nothing on this page or elsewhere in the repository was timed "
        "on one, and none of the tests below has run on one. With one, a single command runs them and writes this "
        "page, with the device, versions, ratios and their spread:",
        "",
        "```bash",
        COMMAND,
        "```",
        "",
        "[How it is done](../../docs/gpu.md), also without a network. This page is what the command writes "
        "without a GPU: all that is still to be measured.",
        "",
        "## Attention",
        "",
        f"`{suite_command()}`",
        "",
        "Each attention against every back-end of scaled_dot_product_attention, and QUEST against FlexAttention too, "
        f"forward, and forward and backward, bfloat16, at N = {lengths}.",
        "",
        "## Training steps of the frameworks",
        "",
        "Standard and quest against the framework as it is, in bf16, fp16 and fp32:",
        "",
        *(f"- {file.host}: {file.model}" for file in hosts),
        "",
        "## CUDA tests",
        "",
        "| file | what it holds to | tests |",
        "|---|---|---|",
        *(f"| `{file.name}` | {file.about} | {'; '.join(file.tests)} |" for file in suite() if file.host is None),
        *(f"| `{file.name}` | {file.about} | those of every framework |" for file in hosts),
        "",
        f"Those of every framework: {'; '.join(hosts[0].tests)}.",
        "",
    ]
    return "\n".join(lines)


# --- the page ---------------------------------------------------------------------------------------------------------


def page(steps: list[dict[str, Any]], tests: dict[str, Counter[str]], where: dict[str, str], folder: str) -> str:
    """Return the page; `folder` holds the report of the suite."""
    missing = [file.host for file in suite() if file.host and file.host not in {found["host"] for found in steps}]
    return "\n".join(
        [
            "# Results on a GPU",
            "",
            f"Command: `{COMMAND}`",
            "",
            f"Machine: {', '.join(f'{key} {value}' for key, value in where.items())}.",
            "",
            "## Attention",
            "",
            f"[Report]({folder}/report.md) ([HTML]({folder}/report.html)) of `{suite_command()}`: the time of each "
            "attention as a multiple of the fastest back-end of scaled_dot_product_attention in the same round, by "
            "CUDA's events.",
            "",
            "## Training steps of the frameworks",
            "",
            steps_markdown(steps),
            *([f"Not yet measured: {', '.join(missing)}.\n"] if missing and steps else []),
            "## CUDA tests",
            "",
            tests_markdown(tests),
        ]
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m integration_tests.gpu.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("research/results/gpu.md"), help="the page; the report goes to gpu/"
    )
    parser.add_argument("--run", type=Path, default=Path("runs/gpu/attention"), help="folder of `quest bench report`")
    parser.add_argument("--steps", type=Path, default=Path("runs/gpu"), help="folder of what the tests have left")
    parser.add_argument("--device", default="cuda", help="the device whose name and versions the page shows")
    parser.add_argument("--not-measured", action="store_true", help="write what is to be measured, and measure nothing")
    options = parser.parse_args(arguments)
    folder = options.out.with_suffix("")
    if options.not_measured:
        if folder.exists():
            parser.error(f"{folder} holds measurements, which --not-measured would take away; delete them, or --out")
        options.out.write_text(not_measured())
        return 0
    missing = [name for name in REPORT if not (options.run / name).exists()]
    if missing:
        parser.error(
            f"{options.run} lacks {', '.join(missing)}; first: {suite_command()}; quest bench report {options.run}"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in REPORT:
        (shutil.copytree if name == "report" else shutil.copy)(options.run / name, folder / name)
    text = page(read_steps(options.steps), read_tests(options.steps), versions(options.device), folder.name)
    options.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
