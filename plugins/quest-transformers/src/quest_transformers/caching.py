"""Caches of transformers that hold unit keys, so that a step of decoding normalizes only the keys of its own tokens.

Normalizing all keys of a cache in each step costs more than the step's attention. A layer of a cache that is empty when
a quest module first sees it therefore receives unit keys. Three rules make it safe:

- The mark is an attribute of the layer, so it is copied, reordered, cropped and pickled with the keys.
- A marked layer takes keys only from a quest module, which announces each call. Other modules are refused.
- A module uses keys as they are only if the tensor is the one that a marked layer returned in this call. All other keys
  are normalized, which does not change unit keys.

A layer that holds other keys already, that is given something else than the keys of its module's attention, or whose
class is not one of `CACHE_LAYERS`, keeps what the host gives it.
"""

import functools
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from quest_core.errors import UnsupportedError
from quest_core.ops import unit

CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
"""Classes whose `update` returns the keys as they were given, with those before them; a subclass may not."""

CACHES = ("cache", "past_key_values")
"""What a module's forward calls the cache: since transformers 5.24, and before."""

MARK = "quest_unit_keys"
"""The attribute of a layer that holds unit keys: the `Step` that is under way, or None."""

STEP = "unit_keys"
"""The argument under which a module hands the `Step` to its attention function."""


class Step:
    """One call of an attention module with a cache.

    Attributes:
        sizes: the key/value heads G and the features D of the keys that the module's attention function will get.
        keys: all keys [B, G, M, D], as a marked layer returned them.
    """

    def __init__(self, sizes: tuple[int, int], keys: Tensor | None = None) -> None:
        self.sizes, self.keys = sizes, keys


def announce(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Tell the layer of the cache that its next keys come from `module`; a forward pre-hook of every replacement."""
    cache = next((options[name] for name in CACHES if name in options), None)
    rules = module.rules
    if not isinstance(cache, Cache):  # continuous batching has one of its own
        return None
    index, reads_only = module.layer_idx, False
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if rules.last_values and isinstance(_layer(own, index), StaticLayer):
        raise UnsupportedError(
            f"attention '{module.mechanism.config}' reads the values of the queries' own tokens from the end of the "
            "cache, where a static cache has room for tokens to come; use a dynamic cache"
        )
    if not rules.unit_keys:
        return None
    if isinstance(cache, EncoderDecoderCache):
        reads_only = rules.cross and cache.is_updated.get(index, False)  # a step before has stored the encoder's keys
        # Without `update`, its layer cannot refuse modules of another attention; that of the decoder's tokens has.
        if rules.cross and not _has_mark(cache.self_attention_cache, index):
            return None
        cache = cache.cross_attention_cache if rules.cross else cache.self_attention_cache
    elif rules.cross:
        return None
    layer = _layer(cache, index)
    marked = hasattr(layer, MARK)
    if module.mechanism.monitor is not None:
        if marked:
            raise UnsupportedError(
                f"the monitor of attention '{module.mechanism.config}' was attached after this cache was begun, which "
                "holds unit keys, and reads keys before their normalization; begin a new cache"
            )
        return None
    if type(layer) not in CACHE_LAYERS or (layer.is_initialized and not marked):
        return None
    sizes = module.head_sizes
    step = Step((sizes.kv_heads, sizes.head_dim), layer.keys if reads_only else None)
    setattr(layer, MARK, None if reads_only else step)
    return arguments, {**options, STEP: step}


def _layer(cache: Any, index: int) -> Any:
    """Return a layer of a cache; it is made as `Cache.update` makes it."""
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[index] if index < len(cache.layers) else None


def _has_mark(cache: Any, index: int) -> bool:
    return index < len(cache.layers) and hasattr(cache.layers[index], MARK)


def keep_unit_keys(stock: Any) -> Any:
    """Wrap the `update` of a class of `CACHE_LAYERS`: a marked layer stores k/‖k‖."""

    @functools.wraps(stock)
    def update(self: Any, key_states: Tensor, value_states: Tensor, *arguments: Any, **options: Any) -> Any:
        if not hasattr(self, MARK):
            return stock(self, key_states, value_states, *arguments, **options)
        step: Step | None = getattr(self, MARK)
        if step is None and self.get_seq_length() == 0:  # emptied by `reset`
            delattr(self, MARK)
            return stock(self, key_states, value_states, *arguments, **options)
        if step is None:
            raise UnsupportedError(
                "this cache holds the unit keys of a quest model, and a module with another attention extends it; "
                "give every model a cache of its own"
            )
        given = key_states.shape[1], key_states.shape[-1]
        if given != step.sizes:  # MLA caches what keys and values are made of
            delattr(self, MARK)
            return stock(self, key_states, value_states, *arguments, **options)
        setattr(self, MARK, None)
        keys, values = stock(self, unit(key_states), value_states, *arguments, **options)
        step.keys = keys
        return keys, values

    return update
