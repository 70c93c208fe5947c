"""PyTorch's ring attention on the kernels of CUDA, with QUEST inside; on as many GPUs as there are, up to two."""

import pytest
import torch
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.attention import SDPBackend, sdpa_kernel

import quest_core

TOKENS, WIDTH = 512, 256


def divided(rank, world, attention, folder):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    mesh = torch.distributed.init_device_mesh("cuda", (world,))
    torch.manual_seed(0)
    layer = quest_core.Attention(WIDTH, 4, attention, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    wanted = layer(x, is_causal=True)
    wanted.float().square().mean().backward()
    slopes = [p.grad.float() for p in layer.parameters()]
    layer.zero_grad()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        assert x.shape[1] * world == TOKENS
        out = layer(x, is_causal=True)
        (out.float().square().mean() / world).backward()
    (whole,) = context_parallel_unshard(mesh, [out.detach()], [1])
    torch.testing.assert_close(whole, wanted, rtol=2e-2, atol=2e-2)
    largest = max(slope.norm() for slope in slopes)
    for p, slope in zip(layer.parameters(), slopes, strict=True):
        total = p.grad.float()
        torch.distributed.all_reduce(total)
        # Softmax does not change with the bias of keys: what is left of its gradient is rounding.
        assert (total - slope).norm() <= 0.05 * slope.norm() + 1e-3 * largest
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.parametrize("attention", ["standard", "quest", "qknorm-hs"])
def test_divided_tokens_attend_to_all(attention, tmp_path):
    world = min(2, torch.cuda.device_count())
    torch.multiprocessing.spawn(divided, (world, attention, str(tmp_path)), nprocs=world)
