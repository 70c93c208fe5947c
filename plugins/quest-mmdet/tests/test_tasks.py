"""The suite, shortened, and its images."""

import numpy as np
import pytest

from devtools.cells import smoke_cell
from quest_suites.mmdet import objects
from quest_suites.mmdet.suites import SUITES
from quest_suites.mmdet.tasks import run_objects


def test_a_cell_that_is_stopped_continues(tmp_path):
    cell = smoke_cell(SUITES, tmp_path, "det/objects", batch_size=4, precision="bfloat16")
    said = []

    def stop(done, text):
        if done >= 0.75:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_objects(cell, stop)
    found = run_objects(cell, lambda done, text: said.append(text))
    assert [text.split()[1] for text in said] == ["3", "4"]  # of other images, because mmengine's sampler starts again
    assert set(found.metrics) == {"mAP", "mAP50", "largest logit"}
    assert found.details["injected"].startswith("attention=quest in 2 modules")
    assert len(found.series["loss"]) == 4


def test_boxes_are_of_what_is_seen():
    back, front = np.zeros((2, 20, 20), dtype=bool)
    back[4:10, 2:12] = True
    front[:, 8:] = True
    small = np.zeros((20, 20), dtype=bool)
    small[0, 0] = True
    found = objects.boxes([("box", back), ("pole", small), ("ball", front)])
    assert found == [("box", [2, 4, 6, 6]), ("ball", [8, 0, 12, 20])]


@pytest.mark.parametrize("size", [32, 64])
def test_images_repeat_themselves(size, tmp_path):
    for name, count in (("a", 2), ("b", 3)):
        objects.write(tmp_path / name, train=count, validation=1, size=size)
    for path in ("train/scene_000001.jpg", "validation.json"):
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()
