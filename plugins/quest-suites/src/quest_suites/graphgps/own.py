"""graphgps: GraphGPS's own main.py with any of its configs, in a checkout of GraphGPS.

Each cell is one run of main.py in a folder of the cell. Metrics are read from the stats.json that GraphGym writes for
each split. GraphGym's own checkpoints let a stopped cell continue at its last epoch.
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from quest_core.errors import PluginError
from quest_suites.contract import Cell, Progress, Result, own_trainer

SMOKE_EPOCHS = 2


def tasks(repo: Path) -> dict[str, dict[str, Any]]:
    """Return the configs of a checkout: path below the checkout -> its files, metric and, if it cannot run, why."""
    code = sorted([repo / "main.py", *(repo / "graphgps").glob("**/*.py")])
    found = {}
    for path in sorted((repo / "configs").glob("**/*.yaml")):
        entry: dict[str, Any] = {"files": [str(path), *map(str, code)], "problem": None}
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            metric, agg = config.get("metric_best", "auto"), config.get("metric_agg", "argmax")
            entry |= {"metric": metric, "higher_is_better": agg == "argmax"}
            if config.get("model", {}).get("type") != "GPSModel" and "gt" not in config:
                entry["problem"] = f"{path} has no attention: neither model.type GPSModel nor a section gt"
            elif metric == "auto":
                entry["problem"] = f"{path} does not name its metric; add metric_best and metric_agg"
        except (OSError, yaml.YAMLError, AttributeError) as error:
            entry["problem"] = f"{path} cannot be read as a config: {error}"
        found[str(path.relative_to(repo))] = entry
    return found


def run_own(cell: Cell, progress: Progress) -> Result:
    """Train one config with one attention and one seed in GraphGPS's trainer.

    Returns:
        The metrics of the test split at the epoch that is best on the validation split, and ``epochs``; series of loss
        and metric for each split.
    """
    assert cell.data is not None
    config = yaml.safe_load((cell.data / cell.task).read_text(encoding="utf-8"))
    metric = config["metric_best"]
    epochs = SMOKE_EPOCHS if cell.smoke else config["optim"]["max_epoch"]
    words = ["main.py", "--cfg", cell.task, "seed", str(cell.seed), "gt.attention", cell.attention]
    words += ["out_dir", str(cell.workdir / "results"), "wandb.use", "False"]
    words += ["train.auto_resume", "True", "train.enable_ckpt", "True", "train.ckpt_period", "1"]
    words += ["optim.max_epoch", str(SMOKE_EPOCHS)] if cell.smoke else []
    words += cell.options["set"].split()
    command = [sys.executable, "-m", "quest_graphgps", *words]
    for line in own_trainer("GraphGPS's main.py", command, folder=cell.data):
        if line.startswith("val: {'epoch': "):
            done = int(line.partition("'epoch': ")[2].partition(",")[0]) + 1
            progress(min(done / epochs, 1.0), line.strip()[:100])
    return read_stats(cell.workdir / "results", metric, config.get("metric_agg", "argmax") == "argmax")


def read_stats(results: Path, metric: str, higher: bool) -> Result:
    """Read the stats.json of every split, one JSON line an epoch; a resumed epoch's last line counts."""
    splits: dict[str, dict[int, Mapping[str, float]]] = {}
    for name in ("train", "val", "test"):
        for path in results.glob(f"*/*/{name}/stats.json"):
            lines = map(json.loads, filter(None, path.read_text(encoding="utf-8").splitlines()))
            splits[name] = {int(line["epoch"]): line for line in lines}
    shared = sorted(splits.get("val", {}).keys() & splits.get("test", {}).keys())
    if not shared:
        raise PluginError(f"GraphGPS wrote no stats.json for val and test below {results}")
    known = [name for name in splits["val"][shared[0]] if isinstance(splits["val"][shared[0]][name], int | float)]
    if metric not in known:
        raise PluginError(f"metric_best is '{metric}', which GraphGPS does not report; it reports: {', '.join(known)}")
    sign = 1 if higher else -1
    best = max(shared, key=lambda epoch: sign * splits["val"][epoch].get(metric, -sign * math.inf))
    series = {f"{name}_{key}": [float(line[key]) for _, line in sorted(lines.items()) if key in line]
              for name, lines in splits.items() for key in dict.fromkeys(("loss", metric))}  # fmt: skip
    return Result(
        metrics={
            **{name: float(value) for name, value in splits["test"][best].items() if name in known},
            "epochs": float(len(shared)),
        },
        series=series,
        details={"reported_epoch": best, "validation": float(splits["val"][best][metric])},
    )
