"""The universal site: a module whose forward calls an attention function of PyTorch, whatever its class.

``inject(model, "quest", example=batch)`` runs the model once on `batch` and sees which modules call
scaled_dot_product_attention, multi_head_attention_forward or flex_attention. Each becomes a site: its class gets a
subclass, in whose forward that one call goes to a Mechanism. Projections, rotary embeddings, caches and masks stay the
host's.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat import (
    ATTENTION,
    FLEX_ATTENTION,
    flex_attention_compiles_itself,
    is_compiling,
    is_exporting,
    is_tracing,
    may_read,
    size,
)
from ..config import AttentionConfig
from ..errors import ConfigError, InputError, UnsupportedError
from ..mechanism import Mechanism, head_sizes
from ..multihead import MultiheadAttention, leave_native_path
from ..ops import hides_the_future, mask_of_host, plain_mask
from ..projections import HeadSizes
from .adapter import Capabilities, mechanism_for
from .following import Comparing
from .sites import (
    KEPT,
    Found,
    FoundSite,
    beyond_operands,
    common_norm,
    in_compiled_graph,
    norm_note,
    refuse_checkpoint,
    site_draft,
    without_factors,
)


@dataclass(frozen=True, kw_only=True)
class Call(Found):
    """The calls of one module while the example ran. `heads` is 1 for queries without an axis of heads."""

    scale: float | None = None  # the host's factor on q·k; None for 1/√D
    # By which the host multiplied q and k before, in place of a scale; None if one call differs from another.
    factors: tuple[float, float] | None = (1.0, 1.0)
    masked: bool = False  # a mask hid other pairs of queries and keys than whole keys
    dropout: bool = False  # weights were dropped
    axes: int = 4  # of the queries. Only with four it is known which axis is that of heads.
    function: str = "scaled_dot_product_attention"  # that it called
    weights: bool = False  # the function returned weights

    flags = (*Found.flags, "masked", "dropout", "weights")
    optional: ClassVar[Mapping[str, Any]] = {**Found.optional, "factors": None}

    @property
    def does(self) -> str:
        return f"calls {self.function}"

    @property
    def asks(self) -> Capabilities:
        """The capabilities that the calls need of a mechanism."""
        return Capabilities(
            causal=self.causal, cross=self.cross, dropout=self.dropout, weights=self.weights, pairs=self.masked
        )

    def join(self, other: "Call") -> "Call":
        """Return what two calls have in common; `_attend` repeats keys and values that have fewer heads."""
        fewer, most = sorted((self.kv_heads, other.kv_heads))
        if most % fewer == 0:
            self, other = (replace(one, kv_heads=most) for one in (self, other))
        made: Call = super().join(other)
        return made

    @property
    def scale_number(self) -> float:
        """The factor of the call on q·k, as a number."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def with_factors(self, of_q: float | None, of_k: float | None, *, separable: bool) -> "Call":
        """Return the call of a host that multiplied its queries and keys by factors, None if they are not known.

        They count as its scale if they make the scale of the call to 1/√D, and else stay. `separable` says that these
        are all, and none is on a part or before another function.
        """
        whole = self.scale_number * math.sqrt(self.head_dim)
        if of_q is not None and of_k is not None and math.isclose(of_q * of_k * whole, 1, rel_tol=1e-2):
            return replace(self, factors=(of_q, of_k))
        plain = {of_q, of_k} <= {None, 1}
        return self if plain and (separable or math.isclose(whole, 1, rel_tol=1e-2)) else replace(self, note=KEPT)

    def sizes(self, config: AttentionConfig) -> HeadSizes:
        return head_sizes(config, self.heads, self.head_dim, host_kv_heads=self.kv_heads)

    def draft(self, module: nn.Module, config: AttentionConfig) -> Any:
        """Return the draft of the module as a site with a mechanism; its parameters are the same objects."""
        made = site_draft(Routed, module, self)
        scale, made.undone = self.scale, (1.0, 1.0)
        if self.factors is not None and not config.is_standard and self.factors != (1, 1):
            made.undone = self.factors
            scale = math.prod((self.scale_number, *self.factors))
        made.add_module("mechanism", mechanism_for(module, config, self.sizes(config), scale, like=self.query))
        if isinstance(module, nn.MultiheadAttention):
            leave_native_path(made.mechanism)
        return made

    def refusal(self, config: AttentionConfig) -> str | None:
        """Return what `config` needs beyond the q, k and v of a call, or None."""
        if self.function == "flex_attention" and (why := beyond_operands(config)):
            return why
        if self.factors is None and not config.is_standard:
            return "it multiplies queries and keys by other factors in one call than in another"
        try:
            groups = self.sizes(config).kv_heads
        except ConfigError:  # `draft` says it
            groups = self.kv_heads
        if groups != self.kv_heads:
            return f"the host projects {self.kv_heads} key/value heads, and '{config}' asks for {groups}"
        for part in config.components:
            if self.repeated and (part.learnable or part.stateful or part.chained):
                return f"one forward calls the function more than once, and '{part.name}' keeps something for each call"
            if self.axes != 4 and (part.learnable or part.stateful):
                return f"queries have {self.axes} axes, and '{part.name}' must know which is that of the heads"
        if config.family is not None and self.heads != self.kv_heads:
            return f"'{config.family}' needs as many key/value heads ({self.kv_heads}) as query heads ({self.heads})"
        return None


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

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value with the same number of axes, and heads that a mechanism takes.

        PyTorch broadcasts axes that one of them lacks, and a single head.
        """
        axes = max(x.dim() for x in self[:3])
        axes = 4 if axes == 3 and self.enable_gqa else axes  # the first axis is that of the heads
        q, k, v = (x if x.dim() == axes else x[(None,) * (axes - x.dim())] for x in self[:3])
        if axes > 3:
            heads, *others = (size(x, -3) for x in (q, k, v))
            if others[0] != others[1]:
                k, v = (x.expand(*x.shape[:-3], max(others), -1, -1) for x in (k, v))
            if heads == 1 < max(others):
                q = q.expand(*q.shape[:-3], max(others), -1, -1)
        return q, k, v


class Routed(FoundSite):
    """The class of a site: its calls of an attention function go to `mechanism`.

    The score `standard` keeps the scale of the call; every other score has its own (1 for quest), on queries and keys
    without the factors of the host that stand in for a scale.
    """

    found_attention: Call
    undone: tuple[float, float]  # factors of the host on queries and keys that give way to the scale of the score

    def attention_mode(self) -> "_Route | None":
        """Return the mode that redirects the calls, or None where the host computes the same and no Monitor watches."""
        return None if self.mechanism.is_standard and self.mechanism.monitor is None else _Route(self)


class _Route(Comparing):
    """Sends a site's calls of its attention function to it; everything else passes."""

    def __init__(self, site: Routed) -> None:
        super().__init__(site, eager=site.undone != (1, 1))
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = self.site.found_attention
        if func not in ATTENTION_FUNCTIONS or ATTENTION_FUNCTIONS[func].name != known.function:
            return self.call(func, args, kwargs)
        if in_compiled_graph(self.site):
            return func(*args, **kwargs)
        self.calls += 1
        refuse_checkpoint(known.path)
        if self.eager:
            given = dict(zip(("query", "key"), args, strict=False)) | kwargs
            self.compare_factors((given["query"], given["key"]), known.factors)
        return ATTENTION_FUNCTIONS[func].attend(self.site, *args, **kwargs)

    def finish(self) -> None:
        """Raise UnsupportedError unless the site called its function."""
        known = self.site.found_attention
        if not self.calls:
            raise UnsupportedError(
                f"'{known.path}' did not call {known.function} this time, although it did when attention "
                f"'{self.site.mechanism.config}' was injected; leave out options that return attention weights or turn "
                "fused attention off"
            )


# --- scaled_dot_product_attention -------------------------------------------------------------------------------------


def _read(path: str, *args: Any, **kwargs: Any) -> Call:
    """Return what a call asks of a mechanism; UnsupportedError if its tensors are nested."""
    call = _Arguments(*args, **kwargs)
    if call.query.is_nested:
        raise UnsupportedError(
            "it calls scaled_dot_product_attention with nested tensors; pad them and pass a mask of the padding"
        )
    q, k, _ = call.operands()
    n, m = q.shape[-2], k.shape[-2]
    mask, is_causal, masked = call.attn_mask, call.is_causal, False
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        is_causal = is_causal or hides_the_future(mask)
        masked = True
    return Call(
        path=path,
        heads=_heads(q),
        kv_heads=_heads(k),
        head_dim=q.shape[-1],
        scale=call.scale,
        causal=is_causal,
        cross=n != m,
        masked=masked or (mask is not None and mask.dim() > 2 and mask.shape[-3] > 1),
        dropout=call.dropout_p > 0,
        axes=q.dim(),
        note=norm_note(common_norm(call.key, 1e-2) if may_read(call.key) else None),
        query=q.new_empty(0),
    )


def _attend(site: Routed, *args: Any, **kwargs: Any) -> Tensor:
    """Return the output of a site's mechanism in the layout of the call; raises InputError as `_check`.

    q, k and v are [N, D], [B, N, D] or [..., H, N, D]. Their batches are broadcast, and all become [B, H, N, D].
    """
    call = _Arguments(*args, **kwargs)
    q, k, v = call.operands()
    _check(site, _heads(q), q.shape[-1], call.scale)
    q, k = without_factors((q, k), site.undone)
    axes = q.dim()
    groups = size(k, -3) * site.mechanism.head_share[1] if axes > 3 else 1
    if (repeats := site.found_attention.kv_heads // groups) > 1:  # another call has more key/value heads
        k, v = (x.repeat_interleave(repeats, -3) for x in (k, v))
    mask = plain_mask(call.attn_mask, q.device)
    is_causal = call.is_causal  # query i sees keys j ≤ i, as PyTorch aligns them
    if not is_exporting() and (q.shape[:-3] != k.shape[:-3] or k.shape[:-3] != v.shape[:-3] or axes == 3):
        lead = torch.broadcast_shapes(*(x.shape[: -2 if axes == 3 else -3] for x in (q, k, v)))
        q, k, v = (x.expand(*lead, *x.shape[len(lead) :]) for x in (q, k, v))
    lead = q.shape[:-3]
    if mask is not None and mask.dim() > 2 and (mask.dim(), axes) != (4, 4):
        mask = _with_four_axes(mask.expand(*lead, *mask.shape[-3:]), axes)
    q, k, v = (_with_four_axes(x, axes) for x in (q, k, v))
    n, m = size(q, 2), size(k, 2)
    if is_causal and mask is not None:
        raise InputError(f"'{site.found_attention.path}': attn_mask and is_causal are both given; give one of them")
    if is_causal and n != m:  # Mechanism aligns at the last query
        mask, is_causal = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(), False
    out: Tensor = site.mechanism(q, k, v, attn_mask=mask, is_causal=is_causal, dropout_p=call.dropout_p)
    if axes == 2:
        return out[0, 0]
    out = out.squeeze(1) if axes == 3 else out.unflatten(0, lead) if axes > 4 else out
    return out if any(x.dim() == axes for x in call[:3]) else out[0]  # the batch that `operands` added


def _check(site: Routed, heads: int, features: int, scale: float | None) -> None:
    """Raise InputError if a call has other heads, features or another scale than that of the example."""
    if is_tracing():
        return
    known, heads = site.found_attention, heads * site.mechanism.head_share[1]
    if (heads, features) != (known.heads, known.head_dim):
        raise InputError(
            f"'{known.path}' is called with {heads} heads of {features} features, and was injected for "
            f"{known.heads} of {known.head_dim}; call uninject, and inject with an example of this shape"
        )
    wanted, given = (1 / math.sqrt(features) if factor is None else factor for factor in (known.scale, scale))
    if abs(wanted - given) > 1e-6 * abs(wanted):
        raise InputError(
            f"'{known.path}' is called with scale={given}, and was injected for {wanted}; scale the queries instead"
        )


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.dim() > 3 else 1


def _with_four_axes(x: Tensor, axes: int) -> Tensor:
    """Return [..., H, N, D] as [B, H, N, D], and [B, N, D] or [N, D], of three or two `axes`, with one head."""
    if axes == 2:
        return x[None, None]
    return x.unsqueeze(1) if axes == 3 else x.flatten(0, -4) if axes > 4 else x


# --- multi_head_attention_forward -------------------------------------------------------------------------------------

MULTI_HEAD = F.multi_head_attention_forward
_SIGNATURE = inspect.signature(MULTI_HEAD).parameters
_DEFAULTS = {name: p.default for name, p in _SIGNATURE.items() if p.default is not inspect.Parameter.empty}


class _MultiHead:
    """The arguments of multi_head_attention_forward, by the names of the attributes of MultiheadAttention.

    Tensors are [N, B, E], or [N, E].
    """

    batch_first = False
    _project = MultiheadAttention._project
    _visible = MultiheadAttention._visible
    _extend = MultiheadAttention._extend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = {**_DEFAULTS, **dict(zip(_SIGNATURE, args, strict=False)), **kwargs}
        if given["static_k"] is not None or given["static_v"] is not None:
            raise UnsupportedError("multi_head_attention_forward is called with static_k or static_v; leave them out")
        self.given = given
        self.training, self.dropout = given["training"], given["dropout_p"]
        self.num_heads = self.kv_heads = given["num_heads"]
        self.embed_dim = given["query"].shape[-1]
        self.head_dim = self.embed_dim // self.num_heads
        self.head_sizes = HeadSizes(self.num_heads, self.num_heads, *(self.head_dim,) * 3)
        self.in_proj_weight = None if given["use_separate_proj_weight"] else given["in_proj_weight"]
        self.in_proj_bias, self.bias_k, self.bias_v = given["in_proj_bias"], given["bias_k"], given["bias_v"]
        self.q_proj_weight, self.k_proj_weight = given["q_proj_weight"], given["k_proj_weight"]
        self.v_proj_weight, self.add_zero_attn = given["v_proj_weight"], given["add_zero_attn"]

    def out_proj(self, x: Tensor) -> Tensor:
        return F.linear(x, self.given["out_proj_weight"], self.given["out_proj_bias"])

    def attend(self, mechanism: Mechanism) -> tuple[Tensor, Tensor | None]:
        self.mechanism = mechanism
        names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights")
        forward: Any = MultiheadAttention.forward
        return forward(self, *(self.given[name] for name in names), self.given["is_causal"])  # type: ignore[no-any-return]


def _read_multi_head(path: str, *args: Any, **kwargs: Any) -> Call:
    call = _MultiHead(*args, **kwargs)
    given, mask = call.given, call.given["attn_mask"]
    ours = mask_of_host(mask)
    return Call(
        path=path,
        heads=call.num_heads,
        kv_heads=call.num_heads,
        head_dim=call.head_dim,
        causal=given["is_causal"] or (ours is not None and hides_the_future(ours)),
        cross=given["query"] is not given["key"],
        masked=mask is not None,
        dropout=call.dropout > 0,
        weights=given["need_weights"],
        function="multi_head_attention_forward",
        query=given["query"].new_empty(0),
    )


def _attend_multi_head(site: Routed, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output and the weights of a site's mechanism by the code of the drop-in."""
    call = _MultiHead(*args, **kwargs)
    _check(site, call.num_heads, call.head_dim, None)
    return call.attend(site.mechanism)


# --- flex_attention ---------------------------------------------------------------------------------------------------


def _read_flex(path: str, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Call:
    """Return what a call asks: score_mod, block_mask, scale and kernel_options follow the values [B, G, M, D]."""
    call = _read(path, query, key, value, scale=others[2])
    return replace(call, function="flex_attention", causal=False)


def _attend_flex(site: Routed, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Any:
    """Return what flex_attention returns for prepared queries and keys; score_mod and block_mask stay the host's."""
    if is_compiling() and flex_attention_compiles_itself():
        return FLEX_ATTENTION(query, key, value, *others)
    score_mod, block_mask, scale, *rest = others
    _check(site, query.shape[1], query.shape[-1], scale)
    query, key = without_factors((query, key), site.undone)
    query, key, scale = site.mechanism.score(query, key, value, mask=None, is_causal=False)
    if (monitor := site.mechanism.monitor) is not None:
        of_score, of_mask = rest[-2:]
        sizes = next(x.shape[:2] for x in block_mask if isinstance(x, Tensor) and x.dim() > 2)  # (B or 1, H or 1)
        mods = (lambda *given: score_mod(*given, *of_score), lambda *given: block_mask[-1](*given, *of_mask))
        for layer in monitor:
            layer.saw_flex(query, key, scale, *mods, sizes)
    return FLEX_ATTENTION(query, key, value, score_mod, block_mask, scale, *rest)


class _Function(NamedTuple):
    name: str
    read: Any  # (path, *args, **kwargs) -> Call
    attend: Any  # (site, *args, **kwargs) -> what the function returns


ATTENTION_FUNCTIONS = {
    ATTENTION: _Function("scaled_dot_product_attention", _read, _attend),
    MULTI_HEAD: _Function("multi_head_attention_forward", _read_multi_head, _attend_multi_head),
    FLEX_ATTENTION: _Function("flex_attention", _read_flex, _attend_flex),
}
"""The functions whose calls are found and redirected, as a TorchFunctionMode sees them."""
