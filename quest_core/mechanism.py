"""Mechanism: one attention, ready to apply to q, k and v, composed of its parts."""

import functools
import itertools
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import registry
from .cache import Cache
from .checkpoints import CheckpointGuard
from .compat import (
    autocast_dtype,
    constant_result,
    is_exporting_graph,
    is_one_in_example,
    is_tracing,
    name_second_derivative,
    refuse_one_token,
    same_random_state,
    tokens_are_divided,
    transform,
    without_hooks,
)
from .config import AttentionConfig, AttentionSpec
from .errors import ConfigError, InputError, UnsupportedError
from .mechanisms.base import Dims, Family, Grouping, Normalizer, Score
from .ops import expand_mask, hide_lowest, hides_the_future, logits, merge_masks, plain_mask, visible
from .projections import HeadSizes

TYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
NAMES = "float32, bfloat16, float16 or float64"


class Mechanism(CheckpointGuard):
    """softmax(score(q, k)) v and its relatives: the part of attention between the projections.

    >>> m = Mechanism("quest+gqa(kv_heads=4)", num_heads=8, head_dim=64)
    >>> out = m(q, k, v, is_causal=True)

    Its state dict names the attention, and it refuses a checkpoint of another (see :mod:`quest_core.checkpoints`).

    Args:
        attention: a name, mapping or AttentionConfig; see :class:`quest_core.AttentionConfig`.
        num_heads: query heads H.
        head_dim: features D of a query/key head. Mechanisms with parameters or a state need both sizes; without them
            nothing is added to a state dict either.
        kv_heads: key/value heads G; by default what the attention says. With `mha` the host's own number: if G < H,
            each is shared by H/G consecutive query heads, and the config still reads `mha`.
        standard_scale: the host's own factor on q·k, if it is not the 1/√D that some scores have.
        projected: the caller calls `quest_core.projections.init_norms`, so options may set initial norms.

    Raises:
        ConfigError: unknown name or option, heads that kv_heads does not divide, or sizes missing.

    Attributes:
        dims: the sizes that its components were built for; None for a function.
        reads, chained, fused, on_grid, unit_keys: as its components declare them.
        hides_by_infinity: set by an adapter whose additive masks hide by −inf only, and not by the lowest number.
        takes_unit_keys: whether `forward` may be given unit keys.
        family: computes everything (linear, cosine, the AFTs); if None, `score`, `normalizer` and `grouping` do.
        monitor: a tuple of all :class:`quest_core.tools.monitor.Layer` that see its calls, or None; copies have none.
        head_share: (rank, world size) if tensor parallelism splits the heads, else (0, 1).
    """

    score: Score
    normalizer: Normalizer
    grouping: Grouping

    def __init__(
        self,
        attention: AttentionSpec,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        standard_scale: float | None = None,
        projected: bool = False,
    ) -> None:
        config = AttentionConfig.parse(attention)
        if config.initial_norms and not projected:
            raise ConfigError(
                f"attention '{config}' sets initial norms of query and key projections, which a Mechanism does not "
                "have; use quest_core.Attention or quest_core.inject(model, ..., fresh=True), or leave the option out"
            )
        dims = None
        if num_heads is not None and head_dim is not None:
            groups = count_kv_heads(config, num_heads) if kv_heads is None else kv_heads
            dims = Dims(num_heads, groups, head_dim, standard_scale)
        else:
            _refuse_state(config)
        super().__init__(config, keeps=dims is not None)
        self._name = str(config)
        self.monitor: Any = None
        self.hides_by_infinity = False
        self.head_share = (0, 1)
        self.dims = dims
        if config.family is None:
            self.family: Family | None = None
        for part in config.components:
            self.add_module(part.axis, config.build(part, dims))
        self._collect_declarations()

    def _collect_declarations(self) -> None:
        """Keep what the classes of the components declare in attributes, because each call reads it."""
        parts, dims = self.config.components, self.dims
        self.reads = frozenset(itertools.chain.from_iterable(part.reads for part in parts))
        self.chained = any(part.chained for part in parts)
        self.fused = all(part.fused for part in parts if part.axis not in ("score", "grouping"))
        self.on_grid = any(part.on_grid for part in parts)
        self.unit_keys = any(part.unit_keys for part in parts)
        self.takes_unit_keys = self.unit_keys and not any(part.reads for part in parts if part.axis != "normalizer")
        grouping = None if self.family is not None else self.grouping
        self._chooses_heads = grouping is not None and grouping.chooses
        shared = any(part.reshapes for part in parts) if dims is None else dims.kv_heads < dims.num_heads
        self._grouped = grouping is not None and not self._chooses_heads and shared  # see `Normalizer.forward`
        self._perturbs = grouping is not None and grouping.needs_weights
        self._wrappers = [part.axis for part in parts if part.axis in ("score_mod", "output")]  # of the normalizer
        self._key_features = parts[0].key_features  # only a family has them, and is the only part
        self._learns = any(part.learnable for part in parts)
        # Names of parts that cannot do something, or need something; `_check` and `decode` raise errors with them.
        self._no_causal = [f"'{part.name}' cannot be causal: {part.causal_reason}" for part in parts if not part.causal]
        self._no_cache = [part.name for part in parts if not part.cached]
        self._no_dropout = [part.name for part in parts if not part.dropout]
        self._needs_tokens = [part.name for part in parts if "tokens" in part.reads]
        self._needs_input = [part.name for part in parts if part.needs_input]
        special = self._key_features, self._grouped, self._chooses_heads, self._no_causal, self._needs_tokens
        self._is_plain = not (any(special) or self._needs_input)  # whether `_check` may compare only q, k and v

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0,  # and not 0.0, which a dynamic graph takes for an input, so that it is compiled twice
        unit_keys: bool = False,
        x: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output; `is_causal` is aligned at the last query: query i sees keys j ≤ i + M − N.

        Args:
            q: [B, H, N, D].
            k: [B, G, M, D] and v: [B, G, M, Dv]; H is a multiple of G.
            attn_mask: boolean (True = may attend) or additive, [N, M] or broadcastable to [B, H, N, M].
            dropout_p: dropout on the weights; the caller passes 0 outside training.
            unit_keys: `k` holds unit vectors, as a host's cache may, and is not normalized again; see
                `takes_unit_keys`.
            x: the layer's input [B, N, H·D] of the queries, for mechanisms that read it (gate, diff, forget).

        Returns:
            [B, H, N, Dv]; zeros for a query with no visible key.

        Raises:
            InputError: a shape or type does not fit; the message names it.
            UnsupportedError: the mechanism cannot be causal, has no weights to drop, or needs the keys as they were.
        """
        mask = self._check(q, k, v, attn_mask, is_causal, dropout_p, unit_keys=unit_keys, x=x)
        if self.family is not None:
            return self.family(q, k, v, key_mask=self._key_mask(mask), is_causal=is_causal)  # type: ignore[no-any-return]
        normalizer, q, k, v, scale = self._prepare(q, k, v, mask, is_causal, unit_keys=unit_keys, x=x)
        out: Tensor = normalizer(
            q, k, v, scale=scale, mask=mask, is_causal=is_causal, dropout_p=dropout_p, grouped=self._grouped
        )
        if out.requires_grad:
            name_second_derivative(out, self._name)
        return out

    def _prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        *,
        cache: Cache | None = None,
        unit_keys: bool = False,
        x: Tensor | None = None,
    ) -> tuple[Callable[..., Any], Tensor, Tensor, Tensor, float]:
        """Choose the key/value heads, apply the score, and append the new tokens to a cache.

        Returns:
            The normalizer, wrapped in what changes logits or outputs; q [B, H, N, D], and k and v of all tokens, the
            cached ones first; the factor on q kᵀ.
        """
        score, normalizer = without_hooks(self._modules["score"], self._modules["normalizer"])
        head = None  # the key/value head of each query head [H]; None: equal consecutive groups
        if self._chooses_heads:
            mask_of_k = mask if mask is None or cache is None or mask.shape[-1] == 1 else mask[..., cache.tokens :]
            head = self.grouping(k, q.shape[1], mask_of_k)
        q, k, scale = score(q, k, v, mask=mask, is_causal=is_causal, head=head, cache=cache, unit_keys=unit_keys)
        if cache is not None:
            k, v = cache.append("k", k), cache.append("v", v)
        if head is not None:
            k, v = k.index_select(1, head), v.index_select(1, head)
        if self._perturbs:
            normalizer = functools.partial(normalizer, perturb=self.grouping.perturb)
        for axis in self._wrappers:
            normalizer = functools.partial(self._modules[axis], normalizer, x=x, cache=cache)  # type: ignore[arg-type, misc]
        return normalizer, q, k, v, scale

    @property
    def kernel(self) -> str:
        """The function by which `forward` attends, or "written out" for products and sums."""
        changed = any(part.axis == "score_mod" and not part.fused for part in self.config.components)
        return Normalizer.kernel if self.family is not None or self._perturbs or changed else self.normalizer.kernel

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse torch.jit.script, which calls this first; its own error names a type annotation."""
        raise UnsupportedError(
            f"attention '{self.config}' does not support torch.jit.script, which compiles a subset of Python; use "
            "torch.export or torch.jit.trace"
        )

    def forward_with_weights(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the output and the weights [B, H, N, M] after dropout; `is_causal` is aligned at the last query.

        Arguments are as in `forward`, without `unit_keys`.
        """
        return self.forward_with_logits(q, k, v, **options)[:2]

    def forward_with_logits(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        residual: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0,
        x: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the weights after dropout and the logits; `is_causal` is aligned at the last query.

        They are [B, H, N, Dv] and [B, H, N, M] twice. The logits hold additive masks and the residual; a boolean mask
        acts only on the weights. Arguments are as in `forward_with_weights`, and `residual`: logits of the previous
        layer [B, H, N, M], added to these (RealFormer, He et al., 2021).
        """
        mask = self._check(q, k, v, attn_mask, is_causal, dropout_p, weights=True, x=x)
        if self.family is not None:
            raise UnsupportedError(f"attention '{self.config}' never forms weights; ask for the output only")
        if tokens_are_divided():
            raise UnsupportedError(
                "under torch's context_parallel no rank has all logits of a query; ask for the output only "
                "(need_weights=False)"
            )
        normalizer, q, k, v, scale = self._prepare(q, k, v, mask, is_causal, x=x)
        how = {"scale": scale, "dropout_p": dropout_p, "grouped": self._grouped, "residual": residual}
        return normalizer(q, k, v, mask=mask, is_causal=is_causal, need_weights=True, **how)  # type: ignore[no-any-return]

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Cache,
        *,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0,
        x: Tensor | None = None,
    ) -> Tensor:
        """Return the causal output of new tokens after those in `cache`; equal to `forward` on all of them.

        Args:
            q: [B, H, N, D], k: [B, G, N, D], v: [B, G, N, Dv]: only the new tokens.
            cache: this layer's state; it is extended. A step that raises leaves its tokens as they were.
            attn_mask: as in `forward`, with M counting the cached tokens too. A family has folded those into its state
                and reads the mask only at the new ones.
            x: as in `forward`, of the new tokens.

        Returns:
            [B, H, N, Dv].

        Raises:
            InputError: as in `forward`, or the new tokens do not fit those in the cache, or are more than its
                `max_length`.
            UnsupportedError: the mechanism cannot decode incrementally.
        """
        if self._no_cache:
            raise UnsupportedError(f"attention '{self.config}': '{self._no_cache[0]}' cannot decode incrementally")
        mask, n = self._check(q, k, v, attn_mask, True, dropout_p, cached=cache.tokens, x=x), q.shape[2]
        recorded = torch.is_grad_enabled() and (self._learns or any(x.requires_grad for x in (q, k, v)))
        cache.admit(self, k, v, in_place=not recorded and transform() is None)
        if self.family is not None:
            key_mask = self._key_mask(mask)  # [B or 1, M or 1]
            if key_mask is not None and key_mask.shape[1] > 1:
                key_mask = key_mask[:, cache.tokens :]
            before = cache.states
            try:
                out: Tensor = self.family(q, k, v, key_mask=key_mask, is_causal=True, cache=cache)
            except BaseException:
                cache.states = before
                raise
        else:
            normalizer, q, k, v, scale = self._prepare(q, k, v, mask, True, cache=cache, x=x)
            how = {"scale": scale, "dropout_p": dropout_p, "grouped": self._grouped}
            out = normalizer(q, k, v, mask=mask, is_causal=True, **how)
        cache.tokens += n
        return out

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the logits [B, H, N, M] before any mask, for q [B, H, N, D] and k [B, G, M, D] in equal groups.

        Raises:
            UnsupportedError: the logits depend on more than queries and keys.
        """
        more = self.family is not None or "tokens" in self.score.reads or self.score.stateful
        if more or self.chained or "score_mod" in self._wrappers:
            raise UnsupportedError(f"attention '{self.config}' has no logits that queries and keys determine")
        grouped = q.shape[1] != k.shape[1]
        q, k, scale = self.score(q, k, k, mask=None, is_causal=False)
        return logits(q, k, scale, grouped)

    def padding_mask(self, real: Tensor, *, same_tokens: bool) -> Tensor:
        """Return the mask [B, 1, 1, M] or [B, 1, M, M] for padding, of the type of `real`.

        Args:
            real: [B, M], boolean (False = padding) or additive (−inf = padding).
            same_tokens: whether queries and keys are the same tokens, as in self-attention. Where queries share the
                mass of columns (sinkhorn) or noise (pgqa), query padding must be masked too.
        """
        if real.dtype not in (torch.bool, *TYPES):
            raise InputError(
                f"a mask of padding is {real.dtype}; expected booleans (False = padding) or {NAMES} to add"
            )
        real = real if real.dtype == torch.bool else hide_lowest(real)
        keys = real[:, None, None, :]
        if not (same_tokens and "queries" in self.reads):
            return keys
        return merge_masks(keys, visible(real[:, None, :, None]))

    def _key_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return the mask of keys [B or 1, M] for a family, from one of [B, 1, 1, M]."""
        if mask is None:
            return None
        if mask.dim() == 4 and mask.shape[1:3] == (1, 1):
            return mask[:, 0, 0]
        raise UnsupportedError(
            f"attention '{self.config}' takes only masks of keys, [B, 1, 1, M]; it has no weights that a mask of "
            f"shape {list(mask.shape)} could act on; say is_causal=True for a causal mask"
        )

    def _check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        dropout_p: float,
        cached: int = 0,
        unit_keys: bool = False,
        weights: bool = False,
        x: Tensor | None = None,
    ) -> Tensor | None:
        """Raise unless all arguments fit this mechanism; return the mask, in which only −inf and False hide.

        Args:
            cached: further keys, before those of k, that the mask covers.
            weights: they are wanted, so no kernel is called.
        """
        exporting = is_tracing() or is_exporting_graph()  # which would fix the sizes that are compared
        # Self-attention without a mask is checked by one comparison; any other call piece by piece.
        if (
            self.monitor is None  # torch.compile guards this attribute, and not the hooks of the Monitor
            and self._is_plain
            and mask is None
            and dropout_p == 0
            and (self.takes_unit_keys or not unit_keys)
            and not exporting
            and q.dim() == 4
            and q.shape == k.shape == v.shape
            and q.dtype == k.dtype == v.dtype
            and q.dtype in TYPES
            and q.get_device() == k.get_device() == v.get_device()
            and not q.is_nested
        ):
            return None
        if unit_keys and not self.takes_unit_keys:
            raise UnsupportedError(f"attention '{self.config}' needs the keys before any normalization")
        if self._needs_input and x is None:
            raise UnsupportedError(
                f"attention '{self.config}': '{self._needs_input[0]}' reads the layer's input; pass x [B, N, H·D], or "
                "use quest_core.Attention or MultiheadAttention"
            )
        if dropout_p > 0 and self._no_dropout:
            raise UnsupportedError(
                f"attention '{self.config}': '{self._no_dropout[0]}' has no weights to drop; set the attention "
                "dropout to 0"
            )
        # Outside of the kernel operations broadcast, which fixes each size that is 1 in the example.
        if exporting and (self._learns or not self.fused or (weights and is_one_in_example(q.shape[0]))):
            refuse_one_token(self.config, q.shape[2], k.shape[2])
        if self._needs_tokens and tokens_are_divided():
            raise UnsupportedError(
                f"attention '{self.config}': '{self._needs_tokens[0]}' needs all tokens, and under torch's "
                "context_parallel a rank has some of them; choose a score such as quest or qknorm with softmax and "
                "mha, gqa, mqa or dgqa"
            )
        if mask is not None:
            mask = plain_mask(mask, q.device)
        if not exporting:
            self._check_shapes(q, k, v, mask, dropout_p, cached)
            wanted = (q.shape[0], q.shape[2], q.shape[1] * q.shape[3])
            if self._needs_input and x is not None and x.shape != wanted:
                raise InputError(f"x has shape {list(x.shape)}; expected [B, N, H·D] = {list(wanted)}")
        if self._no_causal:
            self.refuse_future(mask, is_causal)
        if mask is not None and self.family is None and is_exporting_graph():
            mask = expand_mask(mask, q, k, cached)
        return mask if mask is None or mask.dtype == torch.bool or self.hides_by_infinity else hide_lowest(mask)

    def _check_shapes(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, cached: int
    ) -> None:
        """Raise InputError unless q, k, v and mask fit together; arguments as in `_check`."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4:
                raise InputError(f"{name} has shape {list(x.shape)}; it needs four axes, [B, H, N, D]")
            if x.dtype not in TYPES:
                raise InputError(f"{name} is {x.dtype}; attention takes {NAMES}")
            if x.dtype != q.dtype and autocast_dtype(q.device.type) is None:
                raise InputError(f"q is {q.dtype} but {name} is {x.dtype}; convert them to one type")
            if x.device != q.device:
                raise InputError(f"q is on {q.device} but {name} is on {x.device}")
        if q.is_nested:
            raise InputError(
                "q is a nested tensor; pad it and pass a mask of the padding, or use quest_core.attention_packed"
            )
        batch, heads, n, dim = q.shape
        batch_k, groups, m, key_dim = k.shape
        batch_v, groups_v, m_v, _ = v.shape
        if batch_k != batch or batch_v != batch:
            raise InputError(f"batch sizes differ: q {batch}, k {batch_k}, v {batch_v}")
        if key_dim != (self._key_features or dim):
            raise InputError(f"k has head_dim {key_dim}; expected {self._key_features or f'{dim}, as q'}")
        if groups_v != groups or m_v != m:
            raise InputError(f"k has (heads, tokens) {(groups, m)} but v has {(groups_v, m_v)}")
        for part in self.config.components:
            if n > m + cached and part.axis in self._wrappers and not part.cross:
                raise InputError(f"q has {n} tokens and k has {m + cached}; '{part.name}' needs those of one sequence")
        if not 0 <= dropout_p < 1:
            raise InputError(f"dropout_p is {dropout_p}; expected a probability in [0, 1)")
        why = None
        if self.family is not None:
            why = None if heads == groups else f"q has {heads} heads and k has {groups}"
        elif heads != groups or self._grouped or self._chooses_heads:
            ranks = self.head_share[1]
            why = self.grouping.mismatch(heads * ranks, groups * ranks)
        if why:
            raise InputError(f"attention '{self.config}': {why}")
        if mask is not None:
            full = (batch, heads, n, m + cached)
            if mask.dtype not in (torch.bool, *TYPES):
                raise InputError(f"attn_mask is {mask.dtype}; expected booleans (True = may attend) or {NAMES} to add")
            if mask.dim() not in (2, 4) or any(mask.shape[i] not in (1, full[i]) for i in range(-mask.dim(), 0)):
                raise InputError(
                    f"attn_mask has shape {list(mask.shape)}; it needs [N, M] = [{n}, {m + cached}] or a shape "
                    f"that broadcasts to [B, H, N, M] = {list(full)} (for a mask per sample [B, N, M] write "
                    "mask[:, None])"
                )

    def refuse_future(self, mask: Tensor | None, is_causal: bool = False) -> None:
        """Raise UnsupportedError if `is_causal` or the mask hides the future and this mechanism cannot be causal."""
        if self._no_causal and (is_causal or (mask is not None and hides_the_future(mask))):
            raise UnsupportedError(f"attention '{self.config}': {self._no_causal[0]}")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set parameters and buffers in place to those of a new Mechanism; the random state is left as it was.

        So two mechanisms that are reset in a row, with no random numbers drawn between, are equal.
        """
        if self.dims is None:
            return
        with same_random_state(self):
            made = Mechanism(self.config, **vars(self.dims), projected=True)
        new = (*made.parameters(), *made.buffers())
        for own, start in zip((*self.parameters(), *self.buffers()), new, strict=True):
            if hasattr(own, "device_mesh") and hasattr(own, "placements"):  # a DTensor, as fully_shard makes them
                from torch.distributed.tensor import distribute_tensor

                start = distribute_tensor(start.to(own.device), own.device_mesh, own.placements)
            own.copy_(start)

    def extra_repr(self) -> str:
        return str(self.config)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "monitor": None}  # it belongs to the model it watches, not to a copy


def _refuse_state(config: AttentionConfig) -> None:
    """Raise ConfigError if a part has parameters or a state, which needs a Mechanism with sizes."""
    for part in config.components:
        if part.learnable or part.stateful or part.chained:
            keeps = "learnable parameters" if part.learnable else "a state"
            raise ConfigError(
                f"attention '{config}': '{part.name}' has {keeps}, which a function cannot keep; build it once, "
                f"m = quest_core.Mechanism('{config}', num_heads=..., head_dim=...), and call m(q, k, v)"
            )


def count_kv_heads(attention: AttentionSpec, num_heads: int) -> int:
    """Return the number of key/value heads G that `attention` uses for `num_heads` query heads."""
    config = AttentionConfig.parse(attention)
    if config.family:
        return num_heads
    grouping = next(part for part in config.components if issubclass(part, Grouping))
    return config.build(grouping, None).kv_heads(num_heads)


def head_sizes(
    attention: AttentionSpec,
    num_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    host_kv_heads: int | None = None,
) -> HeadSizes:
    """Return the sizes of the heads that `attention` projects to; ConfigError if `num_heads` heads cannot share keys.

    Args:
        value_dim: features of a value head; `head_dim` by default.
        host_kv_heads: key/value heads of the host's own model, which stay if the attention leaves them to the host.
    """
    config = AttentionConfig.parse(attention)
    parts = config.components
    groups, shared = count_kv_heads(config, num_heads), None if host_kv_heads == num_heads else host_kv_heads
    if shared is not None and not any(part.reshapes for part in parts):
        groups = shared
    return HeadSizes(num_heads, groups, head_dim, parts[0].key_features or head_dim, value_dim or head_dim, shared)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: AttentionSpec = "quest",
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0,
) -> Tensor:
    """Return the output of an attention without parameters; `is_causal` is aligned at the last query: j ≤ i + M − N.

    >>> out = attention(q, k, v, "quest", is_causal=True)

    Args:
        q: queries [B, H, N, D].
        k: keys [B, G, M, D], G a divisor of H (G < H needs a grouping such as "quest+gqa").
        v: values [B, G, M, Dv].
        attention: a name, a mapping or an AttentionConfig.
        attn_mask: boolean (True = may attend) or additive, [N, M] or broadcastable to [B, H, N, M].
        dropout_p: dropout on the weights.

    Returns:
        [B, H, N, Dv]; zeros for a query with no visible key.

    Raises:
        ConfigError: unknown name or option, or a mechanism with learnable parameters.
        InputError: wrong shapes, types or mask.
        UnsupportedError: as in `Mechanism.forward`.
    """
    spec = attention if type(attention) is str else _as_constant(attention)  # a name takes one call less
    mechanism: Mechanism = getattr(_SHARED, _shared_name(spec))
    return mechanism.forward(q, k, v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)


def has_mechanism(model: torch.nn.Module) -> bool:
    """Return whether a module of `model` has an attention of quest_core, `standard` included."""
    return any(isinstance(module, Mechanism) for module in model.modules())


def shared_mechanism(attention: AttentionSpec) -> Mechanism:
    """Return the mechanism of `attention`, in evaluation, shared by all callers; ConfigError if it keeps anything."""
    return getattr(_SHARED, _shared_name(_as_constant(attention)))  # type: ignore[no-any-return]


_SHARED = SimpleNamespace()
"""The `MOST_SHARED` mechanisms of `shared_mechanism` made last; ``_33207175657374`` is "3 quest" in hexadecimal.

They are attributes because torch.compile guards those that it reads: it would trace into a function with a cache, and
no module is a constant in a graph.
"""
MOST_SHARED = 64
_attribute_name = functools.lru_cache(MOST_SHARED)(lambda text: f"_{text.encode().hex()}")
_LOCK = threading.Lock()


def _as_constant(attention: AttentionSpec) -> Any:
    """Return `attention` with a mapping as a tuple, whose contents torch.compile compares with those of each call."""
    return tuple(attention.items()) if isinstance(attention, Mapping) else attention


@constant_result  # parsing reads entry points, which cannot be traced
def _shared_name(spec: Any) -> str:
    """Return the name of the attribute of _SHARED that holds the mechanism of `spec`; make it if it is missing."""
    if type(spec) is tuple and all(type(item) is tuple for item in spec):  # of `_as_constant`
        spec = dict(spec)
    spec = spec if isinstance(spec, str) else AttentionConfig.parse(spec)
    name, made = _attribute_name(f"{registry.registrations} {spec}"), _SHARED.__dict__
    if name not in made:
        new = Mechanism(spec).eval()
        with _LOCK:
            while len(made) >= MOST_SHARED:
                del made[next(iter(made))]
            made[name] = new
    return name
