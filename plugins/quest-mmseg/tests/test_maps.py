"""Attention maps: what they show, and what they refuse."""

from __future__ import annotations

import re
import sys

import cv2
import numpy as np
import pytest
import torch
from conftest import CLASSES, segmenter
from mmengine.config import Config
from mmseg.apis import init_model
from mmseg.registry import MODELS

from quest_core.errors import ConfigError, UnsupportedError
from quest_suites.mmseg import maps

NAMES = tuple("abcde")


def config(attention: str = "quest", **backbone) -> Config:
    model = segmenter(type="quest_mmseg.EncoderDecoder", attention=attention)
    model.data_preprocessor.update(bgr_to_rgb=True)
    model.data_preprocessor.pop("size")
    model.backbone.update(backbone)
    pipeline = [{"type": "LoadImageFromFile"}, {"type": "PackSegInputs"}]
    dataset = {"type": "BaseSegDataset", "metainfo": {"classes": NAMES}, "pipeline": pipeline}
    return Config({"model": model, "test_dataloader": {"dataset": dataset}, "default_scope": "mmseg"})


def ready(attention: str = "quest", **backbone):
    torch.manual_seed(0)
    model = init_model(config(attention, **backbone), device="cpu")
    model.dataset_meta = {"classes": NAMES}
    return model


IMAGE = np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)


def test_weights_are_those_that_made_the_output():
    model = ready()
    weights, grid = maps.attend(model, IMAGE)
    assert grid == (4, 6)
    tokens = 24 + CLASSES
    assert [tuple(x.shape) for x in weights.values()] == [(4, 25, 25)] * 2 + [(4, tokens, tokens)] * 2
    for value in weights.values():
        torch.testing.assert_close(value.sum(-1), torch.ones(value.shape[:-1]))
    layer = model.backbone.layers[0].attn
    seen = []
    layer.attn.mechanism.register_forward_pre_hook(lambda m, given: seen.append(given))
    with torch.no_grad():
        model.extract_feat(
            model.data_preprocessor({"inputs": [torch.as_tensor(IMAGE).permute(2, 0, 1)]}, False)["inputs"]
        )
    q, k, _ = seen[0]
    expected = (q @ torch.nn.functional.normalize(k, dim=-1).mT).softmax(-1)[0]
    torch.testing.assert_close(weights["backbone.layers.0.attn.attn.mechanism"], expected)
    assert not hasattr(layer.attn.mechanism.forward, "__wrapped__")
    assert "forward" not in vars(layer.attn.mechanism)


def test_rollout_of_layers_that_look_at_themselves_alone_is_the_identity():
    torch.testing.assert_close(maps.rollout([torch.eye(5).expand(2, 5, 5)] * 3), torch.eye(5))
    one = torch.full((1, 2, 2), 0.5)
    torch.testing.assert_close(maps.rollout([one]), torch.tensor([[0.75, 0.25], [0.25, 0.75]]))


def test_files(tmp_path):
    model = ready()
    names = {path.name for path in maps.draw(model, IMAGE, tmp_path)}
    assert names == {"rollout.png", *(f"layer-{i:02d}-head-{h}.png" for i in range(2) for h in range(4))}
    assert cv2.imread(str(tmp_path / "rollout.png")).shape == IMAGE.shape
    first = (tmp_path / "rollout.png").read_bytes()
    maps.draw(model, IMAGE, tmp_path, at=(47, 31))
    assert (tmp_path / "rollout.png").read_bytes() != first
    assert len(maps.draw(model, IMAGE, tmp_path, label="b")) == 8


def test_a_patch_is_the_one_under_the_pixel(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(maps, "overlay", lambda image, values: drawn.append(values) or image)
    model = ready()
    weights, _ = maps.attend(model, IMAGE)
    maps.draw(model, IMAGE, tmp_path, at=(17, 9))  # third column, second row of patches of 8
    expected = weights["backbone.layers.0.attn.attn.mechanism"][0, 1 + 6 + 2, 1:].reshape(4, 6)
    torch.testing.assert_close(drawn[0], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": (48, 0)}, "outside the image of 48x32"),
        ({"label": "z"}, "class is 'z'"),
        ({"label": "a", "at": (0, 0)}, "not both"),
    ],
)
def test_bad_questions(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        maps.draw(ready(), IMAGE, tmp_path, **options)


def test_what_has_no_weights_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="'aft-simple' at .* never forms weights"):
        maps.draw(ready("aft-simple"), IMAGE, tmp_path)
    stock = MODELS.build(segmenter())
    with pytest.raises(UnsupportedError, match="attention='standard'"), maps.recorded(stock):
        pass
    with pytest.raises(ConfigError, match="no class token"):
        maps.draw(ready(with_cls_token=False), IMAGE, tmp_path)


def test_help_teaches(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["maps", "--help"])
    with pytest.raises(SystemExit):
        maps.main()
    assert re.search(r"--at X,Y\s+the pixel whose patch attends", capsys.readouterr().out)


def test_the_command(tmp_path, capsys, monkeypatch):
    """From files, as a user calls it."""
    config().dump(tmp_path / "config.py")
    torch.save(
        {"state_dict": ready().state_dict(), "meta": {"dataset_meta": {"classes": NAMES}}}, tmp_path / "model.pth"
    )
    cv2.imwrite(str(tmp_path / "image.png"), IMAGE)
    given = [str(tmp_path / name) for name in ("config.py", "model.pth", "image.png")]
    monkeypatch.setattr(sys, "argv", ["maps", *given, "--out", str(tmp_path / "maps"), "--device", "cpu"])
    maps.main()
    assert "9 maps in" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["maps", *given[:2], str(tmp_path / "none.png")])
    with pytest.raises(SystemExit):
        maps.main()
    assert "cannot be read by OpenCV" in capsys.readouterr().err
