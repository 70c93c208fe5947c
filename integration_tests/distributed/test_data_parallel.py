"""DistributedDataParallel and fully_shard on two processes equal one process with the whole batch."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import quest_core

from .models import TRAINED, E, Model, build, check_same, data, half, sgd, tensors, train

pytestmark = pytest.mark.distributed

DGQA = "quest+dgqa(kv_heads=2, window=1)"


def single(attention, steps=3):
    model = build(attention)
    train(model, steps=range(steps))
    return tensors(model)


def shard(model):
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(x.to_local().shape[0] * 2 == x.shape[0] for x in model.parameters() if x.dim() == 2)
    return model


WRAPPERS = {"ddp": DistributedDataParallel, "fsdp": shard}


def trained(rank, how, make):
    """The tensors of a model that two processes have trained, each with half of the batch."""
    model = make()
    train(WRAPPERS[how](model), half(rank))
    return tensors(model)


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "activation checkpointing"])
@pytest.mark.parametrize("attention", TRAINED)
def test_two_processes_train_as_one(ranks, attention, recompute):
    wanted = single(attention)
    for how in WRAPPERS:
        for got in ranks.run(trained, how, functools.partial(build, attention, recompute=recompute)):
            check_same(got, wanted)


def encoder(attention):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 4, 2 * E, dropout=0.0, batch_first=True)
    return quest_core.inject(nn.TransformerEncoder(layer, 2).double(), attention)[0]


class Host(nn.Module):
    """A block that no adapter knows: it calls scaled_dot_product_attention."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind()
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(out.transpose(1, 2).flatten(2))


def universal():
    torch.manual_seed(0)
    return quest_core.inject(Model(Host).double(), "qknorm-hs", example=data(0)[0])[0]


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (functools.partial(encoder, "quest"), "ddp"),
        (functools.partial(encoder, DGQA), "ddp"),
        (universal, "ddp"),
        (universal, "fsdp"),
    ],
)
def test_injected_models_train_as_one_process(ranks, make, how):
    model = make()
    train(model)
    for got in ranks.run(trained, how, make):
        check_same(got, tensors(model))


def ddp_compiled(rank):
    model = build(DGQA)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(DistributedDataParallel(compiled), half(rank))
    torch.compiler.reset()
    return tensors(model), int(model.blocks[0].attention.mechanism.grouping.steps)


@pytest.mark.slow
def test_dgqa_shares_its_statistics_inside_a_compiled_graph(ranks):
    wanted = single(DGQA)
    for got, steps in ranks.run(ddp_compiled):
        assert steps == 3
        check_same(got, wanted)


# --- dgqa -------------------------------------------------------------------------------------------------------------


def dgqa_alone(rank, how):
    """No wrapper that would share buffers; each rank sees other data, and rank 1 more of it."""
    model = build(DGQA)
    if how == "own group":
        groups = [torch.distributed.new_group([r]) for r in range(2)]
        for module in model.modules():
            if isinstance(module, quest_core.mechanisms.groupings.DynamicKeyDriven):
                module.process_group = groups[rank]
    for step in range(3):
        x, _ = data(step)
        if how == "empty batch":
            model(x if rank == 1 else x[:0])
        else:
            model(x[:1] if rank == 0 else x[1:])
    return {name: x for name, x in tensors(model).items() if "grouping" in name}


def observed():
    model = build(DGQA)
    for step in range(3):
        model(data(step)[0])
    return {name: x for name, x in tensors(model).items() if "grouping" in name}


@pytest.mark.parametrize("how", ["uneven batches", "empty batch"])
def test_dgqa_holds_the_same_sizes_on_all_ranks(ranks, how):
    wanted = observed()
    assert any(not torch.equal(x, torch.tensor([2, 2])) for name, x in wanted.items() if name.endswith("sizes"))
    first, second = ranks.run(dgqa_alone, how)
    for name, x in wanted.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], x)


def test_dgqa_can_be_told_which_ranks_share(ranks):
    first, second = ranks.run(dgqa_alone, "own group")
    assert any(not torch.equal(first[name], second[name]) for name in first)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def fsdp_interrupted(rank, attention, folder):
    model = shard(build(attention))
    optimizer = sgd(model)
    train(model, half(rank), steps=range(2), optimizer=optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)

    resumed = shard(build(attention, seed=1))
    optimizer = sgd(resumed)
    weights, state = get_state_dict(resumed, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(resumed, optimizer, model_state_dict=weights, optim_state_dict=state)
    train(resumed, half(rank), steps=range(2, 4), optimizer=optimizer)
    return tensors(resumed)


@pytest.mark.parametrize("attention", ["quest", "qknorm-hs", DGQA])
def test_a_distributed_checkpoint_resumes_exactly(ranks, attention, tmp_path):
    wanted = single(attention, 4)
    for got in ranks.run(fsdp_interrupted, attention, str(tmp_path)):
        check_same(got, wanted)


def refusal(load):
    with pytest.raises(quest_core.CheckpointError) as error:
        load()
    return str(error.value)


def checkpoint_of_another(rank, folder):
    """The errors when a quest model's checkpoint is loaded into another one, by each way of saving."""
    model, other, sigmoid = shard(build("quest")), shard(build("standard")), shard(build("sigmoid"))
    said = {}

    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    found = {"model": get_model_state_dict(sigmoid)}
    dcp.load(found, checkpoint_id=folder)
    said["distributed checkpoint"] = refusal(lambda: set_model_state_dict(sigmoid, found["model"]))

    path = Path(folder, f"{rank}.pt")
    torch.save(model.state_dict(), path)
    said["torch.save of shards"] = refusal(lambda: other.load_state_dict(torch.load(path, weights_only=True)))

    whole = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(model, options=whole)
    said["full state dict"] = refusal(lambda: set_model_state_dict(other, full, options=whole))

    ddp = DistributedDataParallel(build("quest"))
    said["DistributedDataParallel"] = refusal(lambda: build("standard").load_state_dict(ddp.module.state_dict()))
    said["state dict of DistributedDataParallel"] = refusal(
        lambda: set_model_state_dict(DistributedDataParallel(build("sigmoid")), get_model_state_dict(ddp))
    )
    return said


def test_a_checkpoint_of_another_mechanism_is_named(ranks, tmp_path):
    for said in ranks.run(checkpoint_of_another, str(tmp_path)):
        assert len(said) == 5
        for way, text in said.items():
            assert "trained with attention 'quest'" in text, way
