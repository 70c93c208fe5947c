"""Every name of the specification, and every combination of the three axes: it builds, equals its reference, trains."""

import itertools

import pytest
import torch

import quest_core
from quest_core.errors import ConfigError, InputError
from quest_core.registry import mechanisms
from quest_core.testing.truth import truth

SPECIFIED = {
    "score": [
        "standard", "quest", "qnorm", "qknorm-hs", "qknorm-ds", "qknorm", "elliptical", "elliptical-quest",
    ],
    "normalizer": ["softmax", "sigmoid", "sinkhorn"],
    "grouping": ["mha", "gqa", "mqa", "kdgqa", "dgqa", "pgqa"],
    "family": ["linear", "cosine", "aft-full", "aft-local", "aft-simple", "aft-conv"],
}  # fmt: skip
PARTS = list(mechanisms().values())
COMBINATIONS = list(itertools.product(*(SPECIFIED[axis] for axis in ("score", "normalizer", "grouping"))))


def test_all_that_is_specified_exists_and_nothing_else():
    assert {axis: sorted(p.name for p in PARTS if p.axis == axis) for axis in SPECIFIED} == {
        axis: sorted(names) for axis, names in SPECIFIED.items()
    }


def test_every_part_says_what_it_is():
    for part in PARTS:
        assert part.formula()
        assert part.source
        assert part.complexity.startswith("O(")
        assert part.causal or "causal = True" not in part.causal_reason
        assert all(option.doc for option in part.options)
        if part.axis in ("normalizer", "family"):
            made = quest_core.Mechanism(part.name, num_heads=4, head_dim=8)
            assert (made.kernel == "scaled_dot_product_attention") == ("fused kernel" in part.complexity)


@pytest.mark.parametrize("combination", COMBINATIONS, ids="+".join)
def test_every_combination_equals_its_reference_and_trains(combination):
    grouping = combination[2]
    kv = {"mha": 4, "mqa": 1}.get(grouping, 2)
    options = {} if grouping in ("mha", "mqa") else {"kv_heads": kv}
    if grouping == "pgqa":
        options["noise_in_eval"] = False  # its noise has tests of its own
    config = quest_core.AttentionConfig.parse({"name": "+".join(combination), **options})
    torch.manual_seed(0)
    made = quest_core.Mechanism(config, num_heads=4, head_dim=6).double().eval()
    quest_core.chain(made)  # the first layer of an elliptical chain: standard, or quest
    q = torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, kv, 7, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.rand(2, 1, 5, 7) > 0.3

    want, weights, _ = truth(made, q, k, v, attn_mask=mask)
    torch.testing.assert_close(made(q, k, v, attn_mask=mask), want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(made.forward_with_weights(q, k, v, attn_mask=mask)[1], weights, rtol=1e-10, atol=1e-10)

    made.train()
    made(q, k, v, attn_mask=mask, dropout_p=0.1).square().sum().backward()
    leaves = (q, k, v, *made.parameters())
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)
    assert quest_core.AttentionConfig.parse(str(config)) == config


def trace(spec):
    """All that an option may change: the start of projections, parameters, results of training and of evaluation."""
    torch.manual_seed(0)
    made = quest_core.Mechanism(spec, num_heads=4, head_dim=8)
    quest_core.chain(made)
    found = [made.config.initial_norms, {key: x.tolist() for key, x in made.state_dict().items()}]
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 3)
    groups = 1 if "mqa" in spec["name"] else spec.get("kv_heads", 4)
    for step in range(5):  # keys of very different norms, whose order changes
        sizes = torch.linspace(0.1, 3, groups).roll(step)[:, None, None]
        q, k, v = (torch.randn(1, heads, 9, 8) for heads in (4, groups, groups))
        k = (sizes * k)[..., : 1 if spec["name"] == "aft-conv" else 8]
        found += [made.train()(q, k, v).tolist(), made.eval()(q, k, v).tolist()]
    return found


def other(option):
    """A value that an option does not have by default."""
    if option.kind is bool:
        return not option.default
    if option.kind is str:
        return next((text for text in option.choices if text != option.default), "1x9")
    if option.kind is float:
        return 0.5
    return option.minimum if option.minimum != option.default else option.default + 2


FAMILIES = [(name,) for name in SPECIFIED["family"]]


@pytest.mark.parametrize("names", [*COMBINATIONS, *FAMILIES], ids="+".join)
@pytest.mark.drawn(50)
def test_every_option_does_what_it_is_written_for(names):
    options = {option.name: option for part in PARTS if part.name in names for option in part.options}
    spec = {"name": "+".join(names)}
    if "kv_heads" in options:
        spec["kv_heads"] = 2
    if "window" in options:
        spec["window"] = 3
    plain = trace(spec)
    assert trace(spec) == plain  # neither NaN nor chance makes two traces differ
    for option in options.values():
        try:
            changed = trace({**spec, option.name: other(option)})
        except (ConfigError, InputError):  # of a value that is read, such as a grid of another number of tokens
            continue
        assert changed != plain, option.name
