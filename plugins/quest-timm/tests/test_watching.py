"""Watch in a loop of timm's own parts, and what its summary gets."""

import csv

import pytest
import timm
import torch
from timm.utils import update_summary

import quest_core
from devtools.logits import check, recorded


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])  # fused, and written out
def test_the_summary_holds_what_attention_does_in_every_layer(tmp_path, name):
    torch.manual_seed(0)
    sizes = {"depths": (1, 1, 1, 1), "embed_dim": 24} if "swin" in name else {"depth": 2}
    model = timm.create_model(name, img_size=56, num_classes=3, **sizes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kinds = [type(module) for module in model.modules()]
    with quest_core.Watch(model, every=1) as watch:
        for epoch in range(2):
            optimizer.zero_grad()
            with recorded() as calls:
                model(torch.randn(2, 3, 56, 56)).square().mean().backward()
            optimizer.step()
            watch.step()
            update_summary(epoch, watch.latest, {"top1": 0.0}, tmp_path / "summary.csv", write_header=epoch == 0)
    assert [type(module) for module in model.modules()] == kinds
    row = list(csv.DictReader((tmp_path / "summary.csv").open()))[-1]
    values = {key.removeprefix("train_"): float(value) for key, value in row.items() if "attention/" in key}
    check(values, calls, rel=1e-4)
