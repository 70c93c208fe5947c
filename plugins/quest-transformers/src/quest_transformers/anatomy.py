"""What an attention module of transformers is made of, read from its attributes and from its forward's source."""

import ast
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from torch import nn

from quest_core.errors import UnsupportedError
from quest_core.projections import Projections, Separate

from .caching import CACHES

SEPARATE = (
    Separate("q_proj", "k_proj", "v_proj"),
    Separate("query", "key", "value"),
    Separate("q", "k", "v"),
    Separate("q_lin", "k_lin", "v_lin"),
)
"""Projections of one role each: their heads can be reduced and scaled."""

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "qk_head_dim")
_DROPOUT = ("attention_dropout", "attn_dropout", "dropout", "dropout_prob", "dropout_p")


@dataclass(frozen=True)
class Anatomy:
    """What an attention module of transformers is made of.

    Attributes:
        num_heads: query heads H.
        kv_heads: key/value heads G of the host's own model.
        head_dim: features D of a query/key head.
        scaling: the host's factor on q·k.
        role: "encoder", "decoder" or "cross"; see quest_transformers.choice.
        dropout: on the attention weights, in training.
        projections: where queries, keys and values are made, if each is a Linear of its own; else None.
    """

    num_heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    role: str
    dropout: float
    projections: Projections | None


def _names(module: nn.Module) -> tuple[str, ...]:
    """Return the functions and attributes that the source of a module's forward names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def _scales_queries(module: nn.Module) -> bool:
    """Whether a module's forward names the exponent −½, as ESM's, which multiplies its queries before RoPE."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and -0.5 in code.co_consts


def is_rotary(module: nn.Module) -> bool:
    """Whether a module's forward turns queries and keys by their positions (RoPE)."""
    return any(name.startswith("apply_rotary") for name in _names(module))


def regroups(module: nn.Module) -> bool:
    """Whether a module's forward reads from its key projection how many key/value heads there are."""
    names = _names(module)  # T5 names its heads only for the position bias
    counts = not hasattr(module, "has_relative_attention_bias") and not set(_HEADS).isdisjoint(names)
    return not counts or any(name.startswith("num_key_value") for name in names)


def is_attention(module: nn.Module) -> bool:
    """Whether a module's forward calls the function that its config names."""
    names = _names(module)
    return "_attn_implementation" in names and "ALL_ATTENTION_FUNCTIONS" in names and hasattr(module, "config")


def keywords(module: nn.Module) -> set[str]:
    """Return the keywords of a module's forward for the function that its config names; {} if it has no source."""
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return set()
    nodes = list(ast.walk(ast.parse(textwrap.dedent(source))))
    holders = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        if any(isinstance(part, ast.Name) and part.id == "ALL_ATTENTION_FUNCTIONS" for part in ast.walk(node.value))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    calls = (node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", None) in holders)
    return {keyword.arg for call in calls for keyword in call.keywords if keyword.arg is not None}


def examine(module: Any) -> Anatomy:
    """Read what an attention module is made of.

    Raises:
        UnsupportedError: the module does not say how many heads it has, or how wide they are.
    """
    heads = _first(module, _HEADS) or _first(module.config, _HEADS)
    projections = next((each for each in SEPARATE if _is_separate(module, each)), None)
    query: Any = None
    key: Any = None
    value: Any = None
    if projections is not None:
        query, key, value = (getattr(module, name) for name, _ in projections.entries)
    head_dim = _first(module, _HEAD_DIM)
    if head_dim is None and query is not None and heads:
        head_dim = query.out_features // heads
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        raise UnsupportedError(
            f"{type(module).__name__} says neither in {', '.join(_HEADS)} how many heads it has nor in "
            f"{', '.join(_HEAD_DIM)} how wide they are, so no attention can take its place"
        )
    if query is not None and (
        query.out_features != heads * head_dim  # Qwen3-Next packs a gate
        or key.out_features != value.out_features  # MiMo's values are wider
    ):
        projections = None
    held = getattr(module, "mechanism", None)
    if held is not None:
        kv_heads = module.head_sizes.full.kv_heads
    elif key is not None:
        kv_heads = key.out_features // head_dim
    else:
        kv_heads = heads // getattr(module, "num_key_value_groups", 1)
    drop = _first(module, _DROPOUT)
    dropout = float(getattr(drop, "p", drop) or 0.0)
    scaling = getattr(module, "scaling", None)
    if not isinstance(scaling, int | float) or (scaling == 1 and _scales_queries(module)):
        scaling = head_dim**-0.5  # TimesFM's is learned, and its forward has multiplied the queries by it
    return Anatomy(heads, kv_heads, head_dim, scaling, role(module), dropout, projections)


def takes_cache(module: nn.Module) -> bool:
    """Return whether a module's forward has a cache among its arguments, in which the module knows its layer."""
    parameters = inspect.signature(type(module).forward).parameters
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes = not parameters.keys().isdisjoint(CACHES)
    return hands_on and takes and isinstance(getattr(module, "layer_idx", None), int)


def _first(holder: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(holder, name, None)) is not None), None)


def _is_separate(module: nn.Module, projections: Projections) -> bool:
    # Layers with adapters or quantized weights count too: core refuses to change those by name.
    return all(hasattr(getattr(module, name, None), "out_features") for name, _ in projections.entries)


def role(module: Any) -> str:
    """Return what a module attends to: "encoder", "decoder" or "cross"; see quest_transformers.choice."""
    causal = getattr(module, "is_causal", None)
    if causal is None:  # Splinter and others that do not support sdpa say nothing; a decoder among them has a cache
        causal = takes_cache(module)
    named = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    if named or (getattr(module, "is_decoder", False) and not causal):
        return "cross"
    return "decoder" if causal else "encoder"


def unscalable(module: nn.Module) -> str | None:
    """Return why no factor on the projections of an attention module scales its queries and keys, or None."""
    norms = [name for name, _ in module.named_children() if "norm" in name]
    if norms:
        return f"they are normalized after their projections ({', '.join(norms)})"
    if examine(module).projections is None:
        return "its projections are not Linear layers of one role each"
    return None


def eager_fix(module: Any) -> str | None:
    """Return what to change in a module that computes eager attention without AttentionInterface; None for others."""
    if "get_interface" not in _names(module):  # code for transformers 4, which calls it by a name of its own
        return "let its forward call ALL_ATTENTION_FUNCTIONS.get_interface"
    written_out = getattr(module, "reorder_and_upcast_attn", False)  # GPT-2
    return "build the model with reorder_and_upcast_attn=False" if written_out else None
