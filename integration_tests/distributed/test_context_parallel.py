"""Tokens divided between two processes by torch's context_parallel: causal, with its balanced halves, and not.

PyTorch enters only the kernels of CUDA into its ring. Here the CPU's kernel is added; everything else is
PyTorch's own: the order of the tokens, the ring in both directions and how partial results are merged.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel, register_sharding
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

import quest_core

from .models import E, H, N, check_same, data

pytestmark = pytest.mark.distributed

aten = torch.ops.aten


@functools.cache
def enter_cpu_kernel():
    """Let PyTorch's ring attention run the CPU's kernel, in as many bits as the inputs have."""
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ring._cp_options.convert_to_f32 = False

    @register_sharding(forward)
    def _(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
        return [([Shard(2)] * 2, [*[Shard(2)] * 3, None, None])]

    @register_sharding(backward)
    def _(grad, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):
        return [([Shard(2)] * 3, [*[Shard(2)] * 6, None, None])]

    def forward_ring(group, q, k, v, p=0.0, is_causal=False, **o):
        return ring._templated_ring_attention(group, 2, forward, q, k, v, is_causal=is_causal, dropout_p=p, **o)

    def backward_ring(group, grad, q, k, v, out, lse, p, is_causal, **o):
        return ring._templated_ring_attention_backward(
            group, 2, backward, grad, "grad_out", q, k, v, out, lse, is_causal, dropout_p=p, **o
        )

    def handle(op, args, kwargs):
        info = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs)
        DTensor._op_dispatcher.sharding_propagator.propagate(info)
        run = {forward: forward_ring, backward: backward_ring}[op]
        found = run(info.compute_mesh.get_group(), *info.local_args, **info.local_kwargs)
        return DTensor._op_dispatcher.wrap(found, info.output_sharding.output_spec)

    ring.custom_ops.update({forward: handle, backward: handle})


def layer(attention):
    torch.manual_seed(0)
    made = quest_core.Attention(E, H, attention, dtype=torch.float64)
    quest_core.chain(made)
    return made


def step(made, x, is_causal):
    out = made(x, is_causal=is_causal)
    out.square().sum().backward()
    return out.detach()


def divided(rank, attention, is_causal):
    enter_cpu_kernel()
    ring._cp_options.enable_load_balance = is_causal  # PyTorch refuses to balance what is not causal
    made, x = layer(attention), data(0)[0]
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        assert x.shape[1] * 2 == N
        out = step(made, x, is_causal)
    (whole,) = context_parallel_unshard(mesh, [out], [1])
    ring._cp_options.enable_load_balance = True
    for p in made.parameters():
        torch.distributed.all_reduce(p.grad)
    return {"out": whole, **{name: p.grad for name, p in made.named_parameters()}}


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("attention", ["standard", "quest", "qnorm", "qknorm-hs", "qknorm", "quest+gqa(kv_heads=2)"])
def test_divided_tokens_attend_to_all(ranks, attention, is_causal):
    whole = layer(attention)
    wanted = {"out": step(whole, data(0)[0], is_causal)}
    wanted |= {name: p.grad for name, p in whole.named_parameters()}
    for got in ranks.run(divided, attention, is_causal):
        check_same(got, wanted)


REFUSED = ["quest+sigmoid", "quest+sinkhorn", "elliptical-quest", "quest+kdgqa(kv_heads=2)", "linear", "aft-simple"]


def refusals(rank):
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


def test_what_would_attend_to_a_part_is_refused_by_name(ranks):
    for said in ranks.run(refusals):
        assert len(said) == len(REFUSED) + 1
        for attention, text in zip(REFUSED, said, strict=False):
            assert f"attention '{attention}': '" in text
            assert "needs all tokens, and under torch's context_parallel a rank has some of them" in text
        assert "no rank has all logits" in said[-1]
