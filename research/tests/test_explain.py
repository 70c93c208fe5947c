"""explain/*: masks are exact, and both maps equal an independent computation."""

import math

import pandas as pd
import pytest
import torch
from cells import cell, run

from quest_research.suites import explain
from quest_research.suites.images import VisionTransformer

SHAPE = {"patch": 14, "width": 16, "heads": 2}


def test_masks_are_exact():
    images = torch.rand(20, 28, 28) * (torch.rand(20, 28, 28) > 0.5)
    canvases, masks = explain.place(images, 42, 7, 0.1, torch.Generator().manual_seed(0))
    places = set()
    for image, canvas, mask in zip(images, canvases, masks, strict=True):
        assert mask.sum() == (image > 0).sum()
        assert torch.equal(canvas[mask], image[image > 0])  # in the order of rows, so at the same places
        assert canvas[~mask].max() <= 0.1
        rows, columns = mask.nonzero().amin(0).tolist()
        places.add((rows, columns))
        assert rows % 7 == columns % 7 == 0  # the first row and column of an image hold an object pixel here
    assert len(places) > 3


@pytest.mark.parametrize(("attention", "unit"), [("standard", False), ("quest", True)])
def test_ag_cam_equals_a_model_written_out(attention, unit):
    torch.manual_seed(0)
    model = VisionTransformer(attention, SHAPE | {"layers": 2}, size=(28, 28)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    images, labels = torch.randn(3, 28, 28), torch.tensor([1, 7, 4])
    found = explain.maps(model, images, labels)

    patches = images.reshape(3, 2, 14, 2, 14).transpose(2, 3).reshape(3, 4, 196)
    x = model.embedding(patches) + model.positions
    weights, logits = [], []
    for block in model.blocks:
        y, layer = block.norm1(x), block.attention
        q, k, v = (p(y).reshape(3, 4, 2, 8).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        logits.append(q @ (k / k.norm(dim=-1, keepdim=True) if unit else k / math.sqrt(8)).transpose(2, 3))
        weights.append(logits[-1].softmax(-1))
        x = x + layer.out_proj((weights[-1] @ v).transpose(1, 2).reshape(3, 4, 16))
        x = x + block.mlp(block.norm2(x))
    scores = model.classifier(model.norm(x).mean(1))
    wanted = torch.zeros(3, 4)
    for sample in range(3):
        gradients = torch.autograd.grad(scores[sample, labels[sample]], weights, retain_graph=True)
        for gradient, logit in zip(gradients, logits, strict=True):
            wanted[sample] += (gradient[sample].clamp(min=0) * torch.sigmoid(logit[sample])).sum(0).mean(0)
    torch.testing.assert_close(found["AG-CAM"], wanted)

    flow = torch.eye(4).expand(3, 4, 4)
    for layer in reversed(weights):  # from the output back to the input
        flow = flow @ (layer.mean(1) + torch.eye(4)) / 2
    torch.testing.assert_close(found["rollout"], flow.mean(1))
    torch.testing.assert_close(found["rollout"].sum(1), torch.ones(3))


def test_recording_leaves_the_model_as_it_was():
    model = VisionTransformer("quest", SHAPE | {"layers": 1}, size=(28, 28)).eval()
    images = torch.randn(2, 28, 28)
    before = model(images)
    with explain.recorded() as seen:
        torch.testing.assert_close(model(images), before)
    assert len(seen) == 1
    assert torch.equal(model(images), before)
    assert len(seen) == 1


def test_scores_of_a_map():
    masks = torch.tensor([[[True, True], [False, False]]])
    pixels = torch.tensor([[[0.9, 0.2], [0.6, 0.1]]])
    found = {name: value.item() for name, value in explain.compare(pixels, masks).items()}
    assert found == pytest.approx({"IoU": 1 / 3, "Dice": 1 / 2, "pixel accuracy": 1 / 2, "pointing": 1})
    scaled = explain.to_pixels(torch.tensor([[3.0, 5.0, 3.0, 4.0]]), 6)
    assert scaled.amin() == 0
    assert scaled.amax() == 1
    assert torch.equal(explain.to_pixels(torch.ones(1, 4), 6), torch.zeros(1, 6, 6))


def test_a_cell_measures_and_is_drawn(data):
    result = run(cell("explain/fashion-mnist", "canvas", data=data))
    assert all(0 <= value <= 100 for value in result.metrics.values())
    assert {"AG-CAM IoU", "rollout pointing", "accuracy"} <= result.metrics.keys()
    drawn = {"attention": "quest", "seed": 0, "details": result.details}
    ((title, caption, figure),) = explain.pictures(pd.DataFrame({"attention": ["quest"]}), [drawn])
    assert title == "Maps"
    assert "seed 0" in caption
    assert len(figure.axes) == 3 * explain.SHOWN
