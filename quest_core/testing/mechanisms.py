"""check_mechanism: whether a mechanism is right, and whether it keeps what its class declares.

Every check is a method of `MechanismConformance`, so that the same suite runs as a function and in pytest.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..cache import Cache
from ..checkpoints import ENTRY
from ..compat import is_compiling
from ..config import AttentionConfig, AttentionSpec
from ..errors import CheckpointError, ConfigError, InputError, QuestError, UnsupportedError, one_of
from ..mechanism import Mechanism, count_kv_heads
from ..mechanisms.base import (
    Dims,
)
from ..registry import READS, Component
from .truth import missing, truth

HEADS, DIM, TOKENS = 4, 8, 9  # 9 tokens are a line, and a square for mechanisms on grids
LONG = 100  # a square again; two blocks of 64, and the second is not full
ZEROS = "divide by torch.where(total > 0, total, 1), or hide by a finite number and then multiply by the mask"
CLOSE = 1e-9
"""Difference allowed between two computations of the same in float64."""


class Outcome(NamedTuple):
    """The result of one check.

    Attributes:
        check: its name, such as "no_query_sees_the_future".
        passed: whether the mechanism keeps it.
        message: what is wrong, where, and how to mend or declare it; empty if it passed.
    """

    check: str
    passed: bool
    message: str


class MechanismError(AssertionError):
    """A mechanism that fails checks; the message has a paragraph for each."""


def check_mechanism(
    attention: AttentionSpec | type[Component] | Mechanism, *, checks: Collection[str] = (), raises: bool = True
) -> list[Outcome]:
    """Test a mechanism and everything that its parts declare.

    >>> check_mechanism("quest+gqa(kv_heads=2)")
    >>> check_mechanism(Power)  # a class with @register; its package need not be installed
    >>> for outcome in check_mechanism(Power, raises=False): print(outcome.check, outcome.passed)

    Args:
        attention: a specification, a registered class, or a Mechanism, of which the configuration counts.
        checks: the names of the checks to run; all by default.
        raises: whether a failed check is an error.

    Returns:
        One outcome a check, in order.

    Raises:
        MechanismError: naming every failed check, what is wrong, and how to mend or declare it.
        ConfigError: unknown name, option or check.
    """
    names = check_names()
    for name in checks:
        if name not in names:
            raise ConfigError(f"check '{name}' does not exist; {one_of(name, names)}")
    suite = type("Suite", (MechanismConformance,), {"mechanism": attention})()
    outcomes = []
    for name in checks or names:
        suite.setup_method()
        try:
            with torch.random.fork_rng(devices=[]):
                getattr(suite, f"test_{name}")()
            message = ""
        except Exception as error:
            message = str(error) if isinstance(error, _Found | QuestError) else f"it raises {cause(error)}"
        finally:
            suite.teardown_method()
        outcomes.append(Outcome(name, not message, message))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if failed and raises:
        said = zip(failed, brief(failed), strict=True)
        lines = "\n".join(f"- {outcome.check}: {message}" for outcome, message in said)
        raise MechanismError(f"attention '{_name(attention)}' fails {len(failed)} of {len(outcomes)} checks:\n{lines}")
    return outcomes


def check_names() -> list[str]:
    """Return the names of all checks in their order: the tests of MechanismConformance without "test_"."""
    return [name.removeprefix("test_") for name in vars(MechanismConformance) if name.startswith("test_")]


def brief(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Give the message of each outcome; a message that came before is not repeated."""
    said: dict[str, str] = {"": ""}
    for outcome in outcomes:
        yield said.get(outcome.message, outcome.message)
        said.setdefault(outcome.message, f"as {outcome.check.replace('_', ' ')}")


def _name(attention: AttentionSpec | type[Component] | Mechanism) -> str:
    if isinstance(attention, Mechanism):
        return str(attention.config)
    return attention.name if isinstance(attention, type) else str(attention)


def cause(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class _Found(AssertionError):
    """A failed expectation of a check."""


class MechanismConformance:
    """The checks of `check_mechanism`, one test each: inherit, name the class ``Test...``, and set `mechanism`.

    >>> class TestPower(MechanismConformance):
    ...     mechanism = Power

    Attributes:
        mechanism: a specification, a registered class, or a Mechanism.
        tolerance: the error allowed in float32, relative to the largest output; bfloat16 gets 1000 times as much.
    """

    mechanism: ClassVar[AttentionSpec | type[Component] | Mechanism]
    tolerance: ClassVar[float] = 1e-4

    def setup_method(self) -> None:
        self.default_dtype = torch.get_default_dtype()
        self._exit = contextlib.ExitStack()
        self._exit.enter_context(torch.random.fork_rng(devices=[]))
        given = self.mechanism
        if isinstance(given, type):
            needs = any(option.name == "kv_heads" for option in given.options)
            self.config = AttentionConfig.parse(f"{given.name}(kv_heads=2)" if needs else given.name)
        else:
            self.config = AttentionConfig.parse(given.config if isinstance(given, Mechanism) else given)
        self.parts = list(self.config.components)
        self.reads = frozenset(name for part in self.parts for name in part.reads)
        self.groups = count_kv_heads(self.config, HEADS)
        self.stateful = any(part.stateful for part in self.parts)
        self.chained = any(part.chained for part in self.parts)

    def teardown_method(self) -> None:
        self._exit.close()
        torch.set_default_dtype(self.default_dtype)

    # --- helpers ---------------------------------------------------------------------------------------------------

    def can(self, key: str) -> bool:
        """Whether all parts declare `key`."""
        return all(getattr(part, key) for part in self.parts)

    def build(self, seed: int = 0, groups: int | None = None) -> Layers:
        """The mechanism in float64 and evaluation, with random parameters; `groups` key heads are the host's own."""
        torch.manual_seed(seed)
        made = Layers(self.config, self.chained, groups).double().eval()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter)).add_(0.1 * torch.randn_like(parameter))
        return made

    def inputs(self, n: int = TOKENS, m: int | None = None, batch: int = 2, seed: int = 1) -> tuple[Tensor, ...]:
        """q [B, H, N, D], k [B, G, M, D or Dk], v [B, G, M, D], laid out as projections leave them."""
        torch.manual_seed(seed)
        key_dim = self.parts[0].key_features or DIM
        return tuple(
            torch.randn(batch, tokens, heads, dim, dtype=torch.float64).transpose(1, 2)
            for tokens, heads, dim in ((n, HEADS, DIM), (m or n, self.groups, key_dim), (m or n, self.groups, DIM))
        )

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Queries and keys that the mechanism may be given; squares for those on grids."""
        yield from ((TOKENS, TOKENS), (4, 4), (1, 1), (self.longest(), self.longest()))
        if self.can("cross"):
            yield from ((4, TOKENS), (TOKENS, 4), (1, TOKENS))

    def longest(self) -> int:
        """LONG, or TOKENS where the mechanism says that it takes no more."""
        try:
            self.build()(*self.inputs(LONG))
        except QuestError:
            return TOKENS
        return LONG

    def masks(self, n: int, m: int) -> Iterator[tuple[str, Tensor | None]]:
        """Masks in every form that the mechanism takes; the last one hides all keys from something."""
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

    def equal(self, got: Tensor, want: Tensor, said: str, close: float = CLOSE) -> None:
        """Fail, saying `said`, unless two results are equal within `close` of the largest number."""
        if got.shape != want.shape:
            raise _Found(f"shapes {list(got.shape)} and {list(want.shape)} differ. {said}")
        apart = (got.double() - want.double()).abs().nan_to_num(math.inf)
        worst = apart.max().item() if apart.numel() else 0.0
        if not worst <= close * max(1.0, want.abs().max().item() if want.numel() else 0.0):
            place = (apart == apart.max()).nonzero()[:1].flatten().tolist()
            raise _Found(f"{said} (difference {worst:.3g} at {place} of {list(got.shape)})")

    def declare(self, what: str) -> str:
        """How a failure is mended where the mechanism is right and its declaration is not."""
        names = ", ".join(map(repr, self.config.name.split("+")))
        return f"Mend it, or in the class of {names} {what}"

    def reading(self, what: str) -> str:
        return self.declare(f"add '{what}' ({READS[what]}) to reads")

    @contextlib.contextmanager
    def refused(self, what: str, promise: str) -> Iterator[None]:
        """Fail unless the block raises UnsupportedError that names the mechanism."""
        ran = False
        with self.possible(what):
            yield
            ran = True
        if ran:
            raise _Found(f"{what} runs, although no part declares {promise}; report this to quest_core")

    @contextlib.contextmanager
    def possible(self, what: str) -> Iterator[None]:
        """Let the block raise UnsupportedError, if it names the mechanism."""
        try:
            yield
        except UnsupportedError as error:
            if not any(part.name in str(error) for part in self.parts):
                raise _Found(f"{what} is refused without naming the mechanism: {error}") from error

    def spelled(self, seen: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A mask, True where a key is visible, in every form."""
        yield "boolean", seen
        for name, low in (("−inf", -math.inf), ("the lowest value", torch.finfo(torch.float64).min)):
            yield f"additive, of {name}", torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, low)

    def changed(self, x: Tensor, index: tuple[Any, ...]) -> Tensor:
        """A copy of `x` with other numbers at `index`."""
        x = x.clone()
        x[index] = 3 * torch.randn_like(x[index]) + 1
        return x

    # --- what is declared ------------------------------------------------------------------------------------------

    def test_declarations(self) -> None:
        """The modules are what the classes declare: parameters, shapes, unit keys, a chain of layers, a grid."""
        made = self.build()
        if self.config.family is None:
            grouping: Any = made.last.grouping
            head = grouping(self.inputs()[1], HEADS, None) if grouping.chooses else None
            if head is not None and (head.dtype, head.shape) != (torch.int64, (HEADS,)):
                raise _Found(f"the grouping returns {head.dtype} {list(head.shape)}; expected int64 [H]")
            if head is not None and not ((head >= 0) & (head < self.groups)).all():
                raise _Found(f"the grouping returns {head.tolist()}; k has {self.groups} heads, counted from 0")
        for part in self.parts:
            module: Any = getattr(made.last, part.axis)
            names = [name for name, _ in module.named_parameters()]
            if bool(names) != part.learnable:
                raise _Found(f"'{part.name}' has parameters {names}; declare learnable = {bool(names)}")
            if hasattr(module, "follow") != part.chained:
                raise _Found(f"'{part.name}': declare chained = True if and only if it has the method `follow`")
            if part.on_grid and not ({"dims", "grid", "prefix"} <= {option.name for option in part.options}):
                raise _Found(f"'{part.name}' has a grid; give it the options dims, grid and prefix")
        if (self.groups != HEADS or self.parts[0].key_features is not None) and not any(p.reshapes for p in self.parts):
            raise _Found(f"'{self.config}' has {self.groups} key heads for {HEADS}; declare reshapes = True")
        if not (made.last.chained or self.stateful or any(part.learnable for part in self.parts)):
            tensors, fix = (
                self.inputs(),
                self.declare("declare learnable = True, so that it is never built without dims"),
            )
            torch.manual_seed(0)
            try:
                got = Mechanism(self.config).eval()(*tensors)
            except Exception as error:
                raise _Found(f"built with dims=None it raises {cause(error)}. {fix}") from error
            self.equal(got, made(*tensors), f"built with dims=None it computes something else. {fix}")
        if {id(x) for x in self.build().parameters()} & {id(x) for x in made.parameters()}:
            raise _Found("two layers have the same parameter; make it in __init__")
        if any(part.unit_keys for part in self.parts):
            k = self.inputs()[1]
            wanted = k / k.norm(dim=-1, keepdim=True)
            self.equal(made.last.score.key(k), wanted, f"keys are not k/‖k‖. {self.declare('drop unit_keys')}")

    def test_hosts_set_the_grid(self) -> None:
        """A family with a grid uses the extents and the prefix that a host assigns, and no other number of tokens."""
        if not self.can("on_grid"):
            return
        family: Any = self.build().last.family
        axes = [1] * (self.config.option("dims") - 1)
        family.prefix = 1
        for extent in (TOKENS - 1, TOKENS):
            family.grid = (extent, *axes)
            try:
                family(*self.inputs(), key_mask=None, is_causal=False)
                fits = True
            except InputError:
                fits = False
            if fits != (extent == TOKENS - 1):
                said = (
                    f"{TOKENS} tokens with prefix=1 on an assigned grid of {extent} {'run' if fits else 'are refused'}"
                )
                raise _Found(f"{said}. Read `grid` and `prefix` in every call, or {self.declare('drop grid')}")

    def test_queries_choose_among_keys(self) -> None:
        """Where a family declares it, the share of a key depends on the query; elsewhere nothing is promised."""
        if not self.can("compares"):
            return
        made, (q, k, v) = self.build(), self.inputs()
        first = torch.zeros_like(v)
        first[:, :, 0] = 1
        one, other = (made(x, k, first) / made(x, k, torch.ones_like(v)) for x in (q, self.inputs(seed=2)[0]))
        if torch.allclose(one, other):
            raise _Found(f"the share of a key is that of every query. {self.declare('drop compares')}")

    def test_state(self) -> None:
        """Buffers change in training only where a part says `stateful`, and nothing grows or changes in evaluation."""
        made = self.build()
        for training in (False, True):
            before = {name: x.clone() for name, x in made.named_buffers()}
            made.train(training)
            for seed in range(3):
                made(*self.inputs(seed=seed))
            moved = [name for name, x in made.named_buffers() if not torch.equal(x, before[name])]
            if moved and not (training and self.stateful):
                when = "training" if training else "evaluation"
                raise _Found(f"{moved[0]} changes in {when}. {self.declare('say stateful=True')}")
        made.eval()
        sizes = []
        with contextlib.suppress(Exception):  # what cannot be pickled fails in test_copies_and_pickles
            for _ in range(2):
                made(*self.inputs())
                sizes.append(len(pickle.dumps(made)))
        if sizes[1:] > sizes[:1]:
            raise _Found("it grows with every call; keep nothing of the inputs on the module")

    def test_calls_repeat(self) -> None:
        """The same call gives the same output after other calls, under another seed, and in training."""
        made, tensors = self.build(), self.inputs()
        out = made(*tensors)
        for n, m in self.lengths():
            made(*self.inputs(n, m, batch=3, seed=9))
        fix = "Keep nothing of the inputs on the module, and draw random numbers from PyTorch's generator only"
        self.equal(made(*tensors), out, f"the same call gives another output after other calls. {fix}")
        if "random" in self.reads:
            return
        fix = self.reading("random")
        self.equal(made(*tensors, seed=5), out, f"another seed gives another output. {fix}")
        if not self.stateful:
            self.equal(made.train()(*tensors), out, f"training gives another output than evaluation. {fix}")
        drawn = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            Layers(self.config, self.chained).double()(*tensors, seed=None)
            drawn.append(torch.rand(()))
        if drawn[0] == drawn[1]:
            raise _Found("it sets the seed of PyTorch's generator, and so of everything else in a training")

    def test_inputs_are_left_alone(self) -> None:
        """A call changes none of its tensors and no default of PyTorch, and needs no gradients."""
        made = self.build()
        for name, mask in self.masks(TOKENS, TOKENS):
            outs = []
            for recorded in (True, False):
                given = dict(zip("qkv", self.inputs(), strict=True)) | ({} if mask is None else {"attn_mask": mask})
                before = {key: x.clone() for key, x in given.items()}
                with torch.set_grad_enabled(recorded):
                    outs.append(made(**given))
                for key, x in given.items():
                    if not torch.equal(x, before[key]):
                        raise _Found(f"mask {name}: a call changes {key} in place; use mul, not mul_, and no out=")
            self.equal(outs[1], outs[0], f"mask {name}: the output under torch.no_grad() is another one")
        if torch.get_default_dtype() != self.default_dtype:
            raise _Found("a call sets PyTorch's default dtype; say dtype=k.dtype where you make a tensor")

    def test_memory_layout_does_not_matter(self) -> None:
        """Contiguous tensors, slices of packed ones and expanded ones give the output of those that a layer makes."""
        made, tensors = self.build(), self.inputs()
        fix = "Use reshape, not view, and no strides"
        out = made(*tensors)
        for name, lay in (
            ("contiguous", Tensor.contiguous),
            ("sliced", lambda x: torch.stack([x, x], -1)[..., 0]),
            ("transposed", lambda x: x.mT.contiguous().mT),
        ):
            try:
                got = made(*map(lay, tensors))
            except RuntimeError as error:
                raise _Found(f"{name} inputs raise {cause(error)}. {fix}") from error
            self.equal(got, out, f"{name} inputs give another output. {fix}")
        one = self.inputs(batch=1)
        got, want = made(*(x.expand(2, -1, -1, -1) for x in one)), made(*(x.repeat(2, 1, 1, 1) for x in one))
        self.equal(got, want, f"an expanded batch gives another output. {fix}")

    # --- values ----------------------------------------------------------------------------------------------------

    def test_shapes(self) -> None:
        for n, m in self.lengths():
            for batch in (1, 3):
                q, k, v = self.inputs(n, m, batch)
                out = self.build()(q, k, v)
                if out.shape != q.shape:
                    raise _Found(f"q {list(q.shape)}, k {list(k.shape)}: the output has shape {list(out.shape)}")
                if not out.isfinite().all():
                    raise _Found(f"q {list(q.shape)}, k {list(k.shape)}: the output is not finite")
        if self.config.family is None and not self.chained:
            q, k, v = self.inputs()
            narrow, whole = self.build()(q, k, v[..., :3]), self.build()(q, k, v)
            self.equal(narrow, whole[..., :3], "values of 3 features give other outputs than the first 3 of 8")

    def test_dtypes(self) -> None:
        q, k, v = self.inputs()
        exact = self.build()(q, k, v)
        for dtype, close in ((torch.float32, self.tolerance), (torch.bfloat16, 1000 * self.tolerance)):
            made = self.build().to(dtype)
            try:
                out = made(q.to(dtype), k.to(dtype), v.to(dtype))
            except RuntimeError as error:
                raise _Found(f"inputs of {dtype} fail; cast what you add to the dtype of q: {error}") from error
            if out.dtype != dtype:
                raise _Found(f"inputs of {dtype} give an output of {out.dtype}; cast what you add to the dtype of q")
            if not self.randomizes():
                self.equal(out, exact, f"{dtype} differs from float64; compute sums and norms in float32", close)
        with torch.autocast("cpu", torch.bfloat16):
            out = self.build().float()(q.float(), k.float(), v.float())
        if not self.randomizes():
            self.equal(out, exact, "autocast to bfloat16 differs from float64", 1000 * self.tolerance)
        q, k = q.sign(), k.sign()  # exact in float16, whose largest number is 65504
        q[:, :, 1], k[:, :, 2] = 0, 0
        for name, large, small in (("queries", 96, 0.5), ("keys", 0.5, 96)):
            want = self.build()(large * q, small * k, v)
            got = self.build().half()((large * q).half(), (small * k).half(), v.half())
            if not self.randomizes():
                said = f"in float16 {name} of norm 272, whose square overflows, or of norm 0 give another output"
                self.equal(got, want, f"{said}; compute sums and norms in float32", 0.02)

    def test_reference(self) -> None:
        """The output, and the weights if there are any, in float64, under every mask."""
        made = self.build()
        if missing(made.last):
            return  # no formula to compare with
        for n, m in self.lengths():
            q, k, v = self.inputs(n, m)
            for name, mask in self.masks(n, m):
                for is_causal in (False, True) if self.can("causal") else (False,):
                    where = f"N={n}, M={m}, mask {name}, is_causal={is_causal}"
                    options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal}
                    out, weights = made.by_reference(q, k, v, **options)
                    self.equal(made(q, k, v, **options), out, f"{where}: the output is not that of the reference")
                    if weights is not None:
                        _, mine = made.with_weights(q, k, v, **options)
                        self.equal(mine, weights, f"{where}: the weights are not those of the reference")

    def test_shared_key_heads(self) -> None:
        """Two query heads that share a key/value head compute what they do with a copy of it each."""
        if self.groups != HEADS or self.config.family is not None:
            return
        if {"heads", "group"} & self.reads or self.randomizes():
            return
        shared, made = self.build(groups=2), self.build()
        state, shapes = shared.state_dict(), made.state_dict()
        for name, x in state.items():
            for axis, size in enumerate(shapes[name].shape):
                if size == 2 * x.shape[axis]:  # of key heads
                    state[name] = x.repeat_interleave(2, axis)
        made.load_state_dict(state)
        q, k, v = (x[:, :heads] for x, heads in zip(self.inputs(), (HEADS, 2, 2), strict=True))
        fix = "k and v have dims.kv_heads heads, and q has dims.num_heads"
        try:
            got = shared(q, k, v)
        except RuntimeError as error:
            raise _Found(f"2 key heads for {HEADS} query heads raise {cause(error)}. {fix}") from error
        want = made(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        self.equal(got, want, f"query heads that share a key head differ from those with a copy of it. {fix}")

    def test_weights(self) -> None:
        """`forward_with_weights` gives the output of `forward`; hidden weights are exactly 0."""
        made, (q, k, v) = self.build(), self.inputs()
        if self.config.family is not None:
            with self.refused("forward_with_weights", "weights"):
                made.last.forward_with_weights(q, k, v)
            return
        if self.groups == HEADS:
            options: dict[str, Any] = {"mask": None, "is_causal": False, "dropout_p": 0.0, "grouped": False}
            want = made.last.normalizer.weights(0.7 * q @ k.mT, None) @ v
            got = made.last.normalizer(q, k, v, scale=0.7, **options)
            self.equal(got, want, "Normalizer.forward with scale=0.7 is not the output of weights()")
        for name, mask in self.masks(TOKENS, TOKENS):
            out = made(q, k, v, attn_mask=mask)
            again, weights = made.with_weights(q, k, v, attn_mask=mask)
            self.equal(again, out, f"mask {name}: the output with weights differs from that without")
            if mask is not None:
                hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
                if (weights * hidden).any():
                    raise _Found(f"mask {name}: a hidden key has a weight; give it exactly 0")

    def test_masks(self) -> None:
        """Hidden keys and values count for nothing; an additive mask of zeros is none, and −inf is False."""
        made, (q, k, v) = self.build(), self.inputs()
        seen = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
        seen[..., 2] = seen[0, ..., 5] = False
        out = made(q, k, v, attn_mask=seen)
        at = (slice(None), slice(None), 2)
        other = made(q, self.changed(k, at), self.changed(v, at), attn_mask=seen)
        self.equal(other, out, "a key that the mask hides changes the output")
        additive = torch.zeros(2, 1, 1, TOKENS, dtype=torch.float64).masked_fill(~seen, -math.inf)
        self.equal(made(q, k, v, attn_mask=additive), out, "an additive mask of −inf differs from a boolean one")
        none = torch.zeros(2, 1, 1, TOKENS, dtype=torch.float64)
        plain = made(q, k, v)
        self.equal(made(q, k, v, attn_mask=none), plain, "an additive mask of zeros changes the output")
        bias = torch.randn(2, 1, 1, TOKENS, dtype=torch.float64)
        if torch.equal(made(q, k, v, attn_mask=bias), plain):
            raise _Found("a finite additive mask changes nothing; it is added to the logits")
        if self.config.family is None:
            logits = torch.randn(2, HEADS, TOKENS, TOKENS, dtype=torch.float64)
            want = made.last.normalizer.weights(logits + bias, None)
            got = made.last.normalizer.weights(logits, bias)
            self.equal(got, want, "weights() with an additive mask are not those of the sum of logits and mask")

    def test_blind_rows(self) -> None:
        """A query that sees no key gives zeros, and finite gradients; so do zero vectors."""
        seen = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
        seen[0] = False
        if self.config.family is None:
            seen = seen.expand(2, 1, TOKENS, TOKENS).clone()
            seen[1, :, 3] = False
        for mask in (seen, torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)):
            kind = "a boolean mask" if mask.dtype == torch.bool else "an additive mask"
            made, (q, k, v) = self.build(), [x.clone() for x in self.inputs()]
            q[0, 0, 1], k[:, :, 2] = 0, 0
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            out = made(q, k, v, attn_mask=mask)
            blind = [out[0], *([out[1, :, 3]] if self.config.family is None else [])]
            if any(x.any() for x in blind):
                raise _Found(f"{kind} hides all keys of a query, whose output is not zero; {ZEROS}")
            out.square().sum().backward()
            leaves: dict[str, Tensor] = {"q": q, "k": k, "v": v, **dict(made.named_parameters())}
            for name, x in leaves.items():
                if x.grad is not None and not x.grad.isfinite().all():
                    where = f"{kind} hides all keys or a vector is zero"
                    raise _Found(f"the gradient of {name} is not finite where {where}; {ZEROS}")
        if self.can("causal") and self.can("cross"):
            made, (q, k, v) = self.build(), self.inputs(TOKENS, 4)
            if made(q, k, v, is_causal=True)[:, :, :5].any():
                raise _Found(f"with is_causal, the first 5 of 9 queries see none of 4 keys and are not zero; {ZEROS}")

    def test_gradients(self) -> None:
        """Finite, of every input and parameter, and equal to finite differences unless stopped on purpose."""
        made, (q, k, v) = self.build(), [x.detach() for x in self.inputs(4, batch=1)]
        parameters = dict(made.last.named_parameters())
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        made(q, k, v).square().sum().backward()
        for name, x in (*{"q": q, "k": k, "v": v}.items(), *parameters.items()):
            if x.grad is None or not x.grad.isfinite().all():
                raise _Found(f"the gradient of {name} is {'missing' if x.grad is None else 'not finite'}")
            if name in parameters and not x.grad.any():
                raise _Found(f"the gradient of the parameter {name} is zero everywhere, so it does not train")
        if any(part.stops_gradient for part in self.parts):
            return

        def run(*tensors: Tensor) -> Tensor:
            values = dict(zip(parameters, tensors[3:], strict=True))
            out: Tensor = torch.func.functional_call(made, {f"last.{n}": x for n, x in values.items()}, tensors[:3])
            return out

        try:
            torch.autograd.gradcheck(run, (q, k, v, *parameters.values()), fast_mode=True)
        except RuntimeError as error:
            fix = self.declare("say stops_gradient=True")
            raise _Found(f"gradients differ from finite differences. {fix}: {error}") from None

    def test_dropout(self) -> None:
        made, (q, k, v) = self.build(), self.inputs()
        if not all(part.dropout for part in self.parts):
            with self.refused("dropout_p=0.5", "dropout"):
                made.last(q, k, v, dropout_p=0.5)
            return
        torch.manual_seed(0)
        runs = torch.stack([made(q, k, v, dropout_p=0.2, seed=seed) for seed in range(400)])
        if torch.equal(runs[0], runs[1]):
            raise _Found(f"dropout_p=0.2 drops nothing. {self.declare('drop dropout')}")
        error = (runs.mean(0) - made(q, k, v)).abs()
        if not self.randomizes() and (error > 6 * runs.std(0) / 20 + CLOSE).any():
            raise _Found("the mean under dropout is not the output without; scale what is kept by 1 / (1 − p)")

    def randomizes(self) -> bool:
        """Whether the mechanism draws random numbers of its own in evaluation, as it declares."""
        if "random" not in self.reads:
            return False
        made, tensors = self.build(), self.inputs()
        return not torch.equal(made(*tensors, seed=1), made(*tensors, seed=2))

    # --- causality and decoding ------------------------------------------------------------------------------------

    def test_no_query_sees_the_future(self) -> None:
        """With is_causal, a token changes no output before it, in evaluation and in training.

        A mask that hides the future means the same, or is refused.
        """
        made = self.build()
        if not self.can("causal"):
            with self.refused("is_causal=True", "causal=True"):
                made.last(*self.inputs(), is_causal=True)
            for name, mask in self.spelled(torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()):
                with self.refused(f"a mask that hides the future ({name})", "causal=True"):
                    made.last(*self.inputs(), attn_mask=mask)
            return
        fix = self.declare("drop causal and cached")
        longest = self.longest()
        lengths = {(TOKENS, TOKENS), (longest, longest), *([(4, TOKENS)] if self.can("cross") else [])}
        for n, m in sorted(lengths):
            for training in (False, True) if not self.stateful else (False,):
                made.train(training)
                q, k, v = self.inputs(n, m)
                out = made(q, k, v, is_causal=True)
                for token in range(1, n, 1 + n // 10):  # counted among the queries: key m − n + token
                    at = (slice(None), slice(None), m - n + token)
                    asking = self.changed(q, (slice(None), slice(None), token))
                    later = made(asking, self.changed(k, at), self.changed(v, at), is_causal=True)
                    said = f"with is_causal, {token} of {n} outputs precede a token that changes them"
                    self.equal(later[:, :, :token], out[:, :, :token], f"{said}: the future leaks. {fix}")
                for name, mask in self.spelled(torch.ones(n, m, dtype=torch.bool).tril(m - n)):
                    with self.possible("a mask that hides the future"):
                        masked = made(q, k, v, attn_mask=mask)
                        self.equal(masked, out, f"is_causal and a mask that hides the future ({name}) differ. {fix}")

    def test_hidden_keys_do_not_matter(self) -> None:
        """Under masks that show each query other keys, a token changes nothing for those that do not see it."""
        if "unseen" in self.reads:
            return
        made, (q, k, v) = self.build(), self.inputs()
        i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
        torch.manual_seed(4)
        for shape, seen in (
            ("a sliding window", (i - j).abs() < 3),
            ("a causal window", (i >= j) & (i - j < 3)),
            ("packed sequences", i // 3 == j // 3),
            ("packed causal sequences", (i // 3 == j // 3) & (i >= j)),
            ("a prefix", (j <= i) | (j < 4)),
            ("other pairs in every head", torch.rand(2, HEADS, TOKENS, TOKENS) > 0.4),
        ):
            for name, mask in self.spelled(seen):
                with self.possible(f"a mask of {shape}"):
                    out = made(q, k, v, attn_mask=mask)
                    for token in range(0, TOKENS, 4):
                        at = (slice(None), slice(None), token)
                        other = made(q, self.changed(k, at), self.changed(v, at), attn_mask=mask)
                        blind = ~seen[..., token].expand(out.shape[:3])  # [B, H, N]
                        said = f"under {shape} ({name}) key {token} changes outputs of queries that do not see it"
                        self.equal(other[blind], out[blind], f"{said}. {self.reading('unseen')}")

    def test_decoding_equals_the_forward_pass(self) -> None:
        """One token at a time with a Cache, with and without padding."""
        self.decoding([1] * TOKENS)

    def test_chunked_prefill(self) -> None:
        """Several tokens at a time with a Cache, on top of those that it holds."""
        for steps in ([4, 3, 1, 1], [1, 8], *([[64, 35, 1]] if self.longest() == LONG else [])):
            self.decoding(steps)

    def decoding(self, steps: list[int]) -> None:
        tokens = sum(steps)
        made, (q, k, v) = self.build(), self.inputs(tokens)
        if not self.can("cached"):
            with self.refused("decode", "cached=True"):
                made.last.decode(q, k, v, Cache())
            return
        seen = torch.ones(2, 1, 1, tokens, dtype=torch.bool)
        seen[1, ..., :2] = False  # padding at the left of the second sample
        fix = self.declare("drop cached")
        with torch.no_grad():
            for mask in (None, seen):
                whole = made(q, k, v, attn_mask=mask, is_causal=True)
                got = made.decode(q, k, v, steps, mask)
                self.equal(got, whole, f"decoding in steps of {steps} tokens differs from the forward pass. {fix}")

    def test_caches_are_independent(self) -> None:
        """Two batches decode in turns, each with its cache, and a cache follows its batch when that is reordered."""
        if not self.can("cached") or self.chained or "samples" in self.reads or self.randomizes():
            return
        made, rows = self.build().last, torch.tensor([1, 0, 1])
        batches, caches = [self.inputs(seed=1), self.inputs(seed=2)], [Cache(), Cache()]
        fix = "Keep the state in the cache, by names, with the batch first"
        with torch.no_grad():
            wanted = [made(*tensors, is_causal=True) for tensors in batches]
            for start, stop in ((0, 4), (4, 6)):
                for tensors, cache, want in zip(batches, caches, wanted, strict=True):
                    q, k, v = (x[:, :, start:stop] for x in tensors)
                    got = made.decode(q, k, v, cache)
                    said = f"two batches that decode in turns disturb each other. {fix}"
                    self.equal(got, want[:, :, start:stop], said)
            try:
                caches[0].reorder(rows)
                q, k, v = (x[rows, :, 6:] for x in batches[0])
                got = made.decode(q, k, v, caches[0])
            except (RuntimeError, IndexError) as error:
                raise _Found(f"a reordered batch raises {cause(error)}. {fix}") from error
            self.equal(got, wanted[0][rows, :, 6:], f"a reordered batch decodes something else. {fix}")

    # --- what a result depends on ----------------------------------------------------------------------------------

    def test_samples_are_independent(self) -> None:
        if "samples" in self.reads:
            return
        made, (q, k, v) = self.build(), self.inputs(batch=3)
        whole = made(q, k, v, seed=None)
        alone = torch.cat([made(q[i : i + 1], k[i : i + 1], v[i : i + 1], seed=None) for i in range(3)])
        if not self.randomizes():
            self.equal(
                alone, whole, f"a sample gives another output in a batch than by itself. {self.reading('samples')}"
            )

    def test_padding_does_not_matter(self) -> None:
        """Hidden tokens at the end change nothing, and neither do numbers in them."""
        made, (q, k, v) = self.build(), self.inputs()
        if "length" in self.reads or self.randomizes():
            return
        real = torch.zeros(2, TOKENS, dtype=torch.bool)
        real[:, :4] = True
        mask = made.last.padding_mask(real, same_tokens=True)
        short = made(*(x[:, :, :4] for x in (q, k, v)))
        at = (slice(None), slice(None), slice(4, None))
        for tensors in ((q, k, v), [self.changed(x, at) for x in (q, k, v)]):
            padded = made(*tensors, attn_mask=mask)[:, :, :4]
            self.equal(padded, short, f"5 hidden tokens at the end change the others. {self.reading('length')}")

    def test_queries_are_independent(self) -> None:
        """Another query, or fewer of them, leaves the outputs of the others as they are."""
        if "queries" in self.reads:
            return
        made, (q, k, v) = self.build(), self.inputs()
        fix = self.reading("queries")
        rest = [i for i in range(TOKENS) if i != 3]
        out = made(q, k, v)
        other = made(self.changed(q, (slice(None), slice(None), 3)), k, v)
        self.equal(other[:, :, rest], out[:, :, rest], f"a query changes other outputs. {fix}")
        if not self.can("cross") or self.randomizes():
            return
        if "order" not in self.reads:
            some = made(q[:, :, :4], k, v)
            self.equal(some, out[:, :, :4], f"4 of 9 queries have another output by themselves. {fix}")
        if self.can("causal"):
            for m in (TOKENS, 4):
                keys, values = k[:, :, :m], v[:, :, :m]
                want = made(q, keys, values, is_causal=True)[:, :, 6:]
                got = made(q[:, :, 6:], keys, values, is_causal=True)
                said = f"with is_causal and {m} keys, the last 3 of 9 queries have another output by themselves"
                self.equal(got, want, f"{said}; query i sees keys j ≤ i + M − N. {fix}")

    def test_heads_are_independent(self) -> None:
        """A key/value head serves its own query heads only, and query heads do not see each other."""
        made, (q, k, v) = self.build(), self.inputs()
        out, share = made(q, k, v), HEADS // self.groups
        if "heads" not in self.reads and self.groups > 1:
            at = (slice(None), 0)
            other = made(q, self.changed(k, at), self.changed(v, at))
            fix = self.reading("heads")
            self.equal(other[:, share:], out[:, share:], f"key/value head 0 changes other groups' outputs. {fix}")
        if not {"heads", "group"} & self.reads:
            other = made(self.changed(q, (slice(None), 0)), k, v)
            fix = self.reading("group")
            self.equal(other[:, 1:], out[:, 1:], f"query head 0 changes the outputs of other heads. {fix}")

    def test_order_does_not_matter(self) -> None:
        if "order" in self.reads or self.randomizes():
            return
        made, (q, k, v) = self.build(), self.inputs()
        torch.manual_seed(5)
        order = torch.randperm(TOKENS)
        moved = made(*(x[:, :, order] for x in (q, k, v)))
        out = made(q, k, v)[:, :, order]
        self.equal(moved, out, f"tokens in another order give other outputs. {self.reading('order')}")

    def test_tokens_are_prepared_one_by_one(self) -> None:
        """Scores see one token at a time; normalizers leave the rest to scaled_dot_product_attention."""
        if "tokens" in self.reads:
            return
        made, (q, k, v) = self.build(), self.inputs(LONG)
        fix = self.reading("tokens")
        score = made.last.score
        for name, prepare, x in (("query", score.query, q), ("key", score.key, k)):
            alone = torch.cat([prepare(x[:, :, i : i + 1]) for i in range(LONG)], dim=2)
            self.equal(alone, prepare(x), f"{name}() of a token depends on the other tokens. {fix}")
        both = score(q, k, v, mask=None, is_causal=False)[:2]
        for got, want in zip(both, (score.query(q), score.key(k)), strict=True):
            self.equal(got, want, f"forward() gives something else than query() and key(). {fix}")
        with _Fused() as fused:
            made(q, k, v)
        if not fused.calls:
            raise _Found(f"the output does not come from scaled_dot_product_attention. {fix}")

    def test_fused_is_softmax(self) -> None:
        if not any(part.fused for part in self.parts):
            return
        made, q = self.build(), self.inputs()[0]
        weights = made.last.normalizer.weights(q @ q.mT, None)
        self.equal(weights, (q @ q.mT).softmax(-1), f"the weights are not a softmax. {self.declare('drop fused')}")
        options: dict[str, Any] = {"mask": None, "is_causal": False, "dropout_p": 0.0, "grouped": False}
        out = made.last.normalizer(q, q, q, scale=0.7, **options)
        want = (0.7 * q @ q.mT).softmax(-1) @ q
        self.equal(out, want, f"the output is not that of a softmax. {self.declare('drop fused')}")

    def test_packing(self) -> None:
        """attention_packed over sequences of different lengths equals a loop over them, or is refused by name."""
        from ..tools.packing import attention_packed

        made, lengths = self.build(), [4, 9, 1, 4, 0]
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        q, k, v = (x[0].transpose(0, 1) for x in self.inputs(sum(lengths), batch=1))  # [T, heads, features]
        if "samples" in self.reads or self.chained:
            if "length" in self.reads:
                with self.refused("attention_packed", "that samples or lengths do not matter"):
                    attention_packed(q, k, v, made.last, cu_seqlens=cu)
            return
        if self.randomizes():
            return
        for is_causal in (False, True) if self.can("causal") else (False,):
            got = attention_packed(q, k, v, made.last, cu_seqlens=cu, is_causal=is_causal)
            wanted = []
            for start, stop in zip(cu[:-2].tolist(), cu[1:-1].tolist(), strict=True):
                alone = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
                wanted.append(made(*alone, is_causal=is_causal)[0].transpose(0, 1))
            self.equal(got, torch.cat(wanted), "packed sequences differ from a loop over them")

    def test_heads_can_be_divided(self) -> None:
        """Two ranks with half the heads and parameters each compute what one does (tensor parallelism)."""
        if "heads" in self.reads or self.groups % 2 or self.chained or self.randomizes():
            return
        try:
            from ..tools.parallel import head_axes
        except UnsupportedError:  # PyTorch before 2.5 has no DTensor
            return
        made, tensors = self.build(), self.inputs()
        axes = head_axes(self.config, Dims(HEADS, self.groups, DIM))
        halves = []
        for rank in range(2):
            half = copy.deepcopy(made.last)
            half.head_share = (rank, 2)
            for name, axis in axes.items():
                owner, _, leaf = name.rpartition(".")
                whole = half.get_parameter(name)
                own = whole if axis is None else whole.chunk(2, axis)[rank]
                half.get_submodule(owner).register_parameter(leaf, nn.Parameter(own.detach().clone()))
            halves.append(half(*(x.chunk(2, 1)[rank] for x in tensors)))
        fix = f"Read heads from the tensors, not from dims. {self.reading('heads')}"
        self.equal(
            torch.cat(halves, 1), made(*tensors), f"half of the heads, run separately, compute something else. {fix}"
        )

    # --- transforms and checkpoints --------------------------------------------------------------------------------

    def test_devices(self) -> None:
        """Run on the device of the inputs, which a device without numbers shows on every machine."""
        made, tensors = self.build().to("meta"), [x.to("meta") for x in self.inputs()]
        fix = "Make tensors with device=k.device, and read no numbers in Python (item(), if x > 0)"
        with self.by_name("a call on another device", fix):
            out = made(*tensors)
            if out.device.type != "meta":
                raise _Found(f"inputs on another device give an output on {out.device}. {fix}")

    def test_compiles(self) -> None:
        """In one graph, with dynamo; a refusal must name the mechanism."""
        made, tensors = self.build(), self.inputs()
        if self.randomizes() or self.chained:
            return
        causal = {"is_causal": True} if self.can("causal") else {}
        with self.by_name("torch.compile"):
            compiled: Any = torch.compile(made.last, fullgraph=True, backend="eager")
            self.equal(compiled(*tensors, **causal), made(*tensors, **causal), "torch.compile gives another output")
        torch._dynamo.reset()

    def test_exports(self) -> None:
        """torch.export, run again; a refusal must name the mechanism."""
        made, tensors = self.build(), self.inputs()
        if self.randomizes() or self.chained:
            return
        with self.by_name("torch.export"):
            exported = torch.export.export(made.last, tensors).module()
            self.equal(exported(*tensors), made(*tensors), "torch.export gives another output")
        torch._dynamo.reset()

    @contextlib.contextmanager
    def by_name(
        self, what: str, fix: str = "Use PyTorch operations only, or raise UnsupportedError that names the mechanism"
    ) -> Iterator[None]:
        try:
            yield
        except _Found:
            raise
        except Exception as error:
            if not any(part.name in str(error) for part in self.parts):
                raise _Found(f"{what} fails. {fix}: {type(error).__name__}: {error}") from error

    def test_state_dict(self) -> None:
        """A state dict names its attention, loads into the same one strictly, and into no other."""
        made, tensors = self.build(seed=0), self.inputs()
        stored = io.BytesIO()
        torch.save(made.last.state_dict(), stored)
        stored.seek(0)
        state = torch.load(stored, weights_only=True)
        if (ENTRY in state) == self.config.is_standard:
            raise _Found(f"the state dict has no '{ENTRY}'; report this to quest_core")
        twin = self.build(seed=7)
        twin.load_state_dict(made.state_dict(), strict=True)
        self.equal(twin(*tensors), made(*tensors), "a state dict does not carry all that the output depends on")
        stranger = Mechanism("qnorm+sigmoid", num_heads=HEADS, head_dim=DIM)
        if not self.config.is_standard and not self.config.means("qnorm+sigmoid"):
            try:
                stranger.load_state_dict(state, strict=True)
            except CheckpointError:
                return
            raise _Found("a mechanism of another attention loads this state dict")

    def test_copies_and_pickles(self) -> None:
        made, tensors = self.build(), self.inputs()
        want = made(*tensors)
        self.equal(copy.deepcopy(made)(*tensors), want, "a deep copy computes something else")
        try:
            twin = pickle.loads(pickle.dumps(made.last))
        except Exception as error:
            raise _Found(f"it cannot be pickled: {error}; keep no lambdas and local classes on the module") from error
        if not self.chained:
            torch.manual_seed(0)
            self.equal(twin(*tensors), want, "a pickled copy computes something else")


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
        """[B, H, N, Dv], drawn with `seed`; options as of `Mechanism.forward`."""
        return self._each(lambda layer, value: layer(q, k, value, **options), v, seed)  # type: ignore[no-any-return]

    def with_weights(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """The output and the weights of the last layer."""
        return self._each(  # type: ignore[no-any-return]
            lambda layer, value: layer.forward_with_weights(q, k, value, **options), v, 0
        )

    def by_reference(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The output and the weights of the last layer, or None, by the references of its parts."""
        return self._each(lambda layer, value: truth(layer, q, k, value, **options)[:2], v, 0)  # type: ignore[no-any-return]

    def decode(self, q: Tensor, k: Tensor, v: Tensor, steps: list[int], mask: Tensor | None) -> Tensor:
        """[B, H, N, Dv] in `steps` tokens at a time."""
        caches = {layer: Cache() for layer in self.children()}
        outs, start = [], 0
        for step in steps:
            stop = start + step
            new = [x[:, :, start:stop] for x in (q, k, v)]
            seen = None if mask is None else mask[..., :stop]

            def one(layer: Mechanism, value: Tensor, new: Any = new, seen: Any = seen) -> Tensor:
                return layer.decode(new[0], new[1], value, caches[layer], attn_mask=seen)

            outs.append(self._each(one, new[2], 0))
            start = stop
            counted = caches[self.last].tokens
            if counted != start:
                raise _Found(f"decode() of {start} tokens sets cache.tokens to {counted}; it must not")
        return torch.cat(outs, dim=2)

    def _each(self, call: Callable[[Mechanism, Tensor], Any], v: Tensor, seed: int | None) -> Any:
        if seed is not None and not is_compiling():
            torch.manual_seed(seed)
        if self.before is not None:
            call(self.before, 0.5 * v.flip(-1))
        return call(self.last, v)


class _Fused(TorchFunctionMode):
    """Counts calls of scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))
