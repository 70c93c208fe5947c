"""Narrow types: autocast, GradScaler, long sequences, keys of any size, repeatability."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quest_core

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def tensors(tokens, dtype, device, heads=2, dim=64):
    made = torch.randn(3, 1, tokens, heads, dim, dtype=torch.float64, device=device).to(dtype)
    return [x.transpose(1, 2) for x in made]


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("tokens", [1024, 16384, 65536])
@HALF
def test_long_sequences_are_as_exact_as_standard_attention(tokens, dtype, is_causal, device):
    """The error of the last 64 queries' outputs and of all keys' gradients against float64.

    At most twice that of PyTorch's own attention on unit keys that were rounded once.
    """
    if device == "cpu":
        tokens = {1024: 128, 16384: 512, 65536: 1024}[tokens]
    q, k, v = tensors(tokens, dtype, device)
    rows = slice(tokens - 64, tokens)  # causal or not, these see nearly all keys
    wide = [x.double() for x in (q[:, :, rows], k, v)]
    slopes = {}
    for x in wide:
        x.requires_grad_()
    scores = wide[0] @ (wide[1] / wide[1].norm(dim=-1, keepdim=True)).mT  # [1, H, 64, N]
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(tokens - 64), -torch.inf)
    truth = scores.softmax(-1) @ wide[2]
    grad = torch.randn_like(truth)
    slopes["truth"] = torch.autograd.grad(truth, wide, grad)

    outs = {"truth": truth}
    for name in ("quest", "peer"):
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        if name == "quest":
            out = quest_core.attention(*inputs, "quest", is_causal=is_causal)
        else:
            keys = F.normalize(inputs[1].float(), dim=-1).to(dtype)
            out = F.scaled_dot_product_attention(inputs[0], keys, inputs[2], is_causal=is_causal, scale=1.0)
        outs[name] = out[:, :, rows]
        slopes[name] = torch.autograd.grad(outs[name], inputs, grad.to(dtype))
        slopes[name] = (slopes[name][0][:, :, rows], *slopes[name][1:])

    def error(of, kind):
        return float((kind[of].double() - kind["truth"]).detach().norm())

    for kind in (outs, *({name: s[i] for name, s in slopes.items()} for i in range(3))):
        floor = 2 * torch.finfo(dtype).eps * float(kind["truth"].detach().norm())
        assert error("quest", kind) <= max(2 * error("peer", kind), floor)
        assert error("quest", kind) <= 64 * torch.finfo(dtype).eps * float(kind["truth"].detach().norm())
    assert outs["quest"].isfinite().all()


@HALF
def test_keys_of_any_size_give_the_same_output(dtype, device):
    """Norms are taken in float32: keys whose squares overflow or vanish in float16 are normalized alike."""
    q, k, v = tensors(128, dtype, device)
    wanted = quest_core.attention(q, k, v, "quest").float()
    for size in (2.0**-8, 2.0**11):
        got = quest_core.attention(q, k * size, v, "quest").float()
        torch.testing.assert_close(got, wanted, rtol=0, atol=8 * torch.finfo(dtype).eps)


@HALF
@pytest.mark.parametrize("attention", ["quest", "qknorm-hs", "quest+gqa(kv_heads=2)", "quest+sigmoid", "cosine"])
def test_autocast(attention, dtype, device):
    """Outputs in the narrow type, gradients in float32, both near the float32 result."""
    layer = quest_core.Attention(64, 4, attention, device=device)
    x = torch.randn(2, 70, 64, device=device)
    wanted = layer(x)
    wanted.square().sum().backward()
    slopes = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    with torch.autocast(device, dtype):
        out = layer(x)
    out.float().square().sum().backward()
    assert out.dtype == dtype
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    eps = torch.finfo(dtype).eps
    assert (out.float() - wanted).norm() <= 8 * eps * wanted.norm()
    for p, slope in zip(layer.parameters(), slopes, strict=True):
        assert (p.grad - slope).norm() <= 16 * eps * max(slope.norm(), 1e-3)


@pytest.mark.parametrize("attention", ["quest", "qknorm-hs", "elliptical-quest", "quest+sigmoid"])
def test_gradscaler_with_zero_keys_never_skips_a_step(attention, device):
    """Tokens of zeros and no bias make keys of exactly zero, whose gradient an epsilon would send to infinity."""
    blocks = nn.ModuleList(quest_core.Attention(32, 4, attention, bias=False, device=device) for _ in range(2))
    quest_core.chain(blocks)
    optimizer = torch.optim.AdamW(blocks.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
    x = torch.randn(4, 40, 32, device=device)
    x[:, ::3] = 0
    mask = torch.arange(40, device=device) < torch.tensor([40, 30, 20, 1], device=device)[:, None]
    losses = []
    for _ in range(8):
        with torch.autocast(device, torch.float16):
            out = x
            for block in blocks:
                out = block(out, key_mask=mask)
        loss = (out.float() - 1).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        assert all(p.grad.isfinite().all() for p in blocks.parameters())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() == 2.0**12
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "attention", ["quest", "qknorm", "quest+gqa(kv_heads=2)", "quest+dgqa(kv_heads=2)", "quest+sigmoid", "linear"]
)
def test_the_same_seed_gives_the_same_bits(attention, device):
    """With torch.use_deterministic_algorithms, which raises where an operator cannot promise it."""
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(2):
            torch.manual_seed(0)
            dropout = 0.0 if attention == "linear" else 0.1
            layer = quest_core.Attention(64, 4, attention, dropout=dropout, device=device)
            x = torch.randn(4, 130, 64, device=device, requires_grad=True)
            with torch.autocast(device, torch.bfloat16):
                out = layer(x)
            out.float().square().sum().backward()
            found.append([out, x.grad, *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(*found, rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)
