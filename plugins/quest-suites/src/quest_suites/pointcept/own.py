"""pointcept: Pointcept's own tools/train.py with any of its configs that has a Point Transformer V3, in a checkout.

Each cell is one run in a folder of the cell. Metrics are read from Pointcept's train.log there. A stopped cell
continues from Pointcept's own model_last.pth, which is written after each epoch.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from quest_core.config import AttentionConfig
from quest_core.errors import PluginError
from quest_suites.contract import Cell, Progress, Result, own_trainer

SMOKE_SCENES = 4
METRICS = {"SemSegEvaluator": "mIoU", "ClsEvaluator": "allAcc", "InsSegEvaluator": "AP50"}
"""Evaluator of a config -> the metric by which Pointcept calls a model the best."""
EVALUATOR = re.compile(r'type="(\w*(?<!Precise)Evaluator)"')
PTV3 = re.compile(r'"PT-v3m\d"')


def tasks(repo: Path) -> dict[str, dict[str, Any]]:
    """Return the configs of a checkout: path below the checkout -> its files, metric and, if it cannot run, why."""
    code = sorted([repo / "tools" / "train.py", *(repo / "pointcept").glob("**/*.py")])
    base = repo / "configs" / "_base_"
    found = {}
    for path in sorted((repo / "configs").glob("**/*.py")):
        if base in path.parents:
            continue
        text = path.read_text(encoding="utf-8")
        evaluators = set(EVALUATOR.findall(text)) or {"SemSegEvaluator"}  # that of _base_/default_runtime.py
        entry: dict[str, Any] = {"files": [str(path), *map(str, code)], "problem": None}
        if not PTV3.search(text):
            entry["problem"] = f"{path} has no Point Transformer V3"
        elif "evaluate = False" in text:
            entry["problem"] = f"{path} has evaluate = False, so a metric to compare is missing"
        elif len(evaluators) > 1 or not evaluators <= METRICS.keys():
            entry["problem"] = f"{path} has {', '.join(sorted(evaluators))}; this suite reads {', '.join(METRICS)}"
        else:
            entry |= {"metric": METRICS[evaluators.pop()], "higher_is_better": True}
        found[str(path.relative_to(repo))] = entry
    return found


def run_own(cell: Cell, progress: Progress) -> Result:
    """Train one config with one attention and one seed in Pointcept's trainer.

    Returns:
        Pointcept's metrics of the last epoch in %, ``best <metric>`` over the epochs, and ``precise <metric>`` if the
        config evaluates precisely at the end; series of loss and metrics by epoch.
    """
    assert cell.data is not None
    root, base, gpus = cell.data, cell.data / cell.task, 1 if cell.smoke else cell.options["gpus"]
    out = cell.workdir / "exp"
    config = cell.workdir / "quest.py"
    last = out / "model" / "model_last.pth"
    config.write_text("\n".join([*config_lines(cell, base, out), ""]), encoding="utf-8")
    command = [sys.executable, str(root / "tools" / "train.py"), "--config-file", str(config)]
    command += ["--num-gpus", str(gpus), "--options", f"save_path={out}", *cell.options["set"].split()]
    command += [f"weight={last}", "resume=True"] if last.is_file() else []
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    for line in own_trainer("Pointcept's trainer", command, folder=root, environment={"PYTHONPATH": path}):
        if match := re.search(r"Train: \[(\d+)/(\d+)\]\[(\d+)/(\d+)\].* loss: ([\d.]+)", line):
            epoch, epochs, step, steps = (int(number) for number in match.groups()[:4])
            progress((epoch - 1 + step / steps) / epochs, f"epoch {epoch} loss {match[5]}")
    return read_log(out / "train.log")


def config_lines(cell: Cell, base: Path, out: Path) -> list[str]:
    """Return the cell's config: Pointcept's own, with attention, seed and folder. A smoke run is one short epoch."""
    attention = AttentionConfig.parse(cell.attention).to_dict()
    lines = [
        f"_base_ = [{str(base)!r}]",
        "custom_imports = dict(imports=['quest_pointcept'], allow_failed_imports=False)",
        f"model = dict(backbone=dict(attention={attention!r}))",
        f"seed = {cell.seed}",
        f"save_path = {str(out)!r}",
        "enable_wandb = False",
    ]
    if cell.smoke:  # no half precision, which a CPU may not have
        kept = ("CheckpointLoader", "ModelHook", "InformationWriter", "SemSegEvaluator", "CheckpointSaver")
        lines[1] = lines[1].replace("'quest_pointcept'", "'quest_pointcept', 'quest_suites.pointcept.short'")
        lines += ["epoch = eval_epoch = 1", "batch_size, num_worker = 2, 1", "enable_amp = False", "mix_prob = 0"]
        if "SemSegEvaluator" in base.read_text(encoding="utf-8") or not EVALUATOR.search(base.read_text()):
            lines += [f"hooks = {[{'type': name} for name in kept]!r}"]  # no precise evaluation
    return lines


def read_log(path: Path) -> Result:
    """Read Pointcept's train.log. If an epoch was trained again after a kill, its last lines count."""
    epoch, done, text = 0, False, path.read_text(encoding="utf-8") if path.is_file() else ""
    losses: dict[int, float] = {}
    evaluated: dict[int, dict[str, float]] = {}
    precise: dict[str, float] = {}
    report = ""
    for line in text.splitlines():
        if match := re.search(r"Train: \[(\d+)/", line):
            epoch, done = int(match[1]), False
        elif match := re.search(r"Train result: loss: ([\d.]+|nan|inf)", line):
            losses[epoch] = float(match[1])
        elif match := re.search(r"\] (attention=.+ in \d+ module.*)", line):
            report = match[1]
        elif match := re.search(r"Val result: ([\w/]+) ([\d./]+?)\.?$", line):
            found = {n: 100 * float(v) for n, v in zip(match[1].split("/"), match[2].split("/"), strict=True)}
            if done:
                precise = found  # after the last epoch's own evaluation
            else:
                evaluated[epoch], done = found, True
    if not evaluated:
        raise PluginError(f"Pointcept wrote no evaluation into {path}")
    epochs = [evaluated[number] for number in sorted(evaluated)]
    return Result(
        metrics={
            **epochs[-1],
            **{f"best {name}": max(one[name] for one in epochs) for name in epochs[-1]},
            **{f"precise {name}": value for name, value in precise.items()},
            "epochs": float(len(epochs)),
        },
        series={
            "train_loss": [losses[number] for number in sorted(losses)],
            **{name: [one[name] for one in epochs] for name in epochs[-1]},
        },
        details={"injected": report, "precise_evaluation": bool(precise)},
    )
