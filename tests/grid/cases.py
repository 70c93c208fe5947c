"""Cells: what is computed (a mechanism), on which tensors (layout, type, mask), and what is right.

A cell is right if its outputs and gradients differ from the float64 reference by no more than a few times what the
same plain formula differs in the type of the cell.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import quest_core
from quest_core import AttentionConfig, QuestError
from quest_core.mechanisms.naive import is_hidden
from quest_core.registry import AXES, mechanisms
from quest_core.testing.truth import truth

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Subject:
    """A row of the grid; the classes of its parts say what tensors it takes.

    Attributes:
        name: of the row.
        spec: an attention specification; {g} stands for the number of key/value heads.
        groups: key/value heads for 4 query heads.
        training: whether the module is in training mode.
        lengths: numbers of tokens that it takes.
    """

    name: str
    spec: str
    groups: int = 4
    training: bool = False
    lengths: tuple[int, ...] = (7, 5, 12, 66)

    def config(self, heads: int = 4) -> AttentionConfig:
        return AttentionConfig.parse(self.spec.format(g=min(self.groups, heads)))

    def can(self, promise: str) -> bool:
        """Return whether all parts declare it."""
        return all(getattr(part, promise) for part in self.config().components)

    @property
    def key_masks(self) -> bool:
        """Whether masks are of keys only."""
        return self.config().family is not None

    @property
    def key_features(self) -> int | None:
        return self.config().components[0].key_features


OPTIONS = {"dgqa": ", window=8", "aft-full": "max_length=80, rank=4", "aft-local": "max_length=80, rank=4, window=3"}
"""Those that suit few tokens."""


def _subjects() -> tuple[Subject, ...]:
    """Each mechanism of the core, with `quest` where it needs a score, and further combinations and options."""

    def grouped(text: str, groups: int = 2) -> Subject:
        return Subject(text, f"{text}(kv_heads={{g}}{OPTIONS.get(text.rpartition('+')[2], '')})", groups)

    rows = []
    own = (part for part in mechanisms().values() if part.__module__.startswith("quest_core."))
    for part in sorted(own, key=lambda part: AXES.index(part.axis)):  # in the order of registration within an axis
        options = f"({OPTIONS[part.name]})" if part.name in OPTIONS else ""
        if part.axis == "normalizer" and part.name != "softmax":
            rows += [Subject(text, text) for text in (f"standard+{part.name}", f"quest+{part.name}")]
        elif any(option.name == "kv_heads" for option in part.options):
            rows.append(grouped(f"quest+{part.name}"))
        elif part.name == "mqa":
            rows.append(Subject("quest+mqa", "quest+mqa", groups=1))
        elif part.axis in ("score", "family") and part.name != "aft-conv":
            rows.append(Subject(part.name, part.name + options))
    return (
        *rows,
        Subject("quest+dgqa training", f"quest+dgqa(kv_heads={{g}}{OPTIONS['dgqa']})", 2, training=True),
        Subject("quest+pgqa noiseless", "quest+pgqa(kv_heads={g}, noise_in_eval=false)", 2),
        Subject("quest+kdgqa of three", "quest+kdgqa(kv_heads={g})", 3),
        *map(grouped, ("elliptical-quest+sigmoid+gqa", "elliptical+dgqa", "qknorm+sinkhorn+kdgqa", "qknorm+gqa")),
        Subject("aft-full table", "aft-full(max_length=80, rank=null, query=false)"),
        Subject("aft-conv", "aft-conv(window=3, dims=1)"),
        Subject("aft-conv 2d", "aft-conv(window=3, dims=2, prefix=1)", lengths=(10, 5, 17, 65)),
    )


SUBJECTS = _subjects()
BY_NAME: Mapping[str, Subject] = {subject.name: subject for subject in SUBJECTS}


class Layers(nn.Module):
    """A mechanism as a module of q, k, v and mask; an elliptical one is the second of a chain of two."""

    def __init__(self, config: AttentionConfig, heads: int, dim: int, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.chained = any(part.chained for part in config.components)
        count = 2 if self.chained else 1
        self.layers = nn.ModuleList(quest_core.Mechanism(config, num_heads=heads, head_dim=dim) for _ in range(count))
        if self.chained:
            quest_core.chain(self)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, weights: bool = False, plain: bool = False
    ) -> Tensor:
        """Return the output of the last layer: by `forward_with_logits` if `weights`, by its references if `plain`."""
        if plain:
            given = {"attn_mask": mask, "is_causal": self.is_causal}
            values = [earlier(v)] * self.chained + [v]
            return [truth(layer, q, k, x, **given)[0] for layer, x in zip(self.layers, values, strict=True)][-1]
        if self.chained:
            self.layers[0](q, k, earlier(v), attn_mask=mask, is_causal=self.is_causal)
        if weights:
            return self.layers[-1].forward_with_logits(q, k, v, attn_mask=mask, is_causal=self.is_causal)[0]
        return self.layers[-1](q, k, v, attn_mask=mask, is_causal=self.is_causal)


def earlier(v: Tensor) -> Tensor:
    """The values of the layer before, some other function of v."""
    return torch.cat([v[..., -1:], v[..., :-1]], -1)  # torch.roll has other strides in a trace


# Layouts: [B, heads, tokens, D] each, all with the strides of some host.


def _contiguous(b: int, h: int, g: int, n: int, m: int, d: int, kd: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(b, h, n, d), torch.randn(b, g, m, kd), torch.randn(b, g, m, d)
    k[0, 0, 0] = 0  # a zero key
    return q, k, v


def _transposed(b: int, h: int, g: int, n: int, m: int, d: int, kd: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(b, n, h, d), torch.randn(b, m, g, kd), torch.randn(b, m, g, d)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _sliced(b: int, h: int, g: int, n: int, m: int, d: int, kd: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(b, h, n, d + 3), torch.randn(b, g, m, 2 * kd), torch.randn(b, m, 2 * d + 1, g)
    return q[..., 1 : d + 1], k[..., ::2], v.permute(0, 3, 1, 2)[..., d + 1 :]


def _packed(b: int, h: int, g: int, n: int, m: int, d: int, kd: int) -> tuple[Tensor, Tensor, Tensor]:
    if n != m:
        return _chunked(b, h, g, n, m, d, kd)
    q, k, v = torch.randn(b, n, h * d + g * kd + g * d).split([h * d, g * kd, g * d], -1)  # of one projection
    q, k, v = q.unflatten(-1, (h, d)), k.unflatten(-1, (g, kd)), v.unflatten(-1, (g, d))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _chunked(b: int, h: int, g: int, n: int, m: int, d: int, kd: int) -> tuple[Tensor, Tensor, Tensor]:
    k, v = torch.randn(b, g, m, kd + d).split([kd, d], -1)
    return torch.randn(b, h, n, d), k, v


def _expanded(b: int, h: int, g: int, n: int, m: int, d: int, kd: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k = torch.randn(b, 1, n, d).expand(b, h, n, d), torch.randn(1, g, m, kd).expand(b, g, m, kd)
    return q, k, torch.randn(b, g, m, 1).expand(b, g, m, d) * torch.ones(d).cumsum(0)


Layout = Callable[[int, int, int, int, int, int, int], tuple[Tensor, Tensor, Tensor]]
LAYOUTS: Mapping[str, tuple[Layout, int, bool]] = {  # how it is made, query heads, whether there is one token
    "contiguous": (_contiguous, 4, False),
    "transposed": (_transposed, 4, False),
    "feature slice": (_sliced, 4, False),
    "packed": (_packed, 4, False),
    "chunk": (_chunked, 4, False),
    "expanded": (_expanded, 4, False),
    "one head": (_chunked, 1, False),
    "one token": (_packed, 4, True),
}


def _keys(shape: tuple[int, ...], last: bool = True) -> Tensor:
    """Random keys of each sample, all of the first one; whether the last sample has any."""
    b, _, _, m = shape
    seen = torch.rand(b, 1, 1, m) > 0.4
    seen[0] = True
    seen[-1, ..., 0] = True
    seen[-1] &= last
    return seen


def _pairs(*shape: int, blind: Any = None) -> Tensor:
    """Random pairs, and none at the index `blind`."""
    seen = torch.rand(shape) > 0.4
    if blind is not None:
        seen[blind] = False
    return seen


def additive(seen: Tensor, low: float, dtype: torch.dtype) -> Tensor:
    """A mask that adds `low` to what is not seen."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, low)


Mask = Callable[[tuple[int, ...], torch.dtype], Tensor]
KEY_MASKS: Mapping[str, Mask] = {
    "keys": lambda shape, dtype: _keys(shape),
    "sample without keys": lambda shape, dtype: _keys(shape, False),
    "keys, -inf": lambda shape, dtype: additive(_keys(shape, False), -math.inf, dtype),
    "keys, finfo.min": lambda shape, dtype: additive(_keys(shape, False), torch.finfo(dtype).min, dtype),
}
FULL_MASKS: Mapping[str, Mask] = {
    "boolean with blind rows": lambda shape, dtype: _pairs(shape[0], 1, *shape[2:], blind=(..., -1, slice(None))),
    "additive, -inf": lambda shape, dtype: torch.where(
        _pairs(*shape[2:], blind=0), torch.randn(shape[2:]), -math.inf
    ).to(dtype),
    "additive, finfo.min": lambda shape, dtype: additive(
        _pairs(*shape, blind=(-1, -1, -1)), torch.finfo(dtype).min, dtype
    ),
    "additive, -100": lambda shape, dtype: additive(_pairs(shape[0], 1, *shape[2:]), -100.0, dtype),
    "bias a head": lambda shape, dtype: torch.randn(1, *shape[1:]).to(dtype),
}


def masks_of(subject: Subject) -> list[str]:
    """The masks that a mechanism takes, 'none' first."""
    return ["none", *KEY_MASKS, *([] if subject.key_masks else FULL_MASKS)]


@dataclass(frozen=True)
class Cell:
    """A mechanism on certain tensors; with `cross` there are other numbers of queries and keys."""

    subject: Subject
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float64
    mask: str = "none"
    is_causal: bool = False
    cross: bool = False

    def __str__(self) -> str:
        more = [*(["causal"] if self.is_causal else []), *(["N≠M"] if self.cross else [])]
        return ", ".join([self.subject.name, self.layout, str(self.dtype).removeprefix("torch."), self.mask, *more])

    def made(self, seed: int = 0) -> "Made":
        """Build the module, with parameters that differ from where they start, and its reference."""
        return Made(self, seed)


class Made:
    """The module of a cell, its reference, and tensors for both."""

    slack: float = 4
    """How many times the error of the plain formula is allowed."""

    def __init__(self, cell: Cell, seed: int = 0) -> None:
        self.cell, subject = cell, cell.subject
        self.seed = zlib.crc32(str(cell).encode()) + seed
        self.make, self.heads, self.single = LAYOUTS[cell.layout]
        self.config = subject.config(self.heads)
        self.groups = min(subject.groups, self.heads)
        self.batch, self.dim = 2, 8
        self.key_dim = subject.key_features or self.dim
        self.draws = subject.name == "quest+pgqa"
        self._build(subject.training)

    def _build(self, training: bool) -> None:
        torch.manual_seed(self.seed)
        self.module = Layers(self.config, self.heads, self.dim, is_causal=self.cell.is_causal)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        self.module.to(self.cell.dtype)
        if not self.config.family and self.config["grouping"] == "dgqa":
            self._warm_up()
        self.buffers = {name: x.clone() for name, x in self.module.named_buffers()}  # before a call changes them
        self.module.train(training)

    def _warm_up(self) -> None:
        """Train until the sizes of dgqa are uneven; they stay for the next seven calls."""
        self.module.train()
        for _ in range(9 if self.cell.subject.training else 10):
            q, k, v = (x.to(self.cell.dtype) for x in _contiguous(2, self.heads, self.groups, 5, 5, self.dim, self.dim))
            k = k * torch.linspace(3, 1, self.groups)[:, None, None].to(k.dtype)
            with torch.no_grad():
                self.module(q, k, v)

    def large_logit(self, tensors: Sequence[Tensor]) -> float:
        """A logit that sinkhorn rounds, if long queries and keys make it larger than those of the grid."""
        return 0.0

    def lengths(self) -> Sequence[int]:
        """Numbers of tokens to try one after the other."""
        return (1,) if self.single else self.cell.subject.lengths

    def tensors(self, tokens: int | None = None, seed: int = 0) -> tuple[Tensor, ...]:
        """q, k, v and, if the cell has one, the mask; leaves without gradient, with the strides of the layout."""
        torch.manual_seed(self.seed + 1 + seed)
        n = self.lengths()[0] if tokens is None else tokens
        if self.single:
            n = 1
            if self.cell.subject.key_features and self.config.option("prefix"):
                n = 2
        m = (n + 4 if self.single else max(n - 2, 1) + 4 * (n % 2)) if self.cell.cross else n
        given = self.make(self.batch, self.heads, self.groups, n, m, self.dim, self.key_dim)
        base = [cast(x, self.cell.dtype) for x in given]
        if self.cell.mask != "none":
            make = {**KEY_MASKS, **FULL_MASKS}[self.cell.mask]
            base.append(make((self.batch, self.heads, n, m), self.cell.dtype))
        return tuple(base)

    def named(self) -> dict[str, Tensor]:
        """The module's parameters."""
        return dict(self.module.named_parameters())

    def call(self, parameters: Mapping[str, Tensor], *tensors: Tensor, weights: bool = False) -> Tensor:
        """The module as a function of its parameters too; with `weights` by `forward_with_logits`."""
        more = {"weights": True} if weights else {}
        return torch.func.functional_call(self.module, dict(parameters), tensors, more)

    def reference(
        self, parameters: Mapping[str, Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """The formula in the type of `q`."""
        normal = torch.randn

        def draw(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
            return normal(tuple(shape), dtype=self.cell.dtype).to(dtype)  # as the module draws

        torch.manual_seed(self.seed)  # the same draws as `seeded`
        with mock.patch.object(torch, "randn", draw):
            state = {**self.buffers, **parameters}
            return torch.func.functional_call(self.module, state, (q, k, v, mask), {"plain": True})

    def seeded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with the generator that pgqa draws from seeded before each call."""

        def call(*args: Any, **options: Any) -> Any:
            torch.manual_seed(self.seed)
            return function(*args, **options)

        return call


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in another type and with the same strides, overlapping ones included."""
    if x.dtype == dtype:
        return x
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(dtype)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


# Right or not.


class Deviation(AssertionError):
    """The numbers are wrong."""


def weight_of(out: Tensor) -> Tensor:
    """A fixed gradient for the output [B, H, N, D], with tokens before heads as hosts hand it over."""
    b, h, n, d = out.shape
    numbers = torch.sin(torch.arange(b * n * h * d, dtype=torch.float64) * 1.7 + 0.3)
    return numbers.reshape(b, n, h, d).to(out.dtype).transpose(1, 2)


def gradients(
    function: Callable[..., Tensor], parameters: Mapping[str, Tensor], tensors: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The output, and its gradients by q, k, v, an additive mask and every parameter."""
    leaves = [leaf(x, dtype) for x in tensors]
    learned = {name: leaf(x, dtype) for name, x in parameters.items()}
    return with_gradients(function(learned, *leaves), differentiable(leaves, learned))


def with_gradients(out: Tensor, sources: Sequence[Tensor], weight: Tensor | None = None) -> list[Tensor]:
    """The output, and its gradients by the sources, zeros where it does not depend on one; weight: of the output."""
    if not out.requires_grad:
        return [out, *map(torch.zeros_like, sources)]
    weight = weight_of(out) if weight is None else weight
    return [out.detach(), *torch.autograd.grad(out, sources, weight, materialize_grads=True)]


def differentiable(leaves: Sequence[Tensor], learned: Mapping[str, Tensor]) -> list[Tensor]:
    """What gradients are asked for; not of masks that hide by the lowest value of their type."""
    masks = [x for x in leaves[3:] if x.is_floating_point() and bool((x.abs() < 1e4).all())]
    return [*leaves[:3], *masks, *learned.values()]


def leaf(x: Tensor, dtype: torch.dtype, want: bool = True) -> Tensor:
    if not x.is_floating_point():
        return x
    kept = x.detach() if x.dtype == dtype else x.detach().to(dtype)
    if x.dtype != dtype and bool((x <= torch.finfo(x.dtype).min / 2).any()):  # hidden keys stay hidden
        kept = kept.masked_fill(x <= torch.finfo(x.dtype).min / 2, -math.inf)
    return kept.requires_grad_(want)


def names(made: Made, tensors: Sequence[Tensor]) -> list[str]:
    leaves = ["q", "k", "v", *(["mask"] if len(differentiable(tensors, {})) > 3 else [])]
    return ["output", *(f"gradient of {name}" for name in (*leaves, *made.named()))]


def wanted(made: Made, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
    """Output and gradients by the reference in float64, and how far from them rounding may lead.

    See `bounds`.
    """
    exact = gradients(made.reference, made.named(), tensors, torch.float64)
    return exact, bounds(made, exact, gradients(made.reference, made.named(), tensors, rough(made)), tensors)


def rough(made: Made) -> torch.dtype:
    """The type in which the plain formula is computed to see its error."""
    return torch.float32 if made.cell.dtype == torch.float64 else made.cell.dtype


def bounds(
    made: Made, exact: Sequence[Tensor], plain: Sequence[Tensor], tensors: Sequence[Tensor], least: float = 0
) -> list[float]:
    """How far a result may be from `exact`; `plain` are results of the plain formula in the type `rough`.

    The bound is `made.slack` times the relative error of the plain formula in the type of the cell, the largest of the
    results of the cell, and that of a sum of M + D terms: (M + D) / 4 · eps · the largest number of the cell, and twice
    that for a parameter, whose gradient sums over queries too. The
    derivative of a unit vector is 1/‖x‖ times as large, before what lies along x is taken away. The error of float64 is
    that of float32 scaled. `least` is a size that the sums have at least, where they cancel.

    A weight is the exponential of a logit, which float32 or a wider type holds. If an additive mask makes the logit as
    large as L, its rounding changes the weight by a factor of 1 ± L · eps. Sinkhorn in logarithms has this error where
    the plain formula has none, from long queries and keys too.
    """
    eps, dtype = torch.finfo(made.cell.dtype).eps, rough(made)
    sizes = [float(x.abs().max()) if x.numel() else 0.0 for x in exact]
    largest = max(sizes, default=0.0)
    steep = 1.0
    if made.config.family in (None, "cosine"):
        lengths = [float(n) for x in tensors[:2] for n in x.detach().double().norm(dim=-1).flatten() if n > 0]
        steep = max(1.0, 1 / min(lengths, default=1.0))
    errors = []
    for right, other in zip(exact, plain, strict=True):
        error = float((other.double() - right).abs().max()) if right.numel() else 0.0
        errors.append(error * eps / torch.finfo(dtype).eps if math.isfinite(error) else 0.0)
    # What is zero but for rounding has no relative error.
    relative = max((e / size for e, size in zip(errors, sizes, strict=True) if size > 1e-3 * largest), default=0.0)
    logit = eps * made.large_logit(tensors)
    if len(tensors) > 3 and tensors[3].is_floating_point():
        added = tensors[3].detach().double().masked_fill(is_hidden(tensors[3]), 0).abs()
        wide = torch.finfo(torch.promote_types(made.cell.dtype, torch.float32)).eps
        temperature = float(made.config.option("eps") or 1)
        logit += wide * float(added.max()) / temperature if added.numel() else 0.0
    sums = ((tensors[1].shape[2] + made.dim) / 4 * eps + logit) * max(largest, least) * steep
    return [
        made.slack * (max(error, relative * size) + sums * (1 if right.dim() == 4 else 2))
        for error, size, right in zip(errors, sizes, exact, strict=True)
    ]


def compare(
    got: Sequence[Tensor], exact: Sequence[Tensor], allowed: Sequence[float], dtype: torch.dtype, what: Sequence[str]
) -> None:
    """Raise Deviation where a result is further from the truth than allowed, or is of another shape or type.

    Beyond the range of the type, infinity is the truth.
    """
    largest = torch.finfo(dtype).max
    for name, a, b, limit in zip(what, got, exact, allowed, strict=True):
        if a.shape != b.shape:
            raise Deviation(f"{name} has shape {list(a.shape)}, not {list(b.shape)}")
        if a.dtype != dtype:
            raise Deviation(f"{name} is {a.dtype}, not {dtype}")
        off = a.double().clamp(-largest, largest) - b.clamp(-largest, largest)
        error = float(off.abs().max()) if a.numel() else 0.0
        if not error <= limit:  # NaN too
            raise Deviation(f"{name} is off by {error:.2g}; rounding explains {limit:.2g}")


def check(made: Made, tensors: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    """Raise Deviation unless output and gradients (or the first of these) are those of the reference."""
    exact, allowed = wanted(made, tensors)
    some = slice(len(got))
    compare(got, exact[some], allowed[some], made.cell.dtype, names(made, tensors)[some])


# Refused by name.


class Raw(AssertionError):
    """PyTorch's own error reached the user."""


def refusal(error: BaseException) -> QuestError | None:
    """The QuestError that an error is or comes from."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        one = queue.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, QuestError):
            return one
        queue += [one.__cause__, one.__context__]
    return None


WORDS: Mapping[str, tuple[str, ...]] = {
    "decode": ("decode", "causal"),
    "weights returned": ("weights",),
    "compile, one length": ("compile",),
    "compile, any length": ("compile",),
    "export": ("export",),
    "ONNX": ("onnx", "export"),
    "jit.trace": ("trac",),
    "FakeTensorMode": ("fake",),
    "make_fx": ("make_fx", "trac"),
    "make_fx, any length": ("make_fx", "trac"),
    "func.vmap": ("func", "vmap", "batch"),
    "func.grad": ("func", "grad"),
    "func.jacrev": ("func", "jacrev"),
    "func.jvp": ("func", "forward", "jvp"),
    "second derivative": ("second derivative", "double backward"),
    "second derivative, math kernel": ("second derivative", "double backward"),
    "autocast": ("autocast",),
}


def judge(subject: Subject, transform: str, error: BaseException, spec: str | None = None) -> str:
    """The text of a refusal by name.

    Raises:
        Raw: the error is none, or does not name the mechanism and what it cannot do.
    """
    name = spec or subject.name
    found = refusal(error)
    if found is None:
        first = (str(error).strip().splitlines() or [""])[0][:200]
        raise Raw(f"{name}, {transform}: {type(error).__name__}: {first}") from error
    text = str(found)
    config = subject.config() if spec is None else AttentionConfig.parse(spec)
    if not any(part in text for _, part in config.parts):
        raise Raw(f"{name}, {transform}: the refusal does not name the mechanism: {text}") from error
    if not any(word in text.lower() for word in WORDS.get(transform, ())):
        raise Raw(f"{name}, {transform}: the refusal does not name the transform: {text}") from error
    return text
