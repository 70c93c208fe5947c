"""torchvision's transformers, which timm brings along and which have no plugin of their own."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision

import quest_core


def vit():
    torch.manual_seed(0)
    return torchvision.models.VisionTransformer(32, 8, 2, 4, 16, 32, num_classes=5).eval()


def test_vit_is_replaced_through_torch_nn_multiheadattention():
    stock = vit()
    torch.nn.init.normal_(stock.heads.head.weight)
    x = torch.randn(2, 3, 32, 32)
    model, report = quest_core.inject(copy.deepcopy(stock), "standard", example=x)
    assert {row.adapter for row in report.replacements} == {"torch"}
    torch.testing.assert_close(model(x), stock(x), rtol=1e-6, atol=1e-6)
    quest_core.inject(model, "quest", example=x)
    assert not torch.allclose(model(x), stock(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("version", ["", "_v2"])
def test_swin_forms_its_weights_itself_and_is_refused_by_name(version):
    block = getattr(torchvision.models.swin_transformer, f"SwinTransformerBlock{version.upper()[1:]}")
    model = torchvision.models.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4], num_classes=5, block=block).eval()
    with pytest.raises(
        quest_core.InjectionError, match=r"reached no call .* look like attention: ShiftedWindowAttention"
    ):
        quest_core.inject(model, "quest", example=torch.randn(1, 3, 32, 32))
