"""Generated scenes in the layout of ADE20K: a trainer, its evaluator and corruptions run without a download.

An image is a room (wall and floor) or a landscape (sky and grass) with a few objects. Only the outline identifies an
object: colors, stripes and light are random. Labels are those of ADE20K, so its dataset class reads them.

    python -m quest_suites.mmseg.scenes data/scenes --train 256 --validation 64
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

CLASSES = ("wall", "sky", "floor", "grass", "box", "ball", "tent", "pole")
"""The classes of the scenes, by ADE20K's names."""
LABELS = {"wall": 1, "sky": 3, "floor": 4, "grass": 10, "box": 42, "ball": 120, "tent": 115, "pole": 94}
"""Their values in an annotation file; 0 is unlabelled."""
OBJECTS = ("box", "ball", "tent", "pole")


def scene(size: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, list[tuple[str, np.ndarray]]]:
    """Return one image [size, size, 3], BGR, its labels [size, size], both uint8, and the objects, front ones last.

    An object is its name and its outline, boolean [size, size], of which those in front may hide a part.
    """
    horizon = int(size * generator.uniform(0.35, 0.65))
    indoors = generator.random() < 0.5
    image: np.ndarray = np.empty((size, size, 3), dtype=np.float32)
    labels = np.empty((size, size), dtype=np.uint8)
    for part, name in ((slice(0, horizon), "wall" if indoors else "sky"), (slice(horizon, size), None)):
        name = name or ("floor" if indoors else "grass")
        image[part] = _ground(name, size, generator)[part]
        labels[part] = LABELS[name]
    objects = []
    for _ in range(generator.integers(2, 6)):
        name = OBJECTS[generator.integers(len(OBJECTS))]
        inside = _outline(name, size, generator)
        paint = generator.uniform(20, 235, 3) + _stripes(size, generator)[..., None]
        image[inside] = paint[inside]
        labels[inside] = LABELS[name]
        objects.append((name, inside))
    light = generator.uniform(0.7, 1.2) * np.linspace(1, generator.uniform(0.7, 1.3), size)[None, :, None]
    image = image * light + generator.normal(0, 4, image.shape)
    return image.clip(0, 255).astype(np.uint8), labels, objects


def _ground(name: str, size: int, generator: np.random.Generator) -> np.ndarray:
    """[size, size, 3]: sky fades, grass is rough, walls and floors are flat or striped in any color."""
    rows = np.linspace(-1, 1, size)[:, None, None]
    if name == "sky":
        return np.array([210.0, 170, 130]) + generator.normal(0, 12, 3) - 30 * rows + np.zeros((size, size, 3))
    if name == "grass":
        rough = cv2.GaussianBlur(generator.normal(0, 60, (size, size)), (0, 0), 1.0)
        return np.array([50.0, 140, 70]) + generator.normal(0, 12, 3) + rough[..., None]
    return generator.uniform(90, 220, 3) + 0.5 * _stripes(size, generator)[..., None] + np.zeros((size, size, 3))


def _stripes(size: int, generator: np.random.Generator) -> np.ndarray:
    """[size, size]: waves of any direction and length."""
    angle, length = generator.uniform(0, np.pi), generator.uniform(5, 24)
    rows, columns = np.mgrid[:size, :size]
    return generator.uniform(0, 30) * np.sin(2 * np.pi * (rows * np.sin(angle) + columns * np.cos(angle)) / length)


def _outline(name: str, size: int, generator: np.random.Generator) -> np.ndarray:
    """Boolean [size, size]: the pixels of one object."""
    mask = np.zeros((size, size), dtype=np.uint8)
    x, y = generator.integers(0, size, 2)
    extent = size * generator.uniform(0.12, 0.24)
    if name == "ball":
        cv2.circle(mask, (int(x), int(y)), int(extent), 1, -1)
    elif name == "box":
        wide, high = extent * generator.uniform(0.8, 1.3), extent * generator.uniform(0.8, 1.2)
        cv2.rectangle(mask, (int(x - wide), int(y - high)), (int(x + wide), int(y + high)), 1, -1)
    elif name == "tent":
        corners = [(x, y - extent), (x - 1.2 * extent, y + extent), (x + 1.2 * extent, y + extent)]
        cv2.fillPoly(mask, [np.array(corners, dtype=np.int32)], 1)
    else:
        cv2.rectangle(
            mask, (int(x - 0.16 * extent), int(y - 2 * extent)), (int(x + 0.16 * extent), int(y + 2 * extent)), 1, -1
        )
    return mask.astype(bool)


def write(folder: Path, *, train: int, validation: int, size: int = 64, seed: int = 0) -> None:
    """Write images/ and annotations/, each with training/ and validation/, in place of earlier scenes there.

    Image i depends on the seed and on its split, not on the number of images.
    """
    for number, (split, count) in enumerate((("training", train), ("validation", validation))):
        images, annotations = folder / "images" / split, folder / "annotations" / split
        images.mkdir(parents=True, exist_ok=True)
        annotations.mkdir(parents=True, exist_ok=True)
        for earlier in (*images.glob("scene_*.jpg"), *annotations.glob("scene_*.png")):
            earlier.unlink()
        for index in range(count):
            name = f"scene_{split[:5]}_{index:06d}"
            image, labels, _ = scene(size, np.random.default_rng([seed, number, index]))
            cv2.imwrite(str(images / f"{name}.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, 95])
            cv2.imwrite(str(annotations / f"{name}.png"), labels)


def main(write: Callable[..., None] = write, about: str | None = __doc__) -> None:
    """Write scenes from the command line, for segmentation or by the `write` of another task."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder; the data_root of a config")
    parser.add_argument("--train", type=int, default=256, help="training images")
    parser.add_argument("--validation", type=int, default=64, help="validation images")
    parser.add_argument("--size", type=int, default=64, help="height and width in pixels")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.folder, train=options.train, validation=options.validation, size=options.size, seed=options.seed)
    print(f"{options.folder}: {options.train} training and {options.validation} validation scenes")


if __name__ == "__main__":
    main()
