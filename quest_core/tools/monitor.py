"""Monitor: what the attention of a model does while it trains, in a few numbers per layer and head."""

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..compat import has_numbers, is_compiling_without_dynamo, is_recomputing, wider
from ..errors import InjectionError, check_sizes
from ..hosts.inject import REPORT, Report, inject, uninject
from ..mechanism import Mechanism, has_mechanism
from ..notices import say
from ..ops import logits, merge_masks
from .packing import PIECE

BLOCK = 2**19  # logits held at a time

Seen: TypeAlias = dict[str, Tensor]  # name -> maxima [heads], or the sums and numbers of means [2, heads]
Rows: TypeAlias = slice | list[int]
FormLogits: TypeAlias = Callable[[slice, Rows], Tensor]  # of samples b, queries n: [b, H, n, M], float32 or wider


class Monitor:
    """Watches every attention of a model and sums up what it sees until `collect` asks.

    >>> monitor = quest_core.Monitor(model, every=10)
    >>> for batch in batches:
    ...     train_step(model, batch)
    ...     logger.log(monitor.collect(flat=True))   # {"encoder.layers.0.self_attn/entropy/head0": 2.1, ...}
    >>> monitor.remove()

    For every layer, one value for each of its H query heads (key norms: for each of its G key/value heads):

    | name | what | over |
    |---|---|---|
    | max_logit | largest logit as the normalizer gets it: scaled, additive masks and residuals added | visible pairs |
    | entropy | mean entropy, in nats, of a query's absolute weights divided by their sum | queries |
    | top_key_share | part of a sample's weights that its most attended key gets, mean over samples | queries |
    | query_norm_mean, query_norm_max | ‖q‖₂ over the D features, before any normalization | queries |
    | key_norm_mean, key_norm_max | ‖k‖₂ over the D features, before any normalization | keys |
    | logit_bound | max ‖q‖ · abs(scale) plus the largest additive mask, where keys have norm 1 | queries |

    If the host's own code forms the logits (attention that is written out, flex_attention, the edges of a graph),
    max_logit and entropy are those of its logits, and logit_bound is left out. Written-out attention has one value over
    all heads if the example did not show the axis of heads; if the host appends columns to its logits, as it does for
    sinks, the norms count all queries and keys.

    A pair is visible if no mask and no causality hides the key. Queries that see some key count, and keys that some
    query of their sample sees. Entropy is that before dropout and before the noise of pgqa. The families (linear,
    cosine, the AFTs) report only norms. While decoding, a call counts its new tokens.

    The numbers are exact: logits are formed again in blocks of bounded size, in float32 or wider, which costs one to
    two forward passes of the attention; `every` and ``logits=False`` save that. Nothing is read from the device before
    `collect`, and the second forward pass of activation checkpointing is not counted.

    State dicts, copies and pickles of a model do not contain its monitor, and torch.export leaves it out. Under
    torch.compile every observed attention is a graph break, so ``fullgraph=True`` refuses an observed model.

    Args:
        model: a model with quest_core attention in it.
        every: observe the first of every so many calls of each attention.
        logits: whether to report max_logit and entropy, which need the logits.
        in_evaluation: whether the calls of modules in evaluation count.

    Raises:
        InjectionError: the model has no quest_core attention.
        ConfigError: `every` is not a positive whole number.
    """

    def __init__(self, model: nn.Module, *, every: int = 1, logits: bool = True, in_evaluation: bool = True) -> None:
        check_sizes(every=every)
        self.layers = {path: Layer(x, every, logits, in_evaluation) for path, x in mechanisms_in(model).items()}
        if not self.layers:
            raise InjectionError(
                f"{type(model).__name__} has no attention of quest_core to observe; inject one first: "
                "model, report = quest_core.inject(model, 'standard') computes what the model computed before"
            )

    def collect(self, *, flat: bool = False) -> dict[str, Any]:
        """Return what was observed since the last call: maxima of all calls, and means over all their tokens.

        Where torch.distributed is initialized the ranks share what they saw, so all of them must call this; each gets
        the same answer.

        Args:
            flat: return one dict of floats, as loggers take it.

        Returns:
            {path: {name: [a float per head]}}, or {"path/name/head0": float} if `flat`. The path is that of the module
            around the mechanism. Layers that no rank has run are left out; a head without a visible pair reports NaN.
        """
        shares = [{path: layer.take() for path, layer in self.layers.items() if layer.seen}]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            local = shares[0]
            shares = [{} for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(shares, local)
        result: dict[str, dict[str, list[float]]] = {}
        for path in self.layers:
            seen: Seen = {}
            for share in shares:
                _merge(seen, share.get(path, {}))
            if seen:
                result[path] = _summarize(seen)
        if not flat:
            return result
        return {
            f"{path}/{name}/head{head}": value
            for path, names in result.items()
            for name, values in names.items()
            for head, value in enumerate(values)
        }

    def unseen(self) -> dict[str, str]:
        """Return {path: why} of layers whose attention ran and could not be observed."""
        return {path: layer.unseen for path, layer in self.layers.items() if layer.unseen is not None}

    def remove(self) -> None:
        """Stop observing. What has been seen can still be collected; calling it twice does no harm."""
        for layer in self.layers.values():
            layer.remove()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def mechanisms_in(model: nn.Module) -> dict[str, Mechanism]:
    """Return the mechanisms of a model by the paths that users know: those of the modules around them."""
    found = {path: module for path, module in model.named_modules() if isinstance(module, Mechanism)}
    return {path.removesuffix(".mechanism") or "mechanism": module for path, module in found.items()}


_BORROWED: WeakKeyDictionary[nn.Module, tuple[Report, set[object]]] = WeakKeyDictionary()
"""Of each model that has the mechanism `standard` for a time: the report of that injection, and its borrowers."""


def borrow(model: nn.Module, example: Any = None) -> Callable[[], None]:
    """Give a model without attention of quest_core the mechanism `standard`; return what gives it back.

    The last of several borrowers gives it back. What stays the host's, because no adapter knows it, is said in the
    host's log.
    """
    if model not in _BORROWED:
        if has_mechanism(model):
            return lambda: None
        _, report = inject(model, "standard", example=example, allow_partial=True)
        _BORROWED[model] = report, set()
        if report.left_alone:
            say(f"not measured: {', '.join(report.left_alone)}")
    (lent, borrowers), borrower = _BORROWED[model], object()
    borrowers.add(borrower)

    def give_back() -> None:
        if borrower not in borrowers:
            return
        borrowers.remove(borrower)
        if not borrowers:
            del _BORROWED[model]
            if getattr(model, REPORT, None) is lent:  # the user has not injected another since
                uninject(model)

    return give_back


def _merge(seen: Seen, more: Seen) -> None:
    """Add to `seen` what another call, or another rank, has seen of the same layer."""
    for name, value in more.items():
        combine = torch.maximum if value.dim() == 1 else torch.add
        seen[name] = combine(seen[name], value) if name in seen else value


def _summarize(seen: Seen) -> dict[str, list[float]]:
    """Return maxima and means by name, NaN for heads without a visible pair."""
    return {
        name: (x.masked_fill(x == -math.inf, math.nan) if x.dim() == 1 else x[0] / x[1]).tolist()
        for name, x in sorted(seen.items())
    }


class Call(NamedTuple):
    """One call of an attention; while decoding, of the new tokens."""

    q: Tensor  # [B, H, N, D], before any normalization
    k: Tensor  # [B, G, M, D], before any normalization
    mask: Tensor | None  # boolean (True = may attend) or additive, broadcastable to [B, H, N, M]
    is_causal: bool  # query i sees keys j ≤ i + M − N
    shape: tuple[int, ...]  # that of the logits, [B, H, N, M] with cached tokens
    form: FormLogits | None = None  # before any mask; None for a family
    bounded: tuple[Tensor, float] | None = None  # q as the normalizer gets it, and the factor on q kᵀ
    known: bool = True  # whether the axes of the logits are those of `shape`
    # Returns the weights of masked logits; None if they are softmax(logits) or as the mechanism says.
    weigh: Callable[[Tensor], Tensor] | None = None


class _Hook:
    """A forward hook that runs outside graphs; copies and pickles of the module get one that does nothing."""

    def __init__(self, call: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None) -> None:
        self._call = call and torch.compiler.disable(call)

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        if self._call is not None and not is_compiling_without_dynamo():
            self._call(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


class Layer:
    """What has been seen of one mechanism since the last `take`, kept on the mechanism's device."""

    whole: ClassVar[bool] = False
    """Whether it must see the samples of a batch in one call and in their order, so that a host may not pack them."""

    def __init__(self, mechanism: Mechanism, every: int = 1, logits: bool = True, in_evaluation: bool = True) -> None:
        self.every, self.logits, self.calls, self.in_evaluation = every, logits, 0, in_evaluation
        self.mechanism = mechanism
        mechanism.monitor = (*(mechanism.monitor or ()), self)
        self.seen: Seen = {}
        self.unseen: str | None = None  # why a call could not be observed
        self.capped = False  # whether logits were changed before the mask, as by a soft cap
        self._lock = threading.Lock()  # threads may share a mechanism
        self._raw = threading.local()  # q and k before any normalization, in the call that this thread is in
        watched = {"score": self._saw_score, "normalizer": self._saw_normalizer, "family": self._saw_family}
        self._handles = [
            part.register_forward_hook(_Hook(watched[axis]), with_kwargs=True)
            for axis, part in mechanism.named_children()
            if axis in watched
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.mechanism.monitor = tuple(x for x in self.mechanism.monitor or () if x is not self) or None

    def names(self) -> list[str]:
        """Return the names of the values that can be seen of this mechanism."""
        norms = [f"{x}_norm_{over}" for x in ("query", "key") for over in ("mean", "max")]
        if self.mechanism.family is not None:
            return norms
        bound = ["logit_bound"] if self.mechanism.unit_keys else []
        return ["max_logit", "entropy", "top_key_share", *norms, *bound]

    def take(self) -> Seen:
        """Return what was seen, float64 on the CPU, and forget it; heads of other ranks have seen nothing."""
        with self._lock:
            seen, self.seen = self.seen, {}
        taken = {}
        for name, own in seen.items():
            share, shares = self.mechanism.head_share
            nothing = -math.inf if own.dim() == 1 else 0
            full = torch.full((*own.shape[:-1], shares, own.shape[-1]), nothing, dtype=torch.float64)
            full[..., share, :] = own
            taken[name] = full.flatten(-2)
        return taken

    def saw_logits(self, q: Tensor, k: Tensor, logits: Tensor, seen: Tensor | None) -> None:
        """Count a call in which the host formed the logits.

        Args:
            q: [B, H, N, D] and k: [B, G, M, D], before any normalization.
            logits: [B, H, N, M], as the host's softmax gets them.
            seen: whether a pair is visible [B, H, N, M]; None where it is not known which sample, head and key an entry
                of the logits is of, which then are [1, 1, rows, columns].
        """

        def form(samples: slice, rows: Rows) -> Tensor:
            return logits[samples, :, rows].to(wider(logits.dtype), copy=True)

        self._count(Call(q, k, seen, False, logits.shape, form, known=seen is not None))

    def saw_flex(self, q: Tensor, k: Tensor, scale: float, score_mod: Any, mask_mod: Any, sizes: Any) -> None:
        """Count a call of flex_attention with the operands of a score, which this layer has seen.

        Arguments as in `saw_operands`, and flex_attention's functions, and (B or 1, H or 1) of its block mask.
        """
        places = [torch.arange(x, device=q.device) for x in (q.shape[0], q.shape[1], q.shape[2], k.shape[2])]
        plain = self._logit_form(q, k, scale)

        def form(samples: slice, rows: Rows) -> Tensor:
            at = (places[0][samples], places[1], places[2][rows], places[3])
            return _of_pairs(score_mod)(plain(samples, rows), *at)

        at = (*(place[:size] for place, size in zip(places, sizes, strict=False)), *places[2:])
        mask = _of_pairs(lambda _, *pair: mask_mod(*pair))(q.new_zeros([len(x) for x in at]), *at)
        raw_q, raw_k, _ = self._take_raw()
        self._count(Call(raw_q, raw_k, mask, False, (*q.shape[:3], k.shape[2]), form))

    def saw_operands(
        self,
        q: Tensor,
        k: Tensor,
        scale: float,
        mask: Tensor | None,
        change: Callable[[Tensor], Tensor] | None = None,
        weigh: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Count a call of a function that attends with the operands of a score, which this layer has seen.

        Args:
            q: [B, H, N, D] and k: [B, G, M, D], as the score prepared them.
            scale: the factor on q kᵀ.
            mask: as in `Call`.
            change: returns logits as they become before the mask, for example capped.
            weigh: as in `Call`.
        """
        raw_q, raw_k, is_causal = self._take_raw()
        self.capped |= change is not None
        form = self._logit_form(q, k, scale)
        changed = form if change is None else lambda samples, rows: change(form(samples, rows))
        shape = (*q.shape[:3], k.shape[2])
        self._count(Call(raw_q, raw_k, mask, is_causal, shape, changed, (q, scale), weigh=weigh))

    def miss(self, why: str) -> None:
        """Say that a call could not be observed."""
        self.unseen = why

    @torch.no_grad()
    def saw_pairs(self, q: Tensor, k: Tensor, logits: Tensor, index: Tensor, count: int) -> None:
        """Count a call in which a query sees the keys of a list, as on the edges of a graph.

        Args:
            q: [P, H, D] and k: [P, H, D], the query and the key of each pair, before any normalization.
            logits: [P, H], as the softmax over the pairs of a query gets them.
            index: the number of the query of each pair, [P].
            count: the number of queries, with those without a pair.
        """
        if self._skips(q) or not len(q):
            return
        queries = q.new_zeros(count, *q.shape[1:]).index_copy_(0, index, q)
        seen = torch.zeros(count, dtype=torch.bool, device=q.device).index_fill_(0, index, True)
        self._add_norms("query_norm", queries.transpose(0, 1)[None], seen)
        self._add_norms("key_norm", k.transpose(0, 1)[None], torch.ones(len(k), dtype=torch.bool, device=k.device))
        if not self.logits:
            return
        z = logits.to(wider(logits.dtype))
        self._add_max("max_logit", z.amax(0))
        top = z.new_full((count, z.shape[1]), -math.inf).scatter_reduce_(0, index[:, None].expand_as(z), z, "amax")
        z = z - top[index]
        weights = z.exp()
        total, sums = (torch.zeros_like(top).index_add_(0, index, x) for x in (weights, weights * z))
        entropy = torch.where(seen[:, None], total.log() - sums / total, 0)  # [count, H]
        self._add_mean("entropy", entropy.T[None], seen)

    def _saw_family(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        q, k, _ = args
        key_mask = kwargs["key_mask"]
        mask = None if key_mask is None else key_mask[:, None, None]
        self._count(Call(q, k, mask, kwargs["is_causal"], (*q.shape[:3], k.shape[2])))

    def _saw_score(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._raw.q, self._raw.k, self._raw.is_causal = args[0], args[1], kwargs["is_causal"]

    def _saw_normalizer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        masks = [mask for mask in (kwargs.get("residual"), kwargs["mask"]) if mask is not None]
        mask = functools.reduce(merge_masks, masks) if masks else None
        self.saw_operands(args[0], args[1], kwargs["scale"], mask, kwargs.get("change"))

    def _take_raw(self) -> tuple[Tensor, Tensor, bool]:
        """Return q, k and is_causal as the score got them, and forget them."""
        raw = self._raw
        found = raw.q, raw.k, raw.is_causal
        del raw.q, raw.k
        return found

    @staticmethod
    def _logit_form(q: Tensor, k: Tensor, scale: float) -> FormLogits:
        """Return what forms blocks of the logits of q [B, H, N, D] and k [B, G, M, D], which the score prepared."""
        q, k = (x.to(wider(x.dtype)) for x in (q, k))
        return lambda samples, rows: logits(q[samples, :, rows], k[samples], scale, q.shape[1] != k.shape[1])

    def _skips(self, q: Tensor) -> bool:
        """Count a call with the queries `q`, and return whether it is not observed."""
        if not has_numbers(q) or is_recomputing() or not (self.in_evaluation or self.mechanism.training):
            return True  # recomputing: in a backward pass, activation checkpointing computes the same once more
        with self._lock:
            if PIECE.get()[0] == 0:  # the first part of a call that was cut
                self.calls += 1
            return bool((self.calls - 1) % self.every)

    @torch.no_grad()
    def _count(self, call: Call) -> None:
        """Add a call to what was seen."""
        if self._skips(call.q) or 0 in call.q.shape or 0 in call.k.shape:
            return
        mask = call.mask
        if (real := PIECE.get()[1]) is not None:
            mask = merge_masks(mask, real[:, None, :, None])
        with torch.autocast(call.q.device.type, enabled=False):
            self._see(call._replace(mask=mask if mask is None or mask.dim() == 4 else mask[None, None]))

    def _see(self, call: Call) -> None:
        """Sum up a call, whose mask has four axes."""
        q, k, mask = call.q, call.k, call.mask
        queries, keys = _visible(mask, call.is_causal, q.shape[2], call.shape[3], q.device)
        self._add_norms("query_norm", q, queries)
        self._add_norms("key_norm", k, keys[..., -k.shape[2] :])
        if call.bounded is not None and self.mechanism.unit_keys:
            norm = torch.linalg.vector_norm(call.bounded[0], dim=-1, dtype=wider(q.dtype))
            bound = torch.where(queries, norm, -math.inf).amax((0, 2)) * abs(call.bounded[1])  # [H]
            if mask is not None and mask.dtype != torch.bool:
                bound = bound + mask.amax()
            self._add_max("logit_bound", bound)
        if not self.logits or call.form is None:
            return
        batch, heads, _, m = call.shape
        columns = q.new_zeros(batch, heads, m, dtype=torch.float32)  # weights of all queries
        for some, _, z, given in blocks(self.mechanism, call):
            self._add_max("max_logit", z.amax((0, 2, 3)))
            # Weights count divided by their sum.
            weights, entropy, counted = _weights(z if given is None else given.abs().log().to(z.dtype))
            self._add_mean("entropy", entropy, counted)
            columns[some] += weights.sum(2)
        if call.known:
            total = columns.sum(-1)  # [B, H]
            share = torch.where(total > 0, columns.amax(-1) / total, 0)
            self._add_mean("top_key_share", share[..., None], (total > 0)[..., None])

    def _add_norms(self, name: str, x: Tensor, counted: Tensor) -> None:
        """Add norms of `x` [B, heads, tokens, D] where `counted`, broadcastable to [B, heads, tokens]."""
        norm = torch.linalg.vector_norm(x, dim=-1, dtype=wider(x.dtype))
        self._add_max(f"{name}_max", torch.where(counted, norm, -math.inf).amax((0, 2)))
        self._add_mean(f"{name}_mean", torch.where(counted, norm, 0), counted)

    def _add_max(self, name: str, value: Tensor) -> None:  # [heads]
        with self._lock:
            _merge(self.seen, {name: value})

    def _add_mean(self, name: str, values: Tensor, counted: Tensor) -> None:
        """Add `values` [B, heads, tokens], which are 0 where not `counted`, to a mean."""
        both = (values, counted.expand(values.shape))
        with self._lock:
            _merge(self.seen, {name: torch.stack([x.sum((0, 2), dtype=torch.float64) for x in both])})


def _visible(mask: Tensor | None, is_causal: bool, n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which queries see a key, [B, H, N], and which keys some query of the sample sees, [B or 1, 1, M or 1]."""
    last = torch.arange(n, device=device) + (m - n if is_causal else m)  # the last key that a query may see
    if mask is None:
        return (last >= 0)[None, None], torch.ones(1, 1, 1, dtype=torch.bool, device=device)
    pairs = mask if mask.dtype == torch.bool else mask > -math.inf
    pairs = pairs.expand(*pairs.shape[:3], m)
    if is_causal and pairs.shape[2] > 1:
        pairs = pairs & torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)
    # The last query is never shut off by causality, so a mask of only keys hides the same keys with it.
    first = pairs.byte().argmax(-1)  # [.., .., N or 1]: the first key that the mask shows
    return pairs.any(-1) & (first <= last), pairs.any(2).any(1, keepdim=True)


def blocks(
    mechanism: Mechanism, call: Call, queries: list[int] | None = None
) -> Iterator[tuple[slice, slice, Tensor, Tensor | None]]:
    """Yield blocks of samples b and queries n: their logits, and their weights unless those are softmax(logits).

    Both are [b, H, n, M], logits −inf for hidden pairs; the mask of the call has four axes. Weights may be negative
    (differential attention). The second slice counts in `queries`, or in all.
    """
    assert call.form is not None  # a family has no logits
    batch, heads, n, m = call.shape
    positions = torch.arange(n, device=call.q.device)
    needs_all = not mechanism.fused and "queries" in mechanism.reads  # for the weights of a query
    count = n if queries is None else len(queries)
    samples = max(1, BLOCK // (heads * n * m))
    rows = max(1, count) if needs_all else max(1, BLOCK // (samples * heads * m))
    for some, place in itertools.product(_slices(batch, samples), _slices(count, rows)):
        chosen = slice(n) if needs_all else place if queries is None else queries[place]
        z = call.form(some, chosen)
        if call.mask is not None:
            part = call.mask.expand(batch, -1, n, -1)[some][:, :, chosen]
            z = z.masked_fill_(~part, -math.inf) if part.dtype == torch.bool else z + part
        if call.is_causal:
            last = positions[chosen] + (m - n)
            z.masked_fill_(torch.arange(m, device=z.device) > last[:, None], -math.inf)
        # Weights in float64, where those of logits down to −700 are not 0 yet.
        weights = None
        if call.weigh is not None:
            weights = call.weigh(z.double())
        elif not mechanism.fused:
            weights = mechanism.normalizer.weights(z.double(), z > -math.inf)
        if needs_all and queries is not None:
            assert weights is not None
            z, weights = z[:, :, queries], weights[:, :, queries]
        yield some, place, z, weights


def _slices(count: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, count, step)]


def _of_pairs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of logits [B, H, N, M] and the numbers of their axes, from one of a logit and four numbers."""
    for axis in (3, 2, 1, 0):
        function = torch.vmap(function, in_dims=(0, *(0 if axis == i else None for i in range(4))))
    return function


def _weights(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax(z) [b, H, n, M], its entropy in nats and whether a row has weights [b, H, n]; reuse z."""
    top = z.amax(-1, keepdim=True)
    counted = top != -math.inf
    # The largest becomes 0, so that log Σ exp(z) − Σ p·z does not cancel. exp is 0 long before −1e4, and unlike −∞ that
    # can be multiplied with 0.
    z = z.sub_(top.masked_fill(~counted, 0)).clamp_(min=-1e4)
    weights = z.exp()
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(counted, weights / total, 0)
    entropy = total[..., 0].log() - (weights * z).sum(-1)
    return weights, torch.where(counted[..., 0], entropy, 0), counted[..., 0]
