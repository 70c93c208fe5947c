"""attention_maps: the weights of every attention of a model, although fused kernels never form them."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from ..errors import InjectionError, InputError, UnsupportedError
from ..hosts.sites import restoring, run_example
from ..mechanism import Mechanism
from .monitor import Call, Layer, blocks, borrow, mechanisms_in

Queries: TypeAlias = Sequence[int] | Callable[[int], Sequence[int]] | None


def attention_maps(model: nn.Module, example: Any, *, queries: Queries = None) -> dict[str, Tensor]:
    """Return the weights of every attention in one run of a model: any mechanism, or the host's own attention.

    >>> maps = quest_core.attention_maps(model, batch)
    >>> maps["encoder.layers.0.self_attn"].shape  # [B, H, N, M]
    >>> first = quest_core.attention_maps(model, batch, queries=[0])  # of the class token only: [B, H, 1, M]

    The model runs in its own mode, without gradients; its buffers and the random state stay as they were. The weights
    are those before dropout. A model without attention of quest_core gets the mechanism `standard` for this run.

    Args:
        model: a model whose attention is known, as for :func:`quest_core.inject`.
        example: its inputs, as the `example` of inject.
        queries: positions of the queries whose weights are wanted, all by default; negative ones count from the end.
            Or a function that returns them for a layer's number of queries.

    Returns:
        {path: weights [B, H, N, M]} in the order of the run, on the model's device; a row of zeros for a query that
        sees no key. A layer that runs more than once is there once for each run: "path", "path#2", ...

    Raises:
        InjectionError: no attention was found, or none of it ran.
        InputError: an attention has no query at one of these positions.
        UnsupportedError: an attention that forms no weights (linear, cosine, the AFTs), or whose logits only a kernel
            of the host knows.
    """
    give_back = borrow(model, example)
    layers = {path: _Map(mechanism, queries) for path, mechanism in mechanisms_in(model).items()}
    try:
        with restoring(model):
            run_example(model, example)
    finally:
        for layer in layers.values():
            layer.remove()
        give_back()
    found = {
        f"{path}#{i + 1}" if i else path: weights
        for path, layer in layers.items()
        for i, weights in enumerate(layer.maps)
    }
    if not found:
        raise InjectionError("the example reached no attention of the model")
    return found


class _Map(Layer):
    """The weights of each call of one mechanism."""

    whole = True

    def __init__(self, mechanism: Mechanism, queries: Queries) -> None:
        super().__init__(mechanism)
        self.maps: list[Tensor] = []
        self._queries = queries

    def saw_pairs(self, *_: Any) -> None:
        raise UnsupportedError("attention over the edges of a graph has a weight per edge, and no map")

    def miss(self, why: str) -> None:
        raise UnsupportedError(f"no map of attention '{self.mechanism.config}': {why}")

    def _see(self, call: Call) -> None:
        """Keep the weights of a call."""
        if call.form is None:
            raise UnsupportedError(f"attention '{self.mechanism.config}' forms no weights")
        if not call.known:
            raise UnsupportedError(
                f"the model writes attention '{self.mechanism.config}' out in a way that hides which sample, head and "
                "key a weight is of; call scaled_dot_product_attention there"
            )
        batch, heads, n, m = call.shape
        asked = range(n) if self._queries is None else self._queries
        given = asked(n) if callable(asked) else asked
        if outside := [query for query in given if not -n <= query < n]:
            raise InputError(f"queries holds {outside[0]}, and an attention '{self.mechanism.config}' has {n} queries")
        wanted = [query % n for query in given]
        kept = call.q.new_zeros(batch, heads, len(wanted), m)
        for some, place, z, formed in blocks(self.mechanism, call, None if self._queries is None else wanted):
            weights = z.softmax(-1).nan_to_num(0) if formed is None else formed
            kept[some, :, place] = weights.to(kept.dtype)
        self.maps.append(kept)
