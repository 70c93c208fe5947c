"""check_mechanism: every mechanism of quest_core passes it, and mechanisms that are wrong fail it by name."""

import contextlib
import random

import pytest
import torch
from torch import Tensor, nn

import quest_core
from quest_core.errors import ConfigError, UnsupportedError
from quest_core.hosts.adapter import Capabilities, refusal
from quest_core.mechanisms import Cache, Family, Normalizer, Option, Score, local, visible
from quest_core.registry import Component, mechanisms, register, temporary
from quest_core.testing import CHECKS, MechanismError, check_mechanism


@pytest.mark.parametrize("name", list(mechanisms()))
@pytest.mark.drawn(18)
def test_every_mechanism_of_quest_core_passes(name):
    """tests/grid compiles and exports them."""
    check_mechanism(mechanisms()[name], checks=[check for check in CHECKS if check != "compiles"])


@pytest.mark.parametrize(
    "attention",
    [
        "qknorm+sigmoid+mqa",
        "elliptical-quest+sigmoid+gqa(kv_heads=2)",
        "aft-full(rank=null, max_length=32)",
        {"name": "standard", "scale": 0.5},
        quest_core.Mechanism("linear"),
    ],
    ids=str,
)
def test_combinations_pass(attention):
    check_mechanism(attention)


# --- wrong mechanisms -----------------------------------------------------------------------------------------------


class Deviation(Score):
    """Divides by a statistic over all tokens, those of the future too."""

    def key(self, k):
        return k / (k.std(2, keepdim=True, correction=0) + 0.1)


class AcrossHeads(Score):
    def key(self, k):
        return k - k.mean(1, keepdim=True)


class Forgetful(Score):
    """Keeps what it learns outside of its parameters."""

    def __init__(self, dims):
        super().__init__(dims)
        self.factor = torch.rand(())

    def query(self, q):
        return q * self.factor.to(q.dtype)


class Counting(Score):
    def __init__(self, dims):
        super().__init__(dims)
        self.register_buffer("calls", torch.zeros(()))

    def query(self, q):
        self.calls += 1
        return q


class Untrained(Score):
    def __init__(self, dims):
        super().__init__(dims)
        self.factor = nn.Parameter(torch.ones(()))

    def query(self, q):
        return q * self.factor.detach().to(q.dtype)


class Hoarder(Score):
    def __init__(self, dims):
        super().__init__(dims)
        self.seen = []

    def key(self, k):
        self.seen.append(k.detach())
        return k


class Previous(Score):
    """Depends on the call before."""

    def __init__(self, dims):
        super().__init__(dims)
        self.last = 1.0

    def key(self, k):
        factor, self.last = self.last, k.detach().abs().mean().item()
        return k * factor


class Reseeds(Score):
    """Random features, the same in every process."""

    def __init__(self, dims):
        super().__init__(dims)
        torch.manual_seed(0)
        self.register_buffer("features", torch.randn(8, 8))

    def key(self, k):
        return k @ self.features.to(k)


class QueryHeads(Score):
    """A factor for each query head, which also fits one shared key head and turns it into many."""

    def __init__(self, dims):
        super().__init__(dims)
        self.factor = nn.Parameter(torch.rand(dims.num_heads, 1, 1) + 1)

    def key(self, k):
        return k * local(self.factor).to(k.dtype)


class NeedsDims(Score):
    def query(self, q):
        return q * self.heads

    def __init__(self, dims):
        super().__init__(dims)
        self.heads = 1 if dims is None else dims.num_heads


class Soft(Normalizer):
    """A softmax that is right."""

    causal = cross = cached = dropout = True
    reads = ("tokens",)

    def weights(self, logits, mask):
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        seen = logits > -torch.inf
        return logits.masked_fill(~seen, -1e4).softmax(-1) * seen


class WithoutBias(Soft):
    def weights(self, logits, mask):
        return super().weights(logits, None if mask is None else mask > -torch.inf)


class BlindToBias(Soft):
    def weights(self, logits, mask):
        additive = mask is not None and mask.dtype != torch.bool
        return (logits + mask).softmax(-1) if additive else super().weights(logits, mask)


class FirstRows(Soft):
    """Aligns the first query with the first key, instead of the last ones."""

    def forward(self, q, k, v, *, mask, is_causal, **options):
        if is_causal:
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
            mask = seen if mask is None else (mask & seen if mask.dtype == torch.bool else mask.where(seen, -torch.inf))
        return super().forward(q, k, v, mask=mask, is_causal=False, **options)


class Squares(Normalizer):
    """Forgets to hide, and to give zeros to a query that sees no key."""

    def weights(self, logits, mask):
        return logits.square() / logits.square().sum(-1, keepdim=True)


class Mean(Family):
    """The mean of the visible values, whatever the query; ignores is_causal."""

    def forward(self, q, k, v, *, key_mask, is_causal, cache=None):
        seen = torch.ones_like(v[:, :1, :, :1]) if key_mask is None else self._seen(key_mask, v)
        return (v * seen).sum(2, keepdim=True) / seen.sum(2, keepdim=True).clamp(min=1) + 0 * (q + k.mean())

    @staticmethod
    def _seen(key_mask, v):
        seen = key_mask if key_mask.dtype == torch.bool else key_mask > -torch.inf
        return seen[:, None, :, None].to(v.dtype)


class Sums(Family):
    """Linear attention that keeps its sums where `keep` says."""

    def forward(self, q, k, v, *, key_mask, is_causal, cache=None):
        return self.average(q, k, v, key_mask, Cache() if cache is None else cache)

    def average(self, q, k, v, key_mask, cache):
        seen = 1 if key_mask is None else key_mask[:, None, :, None].to(k.dtype)
        new = ((k.exp() * seen).unsqueeze(-1) * nn.functional.pad(v, (0, 1), value=1.0).unsqueeze(-2)).cumsum(2)
        both = (q.exp().unsqueeze(-2) @ self.keep(new, cache)).squeeze(-2)
        return both[..., :-1] / both[..., -1:]

    def keep(self, new, cache):
        raise NotImplementedError


class OnTheModule(Sums):
    sums: Tensor

    def keep(self, new, cache):
        new = new + self.sums if cache.tokens else new
        self.sums = new[:, :, -1:]
        return new


class HeadsFirst(Sums):
    def keep(self, new, cache):
        new = new + cache["sums"].transpose(0, 1) if "sums" in cache else new
        cache["sums"] = new[:, :, -1:].transpose(0, 1)
        return new


class SomeQuery(Score):
    """Right under is_causal; under a mask it looks at every key that some query sees."""

    def forward(self, q, k, v, *, mask, is_causal, **_):
        n, m = q.shape[2], k.shape[2]
        seen = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n if is_causal else m)
        if mask is not None:
            seen = seen & visible(mask).any(1, keepdim=True).any(2, keepdim=True)
        return q + seen.to(k.dtype) @ k / seen.sum(-1, keepdim=True).clamp(min=1), k, 1.0


def toy(base, **declared):
    made = type("Toy", (base,), {"__module__": __name__, **declared})
    globals()["Toy"] = made  # where pickle looks for it
    return made


@contextlib.contextmanager
def known(cls, **arguments):
    """Register a class as 'toy' inside the block."""
    with temporary():
        yield register("toy", source="a test", **arguments)(cls)


def forgets_the_last_block(self, k):
    whole = k.shape[2] // 64 * 64
    return k if not whole else torch.cat([2 * k[:, :, :whole], k[:, :, whole:]], dim=2)


POINTWISE = {"causal": True, "cross": True, "cached": True, "reads": ()}
LINEAR = {**POINTWISE, "reads": ("tokens",)}
NORMALISER = {**POINTWISE, "dropout": True}
WEIGHTED = {**LINEAR, "dropout": True}
WRONG = {  # a class, and the checks that it fails
    "statistics over tokens": (
        toy(Deviation, **LINEAR),
        {"no_query_sees_the_future", "decoding_equals_the_forward_pass", "masks", "padding_does_not_matter"},
    ),
    "keys that some query sees": (
        toy(SomeQuery, **{**LINEAR, "cached": False}),
        {"no_query_sees_the_future", "hidden_keys_do_not_matter"},
    ),
    "keys that some query sees, not causal": (toy(SomeQuery, reads=("tokens",)), {"hidden_keys_do_not_matter"}),
    "statistics over queries": (
        toy(Score, query=lambda self, q: q / q.abs().amax(2, keepdim=True), **POINTWISE),
        {"no_query_sees_the_future", "others_do_not_matter", "tokens_are_prepared_one_by_one"},
    ),
    "heads": (toy(AcrossHeads, **POINTWISE), {"others_do_not_matter", "heads_can_be_divided"}),
    "samples": (
        toy(Score, query=lambda self, q: q - q.mean(0, keepdim=True), **POINTWISE),
        {"others_do_not_matter", "packing"},
    ),
    "order": (
        toy(Score, query=lambda self, q: q * torch.arange(1, q.shape[2] + 1, dtype=q.dtype)[:, None], **POINTWISE),
        {"order_does_not_matter", "tokens_are_prepared_one_by_one"},
    ),
    "dtype": (toy(Score, query=lambda self, q: q * torch.ones(1, dtype=torch.float64), **POINTWISE), {"dtypes"}),
    "state dict": (toy(Forgetful, **POINTWISE), {"state_dict"}),
    "buffers": (toy(Counting, **POINTWISE), {"state"}),
    "parameters": (toy(Untrained, **POINTWISE), {"declarations", "gradients"}),
    "keys of another norm": (toy(Score, unit_keys=True, **POINTWISE), {"declarations"}),
    "reference": (toy(Score, reference=lambda self, q, k, v, head, seen: 2 * q @ k.mT, **POINTWISE), {"reference"}),
    "masks": (toy(Squares, **NORMALISER), {"masks", "blind_rows", "weights", "tokens_are_prepared_one_by_one"}),
    "softmax": (toy(Squares, fused=True, **NORMALISER), {"weights"}),
    "in place, in inference": (
        toy(Score, key=lambda self, k: k * 2 if torch.is_grad_enabled() else k.mul_(2), **POINTWISE),
        {"inputs_are_left_alone"},
    ),
    "batch statistics in training": (
        toy(Score, key=lambda self, k: k / k.std(0, keepdim=True, correction=0) if self.training else k, **POINTWISE),
        {"calls_repeat"},
    ),
    "growth": (toy(Hoarder, **POINTWISE), {"state"}),
    "the call before": (toy(Previous, **POINTWISE), {"calls_repeat"}),
    "noise": (toy(Score, key=lambda self, k: k + torch.randn_like(k), **POINTWISE), {"calls_repeat"}),
    "noise without a seed": (
        toy(Score, key=lambda self, k: k * random.random(), **POINTWISE | {"reads": ("random",)}),
        {"calls_repeat"},
    ),
    "the user's seed": (toy(Reseeds, **POINTWISE), {"calls_repeat"}),
    "strides": (
        toy(Score, key=lambda self, k: k.transpose(1, 2).view(-1, 32).view(2, -1, 4, 8).transpose(1, 2), **POINTWISE),
        {"memory_layout_does_not_matter"},
    ),
    "norms in float16": (
        toy(Score, key=lambda self, k: k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt(), **POINTWISE),
        {"dtypes"},
    ),
    "a shared key head": (toy(QueryHeads, learnable=True, **POINTWISE), {"shared_key_heads"}),
    "heads as a number": (toy(NeedsDims, **POINTWISE), {"declarations"}),
    "a last block": (toy(Score, key=forgets_the_last_block, **POINTWISE), {"tokens_are_prepared_one_by_one"}),
    "a last block, with a reference": (
        toy(Score, key=forgets_the_last_block, reference=lambda self, q, k, v, head, seen: q @ k.mT, **LINEAR),
        {"reference"},
    ),
    "another device": (
        toy(Score, key=lambda self, k: k * torch.linspace(1, 2, 8, dtype=k.dtype), **POINTWISE),
        {"devices"},
    ),
    "finite biases": (toy(WithoutBias, **WEIGHTED), {"masks"}),
    "blind rows of a bias": (toy(BlindToBias, **WEIGHTED), {"blind_rows"}),
    "the first diagonal": (toy(FirstRows, **WEIGHTED), {"decoding_equals_the_forward_pass"}),
    "sums on the module": (toy(OnTheModule, **LINEAR), {"caches_are_independent"}),
    "heads first in the cache": (toy(HeadsFirst, **LINEAR), {"caches_are_independent"}),
    "a family": (
        toy(Mean, compares=True, **LINEAR),
        {"no_query_sees_the_future", "decoding_equals_the_forward_pass", "queries_choose_among_keys"},
    ),
    "blocks of queries": (toy(Soft, rowwise=True, reads=("tokens", "queries")), {"declarations"}),
    "a grid": (toy(Mean, on_grid=True, **LINEAR), {"declarations"}),
    "a chain": (toy(Score, chained=True, **POINTWISE), {"declarations"}),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_mechanism_fails_by_name(name):
    wrong, checks = WRONG[name]
    with known(toy(wrong)) as mechanism:
        outcomes = check_mechanism(mechanism, checks=sorted(checks), raises=False)
    assert [outcome.check for outcome in outcomes if outcome.passed] == []
    assert all(len(outcome.message) > 20 for outcome in outcomes)


def test_a_normalizer_that_is_right_passes():
    with known(Soft) as mechanism:
        check_mechanism(mechanism)


def test_failures_say_what_where_and_how_to_declare_it():
    checks = ("shapes", "others_do_not_matter")
    with (
        known(toy(AcrossHeads, **POINTWISE)) as mechanism,
        pytest.raises(MechanismError, match="attention 'toy' fails 1 of 2 checks:\n- others_do") as error,
    ):
        check_mechanism(mechanism, checks=checks)
    assert "in the class of 'toy' add 'heads'" in str(error.value)
    with (
        known(toy(Deviation, **POINTWISE)),
        pytest.raises(MechanismError, match="the future leaks. Mend it, or in the class of 'toy' drop causal"),
    ):
        check_mechanism("toy", checks=["no_query_sees_the_future"])
    with pytest.raises(ConfigError, match="check 'shape' does not exist; .*did you mean 'shapes'"):
        check_mechanism("quest", checks=["shape"])


def test_what_is_not_declared_is_refused_by_name():
    q = torch.randn(1, 4, 5, 8)
    with known(toy(Deviation)):
        assert quest_core.attention(q, q, q, "toy").isfinite().all()
        with pytest.raises(UnsupportedError, match="'toy' cannot be causal: its class does not declare causal = True"):
            quest_core.attention(q, q, q, "toy", is_causal=True)
        with pytest.raises(UnsupportedError, match="'toy' cannot decode"):
            quest_core.Mechanism("toy").decode(q, q, q, Cache())
        packed = q[0].transpose(0, 1)
        with pytest.raises(UnsupportedError, match="'toy' cannot be packed"):
            quest_core.attention_packed(packed, packed, packed, "toy", cu_seqlens=torch.tensor([0, 2, 5]))
        with pytest.raises(ConfigError, match="its score is not quest"):
            quest_core.calibrate(torch.nn.MultiheadAttention(16, 2), [q], "toy")
        why = refusal(quest_core.AttentionConfig.parse("toy"), Capabilities(ordered=False))
        assert why == "'toy' is not possible here: it needs ordered tokens"


def test_the_random_state_is_left_as_it_was():
    state = torch.get_rng_state()
    check_mechanism("standard")
    assert torch.equal(torch.get_rng_state(), state)


# --- classes that cannot be registered -------------------------------------------------------------------------------


class Elsewhere(Score): ...


@pytest.mark.parametrize(
    ("name", "base", "declared", "options", "message"),
    [
        ("a b", Score, {}, (), "Toy.: name must be letters"),
        ("toy", Component, {}, (), "base class must be Score, Normalizer"),
        ("toy", Score, {"name": "toy"}, (), "Toy is registered already, so make a subclass"),
        ("toy", Score, {}, (Option("p", int, 1, "a"), Option("p", int, 1, "b")), "options of different names"),
        ("toy", Score, {}, (Option("p", int, 1.5, "a"),), "option 'p' is 1.5, but takes a whole number"),
        ("toy", Score, {"reads": ["tokens"]}, (), "reads must be a tuple of tokens, queries"),
        ("toy", Score, {"reads": ("token",)}, (), "reads must be a tuple of tokens, queries"),
        ("toy", Score, {"cached": True}, (), "cached must be for causal mechanisms only"),
        ("Else.Where", Score, {}, (), "Toy: name 'Else.Where' is taken by 'else-where' of .*Elsewhere"),
    ],
)
def test_classes_that_cannot_be_registered(name, base, declared, options, message):
    with temporary():
        register("else-where", source="")(type("Elsewhere", (Elsewhere,), {}))
        before = dict(mechanisms())
        with pytest.raises(ConfigError, match=message):
            register(name, source="", options=options)(toy(base, **declared))
        assert mechanisms() == before


def test_queries_that_do_not_meet_keys_are_refused_where_positions_are_rotated():
    for compares in (False, True):
        with known(toy(Mean, compares=compares, **LINEAR)):
            why = refusal(quest_core.AttentionConfig.parse("toy"), Capabilities(rotary=True))
        said = "'toy' is not possible here: its queries do not meet keys, where rotary positions act"
        assert why == (None if compares else said)
