"""Tokens divided between two processes by torch's context_parallel.

PyTorch's ring attention exists for CUDA alone. Everything around it runs here as it is; in place of the ring, DTensor
is told how to divide the CPU's operator, and gathers keys and values itself. The ring is left to integration_tests/gpu.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel, register_sharding
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

import quest_core

from .models import E, H, N, check_same, data
from .ranks import Ranks

pytestmark = pytest.mark.distributed

aten = torch.ops.aten


def divide_cpu_attention() -> None:
    """Queries by tokens, keys and values whole: outputs by tokens, gradients of keys and values partial sums."""

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)
    def _(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
        return [([Shard(2), Shard(2)], [Shard(2), Replicate(), Replicate(), None, None])]

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    def _(grad, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
        divided = [Shard(2), Shard(2), Replicate(), Replicate(), Shard(2), Shard(2), None, None]
        return [([Shard(2), Partial(), Partial()], divided)]


def layer(attention: str) -> quest_core.Attention:
    torch.manual_seed(0)
    made = quest_core.Attention(E, H, attention, dtype=torch.float64)
    quest_core.chain(made)
    return made


def step(made: quest_core.Attention, x: Tensor) -> Tensor:
    out = made(x)
    out.square().sum().backward()
    return out.detach()


def divided(rank: int, attention: str) -> dict[str, Tensor]:
    divide_cpu_attention()
    made, x = layer(attention), data(0)[0]
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        assert x.shape[1] * 2 == N
        out = step(made, x)
    (whole,) = context_parallel_unshard(mesh, [out], [1])
    for p in made.parameters():
        torch.distributed.all_reduce(p.grad)
    return {"out": whole, **{name: p.grad for name, p in made.named_parameters()}}


@pytest.mark.parametrize("attention", ["standard", "quest", "qnorm", "qknorm-hs", "qknorm", "quest+gqa(kv_heads=2)"])
def test_divided_tokens_attend_to_all(ranks: Ranks, attention: str) -> None:
    whole = layer(attention)
    wanted = {"out": step(whole, data(0)[0])}
    wanted |= {name: p.grad for name, p in whole.named_parameters()}
    for got in ranks.run(divided, attention):
        check_same(got, wanted)


REFUSED = ["quest+sigmoid", "quest+sinkhorn", "elliptical-quest", "quest+kdgqa(kv_heads=2)", "linear", "aft-simple"]


def refusals(rank: int) -> list[str]:
    said = []
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for attention in REFUSED:
        made, x = layer(attention), data(0)[0]
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]), pytest.raises(quest_core.UnsupportedError) as e:
            made(x)
        said.append(str(e.value))
    q = torch.randn(1, H, N, 4)
    with context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]), pytest.raises(quest_core.UnsupportedError) as e:
        layer("quest").mechanism.forward_with_weights(q, q, q)
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    return [*said, str(e.value)]


def test_what_would_attend_to_a_part_is_refused_by_name(ranks: Ranks) -> None:
    for said in ranks.run(refusals):
        assert len(said) == len(REFUSED) + 1
        for attention, text in zip(REFUSED, said, strict=False):
            assert f"attention '{attention}' looks at all tokens" in text
        assert "no rank has all logits" in said[-1]
