"""What this plugin changes in fairseq, and why; the README lists it. `FairseqAdapter.uninstall` undoes it."""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from fairseq import checkpoint_utils, models
from fairseq.distributed import utils as distributed_utils
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from fairseq.trainer import Trainer
from omegaconf import DictConfig, open_dict
from torch import nn

from quest_core import AttentionMismatchWarning
from quest_core.errors import ConfigError, one_of
from quest_core.hosts.patching import Patches

from .attention import Attention
from .config import HELP, parse


def install(patches: Patches) -> None:
    """Change fairseq; a second call changes nothing."""
    patches.wrap(models, "build_model", _refuse_unread)
    patches.wrap(checkpoint_utils, "load_checkpoint_to_cpu", lambda stock: _reach_the_model(_allow_namespaces(stock)))
    patches.wrap(checkpoint_utils, "load_ema_from_checkpoint", _allow_namespaces)
    patches.wrap(Trainer, "load_checkpoint", _resume_the_same)
    patches.put(distributed_utils, "_broadcast_object_slow", _broadcast_structure)
    layer = TransformerEncoderLayerBase
    if "_load_from_state_dict" in vars(layer):  # fairseq 0.12.2
        patches.wrap(layer, "_load_from_state_dict", _load_without_shortcut)
        patches.put(layer, "can_use_fastpath", property(_get_shortcut, _set_shortcut))


# --- nothing is ignored ---------------------------------------------------------------------------------------------


def _refuse_unread(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap fairseq.models.build_model, which ignores options that a model does not read."""

    @functools.wraps(stock)
    def build_model(cfg: Any, *arguments: Any, **options: Any) -> Any:
        name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
        kind = models.ARCH_MODEL_REGISTRY.get(name) or models.MODEL_REGISTRY.get(name)
        given = {option: getattr(cfg, option, None) for option in HELP}
        unread = [
            f"{o}='{spec}'" for o, spec in given.items() if spec is not None and not parse(spec).means("standard")
        ]
        if unread and getattr(kind, "__module__", "").startswith("fairseq."):
            ours = [known for known in models.MODEL_REGISTRY if known.startswith("quest_")]
            raise ConfigError(
                f"the model '{name}' does not read {' and '.join(unread)}; name one that does with --arch (yaml: "
                f"model._name; --model-overrides: {{'model': {{'_name': ...}}}}); {one_of(f'quest_{name}', ours)}"
            )
        return stock(cfg, *arguments, **options)

    return build_model


def _reach_the_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the reader of checkpoints, which drops --model-overrides that a checkpoint's options do not have.

    The model reads them then, or `_refuse_unread` refuses them.
    """

    @functools.wraps(stock)
    def load_checkpoint_to_cpu(path: str, arg_overrides: Any = None, load_on_all_ranks: bool = False) -> Any:
        state = stock(path, arg_overrides, load_on_all_ranks)
        overrides = arg_overrides or {}
        places = [place for place in (overrides, overrides.get("model")) if isinstance(place, dict)]
        given = {name: place[name] for place in places for name in HELP if name in place}
        if given:
            state["args"] = None  # options of an old checkpoint, which fairseq would convert into `cfg` again
            with open_dict(state["cfg"]) as cfg:
                (cfg.model if isinstance(cfg.model, DictConfig) else vars(cfg.model)).update(given)
        return state

    return load_checkpoint_to_cpu


def _resume_the_same(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Trainer.load_checkpoint: a run with its optimizer's state does not go on with another attention.

    The buffer of quest_core refuses all other changes. Standard weights have none, so it only warns of them.
    """

    @functools.wraps(stock)
    def load_checkpoint(self: Trainer, filename: str, reset_optimizer: bool = False, *others: Any, **more: Any) -> Any:
        with warnings.catch_warnings():
            if not reset_optimizer:
                warnings.simplefilter("error", AttentionMismatchWarning)
            return stock(self, filename, reset_optimizer, *others, **more)

    return load_checkpoint


# --- PyTorch 2.6 and later: torch.load reads only what is known to be safe --------------------------------------------


def _allow_namespaces(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Let a reader of checkpoints read the options of quest_transformer, which fairseq stores as a Namespace."""
    allow: Any = getattr(torch.serialization, "safe_globals", lambda _: nullcontext())  # PyTorch 2.5 and later

    @functools.wraps(stock)
    def read(*arguments: Any, **options: Any) -> Any:
        with allow([argparse.Namespace]):
            return stock(*arguments, **options)

    return read


def _broadcast_structure(obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """Send an object without tensors to all ranks. fairseq reads it with torch.load, which refuses its classes."""
    held = [obj]
    torch.distributed.broadcast_object_list(held, src=src_rank, group=group, device=dist_device)
    return held[0]


# --- fairseq 0.12.2: encoder layers have a shortcut around the attention ----------------------------------------------
# In evaluation a layer that has loaded a checkpoint passes packed weights to a fused kernel of PyTorch and never calls
# its attention module.

_PACKED = [f"{module}_{kind}" for module in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")]


def _load_without_shortcut(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def _load_from_state_dict(self: Any, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        if not isinstance(self.self_attn, Attention):
            stock(self, state_dict, prefix, *arguments)
            return
        # The packed weights are unused parameters here. Those of a checkpoint with fewer key heads would not fit.
        state_dict.update({prefix + name: getattr(self, name).detach() for name in _PACKED})
        nn.Module._load_from_state_dict(self, state_dict, prefix, *arguments)

    return _load_from_state_dict


def _get_shortcut(layer: Any) -> bool:
    """Return what fairseq decided, but False while the attention is ours."""
    return layer.__dict__["can_use_fastpath"] and not isinstance(layer.self_attn, Attention)


def _set_shortcut(layer: Any, value: bool) -> None:
    layer.__dict__["can_use_fastpath"] = value
