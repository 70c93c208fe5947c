"""Load checkpoints of another attention by every loader of fairseq; the table is in docs/checkpoints.md."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SHAPE, USER_DIR
from fairseq import checkpoint_utils, hub_utils, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from omegaconf import DictConfig

from devtools import matrix
from quest_fairseq.averaging import average

ARCH = "quest_transformer_lm"


def arguments(kind: str, data: Path) -> list[str]:
    """What the command line says of a model; 'stock' is fairseq's own."""
    model = ["transformer_lm"] if kind == "stock" else [ARCH, "--attention", kind]
    given = ["--task", "language_modeling", "--tokens-per-sample", "24", "--store-ema", "--ema-decay", "0.9", "--cpu"]
    given += ["--optimizer", "adam", "--lr", "0.003", "--batch-size", "8", "--user-dir", USER_DIR, "--arch", *model]
    return [str(data), *given, *SHAPE]


def overrides(kind: str, data: Path) -> dict[str, Any]:
    """What `--model-overrides` and the keywords of `from_pretrained` say for a checkpoint to enter another model."""
    model = {"_name": "transformer_lm"} if kind == "stock" else {"_name": ARCH, "attention": kind}
    return {"data": str(data), "model": model}


@functools.cache
def configuration(kind: str, data: Path) -> DictConfig:
    args = options.parse_args_and_arch(options.get_training_parser(), arguments(kind, data))
    return convert_namespace_to_omegaconf(args)


def build(kind: str, data: Path) -> Any:
    cfg = configuration(kind, data)
    return tasks.setup_task(cfg.task).build_model(cfg.model)


def trainer(kind: str, data: Path, **options: Any) -> Trainer:
    """A training by fairseq's own parts, as fairseq-train puts them together, with options about checkpoints."""
    cfg = copy.deepcopy(configuration(kind, data))
    for name, value in options.items():
        setattr(cfg.ema if name in cfg.ema else cfg.checkpoint, name, str(value))
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


@pytest.fixture(scope="module")
def saved(lm_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of every kind, its moving average and the average of two."""
    folder = tmp_path_factory.mktemp("saved")
    for kind in ("stock", "quest"):
        made = trainer(kind, lm_data)
        path = folder / f"{kind}.pt"
        state = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": False, "version": 2}}
        made.consolidate_optimizer()
        made.save_checkpoint(str(path), {**state, "val_loss": 1.0})
        checkpoint_utils.save_ema_as_checkpoint(str(path), str(folder / f"{kind}-ema.pt"))
        torch.save(average([path, path]), folder / f"{kind}-averaged.pt")
    return folder


def resume(path: Path, kind: str, data: Path) -> None:
    made = trainer(kind, data, restore_file=path)
    checkpoint_utils.load_checkpoint(made.cfg.checkpoint, made)


def finetune(path: Path, kind: str, data: Path) -> None:
    made = trainer(kind, data, finetune_from_model=path, save_dir=path.parent / "none")
    checkpoint_utils.load_checkpoint(made.cfg.checkpoint, made)


def seed(path: Path, kind: str, data: Path) -> None:
    assert trainer(kind, data, ema_seed_model=path).ema


def evaluate(path: Path, kind: str, data: Path) -> None:
    checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides=overrides(kind, data))


def averaged(path: Path, kind: str, data: Path) -> None:
    evaluate(path.with_name(f"{path.stem}-averaged.pt"), kind, data)


def moving_average(path: Path, kind: str, data: Path) -> None:
    evaluate(path.with_name(f"{path.stem}-ema.pt"), kind, data)


def hub(path: Path, kind: str, data: Path) -> None:
    hub_utils.from_pretrained(str(path.parent), path.name, str(data), **overrides(kind, data))


def component(path: Path, kind: str, data: Path) -> None:
    checkpoint_utils.load_pretrained_component_from_model(build(kind, data).decoder, str(path))


def state_dict(path: Path, kind: str, data: Path) -> None:
    build(kind, data).load_state_dict(torch.load(path, weights_only=False)["model"])


def state_dict_not_strict(path: Path, kind: str, data: Path) -> None:
    build(kind, data).load_state_dict(torch.load(path, weights_only=False)["model"], strict=False)


LOADERS: dict[str, Callable[[Path, str, Path], None]] = {
    "`--restore-file`": resume,
    "`--finetune-from-model`": finetune,
    "`--ema-seed-model`": seed,
    "`fairseq-eval-lm`, `-generate`": evaluate,
    "`quest-fairseq average`": averaged,
    "`save_ema_as_checkpoint`": moving_average,
    "`from_pretrained`": hub,
    "`load_pretrained_component_from_model`": component,
    "`load_state_dict`": state_dict,
    "`load_state_dict(strict=False)`": state_dict_not_strict,
}


def test_the_table_has_these_loaders() -> None:
    assert matrix.committed("fairseq").keys() == LOADERS.keys()


@pytest.mark.parametrize("loader", LOADERS)
def test_a_checkpoint_of_another_attention(loader: str, saved: Path, lm_data: Path) -> None:
    def load(checkpoint: str, model: str) -> None:
        LOADERS[loader](saved / f"{checkpoint}.pt", model, lm_data)

    matrix.check_loader(load, "fairseq", loader, named=False)
