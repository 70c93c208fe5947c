"""What this plugin changes in fairseq, and why. `FairseqAdapter.uninstall` undoes it."""

import argparse
import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from fairseq import checkpoint_utils, models
from fairseq.dataclass import initialize
from fairseq.distributed import utils as distributed_utils
from fairseq.logging.progress_bar import BaseProgressBar
from fairseq.trainer import Trainer
from omegaconf import DictConfig, open_dict
from torch import Tensor

from quest_core import AttentionMismatchWarning
from quest_core.errors import CheckpointError, ConfigError, one_of
from quest_core.hosts.patching import Patches

from .config import OPTIONS, parse, read
from .models import BUILDS, load_part
from .watching import shorten, train_and_watch


def install(patches: Patches) -> None:
    """Change fairseq; a second call changes nothing."""
    patches.around(initialize, "add_defaults", _refuse_early, everywhere=True)
    patches.around(models, "build_model", _build_what_reads)
    patches.around(checkpoint_utils, "load_checkpoint_to_cpu", _reach_the_model)
    patches.around(checkpoint_utils, "load_pretrained_component_from_model", load_part)
    patches.around(Trainer, "load_checkpoint", _resume_the_same)
    patches.around(Trainer, "train_step", train_and_watch)
    patches.around(BaseProgressBar, "_format_stats", shorten)
    patches.put(distributed_utils, "_broadcast_object_slow", _broadcast_structure)
    # PyTorch 2.6 and later read only known classes; fairseq stores the options of quest_transformer as a Namespace.
    allowed = getattr(torch.serialization, "safe_globals", nullcontext)([argparse.Namespace])
    patches.once("namespaces", allowed.__enter__, functools.partial(allowed.__exit__, None, None, None))


def _refuse_early(stock: Callable[..., None], cfg: DictConfig) -> None:
    """Fill in a run's options, which comes before its folder is made, but refuse a wrong attention in them."""
    stock(cfg)
    _refuse_unread(cfg.model)
    if getattr(cfg.model, "attention", None) is not None:
        read(cfg.model)


def _build_what_reads(stock: Callable[..., Any], cfg: Any, *arguments: Any, **options: Any) -> Any:
    """Build a model, but refuse an attention that it does not read."""
    _refuse_unread(cfg)
    return stock(cfg, *arguments, **options)


def _refuse_unread(cfg: Any) -> None:
    """Raise ConfigError for an attention in the options of a model that does not read it; fairseq ignores it."""
    name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
    kind = models.ARCH_MODEL_REGISTRY.get(name) or models.MODEL_REGISTRY.get(name)
    given = {option: getattr(cfg, option, None) for option in OPTIONS}
    unread = [f"{o}='{spec}'" for o, spec in given.items() if spec is not None and not parse(spec).is_standard]
    if unread and getattr(kind, "__module__", "").startswith("fairseq."):
        ours = [known for known in models.MODEL_REGISTRY if known.startswith("quest_")]
        raise ConfigError(
            f"the model '{name}' does not read {' and '.join(unread)}; name one that does with --arch (yaml: "
            f"model._name; --model-overrides: {{'model': {{'_name': ...}}}}); {one_of(f'quest_{name}', ours)}"
        )


def _reach_the_model(stock: Callable[..., Any], path: str, arg_overrides: Any = None, *others: Any, **more: Any) -> Any:
    """Read a checkpoint and put all `--model-overrides` for our options into its options.

    fairseq drops those that the checkpoint's options do not have. The model reads them then, or `_refuse_unread`
    refuses them.
    """
    state = stock(path, arg_overrides, *others, **more)
    if (build := BUILDS.get()) is not None:
        build.loaded = True
    overrides = arg_overrides or {}
    places = [place for place in (overrides, overrides.get("model")) if isinstance(place, dict)]
    given = {name: place[name] for place in places for name in OPTIONS if name in place}
    if given:
        state["args"] = None  # options of an old checkpoint, which fairseq would convert into `cfg` again
        with open_dict(state["cfg"]) as cfg:
            (cfg.model if isinstance(cfg.model, DictConfig) else vars(cfg.model)).update(given)
    return state


def _resume_the_same(
    stock: Callable[..., Any], self: Trainer, filename: str, reset_optimizer: bool = False, *others: Any, **more: Any
) -> Any:
    """Load a checkpoint, but never resume a run, with its optimizer's state, from standard weights.

    quest_core only warns of them, because they have no buffer that names an attention. It refuses all others.
    """
    with warnings.catch_warnings():
        if not reset_optimizer:
            warnings.simplefilter("error", AttentionMismatchWarning)
        loaded = stock(self, filename, reset_optimizer, *others, **more)
    states = {} if self._optimizer is None else getattr(self.optimizer.optimizer, "state", {})
    for weight, state in states.items():
        tensors = (x for x in state.values() if isinstance(x, Tensor) and x.dim() == weight.dim())
        kept = next(tensors, weight)  # Adafactor's have fewer axes
        if kept.shape != weight.shape:
            raise CheckpointError(
                f"expected an optimizer of the model in {filename}, and its state has the shape {list(kept.shape)} for "
                f"weights of {list(weight.shape)}: this attention has other projections; say --reset-optimizer, or "
                "--finetune-from-model in place of --restore-file"
            )
    return loaded


def _broadcast_structure(obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """Send an object without tensors to all ranks. fairseq reads it with torch.load, which refuses its classes."""
    held = [obj]
    torch.distributed.broadcast_object_list(held, src=src_rank, group=group, device=dist_device)
    return held[0]
