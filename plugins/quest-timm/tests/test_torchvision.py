"""torchvision's transformers, which timm brings along and which have no plugin of their own."""

import torch
import torchvision
from torchvision.models.swin_transformer import ShiftedWindowAttention

import quest_core
from quest_core.mechanisms import naive as reference


def gradients(model, x):
    out = model(x)
    model.zero_grad()
    (out * torch.linspace(-1, 1, out.numel()).to(out).view_as(out)).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def swin():
    torch.manual_seed(0)
    model = torchvision.models.SwinTransformer([4, 4], 16, [2, 1], [2, 4], [4, 4], num_classes=5).eval()
    for module in model.modules():  # the biases of the positions and the head start near zero
        if type(module) is ShiftedWindowAttention:
            torch.nn.init.normal_(module.relative_position_bias_table)
    torch.nn.init.normal_(model.head.weight)
    return model


def test_swin_writes_its_attention_out():
    """The first stage shifts the windows of its second block."""
    x = torch.randn(2, 3, 32, 32)
    model, report = quest_core.inject(swin(), "standard", example=x)
    assert [row.path for row in report.replacements] == [f"features.{i}.attn" for i in ("1.0", "1.1", "3.0")]
    assert {row.adapter for row in report.replacements} == {"written out"}
    (got, ours), (wanted, theirs) = gradients(model, x), gradients(swin(), x)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-6 * max(1, grad.abs().max().item()))


def test_quest_in_swin_equals_its_formula_in_float64(monkeypatch):
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    found = gradients(quest_core.inject(swin().double(), "quest", example=x)[0], x)
    stock, product, head_dim = swin().double(), torch.Tensor.matmul, 8

    def of_unit_keys(a, b):
        if a.shape[-1] != head_dim:  # weights and values
            return product(a, b)
        return product(a * head_dim**0.5, reference.unit(b.mT).mT)  # torchvision has scaled the queries

    monkeypatch.setattr(torch.Tensor, "matmul", of_unit_keys)
    torch.testing.assert_close(found, gradients(stock, x), rtol=1e-9, atol=1e-10)
