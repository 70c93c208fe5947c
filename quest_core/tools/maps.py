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
from ..ops import merge_causal


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
    found = {
        path.removesuffix(".mechanism") or "mechanism": module
        for path, module in model.named_modules()
        if isinstance(module, Mechanism)
    }
    if not found:
        inject(model, "standard", example=example, allow_partial=True)
        try:
            return attention_maps(model, example, queries=queries)
        finally:
            uninject(model)
    for path, mechanism in found.items():
        if mechanism.family is not None:
            raise UnsupportedError(f"'{path}' is attention '{mechanism.config}', which forms no weights")
    maps: dict[str, Tensor] = {}
    handles = [
        mechanism.normalizer.register_forward_hook(_Note(path, mechanism, queries, maps), with_kwargs=True)
        for path, mechanism in found.items()
    ]
    try:
        with torch.no_grad(), same_random_state(model):
            run_example(model, example)
    finally:
        for handle in handles:
            handle.remove()
    if not maps:
        raise InjectionError("the example reached no attention of the model")
    return maps


class _Note:
    """A forward hook of a normalizer that computes its weights once more and keeps them."""

    def __init__(self, path: str, mechanism: Mechanism, queries: Sequence[int] | None, maps: dict[str, Tensor]) -> None:
        self.path, self.mechanism, self.queries, self.maps = path, mechanism, queries, maps

    def __call__(self, normalizer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], _output: Any) -> None:
        q, k, v = args  # [B, H, N, D], [B, G, M, D], [B, G, M, Dv]
        chosen, mask, causal = self.queries, kwargs["mask"], kwargs["is_causal"]
        together = "queries" in self.mechanism.reads  # the weights of one query depend on the others
        if chosen is not None and not together:
            if causal:
                mask, causal = merge_causal(mask, q.shape[2], k.shape[2], q.device), False
            if mask is not None and mask.shape[-2] > 1:
                mask = mask[..., list(chosen), :]
            q = q[:, :, list(chosen)]
        options = {**kwargs, "mask": mask, "is_causal": causal, "dropout_p": 0, "need_weights": True}
        weights = normalizer.forward(q, k, v, **options)[1]
        if chosen is not None and together:
            weights = weights[:, :, list(chosen)]
        count = sum(name == self.path or name.startswith(f"{self.path}#") for name in self.maps)
        self.maps[f"{self.path}#{count + 1}" if count else self.path] = weights
