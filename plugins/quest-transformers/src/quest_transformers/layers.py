"""An attention module of transformers with a mechanism, and the function that its forward calls.

A module of transformers projects, applies RoPE and extends its cache, then calls the function that
``config._attn_implementation`` names. `AttentionInterface` returns it, and is wrapped, so that the function of a module
with a `Mechanism` gets prepared queries and keys. Nothing else that the model does changes.
"""

import functools
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from quest_core.checkpoints import compare_layers
from quest_core.compat import is_compiling_without_dynamo
from quest_core.config import AttentionConfig
from quest_core.drafts import draft
from quest_core.errors import InjectionError, InputError, UnsupportedError
from quest_core.hosts.adapter import mechanism_for
from quest_core.hosts.sites import beyond_operands
from quest_core.mechanism import Mechanism, head_sizes
from quest_core.mechanisms.base import Score
from quest_core.ops import hide_lowest
from quest_core.projections import Projected

from .anatomy import Anatomy, eager_fix, examine, keywords, takes_cache
from .caching import STEP, announce

OUR_FUNCTION = "quest_transformers"
"""The attention function that a model's config names if a mechanism takes the place of the host's functions; its masks
are those of `make_mask`."""

OUR_FUNCTION_WHOLE_MASKS = f"{OUR_FUNCTION}_whole_masks"
"""The same with the masks of `make_whole_mask`, for models without sdpa: their modules may not say that they are
causal."""

OUR_FUNCTIONS = (OUR_FUNCTION, OUR_FUNCTION_WHOLE_MASKS)

_HOST_ONLY = {
    "softcap": "the host's function caps logits before the softmax",
    "s_aux": "attention sinks are a part of the host's softmax",
    "sinks": "attention sinks are a part of the host's softmax",
    "indices": "the host chooses the keys of each query, and masks the others for its own functions only",
    "block_indices": "the host chooses the keys of each query, and masks the others for its own functions only",
    "cache": "continuous batching pages the cache",
}
"""Arguments of a call that only the host's function honors, and why."""

_REPRODUCED = {"softcap", "s_aux"}
"""Those of them whose logits and weights a Monitor can form as eager attention does."""

_IGNORED = {
    *("output_attentions", "sliding_window", "position_ids", "deterministic"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}
"""Arguments that change nothing here, because the mask says the same, or because they are for one back end only."""


def prepares(config: AttentionConfig) -> bool:
    """Return whether an attention is the host's own function of prepared queries and keys, and of another scale."""
    return beyond_operands(config) is None


def unknown_keywords(module: nn.Module) -> list[str]:
    """Return the keywords of a module for its attention function that `attend_instead` neither reads nor ignores."""
    read = inspect.signature(attend_instead).parameters
    return sorted(keywords(module) - set(read) - set(_HOST_ONLY) - _IGNORED)


def replace(host: Any, config: AttentionConfig, *, fresh: bool) -> nn.Module:
    """Return the draft of an attention module with the same parameters and a mechanism; see `HostAttention.adopt`.

    Args:
        host: an attention module of transformers, or what this function made of one; it is not changed.
    """
    anatomy = examine(host)
    made = draft(host)
    made.head_sizes = head_sizes(config, anatomy.num_heads, anatomy.head_dim, host_kv_heads=anatomy.kv_heads)
    made.mechanism = mechanism_for(made, config, made.head_sizes, anatomy.scaling, projections=anatomy.projections)
    made.mechanism.hides_by_infinity = True  # `attend` sees to it
    made.rules = Rules.of(made.mechanism, anatomy)
    if anatomy.projections is not None:
        anatomy.projections.shrink(made, made.head_sizes, fresh=fresh)
    made.register_load_state_dict_pre_hook(before_load)
    if eager_fix(made) is not None:
        made.register_forward_pre_hook(refuse_eager)
    if takes_cache(made):
        made.register_forward_pre_hook(announce, with_kwargs=True)
    if hasattr(host, "num_key_value_groups"):
        made.num_key_value_groups = anatomy.num_heads // made.head_sizes.kv_heads
    if hasattr(host, "num_key_value_heads"):
        made.num_key_value_heads = made.head_sizes.kv_heads
    return made  # type: ignore[no-any-return]


class View(Projected):
    """The parameters of a replacement, described; a replacement itself keeps the class and the config of its host."""

    @classmethod
    def of(cls, module: Any) -> "View":
        """Return a view of a module that `replace` made, whose projections are known."""
        made: Any = object.__new__(cls)
        made.__dict__.update(vars(module))
        made.config, made.projections = module.mechanism.config, examine(module).projections
        return made  # type: ignore[no-any-return]


def before_load(module: Any, state_dict: Any, prefix: str, *arguments: Any) -> None:
    """Compare the attention of a state dict, and pool its key/value heads if it has all of the host's: a load hook."""
    compare_layers(module, state_dict, prefix, *arguments)
    projections = examine(module).projections
    if projections is not None:
        projections.load(module, state_dict, prefix, module.head_sizes)


@dataclass(frozen=True)
class Rules:
    """What `attend` must know of a mechanism in every call.

    Attributes:
        scaling: the factor on q·k that the mechanism was built for.
        prepares: the host's own function is called, with prepared queries and keys.
        untouched: the host's own function is called, and nothing has to be prepared (`standard`).
        unit_keys: a cache may hold its keys after their normalization; see quest_transformers.caching.
        causal: without a mask queries see no later keys, unless the module says otherwise.
        cross: the keys are those of another sequence.
        last_values: the last values must be those of the queries.
    """

    scaling: float
    prepares: bool
    untouched: bool
    unit_keys: bool
    causal: bool
    cross: bool
    last_values: bool

    @classmethod
    def of(cls, mechanism: Mechanism, anatomy: Anatomy) -> "Rules":
        """Return the rules of a mechanism in a module."""
        prepared = prepares(mechanism.config)
        return cls(
            anatomy.scaling,
            prepared,
            prepared and _is_host(mechanism.score, anatomy),
            mechanism.takes_unit_keys,
            anatomy.role == "decoder",
            anatomy.role == "cross",
            any(part.axis == "output" and "unseen" in part.reads for part in mechanism.config.components),
        )

    def rescale(self, query: Tensor, scaling: float | None) -> Tensor:
        """Return queries for the factor `self.scaling` on q·k of queries for the factor `scaling` of a call."""
        if scaling is None or scaling == self.scaling:
            return query
        return query * (scaling / self.scaling)  # the host has scaled its queries itself (OPT, Whisper)


def _is_host(score: Score, anatomy: Anatomy) -> bool:
    """Return whether a score neither prepares operands nor scales them in another way than the host."""
    plain = all(getattr(type(score), name) is getattr(Score, name) for name in ("query", "key", "forward"))
    return plain and score.scale(anatomy.head_dim) == anatomy.scaling


def dispatch(stock: Any) -> Any:
    """Wrap a method of AttentionInterface that returns the function of a name: `attend` calls that function."""

    @functools.wraps(stock)
    def look_up(self: Any, name: str, *default: Any) -> Any:
        found = stock(self, name, *default)
        ours = isinstance(found, functools.partial) and found.func is attend  # one lookup may call the other
        return found if ours else functools.partial(attend, name, found)

    return look_up


def attend(
    name: str,
    function: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *arguments: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of any module of transformers; in one without a mechanism, the host's function does.

    With a softmax, the host's function gets queries and keys that the score has prepared. `attend_instead` takes its
    place for other mechanisms, for weights that the host's sdpa does not return, and for a Monitor, which sees weights
    there; with arguments that only the host's function honors, a Monitor sees what `_show` can form.

    Args:
        name, function: of the host.
        query: [B, H, N, D].
        key: [B, G, M, D] and value: [B, G, M, Dv], with the tokens of the cache.
        attention_mask: as the host has made it for its own function.
        arguments, options: of the host's function, and the `Step` of quest_transformers.caching.

    Returns:
        The output [B, N, H, Dv], and the weights [B, H, N, M] or None.
    """
    if not hasattr(module, "rules"):  # torch.compile guards this, and no look-up in a __dict__
        return function(module, query, key, value, attention_mask, *arguments, **options)  # type: ignore[no-any-return]
    rules: Rules = module.rules
    mechanism: Mechanism = module.mechanism
    step = options.pop(STEP, None)
    unit_keys = step is not None and step.keys is key
    collected = _active_collector.get()  # what the call of the model records
    wanted = options.get("output_attentions") or (collected and any(one.endswith("attentions") for one in collected))
    monitored = mechanism.monitor is not None
    host_only = _host_only_arguments(name, key, attention_mask, options) if monitored else []
    replaced = not rules.prepares or name in OUR_FUNCTIONS
    observed = monitored and not host_only
    lacks_weights = wanted and name == "sdpa"
    if replaced or observed or lacks_weights:
        return attend_instead(
            module, query, key, value, attention_mask, *arguments, wanted=bool(wanted), unit_keys=unit_keys, **options
        )
    if monitored or not rules.untouched:
        scaled = rules.rescale(query, options.get("scaling"))
        prepared = mechanism.score(scaled, key, value, mask=None, is_causal=False, unit_keys=unit_keys)
        if options.get("block_table") is not None and prepared[1] is not key:
            raise UnsupportedError(
                f"continuous batching has {name} read keys from the cache's pages, where those that "
                f"'{mechanism.config}' has not prepared are; use ContinuousBatchingConfig(max_blocks_per_request=0)"
            )
        if monitored and not is_compiling_without_dynamo():
            torch.compiler.disable(_show)(module, name, *prepared, attention_mask, host_only, options)
        if not rules.untouched:
            query, key, options["scaling"] = prepared
    return function(module, query, key, value, attention_mask, *arguments, **options)  # type: ignore[no-any-return]


def _host_only_arguments(name: str, key: Tensor, mask: Any, options: Any) -> list[str]:
    """Return the arguments of a call by which only the host's function knows its weights, or which keys it hides."""
    found = [each for each in _HOST_ONLY if options.get(each) is not None]
    if name not in ("eager", "sdpa"):  # whose masks say all
        if mask is not None and getattr(mask, "ndim", 0) != 4:
            found.append("attention_mask")
        if mask is None and (options.get("sliding_window") or math.inf) < key.shape[2]:
            found.append("sliding_window")
        if options.get("cu_seq_lens_q") is not None:
            found.append("cu_seq_lens_q")
    return found


def _show(
    module: Any, name: str, query: Tensor, key: Tensor, scale: float, mask: Any, host_only: list[str], options: Any
) -> None:
    """Show a Monitor a call that `attend_instead` cannot take over, because of the arguments `host_only`.

    Queries and keys are prepared; the rest is as in `attend`.
    """
    known = mask is None or getattr(mask, "ndim", 0) == 4
    reproduced = name == "eager" and _REPRODUCED.issuperset(host_only) and options.get("position_bias") is None
    if not reproduced or not known:
        why = f"{type(module).__name__} calls {name} with {host_only[0]}: "
        why += _HOST_ONLY.get(host_only[0], "only that function knows which keys it hides")
        if name != "eager" and "cache" not in host_only and "sinks" not in host_only:
            why += "; set_attn_implementation('eager') lets it be seen"
        for layer in module.mechanism.monitor:
            layer.miss(why)
        return
    if mask is not None:
        mask = mask[..., : key.shape[2]]
        mask = mask if mask.dtype == torch.bool else hide_lowest(mask)
    cap, sinks = options.get("softcap"), options.get("s_aux")

    def weigh(z: Tensor) -> Tensor:
        assert sinks is not None
        column = sinks.to(z).reshape(1, -1, 1, 1).expand(*z.shape[:-1], 1)
        return torch.cat((z, column), -1).softmax(-1)[..., :-1]

    change = None if cap is None else lambda z: cap * torch.tanh(z / cap)
    for layer in module.mechanism.monitor:
        layer.saw_operands(query, key, scale, mask, change, None if sinks is None else weigh)


def refuse(module: Any, *arguments: Any, **options: Any) -> Any:
    """Raise InjectionError: the function of a config that asks for an attention, in a module without one."""
    raise InjectionError(
        f"{type(module).__name__} has no mechanism, but its config says attention "
        f"'{getattr(module.config, 'attention', None)}': the config was changed after the model was built; give each "
        "model a config of its own, and change a built model with quest_core.inject"
    )


def refuse_eager(module: Any, arguments: Any) -> None:
    """Raise UnsupportedError if a module computes eager attention without AttentionInterface; a Monitor misses it."""
    if module.config._attn_implementation != "eager":
        return
    fix = eager_fix(module)
    why = (
        f"{type(module).__name__} asks AttentionInterface for every function but eager attention, which "
        f"'{module.mechanism.config}' therefore cannot reach; use set_attn_implementation('sdpa'), or {fix}"
    )
    if not module.rules.untouched:
        raise UnsupportedError(why)
    for layer in module.mechanism.monitor or ():
        layer.miss(why)


def attend_instead(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    *,
    wanted: bool = False,
    unit_keys: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module with its mechanism, in place of the host's function; as `attend`, and:

    Args:
        attention_mask: None, boolean (True = may attend) or additive, broadcastable to [B, H, N, M].
        is_causal: without a mask, whether the first query sees only the first key; module.is_causal by default.
        position_bias: added to the logits, broadcastable to [B, H, N, M].
        wanted: return the weights too.

    Raises:
        UnsupportedError: an option that the mechanism cannot honor.
        InputError: tensors that do not fit together.
    """
    mechanism: Mechanism = module.mechanism
    rules: Rules = module.rules
    for name in _HOST_ONLY:
        if options.get(name) is not None:
            raise UnsupportedError(
                f"{type(module).__name__} calls its attention with {name}: {_HOST_ONLY[name]}, and "
                + (
                    "its weights are those of the host's function: set_attn_implementation('eager')"
                    if rules.prepares
                    else f"'{mechanism.config}' takes the place of the host's function"
                )
            )
    query = rules.rescale(query, scaling)
    n, m = query.shape[2], key.shape[2]
    if attention_mask is not None and getattr(attention_mask, "ndim", 0) != 4:
        raise InputError(
            f"{type(module).__name__} was given a mask of another implementation of attention ("
            f"{_describe(attention_mask)}, not [B, H, N, M]); use model.set_attn_implementation('sdpa')"
        )
    causal = getattr(module, "is_causal", rules.causal) if is_causal is None else is_causal
    implied = n > 1 and attention_mask is None and causal
    mechanism.refuse_future(None, n > 1 and is_causal is True)  # a compiler cannot read it from the mask
    if implied and m > n:  # a static cache holds room for tokens to come
        key, value, m = key[:, :, :n], value[:, :, :n], n
        position_bias = None if position_bias is None else position_bias[..., :n]
    if causal and mechanism.family is not None:
        _refuse_unordered(module, attention_mask, n, m)
        implied = True
    if "queries" in mechanism.reads and attention_mask is not None and n == m:
        attention_mask = _hide_queries(attention_mask)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        attention_mask = hide_lowest(attention_mask)
    if position_bias is not None:
        attention_mask = _add_bias(position_bias, attention_mask)
    call: dict[str, Any] = {"attn_mask": attention_mask, "is_causal": implied, "dropout_p": dropout}
    weights = None
    if wanted:
        out, weights = mechanism.forward_with_weights(query, key, value, **call)
    else:
        out = mechanism(query, key, value, **call, **({"unit_keys": True} if unit_keys else {}))
    return out.transpose(1, 2).contiguous(), weights


def _describe(mask: Any) -> str:
    return f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__


def _refuse_unordered(module: Any, mask: Tensor | None, n: int, m: int) -> None:
    """Raise UnsupportedError if only the mask says which keys are of the past, because a family gets `is_causal`."""
    if mask is not None and n != m:
        raise UnsupportedError(
            f"attention '{module.mechanism.config}' in {type(module).__name__} cannot see which of {m} keys are of the "
            f"past for {n} queries, as with a static cache, padding or assisted decoding; use a dynamic cache without "
            "padding, or use_cache=False"
        )


def _hide_queries(mask: Tensor) -> Tensor:
    """Hide the rows of tokens that no query sees, which is padding: mask [B or 1, 1 or H, N or 1, M]."""
    if mask.dtype == torch.bool:
        return mask & mask.any(-2, keepdim=True).mT
    real = (mask > torch.finfo(mask.dtype).min / 2).any(-2, keepdim=True).mT
    return mask.masked_fill(~real, -torch.inf)


def _add_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Add a learned bias, which hides nothing, to a mask. T5's is not contiguous."""
    if mask is not None:
        bias = torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask
    return bias.contiguous()


def make_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """Build the mask for `attend`: as for sdpa, but [B, 1, 1, M] where only padding is hidden."""
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    if getattr(options.get("config"), "num_kv_shared_layers", 0):
        options["allow_is_causal_skip"] = False  # Gemma 4 gives such layers only the last queries, as the mask says
    made: Tensor | None = sdpa_mask(*arguments, **options)
    if made is not None and options.get("mask_function") is bidirectional_mask_function:
        return made[:, :, :1]
    return made


def make_whole_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """Build the mask for `attend`, also where it only hides the future."""
    return make_mask(*arguments, **{**options, "allow_is_causal_skip": False})
