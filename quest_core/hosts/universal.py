"""The universal site: a module whose forward calls scaled_dot_product_attention, whatever its class.

``inject(model, "quest", example=batch)`` runs the model once on `batch` and sees which modules call the function. Each
becomes a site: its class gets a subclass, in whose forward that one call goes to a Mechanism. Projections, rotary
embeddings, caches and masks stay the host's. A TorchFunctionMode redirects the call: it is active only inside the
forward of a site and in its thread, so PyTorch is not patched and other models pay nothing.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..compat import ATTENTION, is_compiling, is_exporting, is_tracing, kept_whole, require, same_random_state, size
from ..config import AttentionConfig
from ..drafts import draft, host_class
from ..errors import ConfigError, InjectionError, InputError, UnsupportedError
from ..mechanism import Mechanism, head_sizes
from ..ops import hides_the_future, plain_mask
from ..projections import HeadSizes
from .adapter import Adapter, Capabilities, Site, mechanism_for, refusal

HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads")
"""Attributes that hold the number of heads. A module with one of them and two Linear layers looks like attention."""
SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)


@dataclass(frozen=True)
class Call:
    """The calls of one module while the example ran."""

    path: str  # of the module
    heads: int  # query heads H, the last axis but two; 1 for queries without such an axis
    kv_heads: int  # key/value heads G
    head_dim: int  # features D of a query head
    scale: float | None = None  # the host's factor on q·k; None for 1/√D
    causal: bool = False  # the call or its mask hid every later key
    cross: bool = False  # queries and keys had different numbers of tokens
    masked: bool = False  # a mask hid other pairs of queries and keys than whole keys
    dropout: bool = False  # weights were dropped
    repeated: bool = False  # one forward called the function more than once
    axes: int = 4  # of the queries. Only with four it is known which axis is that of heads.
    query: Tensor | None = None  # without values: has the device and the type of the queries

    def sizes(self, config: AttentionConfig) -> HeadSizes:
        """Return the sizes of the heads that `config` asks for."""
        return head_sizes(config, self.heads, self.head_dim, host_kv_heads=self.kv_heads)

    def joined(self, other: Call) -> Call:
        """Return what both calls of one module ask for.

        Raises:
            UnsupportedError: they differ in heads, features or scale.
        """
        for name in ("heads", "kv_heads", "head_dim", "scale", "axes"):
            one, two = getattr(self, name), getattr(other, name)
            if one != two:
                raise UnsupportedError(
                    f"'{self.path}' calls scaled_dot_product_attention with {name}={one} and with {name}={two}, and a "
                    "site has one mechanism; write an adapter that makes two: https://quest-attention.github.io/quest/writing-an-adapter/"
                )
        flags = ("causal", "cross", "masked", "dropout", "repeated")
        return replace(self, **{name: getattr(self, name) or getattr(other, name) for name in flags})


class _Arguments(NamedTuple):
    """The arguments of scaled_dot_product_attention; tensors are [..., heads, tokens, features]."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class Routed(nn.Module):
    """Mixed into the class of a site: its calls of scaled_dot_product_attention go to `mechanism`.

    It has no other names than these, because a host's method of the same name would be overridden.

    The scale of the call is kept by the score `standard`; every other score has its own (1 for quest, on the queries as
    the host made them).
    """

    mechanism: Mechanism
    routed_call: Call

    def __init_subclass__(cls) -> None:
        """Pass by the hook of the host, which may register its subclasses by name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the host's forward.

        Raises:
            UnsupportedError: it did not call scaled_dot_product_attention, so its attention is another one.
        """
        if (whole := kept_whole(self, *args, **kwargs)) is not None:
            return whole
        if is_compiling():
            require("torch.compile of a model with universal sites", (2, 6))
        route = _Route(self)
        with route:
            out = super().forward(*args, **kwargs)
        if not route.calls:
            raise UnsupportedError(
                f"'{self.routed_call.path}' did not call scaled_dot_product_attention this time, although it did when "
                f"attention '{self.mechanism.config}' was injected; its forward chose another path, which the "
                "mechanism cannot replace. Options that return attention weights or turn fused attention off do that"
            )
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the host's class, because this one is made while the program runs."""
        made = super().__reduce_ex__(protocol)
        return (_empty, (host_class(self),), *made[2:])


class _Route(TorchFunctionMode):
    """Sends a site's calls of scaled_dot_product_attention to it; everything else passes."""

    def __init__(self, site: Routed) -> None:
        super().__init__()
        self.site, self.calls = site, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # the one method that Dynamo reads only as a method
            return args[0].unflatten(*args[1:], **kwargs)
        if func is not ATTENTION:
            return func(*args, **kwargs)
        self.calls += 1
        if not is_compiling():
            _refuse_checkpoint(self.site.routed_call.path)
        return _attend(self.site, _Arguments(*args, **kwargs))


def _refuse_checkpoint(path: str) -> None:
    """Raise if a checkpoint lies between a site's forward and its call: the second forward would not pass the site."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals is not globals():  # until Routed.forward
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise UnsupportedError(
                f"'{path}' calls scaled_dot_product_attention inside an activation checkpoint of its own, which would "
                "repeat it with the host's attention; turn that off and checkpoint the whole module"
            )
        frame = frame.f_back


def _attend(site: Routed, call: _Arguments) -> Tensor:
    """Return the output of a site's mechanism in the layout of the call; raises InputError as `_check`."""
    if not is_tracing():
        _check(site, call)
    axes = call.query.dim()
    mask, is_causal = plain_mask(call.attn_mask), call.is_causal  # query i sees keys j ≤ i, as PyTorch aligns them
    q, k, v = call[:3]
    if not is_exporting() and (q.shape[:-3] != k.shape[:-3] or k.shape[:-3] != v.shape[:-3] or axes == 3):
        lead = torch.broadcast_shapes(*(x.shape[: -2 if axes == 3 else -3] for x in (q, k, v)))
        q, k, v = (x.expand(*lead, *x.shape[len(lead) :]) for x in (q, k, v))
    lead = q.shape[:-3]
    if mask is not None and mask.dim() > 2 and (mask.dim(), axes) != (4, 4):
        mask = _batched(mask.expand(*lead, *mask.shape[-3:]), axes)
    q, k, v = (_batched(x, axes) for x in (q, k, v))
    n, m = size(q, 2), size(k, 2)
    if is_causal and mask is not None:
        raise InputError(f"'{site.routed_call.path}': attn_mask and is_causal are both given; give one of them")
    if is_causal and n != m:  # Mechanism aligns at the last key
        mask, is_causal = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(), False
    out: Tensor = site.mechanism(q, k, v, attn_mask=mask, is_causal=is_causal, dropout_p=call.dropout_p)
    if axes == 2:
        return out[0, 0]
    return out.squeeze(1) if axes == 3 else out.unflatten(0, lead) if axes > 4 else out


def _check(site: Routed, call: _Arguments) -> None:
    known, features = site.routed_call, call.query.shape[-1]
    heads = _heads(call.query) * site.mechanism.head_share[1]
    if (heads, features) != (known.heads, known.head_dim):
        raise InputError(
            f"'{known.path}' is called with {heads} heads of {features} features, and was injected for "
            f"{known.heads} of {known.head_dim}; inject again with an example of this shape"
        )
    wanted, given = (1 / math.sqrt(features) if scale is None else scale for scale in (known.scale, call.scale))
    if abs(wanted - given) > 1e-6 * abs(wanted):
        raise InputError(
            f"'{known.path}' is called with scale={given}, and was injected for {wanted}; scale the queries instead"
        )


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.dim() > 3 else 1


def _batched(x: Tensor, axes: int) -> Tensor:
    """Return [..., H, N, D] as [B, H, N, D], and [B, N, D] or [N, D], of three or two `axes`, with one head."""
    if axes == 2:
        return x[None, None]
    return x.unsqueeze(1) if axes == 3 else x.flatten(0, -4) if axes > 4 else x


@functools.cache
def _routed_class(host: Any) -> Any:
    """Return the subclass of `host` for its sites; names stay, because hosts and wrappers look for names."""

    @functools.wraps(host.forward)  # a host may read which arguments it takes
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Routed.forward(self, *args, **kwargs)

    body = {
        "__module__": host.__module__,
        "__qualname__": host.__qualname__,
        "__doc__": host.__doc__,
        "forward": forward,
    }
    return type(host.__name__, (Routed, host), body)


def _empty(host: Any) -> Any:
    """Return a site without attributes, for copies and pickles to fill."""
    return object.__new__(_routed_class(host))


class UniversalAdapter(Adapter):
    """Adapter for every module that calls scaled_dot_product_attention.

    Args:
        example: as in :func:`quest_core.inject`. None finds only modules that were injected before.
        taken: paths of the modules that other adapters replace.
    """

    name: ClassVar[str] = "universal"
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, example: Any = None, taken: Sequence[str] = ()) -> None:
        self.example, self.taken = example, list(taken)
        self.missed: dict[str, nn.Module] = {}  # look like attention and never called the function; set by `sites`
        self._calls: dict[str, Call] = {}

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Return the modules that call the function, in the order of their first calls.

        Raises:
            InjectionError: one of them contains another attention, or cannot be routed.
            UnsupportedError: the calls of one module differ in heads, features or scale.
        """
        modules = dict(model.named_modules())
        calls = {path: module.routed_call for path, module in modules.items() if isinstance(module, Routed)}
        search = _Search(model)
        if self.example is not None:
            search.run(self.example)
        calls |= search.calls
        self._calls = calls = {path: call for path, call in calls.items() if not within(path, self.taken)}
        ours = [*calls, *self.taken]
        for path in calls:
            inside = [other for other in ours if other != path and within(other, [path])]
            _refuse_unroutable(path, modules[path], inside)
        if self.example is not None:
            kinds = {host_class(modules[path]) for path in calls}
            self.missed = {
                path: module
                for path, module in modules.items()
                if (type(module) in kinds or path in search.softmaxes)
                and not within(path, ours)
                and not any(within(other, [path]) for other in ours)
            }
        for path, call in calls.items():
            asked = Capabilities(causal=call.causal, cross=call.cross, dropout=call.dropout)
            yield Site(path, modules[path], call.heads, call.head_dim, asked)

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the draft of a site with a mechanism; its parameters are the same objects."""
        made: nn.Module = route(site.module, self._calls[site.path], config)
        return made

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Return what `config` needs beyond the q, k and v of a call, or None."""
        return why_not(self._calls[site.path], config) or refusal(config, site.capabilities)


def route(module: nn.Module, call: Call, config: AttentionConfig) -> Any:
    """Return the draft of `module` as a site; `call` describes its calls."""
    host: Any = host_class(module)
    made = draft(module, _routed_class(host))
    made.routed_call = replace(call, query=None)
    made.mechanism = mechanism_for(module, config, call.sizes(config), call.scale, like=call.query)
    return made


def why_not(call: Call, config: AttentionConfig) -> str | None:
    """Return what `config` needs beyond the q, k and v of a call, or None."""
    try:
        groups = call.sizes(config).kv_heads
    except ConfigError:  # `route` says it
        groups = call.kv_heads
    if groups != call.kv_heads:
        return f"the host projects {call.kv_heads} key/value heads, and '{config}' asks for {groups}"
    for part in config.components:
        if call.repeated and (part.learnable or part.stateful or part.chained):
            return f"one forward calls the function more than once, and '{part.name}' keeps something for each call"
        if call.axes != 4 and (part.learnable or part.stateful):
            return f"queries have {call.axes} axes, and '{part.name}' must know which is that of the heads"
    if config.family is not None and call.masked:
        return f"a mask hides pairs of queries and keys, and '{config.family}' takes masks of keys only"
    if config.family is not None and call.heads != call.kv_heads:
        return f"'{config.family}' needs as many key/value heads ({call.kv_heads}) as query heads ({call.heads})"
    return None


def within(path: str, others: Iterable[str]) -> bool:
    """Return whether `path` is one of the others or inside one of them."""
    return any(path == other or other == "" or path.startswith(other + ".") for other in others)


def _refuse_unroutable(path: str, module: nn.Module, inside: list[str]) -> None:
    """Raise InjectionError if the calls of a module cannot be routed."""
    if inside:
        why = f"it contains another attention, '{inside[0]}'; move the call into a module of its own"
    elif hasattr(module, "mechanism") and not isinstance(module, Routed):
        why = "it has an attribute 'mechanism', which a site needs; rename it"
    else:
        return
    raise InjectionError(f"'{path}' ({type(module).__name__}) calls scaled_dot_product_attention, and {why}")


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a module is attention by its class, or has a number of heads and at least two projections."""
    if isinstance(module, nn.MultiheadAttention) or re.search(r"attention$|attn$", type(module).__name__, re.I):
        return True
    linear = sum(isinstance(child, nn.Linear) or type(child).__name__ == "Linear" for child in module.children())
    return linear > 1 and any(isinstance(vars(module).get(name), int) for name in HEADS)


def run_example(model: nn.Module, example: Any) -> Any:
    """Return the output of a model for a tensor, a tuple or list of arguments, a mapping of them, or a function."""
    if isinstance(example, Mapping):
        return model(**example)
    if isinstance(example, tuple | list):
        return model(*example)
    return example(model) if callable(example) else model(example)


class _Search(TorchFunctionMode):
    """Notes which module calls the function, and which forms weights by a softmax, while a model runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.running: list[tuple[nn.Module, list[int]]] = []  # each with the number of its calls
        self.calls: dict[str, Call] = {}
        self.softmaxes: set[str] = set()

    def run(self, example: Any) -> None:
        """Run the model in its mode, without gradients. Random state and buffers are left as they were."""
        model = self.model
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        handles = [module.register_forward_pre_hook(self.enter) for module in model.modules()]
        handles += [module.register_forward_hook(self.leave, always_call=True) for module in model.modules()]
        try:
            with same_random_state(model), torch.no_grad(), self:
                run_example(model, example)
        finally:
            for handle in handles:
                handle.remove()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self.running.append((module, [0]))

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.running and not any(isinstance(module, Mechanism) for module, _ in self.running):
            if func is ATTENTION:
                module, count = self.running[-1]
                count[0] += 1
                path = self.paths[module]
                call = _read(path, _Arguments(*args, **kwargs), repeated=count[0] > 1)
                self.calls[path] = self.calls[path].joined(call) if path in self.calls else call
            elif func is F.multi_head_attention_forward or (
                func in SOFTMAXES and _are_weights(args[0] if args else kwargs["input"])
            ):
                outer = [m for m, _ in self.running if not isinstance(m, nn.Softmax)]
                self.softmaxes.update(self.paths[m] for m in outer[-1:])
        return func(*args, **kwargs)


def _are_weights(logits: Tensor) -> bool:
    """Return whether logits are shaped like attention, [B, H, N, M] or [B·H, N, N], which others rarely are."""
    return logits.dim() > 3 or (logits.dim() == 3 and logits.shape[1] == logits.shape[2])


def _read(path: str, call: _Arguments, *, repeated: bool) -> Call:
    """Return what a call asks of a mechanism; UnsupportedError if its tensors are nested."""
    if call.query.is_nested:
        raise UnsupportedError(
            f"'{path}' calls scaled_dot_product_attention with nested tensors; pad them and pass a mask of the padding"
        )
    n, m = call.query.shape[-2], call.key.shape[-2]
    mask, is_causal, masked = call.attn_mask, call.is_causal, False
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        is_causal = is_causal or hides_the_future(mask)
        masked = True
    return Call(
        path,
        heads=_heads(call.query),
        kv_heads=_heads(call.key),
        head_dim=call.query.shape[-1],
        scale=call.scale,
        causal=is_causal,
        cross=n != m,
        masked=masked or (mask is not None and mask.dim() > 2 and mask.shape[-3] > 1),
        dropout=call.dropout_p > 0,
        repeated=repeated,
        axes=call.query.dim(),
        query=call.query.new_empty(0),
    )
