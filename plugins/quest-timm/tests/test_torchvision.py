"""torchvision's transformers, which timm brings along and which have no plugin of their own."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision

import quest_core
from quest_core.mechanisms import naive as reference


def vit():
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 16, 32, num_classes=5).eval()
    torch.nn.init.normal_(model.heads.head.weight)
    return model


def gradients(model, x):
    out = model(x)
    model.zero_grad()
    (out * torch.linspace(-1, 1, out.numel()).to(out).view_as(out)).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def formula(q, k, v, *_, **__):
    seen = reference.visible(q.shape[2], k.shape[2], None, False)
    return reference.softmax(q @ reference.unit(k).mT, seen) @ v


def test_standard_equals_stock_in_outputs_and_gradients():
    x = torch.randn(2, 3, 32, 32)
    model, report = quest_core.inject(vit(), "standard", example=x)
    assert {row.adapter for row in report.replacements} == {"torch"}
    (got, ours), (wanted, theirs) = gradients(model, x), gradients(vit(), x)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-6 * max(1, grad.abs().max().item()))


def test_quest_equals_its_formula_in_float64(monkeypatch):
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    found = gradients(quest_core.inject(vit().double(), "quest")[0], x)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", formula)
    stock = vit().double().train()  # in evaluation, PyTorch takes a path of its own
    wanted = gradients(stock, x)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


def test_save_and_load(tmp_path):
    x = torch.randn(2, 3, 32, 32)
    model, _ = quest_core.inject(vit(), "quest")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    again, _ = quest_core.inject(vit(), "quest")
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(state)
    assert torch.equal(again(x), model(x))
    with pytest.raises(RuntimeError, match="attention_is_not_standard"):
        vit().load_state_dict(state)


@pytest.mark.parametrize("version", ["", "_v2"])
def test_swin_forms_its_weights_itself_and_is_refused_by_name(version):
    block = getattr(torchvision.models.swin_transformer, f"SwinTransformerBlock{version.upper()[1:]}")
    model = torchvision.models.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4], num_classes=5, block=block).eval()
    with pytest.raises(
        quest_core.InjectionError, match=r"reached no call .* look like attention: ShiftedWindowAttention"
    ):
        quest_core.inject(copy.deepcopy(model), "quest", example=torch.randn(1, 3, 32, 32))
