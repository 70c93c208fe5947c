"""Key-driven groupings: head sizes against exact arithmetic, state, noise."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import quest_core
from quest_core.checkpoints import ENTRY
from quest_core.mechanisms.groupings import allocate, head_index, key_norms


def by_hand(importance, heads, least=0):
    """The specification in exact fractions: floors, then largest remainders, ties to the lower index."""
    total = sum(importance)
    free = heads - least * len(importance)
    share = [x / total * free if total else Fraction(free, len(importance)) for x in importance]
    sizes = [math.floor(s) for s in share]
    order = sorted(range(len(share)), key=lambda g: (-(share[g] - sizes[g]), g))
    for g in order[: free - sum(sizes)]:
        sizes[g] += 1
    return [s + least for s in sizes]


@example(weights=[0, 3, 12, 3], extra=0, least=0)  # 2/3 and the fraction of 8/3 tie
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 10), st.integers(0, 1))
def test_sizes_equal_exact_arithmetic(weights, extra, least):
    heads = len(weights) + extra
    sizes = allocate(torch.tensor(weights, dtype=torch.float64), heads, least)
    assert sizes.tolist() == by_hand([Fraction(w) for w in weights], heads, least)
    assert sizes.sum() == heads
    index = head_index(sizes, heads).tolist()
    assert index == [g for g, size in enumerate(sizes.tolist()) for _ in range(size)]


def keys(norms, batch=2, tokens=3, dim=4):
    """Keys [B, G, M, D] whose heads have these Frobenius norms."""
    made = torch.randn(batch, len(norms), tokens, dim, dtype=torch.float64)
    return made / made.square().sum((2, 3), keepdim=True).sqrt() * torch.tensor(norms)[None, :, None, None]


def test_kdgqa_follows_the_paper():
    made = quest_core.Mechanism("kdgqa(kv_heads=3)", num_heads=6, head_dim=4)
    # n̂ = (0, 1/2, 1): sizes ⌊(0, 2, 4)⌋
    assert made.grouping(keys([1.0, 2.0, 3.0]), 6, None).tolist() == [1, 1, 2, 2, 2, 2]
    nearly = torch.ones(1, 3, 1, 4) * torch.tensor([1, 1 + 3e-7, 1])[:, None, None]
    for equal in (torch.ones(1, 3, 1, 4), torch.zeros(1, 3, 1, 4), 1000 * nearly, nearly / 1000):
        assert made.grouping(equal, 6, None).tolist() == [0, 0, 1, 1, 2, 2]
    least = quest_core.Mechanism("kdgqa(kv_heads=3, min_queries=1)", num_heads=6, head_dim=4)
    assert least.grouping(keys([1.0, 2.0, 3.0]), 6, None).tolist() == [0, 1, 1, 2, 2, 2]


def test_padding_and_batch_size_do_not_change_the_norms():
    k = keys([1.0, 2.0], batch=3)
    padded = torch.cat([k, torch.full((3, 2, 2, 4), 9.0, dtype=torch.float64)], 2)
    mask = torch.ones(3, 1, 1, 5, dtype=torch.bool)
    mask[..., 3:] = False
    torch.testing.assert_close(key_norms(padded, mask), key_norms(k, None))
    torch.testing.assert_close(key_norms(k.repeat(4, 1, 1, 1), None).mean(0), key_norms(k, None).mean(0))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("alpha=1.5", "alpha is 1.5 with evolution=ema; it is at most 1"),
        ("alpha=0.5, evolution=difference", "ema only"),
    ],
)
def test_dgqa_refuses_a_weight_that_has_no_meaning(options, why):
    with pytest.raises(quest_core.ConfigError, match=why):
        quest_core.Mechanism(f"dgqa(kv_heads=2, {options})", num_heads=4, head_dim=4)


@pytest.mark.parametrize("evolution", ["ema", "difference"])
def test_dgqa_changes_its_sizes_every_window_of_training_steps(evolution):
    average = {"alpha": 0.25} if evolution == "ema" else {}
    spec = {"name": "dgqa", "kv_heads": 2, "window": 3, "evolution": evolution, **average}
    made = quest_core.Mechanism(spec, num_heads=8, head_dim=4)
    norms = [[1.0, 4.0], [2.0, 2.0], [5.0, 1.0], [6.0, 2.0], [1.0, 1.0], [1.0, 1.0], [3.0, 6.0], [9.0, 9.0]]
    cached, want, sizes = norms[0], [4, 4], []
    for step, now in enumerate(norms):
        head = made.grouping(keys(now), 8, None)
        sizes.append(torch.bincount(head, minlength=2).tolist())
        assert sizes[-1] == want, step
        if step and step % 3 == 0:  # what this step finds takes effect at the next
            if evolution == "ema":
                cached = [0.25 * n + 0.75 * c for n, c in zip(now, cached, strict=True)]
                importance = cached
            else:
                importance = [abs(n - c) for n, c in zip(now, cached, strict=True)]
                cached = now
            want = by_hand([Fraction(x) for x in importance], 8)
    assert len({tuple(s) for s in sizes}) > 1


def test_samples_without_keys_do_not_count_for_dgqa():
    """Packing leaves them out, as empty graphs of a batch."""
    made, k = quest_core.Mechanism("dgqa(kv_heads=2)", num_heads=4, head_dim=4), torch.randn(3, 2, 5, 4)
    seen = torch.tensor([True, False, False])[:, None, None, None].expand(3, 1, 1, 5)
    made.grouping(k, 4, seen & False)
    assert made.grouping.steps == 0
    made.grouping(k, 4, seen)
    torch.testing.assert_close(made.grouping.norms, key_norms(k[:1], None)[0].float())


def test_dgqa_state_is_kept_in_float32_whatever_the_default_type():
    """`check_mechanism` tests that it is loaded, and that evaluation does not change it."""
    torch.set_default_dtype(torch.bfloat16)  # which has no 257, a number of steps
    try:
        made = quest_core.Mechanism("quest+dgqa(kv_heads=2)", num_heads=4, head_dim=4)
    finally:
        torch.set_default_dtype(torch.float32)
    for state in (made.state_dict(), made.half().state_dict()):
        assert {name.rpartition(".")[2] for name in state} == {"norms", "sizes", "pending", "steps", ENTRY}
        assert all(x.dtype == torch.float32 for name, x in state.items() if not name.endswith(ENTRY))


def test_activation_checkpointing_gives_the_same_gradients_where_sizes_change():
    gradients = []
    for use in (False, True):
        torch.manual_seed(0)
        layer = quest_core.Attention(32, 8, "quest+dgqa(kv_heads=2, window=1)")
        with torch.no_grad():
            layer.k_proj.weight[:4] *= 0.1
        for step in range(3):
            x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(step))
            out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if use else layer(x)
            out.square().sum().backward()
        assert layer.mechanism.grouping.sizes.tolist() == [1, 7]
        gradients.append([p.grad for p in layer.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("bad", [torch.randn(0, 5, 16), torch.full((2, 5, 16), torch.inf)])
def test_a_batch_without_finite_norms_does_not_count(bad):
    layer = quest_core.Attention(16, 4, "dgqa(kv_heads=2, window=1)")
    good = torch.randn(2, 5, 16)
    for x in (bad, good, bad, good):
        layer(x)
    assert layer.mechanism.grouping.steps == 2
    assert layer.mechanism.grouping.norms.isfinite().all()
    assert layer.mechanism.grouping.pending.sum() == 4


def test_pgqa_subtracts_noise_of_the_groups_own_mean_and_deviation():
    q, k, v = torch.randn(2, 4, 40, 4), torch.randn(2, 2, 50, 4), torch.randn(2, 2, 50, 4)
    made = quest_core.Mechanism("quest+pgqa(kv_heads=2)", num_heads=4, head_dim=4)
    clean = quest_core.Mechanism("quest+gqa(kv_heads=2)", num_heads=4, head_dim=4).forward_with_weights(q, k, v)[1]
    mask = torch.ones(50, dtype=torch.bool)
    noise = clean - made.forward_with_weights(q, k, v)[1]  # [B, H, N, M]
    assert (noise.diagonal(dim1=2, dim2=3) == 0).all()
    off = ~torch.eye(40, 50, dtype=torch.bool)
    for b in range(2):
        for g in range(2):
            own, weights = noise[b, 2 * g : 2 * g + 2][:, off], clean[b, 2 * g : 2 * g + 2]
            spread = weights.std().item()
            assert own.mean().item() == pytest.approx(weights.mean().item(), abs=5 * spread / own.numel() ** 0.5)
            assert own.std().item() == pytest.approx(spread, rel=0.1)
    mask[45:] = False
    hidden = made.forward_with_weights(q, k, v, attn_mask=mask.expand(40, 50))[1]
    assert (hidden[..., 45:] == 0).all()


def test_pgqa_repeats_under_a_seed_and_can_be_quiet_in_evaluation():
    q, k, v = torch.randn(2, 4, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    loud = quest_core.Mechanism("pgqa(kv_heads=2)", num_heads=4, head_dim=4).eval()
    quiet = quest_core.Mechanism("pgqa(kv_heads=2, noise_in_eval=false)", num_heads=4, head_dim=4)
    plain = quest_core.attention(q, k, v, "gqa")
    torch.manual_seed(0)
    first = loud(q, k, v)
    torch.manual_seed(0)
    torch.testing.assert_close(loud(q, k, v), first)
    assert not torch.allclose(first, plain)
    assert not torch.allclose(quiet(q, k, v), plain)
    torch.testing.assert_close(quiet.eval()(q, k, v), plain)


@pytest.mark.parametrize("part", ["gqa", "kdgqa", "dgqa", "pgqa"])
def test_kv_heads_is_required_and_checked(part):
    with pytest.raises(quest_core.ConfigError, match=f"needs 'kv_heads'.*{part}\\(kv_heads=2\\)"):
        quest_core.Mechanism(part, num_heads=4, head_dim=4)
    with pytest.raises(quest_core.ConfigError, match="the 4 (query )?heads"):
        quest_core.Mechanism(f"{part}(kv_heads=5)", num_heads=4, head_dim=4)
    made = quest_core.Mechanism(f"{part}(kv_heads=2)", num_heads=4, head_dim=4)
    with pytest.raises(quest_core.InputError, match="kv_heads is 2, but k has 4 heads"):
        made(*torch.randn(3, 1, 4, 3, 4))
    with pytest.raises(quest_core.ConfigError, match="ratio is 3, which does not divide the 4 heads"):
        quest_core.Mechanism(f"{part}(ratio=3)", num_heads=4, head_dim=4)


@pytest.mark.parametrize("part", ["gqa", "kdgqa", "pgqa"])
def test_heads_of_a_call_are_compared_with_the_options(part):
    q, k = torch.randn(1, 6, 5, 8), torch.randn(1, 1, 5, 8)
    for ratio, said in (
        (4, "ratio is 4, which does not divide the 6 heads"),
        (3, "ratio is 3, but 6 query heads have"),
    ):
        with pytest.raises(quest_core.InputError, match=said):
            quest_core.attention(q, k, k, f"quest+{part}(ratio={ratio})")
    with pytest.raises(quest_core.InputError, match="kv_heads is 0"):
        quest_core.attention(q, k[:, :0], k[:, :0], f"quest+{part}")


def test_starting_values_are_those_of_the_specification():
    dgqa = quest_core.Mechanism("dgqa(kv_heads=2)", num_heads=4, head_dim=8).grouping
    assert (dgqa.window, dgqa.evolution, dgqa.alpha) == (300, "ema", 0.9)
    assert quest_core.AttentionConfig.parse("kdgqa(kv_heads=2)").option("min_queries") == 0
    assert quest_core.AttentionConfig.parse("pgqa(kv_heads=2)").option("noise_in_eval") is True


@pytest.mark.parametrize("decay", [0.9, 0.99, 0.995, 0.9999])
@pytest.mark.parametrize("sizes", [[3.0, 1.0], [7.0, 1.0], [6.0, 3.0, 2.0, 1.0]])
def test_a_moving_average_of_sizes_groups_heads_as_they_do(sizes, decay):
    sizes = torch.tensor(sizes)
    average, heads = sizes.clone(), int(sizes.sum())
    for _ in range(3000):
        average.mul_(decay).add_(sizes, alpha=1 - decay)
    assert torch.equal(head_index(average, heads), head_index(sizes, heads))


def test_dgqa_goes_on_from_an_average_of_checkpoints():
    def train(steps):
        for step in range(steps):
            k = torch.randn(2, 2, 5, 4) * torch.tensor([1.0 + step, 1]).view(2, 1, 1)
            mechanism(torch.randn(2, 8, 5, 4), k, k)

    mechanism, states = quest_core.Mechanism("dgqa(kv_heads=2, window=4)", num_heads=8, head_dim=4).train(), []
    for steps in (5, 1):
        train(steps)
        states.append({name: x.clone() for name, x in mechanism.state_dict().items()})
    mechanism.load_state_dict({name: (x + states[1][name]) / 2 for name, x in states[0].items()})
    before = mechanism.grouping.norms.clone()
    train(8)
    assert not torch.equal(mechanism.grouping.norms, before)
