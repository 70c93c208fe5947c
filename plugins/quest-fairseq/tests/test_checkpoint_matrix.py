"""Load checkpoints of another attention by every loader of fairseq; the table is in docs/checkpoints.md."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import SHAPE, USER_DIR
from fairseq import checkpoint_utils, hub_utils, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

from devtools import matrix
from quest_fairseq.averaging import average

ARCH = "quest_transformer_lm"


def arguments(kind, data):
    """What the command line says of a model; 'stock' is fairseq's own."""
    model = ["transformer_lm"] if kind == "stock" else [ARCH, "--attention", kind]
    given = ["--task", "language_modeling", "--tokens-per-sample", "24", "--store-ema", "--ema-decay", "0.9", "--cpu"]
    given += ["--optimizer", "adam", "--lr", "0.003", "--batch-size", "8", "--user-dir", USER_DIR, "--arch", *model]
    return [str(data), *given, *SHAPE]


def overrides(kind, data):
    """What `--model-overrides` and the keywords of `from_pretrained` say for a checkpoint to enter another model."""
    model = {"_name": "transformer_lm"} if kind == "stock" else {"_name": ARCH, "attention": kind}
    return {"data": str(data), "model": model}


@functools.cache
def configuration(kind, data):
    args = options.parse_args_and_arch(options.get_training_parser(), arguments(kind, data))
    return convert_namespace_to_omegaconf(args)


def build(kind, data):
    cfg = configuration(kind, data)
    return tasks.setup_task(cfg.task).build_model(cfg.model)


def trainer(kind, data, **options):
    """A training by fairseq's own parts, as fairseq-train puts them together, with options about checkpoints."""
    cfg = copy.deepcopy(configuration(kind, data))
    for name, value in options.items():
        setattr(cfg.ema if name in cfg.ema else cfg.checkpoint, name, str(value))
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


@pytest.fixture(scope="module")
def saved(lm_data, tmp_path_factory):
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


def resume(path, kind, data):
    made = trainer(kind, data, restore_file=path)
    checkpoint_utils.load_checkpoint(made.cfg.checkpoint, made)


def finetune(path, kind, data):
    made = trainer(kind, data, finetune_from_model=path, save_dir=path.parent / "none")
    checkpoint_utils.load_checkpoint(made.cfg.checkpoint, made)


def seed(path, kind, data):
    assert trainer(kind, data, ema_seed_model=path).ema


def evaluate(path, kind, data, of=""):
    path = path.with_stem(f"{path.stem}{of}")
    checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides=overrides(kind, data))


def hub(path, kind, data):
    hub_utils.from_pretrained(str(path.parent), path.name, str(data), **overrides(kind, data))


def component(path, kind, data):
    checkpoint_utils.load_pretrained_component_from_model(build(kind, data).decoder, str(path))


def state_dict(path, kind, data, strict=True):
    build(kind, data).load_state_dict(torch.load(path, weights_only=False)["model"], strict=strict)


LOADERS: dict[str, Callable[[Path, str, Path], None]] = {
    "`--restore-file`": resume,
    "`--finetune-from-model`": finetune,
    "`--ema-seed-model`": seed,
    "`fairseq-eval-lm`, `-generate`": evaluate,
    "`quest-fairseq average`": functools.partial(evaluate, of="-averaged"),
    "`save_ema_as_checkpoint`": functools.partial(evaluate, of="-ema"),
    "`from_pretrained`": hub,
    "`load_pretrained_component_from_model`": component,
    "`load_state_dict`": state_dict,
    "`load_state_dict(strict=False)`": functools.partial(state_dict, strict=False),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_checkpoint_of_another_attention(loader, saved, lm_data):
    def load(checkpoint, model):
        LOADERS[loader](saved / f"{checkpoint}.pt", model, lm_data)

    matrix.check_loader(load, "fairseq", loader, among=LOADERS, named=False)
