"""What runs in place of tsai's functions, reads `attention` and compares it with a checkpoint's.

`TsaiAdapter` puts it in place.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quest_core.checkpoints import ENTRY, refuse_entries
from quest_core.errors import CheckpointError, ConfigError, InjectionError, UnsupportedError
from quest_core.hosts.adapter import Adapter
from quest_core.hosts.request import KEYS, Request
from quest_core.hosts.torch import TorchAdapter
from quest_core.mechanism import has_mechanism
from quest_core.mechanisms import Score
from quest_core.projections import Projected, init_norms

ARCHITECTURES = (
    "TSTPlus",
    "MultiTSTPlus",
    "TSiTPlus",
    "TST",
    "PatchTST",
    "TSPerceiver",
    "TransformerModel",
    "TransformerRNNPlus",
    "TransformerLSTMPlus",
    "TransformerGRUPlus",
    "RNNAttention",
    "LSTMAttention",
    "GRUAttention",
    "RNNAttentionPlus",
    "LSTMAttentionPlus",
    "GRUAttentionPlus",
    "ConvTranPlus",
    "TabTransformer",
    "TabFusionTransformer",
    "TSTabFusionTransformer",
    "GatedTabTransformer",
)
"""Architectures of tsai that have an attention to replace."""


def read_request(architecture: Any, options: Mapping[str, Any]) -> Request | None:
    """Return what the options of an architecture (a class or function that builds a model, or a model) ask for."""
    built = isinstance(architecture, nn.Module)
    kind = type(architecture) if built else architecture
    name = getattr(kind, "__name__", repr(kind))
    known = set() if built else inspect.signature(architecture).parameters.keys()
    if "attention" in known:  # a user's own architecture, which reads it itself
        return None
    # Many architectures swallow options that they do not know.
    request = Request.read(options, name, options.keys() - known)
    if request is not None and built:
        raise ConfigError(
            f"attention='{request.attention}' cannot change {name}, a model that is built already; give attention to "
            f"the class of the model, or call quest_core.inject(model, '{request.attention}') before the learner is "
            "made"
        )
    names = {base.__name__ for base in getattr(kind, "__mro__", ())}
    if request is not None and kind.__module__.startswith("tsai.") and names.isdisjoint(ARCHITECTURES):
        raise UnsupportedError(
            f"attention='{request.attention}' cannot be used in {name}: it has no attention that could be replaced. "
            f"Architectures of tsai that take it: {', '.join(ARCHITECTURES)}"
        )
    return request


def build_with_attention(
    architecture: type[Any], adapter: Adapter, stock: Callable[..., None], self: Any, /, *arguments: Any, **options: Any
) -> None:
    """Run `architecture.__init__`: build the stock model, then inject."""
    request = read_request(architecture, options)
    stock(self, *arguments, **{name: value for name, value in options.items() if name not in KEYS})
    if request is not None:
        request.apply(self, [adapter, TorchAdapter()])


def check_early(stock: Any, /, *arguments: Any, **options: Any) -> Any:
    """Run a function or `__init__` that makes a learner; refuse what cannot be before the data is prepared."""
    from tsai.learner import get_arch
    from tsai.models.utils import build_ts_model

    code = stock.__code__  # its signature is fastai's, which hides **kwargs
    own, passes_on = code.co_varnames[: code.co_argcount], code.co_flags & inspect.CO_VARKEYWORDS
    given = {**dict(zip(own, arguments, strict=False)), **options}
    further = given.keys() - {*own} - inspect.signature(build_ts_model).parameters.keys()  # for the architecture
    for name in () if passes_on else sorted(further & {*KEYS}):
        raise ConfigError(f"{name!r} is an option of the architecture; write arch_config={{{name!r}: {given[name]!r}}}")
    arch = "InceptionTimePlus" if given.get("arch") is None else given["arch"]
    request = read_request(get_arch(arch), {name: given[name] for name in further} | (given.get("arch_config") or {}))
    made = stock(*arguments, **options)
    model = (arguments[0] if made is None else made).model  # an `__init__` returns None
    if request is not None and not has_mechanism(model):
        raise InjectionError(
            f"attention='{request.attention}' was given to {arch!r}, which did not read it; pass it on to an "
            "architecture of tsai, or call quest_core.inject(model, ...) before the learner is made"
        )
    return made


def init_again(stock: Callable[..., None], model: nn.Module, *arguments: Any, **options: Any) -> None:
    """Run `apply_init`, which draws projections again, and set the initial norms that the attention asks for."""
    stock(model, *arguments, **options)
    init_norms(model)


def leave_out_scores(stock: Callable[..., list[nn.Module]], model: nn.Module) -> list[nn.Module]:
    """Return the modules that fastai hooks, without scores: `learn.summary` reads a shape of all that they return."""
    return [module for module in stock(model) if not isinstance(module, Score)]


def transfer(
    stock: Callable[..., None],
    model: nn.Module,
    weights_path: Any,
    device: Any = None,
    exclude_head: bool = True,
) -> None:
    """Do what `transfer_weights` does, which copies tensors by name, but compare the attention and pool heads."""
    from fastai.torch_core import default_device

    stored = torch.load(weights_path, map_location=default_device() if device is None else device)
    layers = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, Projected))
    if not layers:
        refuse_entries(model, stored, "tsai")
        stock(model, weights_path, device, exclude_head)
        return

    def take(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x for name, x in state.items() if not (exclude_head and "head" in name)}

    own, given = take(model.state_dict()), take(stored)
    fits = {
        name: x for name, x in given.items() if name.startswith(layers) or (name in own and x.shape == own[name].shape)
    }
    if not fits:
        raise CheckpointError(f"{weights_path} and the model have no weights in common")
    model.load_state_dict(fits, strict=False)
    left = [name for name in own if name not in fits and not name.endswith(ENTRY)]
    print(f"check unmatched_layers: {left}" if left else f"weights from {weights_path} successfully transferred!\n")
