"""Random cells: any combination of parts and options, sizes, strides, masks and wanted gradients."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from quest_core import AttentionConfig
from quest_core import ops as blocks
from quest_core.mechanisms import aft_ops, linear

from .cases import BY_NAME, DTYPES, Cell, Made, additive, bounds, compare, leaf, rough, weight_of, with_gradients

Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of several options."""


@dataclass(frozen=True)
class Strides:
    """How a tensor [B, heads, tokens, features] lies in memory.

    Attributes:
        order: axes from the slowest to the fastest.
        steps: of each axis.
        offset: elements before the first.
        expanded: axes along which one element stands for all.
        windows: the axis of heads or tokens whose entries are overlapping windows, as of tensor.unfold.
    """

    order: tuple[int, ...] = (0, 1, 2, 3)
    steps: tuple[int, ...] = (1, 1, 1, 1)
    offset: int = 0
    expanded: tuple[int, ...] = ()
    windows: int | None = None

    def make(self, shape: Sequence[int], dtype: torch.dtype, factor: float) -> Tensor:
        if self.windows is not None and shape[self.windows] > 0:
            others = [size for axis, size in enumerate(shape[:3]) if axis != self.windows]
            series = (torch.randn(*others, shape[self.windows] - 1 + shape[3]) * factor).to(dtype)
            return series.unfold(2, shape[3], 1).movedim(2, self.windows)
        stored = [1 if axis in self.expanded else shape[axis] * self.steps[axis] for axis in self.order]
        count = int(torch.tensor(stored).prod())
        flat = (torch.randn(count + self.offset) * factor).to(dtype)
        x = flat[self.offset :].view(stored).permute([self.order.index(axis) for axis in range(4)])
        for axis, step in enumerate(self.steps):
            if axis not in self.expanded and step > 1:
                x = x[(slice(None),) * axis + (slice(None, None, step),)]
        return x.expand(*shape)


@dataclass(frozen=True)
class Example:
    """A random cell."""

    spec: str
    heads: int = 4
    groups: int = 4
    batch: int = 2
    n: int = 7
    m: int = 7
    dim: int = 8
    dim_v: int = 8
    key_dim: int = 8
    dtype: torch.dtype = torch.float64
    q: Strides = Strides()
    k: Strides = Strides()
    v: Strides = Strides()
    shared: bool = False  # k and v are pieces of one tensor
    mask: str = "none"
    mask_shape: tuple[bool, ...] = ()  # which of B, H, N, M are broadcast; two entries for [N, M]
    mask_wide: bool = False  # the mask is float32, or float64 with tensors of float32
    mask_layout: str = "contiguous"
    is_causal: bool = False
    training: bool = False
    wants: tuple[bool, ...] = (True, True, True, True, True)  # gradients of q, k, v, the mask, the parameters
    factor: float = 1.0
    zeros: bool = False  # some keys and queries are zero
    grad: str = "tokens first"  # how the gradient of the output lies in memory
    block: int = 0  # rows of a block, for mechanisms that take large calls in blocks; 0 for their own
    transform: str = "eager"
    seed: int = 0


SCORES = ("standard", "quest", "quest", "qnorm", "qknorm-hs", "qknorm-ds", "qknorm", "elliptical", "elliptical-quest")
SIZES = (0, 1, 1, 2, 3, 5, 7, 11, 13, 16, 31, 64, 67, 97)
KINDS = ("boolean", "-inf", "finfo.min", "-100", "bias")
MASK_LAYOUTS = ("contiguous", "transposed", "slice", "expanded")
GRADS = ("tokens first", "contiguous", "expanded", "features first")


def example(pick: Pick, transform: str = "eager") -> Example:
    """Draw an example."""
    lengths = SIZES if transform == "eager" else (2, 3, 5, 7, 13, 31, 67)
    heads = pick((1, 2, 3, 4, 6, 8))
    groups, n, m = heads, pick(lengths), pick(lengths)
    dim = pick((1, 2, 3, 5, 8, 16, 24))
    key_dim = dim
    training = False
    if pick((True, True, False)):  # score, normalizer and grouping
        score, normalizer = pick(SCORES), pick(("", "", "+sigmoid", "+sinkhorn"))
        grouping = pick(("", "", "gqa", "mqa", "kdgqa", "dgqa", "pgqa"))
        options = [f"scale={pick((0.1, 1.0, 0.5, 2))}"] if pick((False, False, True)) else []
        if normalizer == "+sigmoid" and pick((False, True)):
            options.append(f"bias={pick((0, -1.5, 2))}")
        if normalizer == "+sinkhorn":
            options += [f"iterations={pick((1, 2, 3, 4, 7))}", f"eps={pick((1, 0.5, 2))}"]
        if grouping in ("gqa", "pgqa", "kdgqa", "dgqa"):
            fitting = [g for g in range(1, heads + 1) if heads % g == 0 or grouping in ("kdgqa", "dgqa")]
            groups = pick(fitting)
            options.append(f"kv_heads={groups}")
        if grouping in ("kdgqa", "dgqa") and heads >= groups:
            options.append(f"min_queries={pick(range(heads // groups + 1))}")
        if grouping == "dgqa":
            options += [f"window={pick((1, 2, 3))}", f"evolution={pick(('ema', 'difference'))}"]
            training = transform == "eager" and pick((True, False))
        if grouping == "pgqa" and (transform != "eager" or pick((True, False))):
            options.append("noise_in_eval=false")
        groups = 1 if grouping == "mqa" else groups
        name = f"{score}{normalizer}{f'+{grouping}' if grouping else ''}"
        spec = f"{name}({', '.join(options)})" if options else name
    else:
        family = pick(("linear", "cosine", "aft-full", "aft-local", "aft-simple", "aft-conv"))
        options = []
        if family in ("aft-full", "aft-local"):
            options += ["max_length=100", f"rank={pick(('null', 1, 4))}"]
        if family == "aft-local":
            options.append(f"window={pick((1, 3, 8, 200))}")
        if family == "aft-conv":
            axes = pick((1, 1, 2, 3))
            prefix = pick((0, 1, 2))
            options += [
                f"dims={axes}",
                f"window={pick((1, 3, 5))}",
                f"prefix={prefix}",
                f"gumbel={pick(('true', 'false'))}",
            ]
            n = pick((1, 2, 3, 4) if axes > 1 else (1, 2, 7, 13, 31, 67)) ** axes + prefix
            key_dim = 1
        if family.startswith("aft") and pick((True, False, False)):
            options.append("query=false")
        spec = f"{family}({', '.join(options)})" if options else family
    config = AttentionConfig.parse(spec)
    parts = list(config.components)
    if pick((True, True, False)) or not all(part.cross for part in parts):
        m = n
    is_causal = all(part.causal for part in parts) and pick((True, False))
    free = config.family in ("linear", "cosine") or (config.family is None and "elliptical" not in spec)
    mask = pick(("none", "none", *KINDS))
    if config.family in ("linear", "cosine") and mask in ("-100", "bias"):
        mask = "finfo.min"
    if config.family is not None:
        shape = (pick((True, False)), True, True, pick((False, False, False, True)))
    elif pick((True, False)):
        shape = (False, pick((False, False, True)))
    else:
        shape = (*(pick((True, False)) for _ in range(3)), pick((False, False, False, True)))
    # Second derivatives in a narrow type are often the difference of sums that are rounded worse than it is large.
    dtype = pick(DTYPES[:1] if transform == "second derivative" else DTYPES)
    shared = pick((True, False, False))
    more = {name: strides(pick) for name in "qkv"}
    if pick((False,) * 7 + (True,)):  # of q only: PyTorch refuses a gradient by windows of k or v in bfloat16
        more["q"] = Strides(windows=pick((1, 2)))
    widens = mask != "none" and transform == "eager" and "pgqa" not in spec  # whose noise is drawn in the wider type
    return Example(
        spec, heads, groups, pick((1, 2, 2, 3, 0) if transform == "eager" else (1, 2, 3)), n, m, dim,
        pick((dim, 4, 9)) if free else dim, key_dim, dtype, **more, shared=shared, mask=mask, mask_shape=shape,
        mask_wide=widens and pick((True, False)), is_causal=is_causal,
        training=training, wants=tuple(pick((True, True, False)) for _ in range(5)), factor=pick((1.0, 0.01, 3.0)),
        zeros=pick((True, False)), transform=transform, seed=pick(range(1000)),
        mask_layout=pick(MASK_LAYOUTS) if transform == "eager" else "contiguous",
        grad=pick(GRADS) if transform == "eager" else GRADS[0],
        block=pick((0, 0, 1, 3)) if transform == "eager" else 0,
    )  # fmt: skip


def strides(pick: Pick) -> Strides:
    """Draw how a tensor lies in memory."""
    order = [0, 1, 2, 3]
    for i in (3, 2, 1):
        j = pick(range(i + 1))
        order[i], order[j] = order[j], order[i]
    steps = tuple(pick((1, 1, 1, 2, 3)) for _ in range(4))
    expanded = tuple(axis for axis in range(4) if pick((False, False, False, False, True)))
    return Strides(tuple(order), steps, pick((0, 0, 1, 3)), expanded)


class MadeOf(Made):
    """The module, reference and tensors of an example."""

    def __init__(self, one: Example) -> None:
        self.one = one
        self.cell = Cell(BY_NAME["quest"], dtype=one.dtype, is_causal=one.is_causal, cross=one.n != one.m)
        self.seed = one.seed
        # Among thousands of draws some are rounded much worse than the plain formula in another type. A wrong formula
        # is further off than any rounding in float64.
        self.slack = 1000 if one.dtype == torch.float64 else 32
        self.heads, self.single = one.heads, one.n < 2 or "aft-conv" in one.spec
        self.config = AttentionConfig.parse(one.spec)
        self.groups, self.batch, self.dim, self.key_dim = one.groups, one.batch, one.dim, one.key_dim
        self.draws = "pgqa" in one.spec and "noise_in_eval=false" not in one.spec
        self._build(one.training)

    def _warm_up(self) -> None:
        """Some steps of training, which leave dgqa with other sizes."""
        self.module.train()
        for step in range(self.seed % 6):
            q, v = torch.randn(2, self.heads, 3, self.dim), torch.randn(2, self.groups, 3, self.dim)
            k = torch.randn_like(v) * torch.linspace(3, 1, self.groups)[:, None, None] * (1 + step % 3)
            with torch.no_grad():
                self.module(*(x.to(self.one.dtype) for x in (q, k, v)))

    def large_logit(self, tensors: Sequence[Tensor]) -> float:
        eps = self.config.option("eps")
        if not eps or self.one.factor <= 1 or not all(x.numel() for x in tensors[:2]):
            return 0.0
        q, k = (float(x.detach().double().norm(dim=-1).max()) for x in tensors[:2])
        return (q * k / math.sqrt(self.dim) if self.config["score"] == "standard" else max(q, k)) / eps

    def lengths(self) -> Sequence[int]:
        return (self.one.n,) if self.single else (self.one.n, self.one.n + 1)

    def tensors(self, tokens: int | None = None, seed: int = 0) -> tuple[Tensor, ...]:
        one = self.one
        torch.manual_seed(self.seed + 1 + seed)
        n = one.n if tokens is None else tokens
        m = n - one.n + one.m
        q = one.q.make((one.batch, one.heads, n, one.dim), one.dtype, one.factor)
        if one.shared:
            both = one.k.make((one.batch, one.groups, m, one.key_dim + one.dim_v), one.dtype, one.factor)
            k, v = both.split([one.key_dim, one.dim_v], -1)
        else:
            k = one.k.make((one.batch, one.groups, m, one.key_dim), one.dtype, one.factor)
            v = one.v.make((one.batch, one.groups, m, one.dim_v), one.dtype, one.factor)
        if one.zeros:
            for x in (q, k):
                if 0 not in (*x.shape, *x.stride()):
                    x[0, 0, 0] = 0
        return (q, k, v) if one.mask == "none" else (q, k, v, self._laid_out(self._mask(n, m), n, m))

    def _laid_out(self, mask: Tensor, n: int, m: int) -> Tensor:
        """The same mask in another layout."""
        one = self.one
        if one.mask_layout == "transposed":
            return mask.mT.contiguous().mT
        if one.mask_layout == "slice":
            return torch.cat([mask[..., :1], mask, mask[..., :1]], -1)[..., min(mask.shape[-1], 1) :][
                ..., : mask.shape[-1]
            ]
        if one.mask_layout == "expanded":
            rows = 1 if self.config.family else n
            return mask.expand(*((one.batch, -1)[: mask.dim() - 2]), rows, m)
        return mask

    def _mask(self, n: int, m: int) -> Tensor:
        one = self.one
        sizes = (one.batch, one.heads, n, m)[4 - len(one.mask_shape) :]
        shape = [1 if broadcast else size for size, broadcast in zip(sizes, one.mask_shape, strict=True)]
        dtype = {torch.float32: torch.float64}.get(one.dtype, torch.float32) if one.mask_wide else one.dtype
        seen = torch.rand(shape) > 0.4
        if shape[-2]:
            free = all(part.causal for part in self.config.components)  # others refuse a mask that hides the future
            seen[..., 0, :] = bool(one.seed % 2) or not free
        if one.mask == "boolean":
            return seen
        if one.mask == "bias":
            return torch.randn(shape).to(dtype)
        if one.transform != "eager":  # a mask that hides nothing is taken for a bias, whose gradient is wanted
            seen.view(-1)[-1:] = False
        low = {"-inf": -torch.inf, "finfo.min": torch.finfo(dtype).min, "-100": -100.0}[one.mask]
        return additive(seen, low, dtype)


def run(one: Example) -> None:
    """Raise if outputs or the gradients that are asked for are not those of the reference."""
    made = MadeOf(one)
    tensors = made.tensors()
    dtype = one.dtype

    def results(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        kinds = [dtype] * 3 + [torch.promote_types(dtype, x.dtype) for x in tensors[3:]]  # a mask is never narrowed
        leaves = [leaf(x, kind, want) for x, kind, want in zip(tensors, kinds, one.wants, strict=False)]
        if len(leaves) > 3 and one.mask not in ("bias", "-100"):
            leaves[3] = leaves[3].detach()
        learned = {name: leaf(x, dtype, one.wants[4]) for name, x in made.named().items()}
        out = function(learned, *leaves)
        sources = [x for x in (*leaves, *learned.values()) if x.requires_grad]
        if not sources and out.requires_grad:
            raise AssertionError("the output requires a gradient though no input does")
        return with_gradients(out, sources, _weight(out, one.grad))

    with small_blocks(one.block) if one.block else contextlib.nullcontext():
        got = results(made.seeded(made.call), dtype)
    exact, plain = results(made.reference, torch.float64), results(made.reference, rough(made))
    what = ["output", *(f"gradient {i}" for i in range(len(got) - 1))]
    # Weighted values may cancel, which their rounding does not.
    values = float(tensors[2].abs().max()) if tensors[2].numel() else 0.0
    limits = bounds(made, exact, plain, tensors, least=values)
    kept = [i for i, x in enumerate(got) if i == 0 or x.dtype == dtype]  # a mask of a wider type has a wider gradient
    compare([got[i] for i in kept], [exact[i] for i in kept], [limits[i] for i in kept], dtype, [what[i] for i in kept])


@contextlib.contextmanager
def small_blocks(rows: int) -> Iterator[None]:
    """Small tensors are taken in blocks as large ones are."""
    with (
        mock.patch.multiple(blocks, PLAIN_WEIGHTS=1, BLOCK_WEIGHTS=1, BLOCK_ROWS=rows),
        mock.patch.multiple(aft_ops, ROWS=rows, NARROW=2, ELEMENTS=40),
        mock.patch.object(linear, "CHUNK", rows),
    ):
        yield


def _weight(out: Tensor, layout: str) -> Tensor:
    """A fixed gradient for the output, laid out as `layout` says."""
    if layout == "expanded":  # as of out.sum()
        return torch.ones((), dtype=out.dtype).expand(out.shape)
    weight = weight_of(out)
    if layout == "features first":
        return weight.mT.contiguous().mT
    return weight.contiguous() if layout == "contiguous" else weight


def text(one: Example) -> str:
    """The fields that are not at their defaults, as code."""
    fields = [f for f in dataclasses.fields(Example) if f.name == "spec" or getattr(one, f.name) != f.default]
    return f"Example({', '.join(f'{f.name}={getattr(one, f.name)!r}' for f in fields)})"
