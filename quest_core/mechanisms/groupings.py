"""Groupings: which key/value head a query head uses. [G] is Key-Driven GQA, Khan et al."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..compat import is_exporting_to_onnx, is_recomputing, transform, wider
from ..errors import ConfigError, UnsupportedError
from ..ops import visible
from ..registry import Option, register
from .base import Dims, Grouping

KV_HEADS = Option("kv_heads", int, None, "number of key/value heads G, at most the query heads", 1, nullable=True)
RATIO = Option("ratio", int, None, "query heads per key/value head, in place of kv_heads", 1, nullable=True)
MIN_QUERIES = Option("min_queries", int, 0, "query heads that every key/value head gets first", 0)
EQUAL = 1e-6  # norms whose spread is a smaller part of the largest are equal but for rounding: each is a sum in float32


@register("gqa", source="Ainslie et al., 2023", options=(KV_HEADS, RATIO))
class Grouped(Grouping):
    """H/G query heads share a k/v head."""

    causal = cross = cached = reshapes = True
    reads: ClassVar[tuple[str, ...]] = ()

    def __init__(self, dims: Dims | None, *, kv_heads: int | None, ratio: int | None = None) -> None:
        super().__init__(dims)
        if kv_heads is not None and ratio is not None:
            raise ConfigError(f"attention '{self.name}': kv_heads={kv_heads} and ratio={ratio} say the same; keep one")
        self.requested, self.ratio = kv_heads, ratio

    def kv_heads(self, num_heads: int) -> int:
        wanted = self.requested if self.ratio is None else num_heads // self.ratio
        if wanted is None:
            raise ConfigError(
                f"attention '{self.name}' needs 'kv_heads' or 'ratio': write for example {self.name}(kv_heads=2)"
            )
        if why := self.mismatch(num_heads, wanted):
            raise ConfigError(f"attention '{self.name}': {why}")
        return wanted

    def mismatch(self, num_heads: int, kv_heads: int) -> str | None:
        if self.ratio is not None and num_heads != self.ratio * kv_heads:
            if num_heads % self.ratio:
                return f"ratio is {self.ratio}, which does not divide the {num_heads} heads"
            return f"ratio is {self.ratio}, but {num_heads} query heads have {kv_heads} key/value heads"
        if self.requested is not None and kv_heads != self.requested:
            return f"kv_heads is {self.requested}, but k has {kv_heads} heads"
        return self._misfit(num_heads, kv_heads)

    def _misfit(self, num_heads: int, kv_heads: int) -> str | None:
        if kv_heads and num_heads % kv_heads == 0:
            return None
        fitting = ", ".join(str(g) for g in range(1, num_heads + 1) if num_heads % g == 0)
        return f"kv_heads is {kv_heads}, which does not divide the {num_heads} heads; choose from: {fitting}"

    def reference(self, k: Tensor, num_heads: int, seen: Tensor) -> Tensor:
        return torch.arange(num_heads) * k.shape[1] // num_heads


@register("mqa", source="Shazeer, 2019")
class MultiQuery(Grouped):
    """all query heads share one k/v head."""

    def __init__(self, dims: Dims | None) -> None:
        super().__init__(dims, kv_heads=1)


@register("mha", source="Vaswani et al., 2017")
class MultiHead(Grouped):
    """one k/v head per query head.

    A host's own k/v heads, if it shares them in equal groups.
    """

    reshapes = False

    def __init__(self, dims: Dims | None) -> None:
        super().__init__(dims, kv_heads=None if dims is None else dims.kv_heads)
        self.shared = dims is not None and dims.kv_heads < dims.num_heads

    def kv_heads(self, num_heads: int) -> int:
        return num_heads

    def mismatch(self, num_heads: int, kv_heads: int) -> str | None:
        if self.shared:
            return super().mismatch(num_heads, kv_heads)
        if kv_heads == num_heads:
            return None
        return f"q has {num_heads} heads and k has {kv_heads}; for shared key heads add a grouping, as in 'quest+gqa'"


def allocate(importance: Tensor, num_heads: int, min_queries: int) -> Tensor:
    """Return how many of the H query heads each key/value head gets ([G], equation 3): ⌊n̂_g · H / Σ n̂⌋.

    Every key/value head gets `min_queries` first. The heads that are left over go to the largest fractional parts, ties
    to the lower index. `importance` [G] is n̂ or d, not negative; all zero counts as all equal.
    """
    groups, importance = importance.shape[0], importance.double()
    free = num_heads - groups * min_queries
    total = importance.sum()
    share = torch.where(total > 0, importance / torch.where(total > 0, total, 1), 1 / groups) * free  # [G]
    # Where exact arithmetic gives a whole number, rounding must not take one away.
    whole = (share + 1e-9).floor()
    left = free - whole.sum()
    # Nor may it break a tie: fractions of 8/3 and 2/3 are equal.
    fraction = ((share - whole) * 1e9).round()  # [G]
    larger = fraction > fraction[:, None]  # [G, G]: the columns that come before the row
    ties = (fraction == fraction[:, None]).tril(-1)
    rank = (larger | ties).sum(1)  # 0 for the largest fractional part, ties to the lower index
    return (whole + (rank < left)).long() + min_queries


def head_index(sizes: Tensor, num_heads: int) -> Tensor:
    """Return the key/value head of each query head [H], filled left to right by `sizes` [G].

    Sizes that averages of checkpoints have made fractions, or rounded, are rounded so that their sum stays H.
    """
    query, ends = torch.arange(num_heads, device=sizes.device), sizes.cumsum(0)
    ends = ends.round() if ends.is_floating_point() else ends
    return (query[:, None] >= ends).sum(1)


def key_norms(k: Tensor, mask: Tensor | None) -> Tensor:
    """Return n_g [B, G], the norm of k [B, G, M, D] over visible tokens and features, in float64 ([G], equation 1)."""
    k = k.detach()
    tokens = torch.linalg.vector_norm(k, dim=-1, dtype=wider(k.dtype))  # [B, G, M]
    if mask is not None:
        tokens = tokens * visible(mask).any(2).any(1, keepdim=True)
    norms: Tensor = tokens.double().square().sum(-1).sqrt()
    return norms


@register("kdgqa", source="Key-Driven GQA, equations 1-3", options=(KV_HEADS, RATIO, MIN_QUERIES))
class KeyDriven(Grouped):
    """k/v heads with larger key norms serve more query heads."""

    causal = cached = False
    causal_reason = "its head sizes depend on all keys, those of the future too"
    reads: ClassVar[tuple[str, ...]] = ("tokens", "unseen", "heads", "samples")

    def __init__(self, dims: Dims | None, *, min_queries: int, **heads: Any) -> None:
        super().__init__(dims, **heads)
        self.min_queries = min_queries

    def _misfit(self, num_heads: int, kv_heads: int) -> str | None:
        if not kv_heads:
            return super()._misfit(num_heads, kv_heads)
        if kv_heads * max(1, self.min_queries) <= num_heads:
            return None
        return f"kv_heads={kv_heads} with min_queries={self.min_queries} needs more than the {num_heads} query heads"

    def forward(self, k: Tensor, num_heads: int, mask: Tensor | None) -> Tensor:
        norms = key_norms(k, mask).mean(0)  # [G]
        spread = norms.max() - norms.min()
        differ = spread > EQUAL * norms.max()
        scaled = torch.where(differ, (norms - norms.min()) / torch.where(differ, spread, 1), 1)
        return head_index(allocate(scaled, num_heads, self.min_queries), num_heads)

    def reference(self, k: Tensor, num_heads: int, seen: Tensor) -> Tensor:
        tokens = k.detach().double() * seen.any(2).any(1)[:, None, :, None]
        norms = tokens.square().sum((2, 3)).sqrt().mean(0).tolist()
        low, high = min(norms), max(norms)
        shares = [(norm - low) / (high - low) if high - low > EQUAL * high else 1.0 for norm in norms]
        free = num_heads - self.min_queries * len(norms)
        shares = [round(free * share / sum(shares), 9) for share in shares]  # 9 digits: a tie stays one
        sizes = [math.floor(share) for share in shares]
        by_fraction = sorted(range(len(norms)), key=lambda g: (round(sizes[g] - shares[g], 9), g))
        for g in by_fraction[: free - sum(sizes)]:
            sizes[g] += 1
        return torch.arange(len(norms)).repeat_interleave(torch.tensor(sizes) + self.min_queries)


@register(
    "dgqa",
    source="Key-Driven GQA, section 3.2",
    options=(
        KV_HEADS,
        RATIO,
        MIN_QUERIES,
        Option("window", int, 300, "training steps for which sizes are kept", 1),
        Option("evolution", str, "ema", "by norms' moving average or change", choices=("ema", "difference")),
        Option("alpha", float, None, "weight of current norms in ema's average; null: 0.9", 0.0, nullable=True),
    ),
)
class DynamicKeyDriven(KeyDriven):
    """as kdgqa, by how key norms evolve in training.

    Sizes stay for `window` training steps. The state lives in float32 buffers, so that it is saved and resumed, and
    survives averaging of checkpoints. Evaluation and the second forward pass of activation checkpointing do not change
    it. A cache keeps the G key/value heads; each step assigns them to the query heads by the current sizes.

    Where torch.distributed is initialized, a training step takes the mean over the batches of all ranks, so that all
    hold the same sizes. Like torch.nn.SyncBatchNorm it needs every rank of the group to run the layer equally often.

    Attributes:
        process_group: the ranks that share statistics; None means all. Under pipeline parallelism, give each layer the
            group of ranks that hold it.
    """

    causal = cached = stateful = True
    reads = ("heads", "samples")
    process_group: torch.distributed.ProcessGroup | None
    norms: Tensor
    sizes: Tensor
    pending: Tensor
    steps: Tensor

    def __init__(self, dims: Dims | None, *, window: int, evolution: str, alpha: float | None, **heads: Any) -> None:
        super().__init__(dims, **heads)
        if alpha is not None and (evolution != "ema" or alpha > 1):
            why = "at most 1" if evolution == "ema" else "for evolution=ema only, whose moving average it weighs"
            raise ConfigError(f"attention 'dgqa': alpha is {alpha:g} with evolution={evolution}; it is {why}")
        self.window, self.evolution, self.alpha = window, evolution, 0.9 if alpha is None else alpha
        self.process_group = None
        if dims is not None:
            sizes = allocate(torch.ones(dims.kv_heads), dims.num_heads, self.min_queries)
            self.register_buffer("norms", torch.zeros(dims.kv_heads, dtype=torch.float32))  # c
            self.register_buffer("sizes", sizes.float())
            self.register_buffer("pending", sizes.float())  # what the next training step will use
            self.register_buffer("steps", torch.zeros((), dtype=torch.float32))  # training steps so far

    def forward(self, k: Tensor, num_heads: int, mask: Tensor | None) -> Tensor:
        if self.training and not is_recomputing():
            if (active := transform()) is not None:
                raise UnsupportedError(
                    f"attention 'dgqa' changes its statistics while training, which {active} does not allow; call "
                    "eval() on the model, or choose gqa"
                )
            with torch.no_grad():
                self.sizes.copy_(self.pending)  # before the forward pass, so that its backward pass finds the same
            self._observe(self._mean_over_ranks(key_norms(k, mask)), num_heads)
        return head_index(self.sizes, num_heads)

    def _mean_over_ranks(self, norms: Tensor) -> Tensor:
        """Return the mean [G] of norms [B, G] over the samples with keys, of all ranks; NaN without any."""
        count = (norms != 0).any(1).sum()
        total = torch.cat([norms.sum(0), count.to(norms.dtype)[None]])  # [G + 1]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(total, group=self.process_group)
        return total[:-1] / total[-1]

    @torch.no_grad()
    def _observe(self, current: Tensor, num_heads: int) -> None:
        """Count a training step: the first stores the norms, every `window`-th sets the sizes for the next.

        A step whose norms are not finite (an overflow, an empty batch) does not count.
        """
        counts = current.isfinite().all()
        current = torch.where(counts, current, self.norms).to(self.norms.dtype)
        steps = self.steps.round()  # an average of checkpoints may lie between two
        first = counts & (steps == 0)
        due = counts & (steps > 0) & (steps % self.window == 0)
        if self.evolution == "ema":
            kept = importance = self.alpha * current + (1 - self.alpha) * self.norms
        else:  # "difference"
            kept, importance = current, (current - self.norms).abs()
        self.pending.copy_(torch.where(due, allocate(importance, num_heads, self.min_queries), self.pending))
        self.norms.copy_(torch.where(first, current, torch.where(due, kept, self.norms)))
        self.steps.copy_(steps + counts)

    def reference(self, k: Tensor, num_heads: int, seen: Tensor) -> Tensor:
        sizes = self.pending if self.training else self.sizes
        return torch.arange(len(sizes)).repeat_interleave(sizes.long())


@register(
    "pgqa",
    source="Key-Driven GQA, section 3.3",
    options=(
        KV_HEADS,
        RATIO,
        Option("noise_in_eval", bool, True, "subtract the noise in evaluation too, as the paper times it"),
    ),
)
class Perturbed(Grouped):
    """gqa, minus noise of each group's mean and deviation.

    The noise is Gaussian with the mean and standard deviation of the weights of that sample's group over its heads,
    queries and visible keys, without those of padding; it is zero where query and key index agree and where a key is
    hidden. No gradient flows through it.
    """

    causal = cached = False
    causal_reason = "its noise depends on the weights of all queries, those of the future too"
    reads = ("tokens", "queries", "unseen", "group", "random")
    complexity = "O(N·M·D) time, O(N·M) memory"
    stops_gradient = True

    def __init__(self, dims: Dims | None, *, noise_in_eval: bool, **heads: Any) -> None:
        super().__init__(dims, **heads)
        self.noise_in_eval = noise_in_eval

    def perturb(self, weights: Tensor, kv_heads: int, mask: Tensor | None) -> Tensor:
        if not (self.training or self.noise_in_eval):
            return weights
        if is_exporting_to_onnx():
            raise UnsupportedError(
                "attention 'pgqa' does not support torch.onnx.export while it adds noise, which no other runtime would "
                "draw alike; say noise_in_eval=false and export the model in evaluation"
            )
        n, m = weights.shape[2:]
        seen = torch.ones_like(weights, dtype=torch.bool) if mask is None else visible(mask).expand_as(weights)
        grouped, counted = (x.unflatten(1, (kv_heads, -1)) for x in (weights.detach(), seen))  # [B, G, H/G, N, M]
        axes = (2, 3, 4)  # the heads of a group, queries and keys
        count = counted.sum(axes, keepdim=True).clamp(min=1)
        mean = (grouped * counted).sum(axes, keepdim=True) / count  # [B, G, 1, 1, 1]
        deviation = (((grouped - mean) * counted).square().sum(axes, keepdim=True) / count).sqrt()
        noise = (mean + deviation * torch.randn_like(grouped)).flatten(1, 2)  # [B, H, N, M]
        same = torch.eye(n, m, dtype=torch.bool, device=weights.device)
        perturbed: Tensor = weights - noise.masked_fill(same | ~seen, 0)
        return perturbed

    def reference_weights(self, weights: Tensor, kv_heads: int, seen: Tensor) -> Tensor:
        if not (self.training or self.noise_in_eval):
            return weights
        noise = torch.randn(weights.shape, dtype=weights.dtype)
        for sample in zip(weights.detach(), noise, seen, strict=True):
            for own, drawn, counted in zip(*(x.chunk(kv_heads) for x in sample), strict=True):  # [H/G, N, M]
                if counted.any():
                    drawn.mul_(own[counted].std(correction=0)).add_(own[counted].mean())
        return weights - noise * (seen & ~torch.eye(*weights.shape[2:], dtype=torch.bool))
