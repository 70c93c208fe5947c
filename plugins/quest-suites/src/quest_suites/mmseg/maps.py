"""Attention maps of a trained model as PNG: one a head and layer, and the rollout through the backbone.

    python -m quest_suites.mmseg.maps config.py checkpoint.pth street.jpg --out maps
    python -m quest_suites.mmseg.maps config.py checkpoint.pth street.jpg --out maps --at 310,140
    python -m quest_suites.mmseg.maps config.py checkpoint.pth street.jpg --out maps --class sky

A map shows the attention of one token: the class token by default, the patch under a pixel with ``--at x,y``, or, in
Segmenter's head, the embedding of a class with ``--class name``. For models of the VisionTransformer, BEiT and MAE
whose attention came from this plugin and has weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from matplotlib import colormaps
from mmengine.dataset import Compose
from mmengine.registry import init_default_scope
from torch import Tensor, nn

from quest_core.errors import ConfigError, InputError, QuestError, UnsupportedError, one_of
from quest_core.mechanism import Mechanism

OPACITY = 0.6


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the attention weights of the latest call inside the block: path of the layer -> [B, H, N, M].

    Raises:
        UnsupportedError: the model has no attention of this plugin, or one without weights.
    """
    found: dict[str, Tensor] = {}
    mechanisms = {path: m for path, m in model.named_modules() if isinstance(m, Mechanism)}
    if not mechanisms:
        raise UnsupportedError(
            "the model has mmseg's own attention, which does not return its weights; build it with "
            "attention='standard', which loads the same checkpoint"
        )
    for path, m in mechanisms.items():
        if m.family is not None:
            raise UnsupportedError(f"attention '{m.config}' at '{path}' never forms weights, so it has no map")

    def with_weights(path: str, m: Mechanism) -> Any:
        def forward(*arguments: Any, **options: Any) -> Tensor:
            out, weights = m.forward_with_weights(*arguments, **options)
            found[path] = weights.detach()
            return out

        return forward

    for path, m in mechanisms.items():
        m.forward = with_weights(path, m)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for m in mechanisms.values():
            del m.forward


def rollout(layers: list[Tensor]) -> Tensor:
    """Return how much of each input token reaches each output token, with residual connections (Abnar & Zuidema, 2020).

    Args:
        layers: weights [H, N, N] from the first layer to the last.

    Returns:
        [N, N]; rows sum to 1.
    """
    total = torch.eye(layers[0].shape[-1], dtype=layers[0].dtype, device=layers[0].device)
    for weights in layers:
        mixed = weights.mean(0) + torch.eye(len(total), dtype=total.dtype, device=total.device)
        total = (mixed / mixed.sum(-1, keepdim=True)) @ total
    return total


def attend(model: Any, image: np.ndarray) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Return the weights of every layer [H, N, M] for one image, and the grid of patches (height, width).

    The image goes through the model's test pipeline, and whole, not in the windows of ``mode='slide'``.

    Args:
        model: as mmseg.apis.init_model builds it.
        image: [height, width, 3], BGR.
    """
    steps = [dict(step) for step in model.cfg.test_dataloader.dataset.pipeline if step["type"] != "LoadAnnotations"]
    steps[0]["type"] = "LoadImageFromNDArray"
    init_default_scope(model.cfg.get("default_scope", "mmseg"))
    given = Compose(steps)({"img": image})
    with recorded(model) as found, torch.no_grad():
        inputs = model.data_preprocessor({"inputs": [given["inputs"]]}, False)["inputs"]
        features = model.extract_feat(inputs)
        model.decode_head.forward(features)
    last = features[-1]
    height, width = (last[0] if isinstance(last, list | tuple) else last).shape[-2:]
    weights = {path: value[0].float().cpu() for path, value in found.items()}
    for path, value in weights.items():
        if path.startswith("backbone.") and value.shape[-1] - height * width not in (0, 1):
            raise UnsupportedError(
                f"the layer '{path}' has keys {value.shape[-1]} for {height}x{width} patches; maps are drawn for "
                "VisionTransformer, BEiT and MAE"
            )
    return weights, (int(height), int(width))


def overlay(image: np.ndarray, values: Tensor) -> np.ndarray:
    """Return the image [height, width, 3], BGR, under a map [rows, columns], scaled from its minimum to its maximum."""
    spread = values.max() - values.min()
    scaled = ((values - values.min()) / torch.where(spread > 0, spread, 1)).numpy()
    large = cv2.resize(scaled, (image.shape[1], image.shape[0]), interpolation=cv2.INTER_CUBIC).clip(0, 1)
    colours = colormaps["inferno"](large)[..., 2::-1] * 255  # BGR
    return (OPACITY * colours + (1 - OPACITY) * image).astype(np.uint8)


def draw(
    model: Any, image: np.ndarray, folder: Path, *, at: tuple[int, int] | None = None, label: str | None = None
) -> list[Path]:
    """Write the maps of one image; returns the paths of the files.

    Args:
        model: as mmseg.apis.init_model builds it.
        image: [height, width, 3], BGR.
        folder: rollout.png and layer-<i>-head-<h>.png go there, or class-<name>-layer-<i>-head-<h>.png.
        at: the pixel (x, y) whose patch attends; the class token by default.
        label: a class whose embedding attends, in Segmenter's head.
    """
    if at is not None and label is not None:
        raise ConfigError("a map is of one token: give a pixel or a class, not both")
    if at is not None and not (0 <= at[0] < image.shape[1] and 0 <= at[1] < image.shape[0]):
        raise ConfigError(f"the pixel {at[0]},{at[1]} is outside the image of {image.shape[1]}x{image.shape[0]}")
    weights, (height, width) = attend(model, image)
    patches = height * width
    part = "backbone." if label is None else "decode_head."
    layers = {path: value for path, value in weights.items() if path.startswith(part)}
    if not layers:
        raise InputError(f"no attention with weights in the {part[:-1]}")
    count = next(iter(layers.values())).shape[-1]
    if label is not None:
        classes = [name.strip() for name in model.dataset_meta["classes"]]
        if label not in classes:
            raise ConfigError(f"class is '{label}'; {one_of(label, classes)}")
        row, keys, stem = patches + classes.index(label), slice(0, patches), f"class-{label.replace(' ', '-')}-"
    else:
        first = count - patches  # the class token, where there is one
        if at is None and first == 0:
            raise ConfigError("this model has no class token; choose a patch, --at x,y")
        row, keys, stem = 0, slice(first, None), ""
        if at is not None:
            row = first + at[1] * height // image.shape[0] * width + at[0] * width // image.shape[1]
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        f"{stem}layer-{i:02d}-head-{h}": heads[h, row, keys]
        for i, heads in enumerate(layers.values())
        for h in range(len(heads))
    }
    if label is None:
        pictures["rollout"] = rollout(list(layers.values()))[row, keys]
    paths = []
    for name, values in pictures.items():
        paths.append(folder / f"{name}.png")
        cv2.imwrite(str(paths[-1]), overlay(image, values.reshape(height, width)))
    return paths


def _pixel(text: str) -> tuple[int, int]:
    try:
        x, y = (int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not x,y") from None
    return x, y


def main() -> None:
    from mmengine.config import DictAction
    from mmseg.apis import init_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="the config that the model was trained with")
    parser.add_argument("checkpoint", help="its checkpoint")
    parser.add_argument("image", type=Path, help="any image")
    parser.add_argument("--out", type=Path, default=Path("maps"), help="folder for the PNG files")
    parser.add_argument("--at", type=_pixel, metavar="X,Y", help="the pixel whose patch attends")
    parser.add_argument("--class", dest="label", help="the class whose embedding attends, in Segmenter's head")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cfg-options", nargs="+", action=DictAction, help="as in tools/test.py")
    options = parser.parse_args()
    image = cv2.imread(str(options.image))
    if image is None:
        parser.error(f"{options.image} cannot be read by OpenCV")
    model = init_model(options.config, options.checkpoint, device=options.device, cfg_options=options.cfg_options)
    try:
        paths = draw(model, image, options.out, at=options.at, label=options.label)
    except QuestError as error:
        parser.error(str(error))
    print(f"{len(paths)} maps in {options.out}")


if __name__ == "__main__":
    main()
