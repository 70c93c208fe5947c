"""forecast/ett: ETTh1 and ETTh2 in Time-Series-Library's own run.py, with its data provider, trainer and models.

The library is read from a clone, because it is not a package. Each cell runs its run.py in a folder of its own. Between
the model and the optimizer, `inject` replaces the attention. Depth and heads are those of the library's scripts.
"""

import importlib
import importlib.util
import os
import random
import runpy
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from quest_core.errors import ConfigError, PluginError
from quest_core.hosts.inject import inject
from quest_core.hosts.patching import Patches
from quest_suites.contract import Cell, Progress, Result, about, observe

LIBRARY, SERIES = Path("Time-Series-Library"), Path("ETDataset", "ETT-small")
CLONES = {LIBRARY / "run.py": "thuml/Time-Series-Library", SERIES: "zhouhaoyi/ETDataset"}
"""What a data folder must hold -> the repository on GitHub that brings it."""
PACKAGES = {"datasets": "datasets", "einops": "einops", "patoolib": "patool", "reformer_pytorch": "reformer-pytorch"}
PACKAGES |= {"sktime": "sktime"}
"""What the library's trainer imports and tsai does not bring: module -> distribution."""
HOURS = 20 * 30 * 24
"""The rows that the library reads: 12 months to train on, 4 of validation and 4 of test."""
LONGEST = 720
PATCHTST = {"ETTh1": (1, 2), "ETTh2": (3, 4)}
"""Layers and heads of its scripts for a horizon of 96. Those of other models keep run.py's 2 layers and 8 heads."""
OBSERVED = 64
"""Windows of the validation split whose attention is looked at."""


def tasks(data: Path) -> dict[str, dict[str, Any]]:
    """Return the series of a folder with both clones: name -> its files, with the library's code, and the problem."""
    for path, repository in CLONES.items():
        if not (data / path).exists():
            url = f"https://github.com/{repository}"
            raise ConfigError(f"expected {data / path}, which does not exist; git -C {data} clone --depth 1 {url}")
    if missing := [pip for module, pip in PACKAGES.items() if importlib.util.find_spec(module) is None]:
        lacks = f"{LIBRARY} imports {', '.join(missing)}, which {sys.executable} lacks"
        raise PluginError(f"{lacks}; {sys.executable} -m pip install {' '.join(missing)}")
    code = [str(path) for path in sorted((data / LIBRARY).glob("**/*.py"))]
    found = {}
    for name in PATCHTST:
        path = data / SERIES / f"{name}.csv"
        rows = path.read_bytes().count(b"\n") - 1 if path.is_file() else 0
        short = f"expected {HOURS} hours in {path}, found {rows}; git -C {data / SERIES} checkout -- {name}.csv"
        found[name] = {"files": [str(path), *code], "problem": short if rows < HOURS else None}
    return found


def run_ett(cell: Cell, progress: Progress) -> Result:
    """Train one model with one attention and one seed, and forecast the test split with the best epoch in validation.

    Returns:
        Metrics ``mse`` and ``mae`` as the library reports them, on standardised series, ``validation mse`` of the
        epoch, ``largest logit`` and ``entropy`` over all attention on validation windows, and ``epochs``; series
        ``train_loss`` and ``valid_loss``.
    """
    assert cell.data is not None  # the harness has checked it
    words = command(cell, cell.data)
    epochs = int(words[words.index("--train_epochs") + 1])
    batches: list[float] = []
    series: dict[str, list[float]] = {"train_loss": [], "valid_loss": []}
    made: list[Any] = []

    def start(original: Any, trainer: Any, args: Any) -> None:
        random.seed(cell.seed)  # run.py has seeded with 2021
        np.random.seed(cell.seed)
        torch.manual_seed(cell.seed)
        made.append(trainer)
        original(trainer, args)

    def build(original: Any, trainer: Any) -> nn.Module:
        model: nn.Module = original(trainer)
        inject(model, cell.attention, fresh=True, example=windows(trainer, "train", range(2)))
        return model

    def criterion(original: Any, trainer: Any) -> nn.Module:
        loss: nn.Module = original(trainer)
        loss.register_forward_hook(lambda _, given, one: batches.append(one.item()) if one.requires_grad else None)
        return loss

    def validate(original: Any, trainer: Any, split: Any, *rest: Any) -> float:
        loss = float(original(trainer, split, *rest))
        if split.set_type == 1:  # validation, which follows training in each epoch
            series["train_loss"].append(statistics.fmean(batches))
            series["valid_loss"].append(loss)
            batches.clear()
            progress(0.95 * len(series["valid_loss"]) / epochs, f"epoch {len(series['valid_loss'])} loss {loss:.4f}")
        return loss

    patches = Patches()
    with inside(cell.data / LIBRARY, cell.workdir, words):
        kind = importlib.import_module("exp.exp_long_term_forecasting").Exp_Long_Term_Forecast
        name = cell.options["model"]
        changes: dict[str, Callable[..., Any]] = {
            "__init__": start, "_build_model": build, "_select_criterion": criterion, "vali": validate
        }  # fmt: skip
        if cell.smoke:
            changes["_get_data"] = shorten
        # It lists the folder models/ of the working directory, which is the cell's.
        changes["_scan_models_directory"] = lambda original, trainer: {name: f"models.{name}"}
        try:
            for method, change in changes.items():
                patches.around(kind, method, change)
            runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            patches.undo()
        (trainer,) = made
        hours = HOURS // 5  # of the validation split
        picked = np.linspace(0, hours - LONGEST, OBSERVED, dtype=int).tolist()
        seen = observe(trainer.model, *(one.to(trainer.device) for one in windows(trainer, "val", picked)))
    (written,) = (cell.workdir / "results").glob("*/metrics.npy")
    mae, mse = np.load(written)[:2].tolist()
    return Result(
        metrics={
            "mse": mse,
            "mae": mae,
            "validation mse": min(series["valid_loss"]),
            "largest logit": seen["max_logit"],
            "entropy": seen["entropy"],
            "epochs": float(len(series["valid_loss"])),
        },
        series=series,
        details=about(trainer.model),
    )


def command(cell: Cell, data: Path) -> list[str]:
    """Return the words after run.py. What they leave out has run.py's defaults, which are its scripts' too."""
    options, model = cell.options, cell.options["model"]
    layers, heads = PATCHTST[cell.task] if model == "PatchTST" else (2, 8)
    width = 8 * heads if cell.smoke else options["width"]
    if width % heads:
        raise ConfigError(f"option width is {width}, which {heads} heads do not divide; choose a multiple of {heads}")
    if options["horizon"] > LONGEST:
        raise ConfigError(f"option horizon is {options['horizon']} hours; expected at most {LONGEST}")
    given = f"""--task_name long_term_forecast --is_training 1 --model_id {cell.task} --model {model} --data {cell.task}
        --pred_len {options["horizon"]} --e_layers {layers} --n_heads {heads} --factor 3
        --d_model {width} --d_ff {width if model == "iTransformer" else 4 * width}
        --train_epochs {1 if cell.smoke else options["epochs"]} --learning_rate {options["lr"]} --num_workers 0"""
    places = ["--root_path", str(data / SERIES), "--data_path", f"{cell.task}.csv"]
    return [*given.split(), *places, *([] if torch.cuda.is_available() else ["--no_use_gpu"])]


def windows(trainer: Any, split: str, picked: Iterable[int]) -> list[Tensor]:
    """Return the model's inputs for some windows of a split. Draws no random number, as a loader would."""
    data, _ = trainer._get_data(split)
    x, y, x_mark, y_mark = (one.float() for one in default_collate([data[i] for i in picked]))
    y[:, -trainer.args.pred_len :] = 0
    return [x, x_mark, y, y_mark]


def shorten(original: Any, trainer: Any, flag: str) -> tuple[Any, list[Any]]:
    """Return a split, and its first two batches in place of its loader."""
    data, loader = original(trainer, flag)
    return data, list(islice(loader, 2))


@contextmanager
def inside(clone: Path, folder: Path, words: list[str]) -> Iterator[None]:
    """Work in `folder` with the clone's modules and the command line of its run.py, and write no bytecode there."""
    kept = sys.argv, sys.path[:], sys.dont_write_bytecode, Path.cwd()
    sys.argv, sys.dont_write_bytecode = [str(clone / "run.py"), *words], True
    sys.path.insert(0, str(clone))
    os.chdir(folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.dont_write_bytecode, there = kept
        os.chdir(there)
