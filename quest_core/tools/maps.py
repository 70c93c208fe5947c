"""attention_maps: the weights of every attention of a model, although fused kernels never form them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import same_random_state
from ..errors import InjectionError, UnsupportedError
from ..hosts.inject import inject, uninject
from ..hosts.sites import run_example
from ..mechanism import Mechanism
from .monitor import Form, Layer, Monitor, blocks


def attention_maps(model: nn.Module, example: Any, *, queries: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Return the weights of every attention in one run of a model: any mechanism, or the host's own attention.

    >>> maps = quest_core.attention_maps(model, batch)
    >>> maps["encoder.layers.0.self_attn"].shape  # [B, H, N, M]
    >>> first = quest_core.attention_maps(model, batch, queries=[0])  # of the class token only: [B, H, 1, M]

    The model runs as it is, in training or evaluation, without gradients, and the random state is left as it was. The
    weights are those before dropout. Attention that is not of
    quest_core gets the mechanism `standard` for this run.

    Args:
        model: a model whose attention is known, as for :func:`quest_core.inject`.
        example: its inputs, as the `example` of inject.
        queries: positions of the queries whose weights are wanted, all by default. Few queries need little memory.

    Returns:
        {path: weights [B, H, N, M]} in the order of the run, on the model's device; a row of zeros for a query that
        sees no key. A layer that runs more than once is there once for each run: "path", "path#2", ...

    Raises:
        InjectionError: no attention was found, or none of it ran.
        UnsupportedError: an attention that forms no weights (linear, cosine, the AFTs).
    """
    if not any(isinstance(module, Mechanism) for module in model.modules()):
        inject(model, "standard", example=example, allow_partial=True)
        try:
            return attention_maps(model, example, queries=queries)
        finally:
            uninject(model)
    for path, module in model.named_modules():
        if isinstance(module, Mechanism) and module.family is not None:
            raise UnsupportedError(
                f"'{path.removesuffix('.mechanism')}' is attention '{module.config}', which forms no weights"
            )
    with _Maps(model, queries) as maps, torch.no_grad(), same_random_state(model):
        run_example(model, example)
    found = maps.found()
    if not found:
        raise InjectionError("the example reached no attention of the model")
    return found


class _Maps(Monitor):
    """A Monitor that keeps weights."""

    def __init__(self, model: nn.Module, queries: Sequence[int] | None) -> None:
        self._queries = queries
        super().__init__(model)

    def layer(self, mechanism: Mechanism, every: int, logits: bool) -> Layer:
        return _Map(mechanism, self._queries)

    def found(self) -> dict[str, Tensor]:
        """Return the weights of each call, by path."""
        return {
            f"{path}#{i + 1}" if i else path: weights
            for path, layer in self._layers.items()
            if isinstance(layer, _Map)
            for i, weights in enumerate(layer.maps)
        }


class _Map(Layer):
    """The weights of each call of one mechanism."""

    def __init__(self, mechanism: Mechanism, queries: Sequence[int] | None) -> None:
        super().__init__(mechanism, every=1, logits=True)
        self.maps: list[Tensor] = []
        self._queries = queries

    def saw_pairs(self, *_: Any) -> None:
        raise UnsupportedError("attention over the edges of a graph has a weight per edge, and no map")

    def _count(
        self,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        shape: tuple[int, ...],
        form: Form | None = None,
        bounded: tuple[Tensor, float] | None = None,
        known: bool = True,
    ) -> None:
        """Keep the weights of a call; arguments as of `Layer`."""
        if not known:
            raise UnsupportedError(
                f"the model writes attention '{self.mechanism.config}' out in a way that hides which sample, head and "
                "key a weight is of; call scaled_dot_product_attention there"
            )
        assert form is not None  # a family has been refused
        wanted = list(range(shape[2]) if self._queries is None else self._queries)
        kept = q.new_zeros(shape[0], shape[1], len(wanted), shape[3])
        mask = mask if mask is None or mask.dim() == 4 else mask[None, None]
        for some, rows, _, logs in blocks(self.mechanism, form, shape, mask, is_causal):
            here = [(i, n - rows.start) for i, n in enumerate(wanted) if rows.start <= n < rows.stop]
            if here:
                to, of = map(list, zip(*here, strict=True))
                chosen = logs[:, :, of]
                weights = chosen.softmax(-1).nan_to_num(0) if self.mechanism.fused else chosen.exp()
                kept[some, :, to] = weights.to(kept.dtype)
        self.maps.append(kept)
