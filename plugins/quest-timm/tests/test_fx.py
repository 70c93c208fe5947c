"""Symbolic traces of torch.fx and of timm: the attention is a leaf, as reported in timm#1176."""

import pytest
import timm
import torch
from timm.models import create_feature_extractor

import quest_core

MODELS = [
    ("vit_tiny_patch16_224", {"img_size": 32}, "quest"),
    ("swin_tiny_patch4_window7_224", {"img_size": 32, "window_size": 1}, "quest+sigmoid"),
    ("eva02_tiny_patch14_224", {"img_size": 28}, "standard"),
    ("pvt_v2_b0", {}, "quest"),
]


@pytest.mark.parametrize(("name", "options", "attention"), MODELS)
def test_a_model_is_traced(name, options, attention):
    model = timm.create_model(name, num_classes=3, **options).eval()
    quest_core.inject(model, attention)
    size = options.get("img_size", 64)
    images = torch.randn(2, 3, size, size)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(images), model(images))
    found = create_feature_extractor(model, ["head"])(images)
    torch.testing.assert_close(found["head"], model(images))
