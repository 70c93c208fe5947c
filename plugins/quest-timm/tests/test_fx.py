"""Symbolic traces of torch.fx and of torchvision: the attention is a leaf, as reported in timm#1176."""

import pytest
import timm
import torch
from torchvision.models.feature_extraction import create_feature_extractor

import quest_core

MODELS = {
    "vit_tiny_patch16_224": {"img_size": 32},
    "swin_tiny_patch4_window7_224": {"img_size": 32, "window_size": 1},
    "eva02_tiny_patch14_224": {"img_size": 28},
}


@pytest.mark.parametrize(("name", "attention"), zip(MODELS, ["quest", "quest+sigmoid", "standard"], strict=True))
def test_a_model_is_traced(name, attention):
    model = timm.create_model(name, num_classes=3, **MODELS[name]).eval()
    quest_core.inject(model, attention)
    size = MODELS[name]["img_size"]
    images = torch.randn(2, 3, size, size)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(images), model(images))
    found = create_feature_extractor(model, ["head"])(images)
    torch.testing.assert_close(found["head"], model(images))
