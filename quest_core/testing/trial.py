"""The tools of the checks of a mechanism: the mechanism under test, its inputs, and the wording of a failure."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..cache import Cache
from ..config import AttentionConfig, AttentionSpec
from ..errors import QuestError, UnsupportedError
from ..mechanism import Mechanism, count_kv_heads
from ..registry import READS, Component

HEADS, DIM, TOKENS = 4, 8, 9  # 9 tokens are a line, and a square for mechanisms on grids
LONG = 100  # a square again; two blocks of 64, and the second is not full
CLOSE = 1e-9
"""Difference allowed between two computations of the same in float64, relative to the largest number."""
SINGLE = 1e-4
"""The same between float32 and float64; bfloat16 gets 1000 times as much."""


class Wrong(AssertionError):
    """Raised by a check. The message names the fault and the fix."""


def cause(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class Trial:
    """A mechanism under test. Checks build it, feed it and word their failures with it."""

    def __init__(self, attention: AttentionSpec | type[Component] | Mechanism) -> None:
        if isinstance(attention, type):
            needs = any(option.name == "kv_heads" for option in attention.options)
            attention = f"{attention.name}(kv_heads=2)" if needs else attention.name
        self.config = AttentionConfig.parse(attention.config if isinstance(attention, Mechanism) else attention)
        self.parts = list(self.config.components)
        self.reads = frozenset(name for part in self.parts for name in part.reads)  # what some part reads
        self.groups = count_kv_heads(self.config, HEADS)  # key/value heads for HEADS query heads
        self.stateful = any(part.stateful for part in self.parts)
        self.chained = any(part.chained for part in self.parts)

    def can(self, key: str) -> bool:
        """Return whether all parts declare `key`."""
        return all(getattr(part, key) for part in self.parts)

    @functools.cached_property
    def randomizes(self) -> bool:
        """Whether the mechanism draws random numbers of its own in evaluation, as it declares."""
        if "random" not in self.reads:
            return False
        made, tensors = self.build(), self.inputs()
        return not torch.equal(made(*tensors, seed=1), made(*tensors, seed=2))

    @functools.cached_property
    def longest(self) -> int:
        """LONG, or TOKENS where the mechanism says that it takes no more."""
        try:
            self.build()(*self.inputs(LONG))
        except QuestError:
            return TOKENS
        return LONG

    def build(self, seed: int = 0, groups: int | None = None) -> "Layers":
        """Return the mechanism in float64 and evaluation, with random parameters; `groups` are a host's key heads."""
        torch.manual_seed(seed)
        made = Layers(self.config, self.chained, groups).double().eval()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter)).add_(0.1 * torch.randn_like(parameter))
        return made

    def inputs(self, n: int = TOKENS, m: int | None = None, batch: int = 2, seed: int = 1) -> tuple[Tensor, ...]:
        """Return q [B, H, N, D], k [B, G, M, D or Dk], v [B, G, M, D], laid out as projections leave them."""
        torch.manual_seed(seed)
        key_dim = self.parts[0].key_features or DIM
        return tuple(
            torch.randn(batch, tokens, heads, dim, dtype=torch.float64).transpose(1, 2)
            for tokens, heads, dim in ((n, HEADS, DIM), (m or n, self.groups, key_dim), (m or n, self.groups, DIM))
        )

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Yield numbers of queries and keys that the mechanism may be given; squares for those on grids."""
        yield from ((TOKENS, TOKENS), (4, 4), (1, 1), (self.longest, self.longest))
        if self.can("cross"):
            yield from ((4, TOKENS), (TOKENS, 4), (1, TOKENS))

    def masks(self, n: int, m: int) -> Iterator[tuple[str, Tensor | None]]:
        """Yield masks in every form that the mechanism takes; the last one hides all keys from something."""
        torch.manual_seed(3)
        keys = torch.rand(2, 1, 1, m) > 0.3
        keys[..., 0] = True
        yield "none", None
        yield "boolean, of keys", keys
        yield "additive, of keys", torch.randn(2, 1, 1, m, dtype=torch.float64).masked_fill(~keys, -math.inf)
        if self.config.family is None:
            pairs = torch.rand(2, HEADS, n, m) > 0.3
            yield "boolean, of pairs", pairs[0, 0]
            yield "boolean, a head", pairs
            yield "additive, of pairs", torch.randn(2, 1, n, m, dtype=torch.float64).masked_fill(~pairs[:, :1], -100.0)

    def declare(self, what: str) -> str:
        """Return how a failure is mended where the mechanism is right and its declaration is not."""
        return f"Mend it, or in the class of {', '.join(map(repr, self.config.name.split('+')))} {what}"

    def reading(self, what: str) -> str:
        return self.declare(f"add '{what}' ({READS[what]}) to reads")

    @contextlib.contextmanager
    def possible(self, what: str, fix: str = "Raise UnsupportedError that names the mechanism") -> Iterator[None]:
        """Fail if the block raises an error that does not name the mechanism."""
        try:
            yield
        except Wrong:
            raise
        except Exception as error:
            if not any(part.name in str(error) for part in self.parts):
                raise Wrong(f"{what} fails. {fix}: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def expect_refusal(self, what: str, promise: str) -> Iterator[None]:
        """Fail unless the block raises UnsupportedError that names the mechanism."""
        ran = True
        with self.possible(what):
            try:
                yield
            except UnsupportedError:
                ran = False
                raise
        if ran:
            raise Wrong(f"{what} runs, although no part declares {promise}; report this to quest_core")


class Layers(nn.Module):
    """The mechanism, and one of its kind before it where it needs one."""

    def __init__(self, config: AttentionConfig, chained: bool, groups: int | None = None) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"num_heads": HEADS, "head_dim": DIM, "kv_heads": groups}
        self.before = Mechanism(config, **sizes) if chained else None
        self.last = Mechanism(config, **sizes)
        if self.before is not None:
            first, second = cast(Any, self.before.score), cast(Any, self.last.score)
            first.follow(None)
            second.follow(first)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, seed: int | None = 0, **options: Any) -> Tensor:
        """Return [B, H, N, Dv], drawn with `seed`; options as of `Mechanism.forward`."""
        return cast(Tensor, self.each(Mechanism.__call__, q, k, v, seed=seed, **options))

    def layer_input(self, q: Tensor) -> dict[str, Tensor]:
        """Return {"x": the input of a layer [B, N, H·D]} if the mechanism reads it."""
        return {"x": q.transpose(1, 2).flatten(2)} if self.last.config.needs_input else {}

    def each(
        self, call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, seed: int | None = 0, **options: Any
    ) -> Any:
        """Call `call(layer, q, k, v, **options)` for the layer before, on other values, and return it for the last."""
        if seed is not None:
            torch.manual_seed(seed)
        options |= self.layer_input(q)
        if self.before is not None:
            call(self.before, q, k, 0.5 * v.flip(-1), **options)
        return call(self.last, q, k, v, **options)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, steps: list[int], mask: Tensor | None) -> Tensor:
        """Return [B, H, N, Dv] in `steps` tokens at a time."""
        caches, outs = {layer: Cache() for layer in self.children()}, []

        def decode(layer: Mechanism, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            return layer.decode(q, k, v, caches[layer], **options)

        for stop, step in zip(itertools.accumulate(steps), steps, strict=True):
            new = (x[:, :, stop - step : stop] for x in (q, k, v))
            outs.append(self.each(decode, *new, attn_mask=None if mask is None else mask[..., :stop]))
            if (counted := caches[self.last].tokens) != stop:
                raise Wrong(f"decode() of {stop} tokens sets cache.tokens to {counted}; it must not")
        return torch.cat(outs, dim=2)


class Fused(TorchFunctionMode):
    """Counts calls of scaled_dot_product_attention."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def equal(got: Tensor, want: Tensor, said: str, close: float = CLOSE) -> None:
    """Fail, saying `said`, unless two results are equal within `close` of the largest number."""
    if got.shape != want.shape:
        raise Wrong(f"shapes {list(got.shape)} and {list(want.shape)} differ. {said}")
    apart = (got.double() - want.double()).abs().nan_to_num(math.inf)
    worst = apart.max().item() if apart.numel() else 0.0
    if not worst <= close * max(1.0, want.abs().max().item() if want.numel() else 0.0):
        place = (apart == apart.max()).nonzero()[:1].flatten().tolist()
        raise Wrong(f"{said} (difference {worst:.3g} at {place} of {list(got.shape)})")


def change(x: Tensor, axis: int, at: int | slice) -> Tensor:
    """Return a copy of x [B, H, N, D] with other numbers at a place of an axis."""
    x = x.clone()
    index = (*[slice(None)] * axis, at)
    x[index] = 3 * torch.randn_like(x[index]) + 1
    return x


def spellings(seen: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a mask, True where a key is visible, in every form."""
    yield "boolean", seen
    for name, low in (("−inf", -math.inf), ("the lowest value", torch.finfo(torch.float64).min)):
        yield f"additive, of {name}", torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, low)
