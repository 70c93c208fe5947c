"""Heads divided between two processes: the same numbers, and no communication except in the output projection."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

import quest_core
from quest_core.errors import QuestError
from quest_core.tools.parallel import HeadParallel

from .models import E, H, N, build, check_same, data, half, tensors, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DIVIDED = [
    "standard",
    "quest",
    "qnorm",
    "qknorm-hs",
    "qknorm-ds",
    "qknorm+gqa(kv_heads=2)",
    "elliptical-quest+gqa(kv_heads=2)",
    "quest+sigmoid",
    "quest+sinkhorn",
    "linear",
    "cosine",
    "aft-simple",
    "aft-full(max_length=8)",
    "aft-conv(dims=1, window=3)",
]


def mesh():
    return torch.distributed.init_device_mesh("cpu", (2,))


def divide(model, style=None):
    return parallelize_module(model, mesh(), {"blocks.*.attention": style or HeadParallel()})


def perturbed(attention):
    """Parameters that differ from head to head, so that a wrong division shows."""
    model = build(attention)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "mechanism" in name:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)), dtype=p.dtype))
    return model


def step(model):
    """Output, gradient of the input, gradients of the parameters."""
    x = data(0)[0].requires_grad_()
    out = model(x)
    out.square().sum().backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in model.named_parameters()}
    gradients = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return {"out": out.detach(), "gradient of x": x.grad, **gradients}


def divided(rank, attention):
    model = divide(perturbed(attention))
    weight = model.blocks[0].attention.q_proj.weight
    assert weight.to_local().shape == (E // 2, E)
    return step(model)


@pytest.mark.parametrize("attention", DIVIDED)
def test_divided_heads_compute_the_same(ranks, attention):
    wanted = step(perturbed(attention))
    for got in ranks.run(divided, attention):
        check_same(got, wanted)


def communication(rank, attention, sequence):
    """Collectives of one layer's forward pass, and of its backward pass; parameters on all ranks are frozen."""
    torch.manual_seed(0)
    layer = quest_core.Attention(E, H, attention, dtype=torch.float64)
    quest_core.chain(layer)
    layout = Shard(1) if sequence else Replicate()
    parallelize_module(layer, mesh(), HeadParallel(input_layout=layout, output_layout=layout))
    x = data(0)[0]
    x = (x[:, rank * N // 2 : (rank + 1) * N // 2] if sequence else x).clone().requires_grad_()
    for p in layer.parameters():
        p.requires_grad_(not isinstance(p.data, DTensor) or p.placements != (Replicate(),))
    with CommDebugMode() as forward:
        out = layer(x)
    with CommDebugMode() as backward:
        out.sum().backward()
    assert out.shape == x.shape
    return tuple(
        {str(k).rpartition(".")[2]: n for k, n in m.get_comm_counts().items() if n} for m in (forward, backward)
    )


@pytest.mark.parametrize("attention", ["standard", "quest", "qknorm-hs", "quest+gqa(kv_heads=2)", "elliptical-quest"])
def test_only_the_projections_around_the_heads_communicate(ranks, attention):
    """One all-reduce after the output projection; in the backward pass one for the gradient of the input.

    Parameters that all ranks have are frozen here; theirs come on top.
    """
    for forward, backward in ranks.run(communication, attention, False):
        assert forward == {"all_reduce": 1}
        assert backward == {"all_reduce": 1}


def test_sequence_parallelism_gathers_and_scatters_once(ranks):
    for forward, backward in ranks.run(communication, "quest", True):
        assert forward == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
        assert backward == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}


@torch.no_grad()
def masked(rank, split):
    """Cross-attention by keyword, a padding mask, and decoding with a cache."""
    torch.manual_seed(0)
    layer = quest_core.Attention(E, H, "quest", dtype=torch.float64)
    if split:
        parallelize_module(layer, mesh(), HeadParallel())
    x, context = data(0)
    mask = torch.arange(N) < torch.tensor([[2], [6], [3], [1]])
    cache = quest_core.Cache()
    steps = [layer(x[:, i : i + 1], is_causal=True, cache=cache) for i in range(3)]
    crossed = layer(x, context=context, key_mask=mask)
    outs = {"cross": crossed, "masked": layer(x, key_mask=mask), "decoded": torch.cat(steps, 1)}
    return {name: out.clone() for name, out in outs.items()}  # waits for the collective, which pickling does not


def test_masks_cross_attention_and_caches_work_with_divided_heads(ranks):
    wanted = masked(0, False)
    for got in ranks.run(masked, True):
        check_same(got, wanted)


def two_dimensional(rank, attention):
    """Divided by heads and then sharded: the meshes that large models use, here (1, 2)."""
    grid = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = perturbed(attention)
    parallelize_module(model, grid["tp"], {"blocks.*.attention": HeadParallel()})
    for block in model.blocks:
        fully_shard(block, mesh=grid["dp"])
    fully_shard(model, mesh=grid["dp"])
    train(model)
    return tensors(model)


@pytest.mark.parametrize("attention", ["quest", "qknorm", "qknorm-ds"])
def test_heads_can_be_divided_and_sharded(ranks, attention):
    model = perturbed(attention)
    train(model)
    for got in ranks.run(two_dimensional, attention):
        check_same(got, tensors(model))


def observed(rank, attention, split):
    model = build(attention)
    if split == "heads":
        divide(model)
    with quest_core.Monitor(model) as monitor, torch.no_grad():
        x = data(0)[0]
        model(half(rank)(x) if split == "batch" else x)
        return monitor.collect(flat=True)


@pytest.mark.parametrize("split", ["heads", "batch"])
@pytest.mark.parametrize("attention", ["quest", "quest+gqa(kv_heads=2)"])
def test_the_monitor_reports_all_heads_of_all_ranks(ranks, attention, split):
    model = build(attention)
    with quest_core.Monitor(model) as monitor, torch.no_grad():
        model(data(0)[0])
    first, second = ranks.run(observed, attention, split)
    assert first == second == pytest.approx(monitor.collect(flat=True), rel=1e-5)


def seen_by_one(rank):
    """Sequences of unlike length, and a layer that only rank 1 runs."""
    model = build("quest").blocks
    with quest_core.Monitor(model) as monitor, torch.no_grad():
        for layer in range(rank + 1):
            model[layer](data(rank)[0][:, : 3 + rank])
        return monitor.collect(flat=True)


def test_the_monitor_adds_up_what_ranks_saw(ranks):
    model = build("quest").blocks
    with quest_core.Monitor(model) as monitor, torch.no_grad():
        for rank in range(2):
            for layer in range(rank + 1):
                model[layer](data(rank)[0][:, : 3 + rank])
    wanted = monitor.collect(flat=True)
    for found in ranks.run(seen_by_one):
        assert found == pytest.approx(wanted, rel=1e-6)


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusals(rank):
    return [
        refused(quest_core.Attention(E, H, "quest+mqa")),
        refused(quest_core.Attention(E, H, "quest+dgqa(kv_heads=2)")),
        refused(quest_core.Attention(3 * H, 3, "quest")),
        refused(quest_core.MultiheadAttention(E, H)),
        refused(parallelize_module(quest_core.Attention(E, H), mesh(), HeadParallel())),
    ]


def refused(module):
    with pytest.raises(QuestError) as error:
        parallelize_module(module, mesh(), HeadParallel())
    return f"{type(error.value).__name__}: {error.value}"


def test_what_cannot_be_divided_is_refused_by_name(ranks):
    for mqa, dgqa, odd, packed, again in ranks.run(refusals):
        assert "kv_heads is 1, which 2 ranks do not divide" in mqa
        assert dgqa.startswith(
            "UnsupportedError: attention 'quest+dgqa(kv_heads=2)': 'dgqa' reads other key/value heads"
        )
        assert "num_heads is 3, which 2 ranks do not divide" in odd
        assert "here is MultiheadAttention" in packed
        assert "divided already" in again
