"""The path that CUDA takes, traced without a GPU: shapes, types and devices are real, numbers there are none.

PyTorch's fake tensors refuse a mix of devices and every copy to the host. What a GPU then computes is tested in
integration_tests/gpu/test_pointcept_patches.py.
"""

import math

import pytest
import torch
from stand_in import Point, Stages
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

import quest_core
import quest_core.tools.packing
from quest_pointcept import PointceptAdapter

COUNTS = [37, 12, 6]
SLOTS = 40 + 16 + 6
"""Slots of their patches of 8 points."""


class Indexing(TorchFunctionMode):
    """`x[i]` by the operators it consists of; Python's own indexing asks the CUDA that is not there for its device."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is not torch.Tensor.__getitem__ or not arguments[0].is_cuda:
            return function(*arguments, **(options or {}))
        x, index = arguments
        if isinstance(index, torch.Tensor):
            return torch.ops.aten.index.Tensor(x, [index])
        for axis, one in enumerate(index if isinstance(index, tuple) else (index,)):
            assert one is None or isinstance(one, int) or one == slice(None)
            if one is None:
                x = x.unsqueeze(axis)
            elif isinstance(one, int):
                assert axis == 0
                x = x.select(0, one)
        return x


@pytest.fixture
def calls(monkeypatch):
    """What PyTorch's variable-length attention was called with; autocast believes in CUDA."""
    seen = []
    stock = quest_core.tools.packing._varlen_attn(shared=True)

    def varlen_attn(*arguments, **options):
        seen.append((*arguments, options))
        return stock(*arguments, **options)

    monkeypatch.setattr(quest_core.tools.packing, "_varlen_attn", lambda shared: varlen_attn)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    return seen


def trace(attention, half=None, channels=32, **options):
    """One block on fake CUDA tensors, twice, under the caller's `half` autocast; returns the features."""
    stages = Stages(channels=channels, enable_flash=True, **options)
    module = quest_core.inject(stages, attention, adapter=PointceptAdapter())[0].enc0["block0"].attn.eval()
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with FakeTensorMode(), Indexing(), torch.no_grad():
        there = {name: torch.empty(x.shape, dtype=x.dtype, device="cuda") for name, x in held.items()}
        order = torch.empty(2, sum(COUNTS), dtype=torch.long, device="cuda")
        point = Point(
            feat=torch.empty(sum(COUNTS), channels, device="cuda"),
            coord=torch.empty(sum(COUNTS), 3, device="cuda"),
            offset=torch.empty(len(COUNTS), dtype=torch.long, device="cuda"),
            serialized_order=order,
            serialized_inverse=order,
            quest_counts=tuple(COUNTS),  # the one copy to the host, for each set of points
        )
        with torch.autocast("cuda", dtype=half or torch.bfloat16, enabled=half is not None):
            for _ in range(2):
                point = functional_call(module, there, (point,))
        return point.feat


@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(
    ("attention", "groups"), [("standard", 4), ("quest", 4), ("quest+gqa(kv_heads=2)", 2), ("qknorm-hs", 4)]
)
def test_the_flash_kernel_gets_what_it_takes(attention, groups, rotary, half, calls):
    """And nothing is copied to the host in the block: fake tensors would refuse."""
    features = 24 if rotary else 8
    out = trace(attention, half, 4 * features, rotary=rotary)
    assert out.device.type == "cuda"
    assert out.dtype == (half or torch.float32)
    assert len(calls) == 2
    for q, k, v, cu_q, cu_k, longest_q, longest_k, options in calls:
        for x, heads in ((q, 4), (k, groups), (v, groups)):
            assert x.dtype == torch.bfloat16  # whatever the caller's autocast says, as Pointcept's does
            assert x.shape == (SLOTS, heads, features)
            assert x.stride(2) == 1
            assert x.stride(0) % 8 == x.stride(1) % 8 == 0  # rows begin at 16 bytes
        assert cu_q is cu_k
        assert cu_q.dtype == torch.int32
        assert cu_q.is_contiguous()
        assert cu_q.device.type == "cuda"
        assert (longest_q, longest_k) == (8, 8)
        assert options["scale"] == pytest.approx(1 / math.sqrt(features) if attention == "standard" else 1.0)
        assert options.get("enable_gqa", False) == (groups != 4)


@pytest.mark.parametrize("half", [None, torch.float16], ids=str)
def test_a_gpu_before_ampere_keeps_the_type_of_the_caller(half, calls, monkeypatch):
    """It has neither flash kernels nor bfloat16 arithmetic: patches of similar length share batches."""
    seen = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))

    def in_buckets(q, k, v, *rest):  # the real one copies lengths to the host, which fake tensors refuse
        seen.append(torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else q.dtype)
        return v

    monkeypatch.setattr(quest_core.tools.packing, "_in_buckets", in_buckets)
    assert trace("quest", half).dtype == (half or torch.float32)
    assert not calls
    assert seen == [half or torch.float32] * 2
