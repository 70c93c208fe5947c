"""The generated scenes of quest_suites.mmseg as data for a detector, in the layout of COCO: no download.

python -m quest_suites.mmdet.objects data/objects --train 512 --validation 64
"""

import json
from pathlib import Path

import cv2
import numpy as np

from quest_suites.mmseg.scenes import OBJECTS, main, scene

SMALLEST = 16
"""Pixels of an object that must be seen for it to have a box."""


def boxes(objects: list[tuple[str, np.ndarray]]) -> list[tuple[str, list[int]]]:
    """Return the name and the box [x, y, width, height] of what is seen of every object that is large enough."""
    found: list[tuple[str, list[int]]] = []
    for index, (name, outline) in enumerate(objects):
        seen = outline.copy()
        for _, front in objects[index + 1 :]:
            seen &= ~front
        if seen.sum() >= SMALLEST:
            rows, columns = np.nonzero(seen)
            x, y = int(columns.min()), int(rows.min())
            found.append((name, [x, y, int(columns.max()) + 1 - x, int(rows.max()) + 1 - y]))
    return found


def write(folder: Path, *, train: int, validation: int, size: int = 64, seed: int = 0) -> None:
    """Write train/ and validation/ with images, and train.json and validation.json, in place of earlier ones.

    Image i depends on the seed and on its split, not on the number of images.
    """
    for number, (split, count) in enumerate((("train", train), ("validation", validation))):
        (folder / split).mkdir(parents=True, exist_ok=True)
        for earlier in (folder / split).glob("scene_*.jpg"):
            earlier.unlink()
        images: list[dict[str, object]] = []
        annotations: list[dict[str, object]] = []
        for index in range(count):
            image, _, objects = scene(size, np.random.default_rng([seed, number, index]))
            name = f"scene_{index:06d}.jpg"
            cv2.imwrite(str(folder / split / name), image, [cv2.IMWRITE_JPEG_QUALITY, 95])
            images.append({"id": index, "file_name": name, "width": size, "height": size})
            for kind, box in boxes(objects):
                area = box[2] * box[3]
                one = {"id": len(annotations) + 1, "image_id": index, "category_id": OBJECTS.index(kind) + 1}
                annotations.append({**one, "bbox": box, "area": area, "iscrowd": 0})
        categories = [{"id": index + 1, "name": name} for index, name in enumerate(OBJECTS)]
        made = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"{split}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(write, __doc__)
