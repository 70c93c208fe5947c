"""time-series-library: thuml's Time-Series-Library in a checkout, its own run.py with a command of one of its scripts.

Each cell is one run of run.py in a folder of the cell. Metrics are read from the files that the library writes there.
The library saves weights only, without its optimizer and its epoch, so a stopped cell starts again. Its attention is
replaced by `time_series_library_attention`.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quest_core.benchmarks import Cell, Progress, Result, own_trainer
from quest_core.errors import PluginError

SMOKE_EPOCHS = 1
LAUNCHER = Path(__file__).with_name("time_series_library_attention.py")
METRICS = {
    "classification": ("accuracy", True, "paper"),
    "long_term_forecast": ("mse", False, "validation"),
    "imputation": ("mse", False, "validation"),
    "anomaly_detection": ("F-score", True, "validation"),
}
"""Task of the library -> metric, whether higher is better, and how the reported epoch is chosen."""
FORECAST = ("mae", "mse", "rmse", "mape", "mspe")
"""The values in metrics.npy."""


def tasks(repo: Path) -> dict[str, dict[str, Any]]:
    """Return the commands in a checkout's scripts: "SCRIPT" or "SCRIPT#MODEL_ID" -> files, metric and any problem."""
    code = sorted(
        [repo / "run.py", *(path for part in ("exp", "layers", "models") for path in repo.glob(f"{part}/*.py"))]
    )
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((repo / "scripts").glob("**/*.sh")):
        name = str(path.relative_to(repo))
        try:
            every = commands(path)
        except ValueError as error:
            found[name] = {"files": [str(path)], "problem": f"{path} cannot be read: {error}"}
            continue
        names = Counter(command["--model_id"] for command in every)
        for command in every:
            task = name if len(every) == 1 else f"{name}#{command['--model_id']}"
            kind, data = command["--task_name"], repo / command["--root_path"]
            entry: dict[str, Any] = {"files": [str(path), *map(str, code)], "problem": None}
            if names[command["--model_id"]] > 1:
                entry["problem"] = f"{path} has several commands with --model_id {command['--model_id']}"
            elif kind not in METRICS:
                entry["problem"] = f"{path} runs {kind}; this suite reads {', '.join(METRICS)}"
            elif not data.is_dir():
                entry["problem"] = f"its data is missing: {data}"
            else:
                entry["files"] += [str(file) for file in sorted(data.iterdir()) if file.is_file()]
                entry |= dict(zip(("metric", "higher_is_better", "selection"), METRICS[kind], strict=True))
            found[task] = entry
    return found


def commands(script: Path) -> list[dict[str, str]]:
    """Return the options of each `python -u run.py` in a script, with its variables filled in.

    Raises:
        ValueError: the script has a loop, or a command lacks an option that this suite needs.
    """
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    variables: dict[str, str] = {}
    found = []
    for line in text.splitlines():
        if re.match(r"\s*(for|while)\s", line):
            raise ValueError("it has a loop; write one of its commands into a script without one")
        if match := re.match(r"\s*(?:export\s+)?(\w+)=(\S*)\s*$", line):
            variables[match[1]] = match[2].strip("'\"")
        elif re.match(r"\s*python3?\s.*run\.py\s", line):
            line = re.sub(r"\$\{?(\w+)\}?", lambda name: variables.get(name[1], ""), line)
            words = shlex.split(line)
            words = words[words.index("run.py") + 1 :]
            options: dict[str, str] = {}
            for place, word in enumerate(words):
                if word.startswith("--"):
                    value = words[place + 1 : place + 2]
                    options[word] = "" if not value or value[0].startswith("--") else value[0]
            missing = {"--task_name", "--model_id", "--model", "--root_path"} - options.keys()
            if missing:
                raise ValueError(f"a command has no {', '.join(sorted(missing))}")
            found.append(options)
    return found


def run(cell: Cell, progress: Progress) -> Result:
    """Train one command of a script with one attention and one seed in the library's own trainer.

    Args:
        cell: `task` is a script below the checkout `data`, with "#MODEL_ID" if it has several commands; the option
            `set` holds further words for run.py. Seed 0 is the library's own seed, 2021.
        progress: called after each epoch.

    Returns:
        The metrics that the library writes at its end: accuracy in %, or mae, mse, rmse, mape and mspe, or precision,
        recall and F-score; ``epochs`` and ``seconds_per_epoch``; the losses that it prints, as series.

    Raises:
        PluginError: run.py failed, or the model has no attention to replace.
    """
    assert cell.data is not None
    script, _, model_id = cell.task.partition("#")
    command = next(one for one in commands(cell.data / script) if model_id in ("", one["--model_id"]))
    folder = cell.workdir / "run"
    shutil.rmtree(folder, ignore_errors=True)  # the library adds to its files, and cannot resume
    folder.mkdir()
    for entry in cell.data.iterdir():
        if not re.search(r"^(\.git|checkpoints)$|result", entry.name):
            (folder / entry.name).symlink_to(entry.resolve())  # it looks for models/ and data in the current folder
    command |= {"--itr": "1"} | ({"--train_epochs": str(SMOKE_EPOCHS), "--num_workers": "0"} if cell.smoke else {})
    words = [word for key, value in command.items() for word in (key, *([value] if value else []))]
    words += [] if torch.cuda.is_available() else ["--no_use_gpu"]
    words += cell.options["set"].split()
    given = dict(itertools.pairwise(words))  # the last one counts, as in run.py
    epochs = int(given.get("--train_epochs", 10))
    series: dict[str, list[float]] = {}
    started, report = time.perf_counter(), ""
    launch = [sys.executable, str(LAUNCHER), cell.attention, str(cell.seed)]
    for line in own_trainer("Time-Series-Library's run.py", [*launch, *words], folder=folder):
        if line.startswith("attention="):
            report = line.strip()
        elif match := re.match(r"Epoch: (\d+), Steps", line):
            for name, value in re.findall(r"(\w+ (?:Loss|Acc)): ([\d.]+|nan)", line):
                series.setdefault(name.lower().replace(" ", "_"), []).append(float(value))
            progress(min(int(match[1]) / epochs, 1.0), line.strip()[:100])
    done = max(map(len, series.values()), default=1)
    metrics = read_metrics(folder)
    return Result(
        metrics={**metrics, "epochs": float(done), "seconds_per_epoch": (time.perf_counter() - started) / done},
        series=series,
        details={"injected": report, "command": shlex.join(["run.py", *words])},
    )


def read_metrics(folder: Path) -> dict[str, float]:
    """Read the library's own metric files in the folder of a run; raises PluginError if there is none."""
    for path in folder.glob("results/*/result_classification.txt"):
        return {"accuracy": 100 * float(re.findall(r"accuracy:([\d.]+|nan)", path.read_text())[-1])}
    for path in folder.glob("results/*/metrics.npy"):
        return dict(zip(FORECAST, map(float, np.load(path)), strict=True))
    path = folder / "result_anomaly_detection.txt"
    if path.is_file():
        return {name: float(value) for name, value in re.findall(r"([\w-]+) : ([\d.]+)", path.read_text())}
    raise PluginError(f"Time-Series-Library wrote no metrics below {folder}")
