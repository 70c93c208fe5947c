"""torch.compile and CUDA graphs: whole graphs, no waiting for the device, the same numbers."""

import contextlib
import copy

import pytest
import torch

import quest_core

ATTENTIONS = [
    "standard",
    "quest",
    "qknorm",
    "quest+gqa(kv_heads=2)",
    "quest+kdgqa(kv_heads=2)",
    "quest+dgqa(kv_heads=2, window=2)",
    "quest+pgqa(kv_heads=2)",
    "elliptical-quest",
    "quest+sigmoid",
    "quest+sinkhorn",
    "linear",
    "cosine",
    "aft-simple",
    "aft-local(max_length=64, rank=8, window=8)",
]


def layer(attention, device):
    made = quest_core.Attention(64, 4, attention, device=device)
    quest_core.chain(made)
    return made


def step(model, x):
    """Output, gradient of the input, gradients of the parameters."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(1)
    out = model(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach().clone(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("attention", [a for a in ATTENTIONS if "pgqa" not in a])  # its noise differs when compiled
def test_compiled_training_equals_eager(attention, device):
    """One graph without breaks; on a GPU through inductor."""
    eager, x = layer(attention, device), torch.randn(2, 50, 64, device=device)
    twin = copy.deepcopy(eager)
    quest_core.chain(twin)
    torch.compiler.reset()
    compiled = torch.compile(twin, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    for _ in range(3):
        for a, b in zip(step(compiled, x), step(eager, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * max(1.0, b.abs().max().item()))
    # norms in float64, summed up from float32
    torch.testing.assert_close([*twin.buffers()], [*eager.buffers()], rtol=1e-5, atol=1e-5)


# aft-local reads numbers from the device.
CAPTURED = [a for a in ATTENTIONS if not a.startswith("aft-local")]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", CAPTURED)
def test_a_training_step_is_captured_as_a_cuda_graph(attention):
    """Capture fails where the host waits for the device; replays take new inputs."""
    model = layer(attention, "cuda")
    inputs = [torch.randn(2, 50, 64, device="cuda") for _ in range(3)]
    # Noise, and sizes that follow the steps: no replay equals an eager step.
    wanted = None if "pgqa" in attention or "dgqa" in attention else [step(model, x) for x in inputs]
    static = inputs[0].clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # allocate
            model.zero_grad(set_to_none=True)
            static.grad = None
            model(static).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    static.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(static)
        out.square().sum().backward()
    for i, x in enumerate(inputs):
        with torch.no_grad():
            static.copy_(x)
        graph.replay()
        got = [out.detach(), static.grad]
        assert all(g.isfinite().all() for g in got)
        if wanted is not None:
            torch.testing.assert_close(got, wanted[i][:2], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_host_never_waits_for_the_device(attention, monkeypatch):
    """On tensors that have shapes and no values, which take the paths of a GPU: reading one raises.

    What an operator of ours does inside is not looked into here: that of aft-local waits (`CAPTURED`).
    """
    # Autocast does not know this device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    model = layer(attention, "meta")
    x = torch.empty(2, 50, 64, device="meta", requires_grad=True)
    out = model(x)
    out.square().sum().backward()
    assert out.shape == x.shape
    assert x.grad is not None
    with pytest.raises(RuntimeError):
        bool(out.sum() > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["elliptical", "elliptical-quest", "quest+dgqa(kv_heads=2, window=1)"])
def test_activation_checkpointing_gives_the_same_gradients(name):
    """The GPU's backward pass has a thread of its own."""
    found = []
    for use in (False, True):
        torch.manual_seed(0)
        blocks = torch.nn.ModuleList(layer(name, "cuda") for _ in range(3))
        quest_core.chain(blocks)
        for _ in range(2):
            x = torch.randn(2, 50, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
            for block in blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if use else block(x)
            x.square().sum().backward()
        found.append([p.grad for p in blocks.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
