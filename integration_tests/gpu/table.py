"""Writes research/results/gpu.md: the results of `quest bench run gpu/attention`, step times of hosts, and the tests.

  python -m integration_tests.gpu.table --run runs/gpu/attention --out research/results/gpu.md

`./dev gpu --table` runs the CUDA tests, the suite, and then this. From --steps it reads what the tests have left there:
step times (integration_tests/gpu/test_<host>.py), and which tests passed.
"""

import argparse
import ast
import json
import shlex
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from .command import SUITE
from .measure import Timing, versions

COMMAND = "path/to/python dev gpu --table"
REPORT = "https://quest-attention.github.io/quest/results/gpu/report/"
SUITE_COMMAND = shlex.join(["quest", "bench", *SUITE, "--out", "runs/gpu/attention"])
"""The command that measures attention, as a user writes it."""
METRICS = {"forward time of sdpa": "Forward", "time of sdpa": "Forward and backward"}


def attention_markdown(run: Path) -> str:
    """For each direction a row for each attention and a column for each length: the ratio, as the mean over seeds."""
    from quest_bench.groups import read_groups

    groups = read_groups(run, "standard")
    parts = []
    for metric, title in METRICS.items():
        found = [group for group in groups if group.suite.metric == metric]
        found.sort(key=lambda group: int(group.task.removeprefix("N=")))
        lines = [f"| {title} | " + " | ".join(group.task for group in found) + " |", "|---|" + "--:|" * len(found)]
        for attention in dict.fromkeys(row.attention for group in found for row in group.rows):
            rows = [group.row(attention) for group in found]
            cells = [f"{row.score.mean:.2f}" if row and row.finished else "failed" for row in rows]
            lines.append(f"| `{attention}` | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def steps_markdown(folder: Path) -> str:
    """A row for each framework, precision and attention, from what the frameworks' tests have left."""
    found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
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


def tests_markdown(folder: Path) -> str:
    """A row for each file of tests: the first line of its docstring, and what became of its tests on a GPU."""
    found = read_tests(folder)
    lines = ["| file | what it holds to | passed | failed | skipped |", "|---|---|---:|---:|---:|"]
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        about = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].rstrip(".:")
        counts = found.get(path.name)
        cells = ["not run", "", ""] if counts is None else [str(counts[w]) for w in ("passed", "failed", "skipped")]
        lines.append("| " + " | ".join((f"`{path.name}`", about, *cells)) + " |")
    return "\n".join(lines) + "\n"


def page(attention: str, steps: str, tests: str, where: dict[str, str]) -> str:
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
            f"`{SUITE_COMMAND}` ([report]({REPORT})): the time of each attention as a multiple of the fastest "
            "back-end of scaled_dot_product_attention in the same round, by CUDA's events. bfloat16, 65,536 tokens a "
            "call, 16 query heads of 64 features.",
            "",
            attention,
            "## Training steps of the frameworks",
            "",
            steps,
            "## CUDA tests",
            "",
            tests,
        ]
    )


def main(arguments: list[str]) -> int:
    from quest_bench.store import load_all, write_table

    parser = argparse.ArgumentParser(
        prog="python -m integration_tests.gpu.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("research/results/gpu.md"), help="the page; the results go to gpu/"
    )
    parser.add_argument("--run", type=Path, default=Path("runs/gpu/attention"), help="folder of `quest bench run`")
    parser.add_argument("--steps", type=Path, default=Path("runs/gpu"), help="folder of what the tests have left")
    parser.add_argument("--device", default="cuda", help="the device whose name and versions the page shows")
    options = parser.parse_args(arguments)
    folder = options.out.with_suffix("")
    if not any(options.run.glob("cells/*")):
        parser.error(f"{options.run} holds no cells; first: {SUITE_COMMAND}")
    steps, tests = steps_markdown(options.steps), tests_markdown(options.steps)
    text = page(attention_markdown(options.run), steps, tests, versions(options.device))
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(options.run / "run.json", folder)
    write_table(load_all(options.run), folder / "results.parquet")
    options.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
