"""The suites, shortened; scenes and corruptions."""

import itertools
import math
import random
import sys

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from mmseg.datasets import ADE20KDataset
from mmseg.registry import DATASETS, TRANSFORMS

from devtools.cells import HostSuites, smoke_cell
from quest_core.errors import PluginError
from quest_suites.mmseg import scenes, tasks
from quest_suites.mmseg.corruptions import CORRUPTIONS, Corrupt, distort, severities
from quest_suites.mmseg.suites import SUITES
from quest_suites.mmseg.tasks import run_ade20k, run_camvid, run_shapes

# --- suites ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_shapes_are_reproducible_and_say_what_they_did(tmp_path, monkeypatch):
    reported = []
    given = smoke_cell(SUITES, tmp_path, "seg/shapes", batch_size=4)
    one = run_shapes(given, lambda done, text: reported.append((done, text)))
    monkeypatch.setattr(tasks, "SMOKE_CORRUPTIONS", ("gaussian_noise",))  # corruptions repeat themselves, see below
    two = run_shapes(smoke_cell(SUITES, tmp_path, "seg/shapes", batch_size=4), lambda *_: None)
    for name in ("mIoU", "aAcc", "mIoU corrupted/gaussian_noise"):
        assert one.metrics[name] == two.metrics[name]
    assert one.series == two.series
    assert len(one.series["loss"]) == 4
    assert list(one.metrics) == [
        "mIoU", "aAcc", "mIoU corrupted", "mIoU corrupted/gaussian_noise", "mIoU corrupted/fog"
    ]  # fmt: skip
    by_severity = one.details["mIoU by severity"]
    assert [len(values) for values in by_severity.values()] == [3, 5]
    assert one.metrics["mIoU corrupted/fog"] == pytest.approx(sum(by_severity["fog"]) / 5)
    assert one.details["injected"].startswith("attention=quest in 6 modules")
    assert reported[0] == (pytest.approx(0.7 / 4), f"iteration 1 loss {one.series['loss'][0]:.3f}")
    assert reported[-1][0] == 1


@pytest.mark.slow
def test_a_missing_package_of_corruptions_is_named_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    reported = []
    with pytest.raises(PluginError, match="pip install 'quest-suites\\[robustness\\]'"):
        run_shapes(smoke_cell(SUITES, tmp_path, "seg/shapes"), lambda *said: reported.append(said))
    assert not reported


def test_an_interrupted_cell_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "SMOKE_CORRUPTIONS", ())

    def stop(done, text):
        if text.startswith("iteration 3"):
            raise KeyboardInterrupt

    given = smoke_cell(SUITES, tmp_path, "seg/shapes", batch_size=4)
    with pytest.raises(KeyboardInterrupt):
        run_shapes(given, stop)
    reported = []
    done = run_shapes(given, lambda done, text: reported.append(text))
    assert [text.split()[1] for text in reported if text.startswith("iteration")] == ["3", "4"]
    assert len(done.series["loss"]) == 4


@pytest.mark.slow
def test_ade20k_from_a_folder(tmp_path, monkeypatch):
    """The official layout, with the shipped 512x512 config cut to a few iterations; corrupted images with it."""
    scenes.write(tmp_path / "ade", train=2, validation=1, size=48)
    options = {"data": tmp_path / "ade", "task": "vit-t", "workers": 0, "iterations": 1}
    found = run_ade20k(smoke_cell(SUITES, tmp_path, "seg/ade20k", **options), lambda *_: None)
    assert math.isfinite(found.metrics["mIoU"])
    assert found.details["injected"].startswith("attention=quest in 14 modules")
    monkeypatch.setattr(tasks, "SMOKE_CORRUPTIONS", ("gaussian_noise",))
    corrupt = smoke_cell(SUITES, tmp_path, "seg/ade20k-c", **options)
    noisy = run_ade20k(corrupt, lambda *_: None)
    assert {name: noisy.metrics[name] for name in found.metrics} == found.metrics
    assert len(noisy.details["mIoU by severity"]["gaussian_noise"]) == 3
    assert noisy.metrics["mIoU corrupted"] == noisy.metrics["mIoU corrupted/gaussian_noise"]


@pytest.mark.slow
def test_camvid_from_a_folder(tmp_path):
    """Void pixels count in no class: a test image of nothing else changes no metric."""
    draw, void, found = np.random.default_rng(0), np.full((36, 48), 11), []

    def write(split, number, labels):
        for folder, image in ((split, draw.integers(0, 255, (36, 48, 3))), (f"{split}annot", labels)):
            (tmp_path / "CamVid" / folder).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(tmp_path / "CamVid" / folder / f"{number}.png"), image.astype(np.uint8))

    for split, number in itertools.product(("train", "val", "test"), range(2)):
        write(split, number, draw.integers(0, 12, (36, 48)))
    for _ in ("labelled", "and void"):
        one = smoke_cell(SUITES, tmp_path, "seg/camvid", data=tmp_path / "CamVid", batch_size=2)
        found.append(run_camvid(one, lambda *_: None))
        write("test", 2, void)
    assert found[0].details["injected"].startswith("attention=quest in 6 modules")
    assert found[0].metrics == found[1].metrics
    assert 0 < found[0].metrics["mIoU"] < 100


# --- scenes ---------------------------------------------------------------------------------------------------------


def test_scenes_are_read_by_the_dataset_class_of_ade20k(tmp_path):
    scenes.write(tmp_path, train=1, validation=3)
    pipeline = [{"type": "LoadImageFromFile"}, {"type": "LoadAnnotations"}, {"type": "PackSegInputs"}]
    prefix = {"img_path": "images/validation", "seg_map_path": "annotations/validation"}
    dataset = DATASETS.build({
        "type": "ADE20KDataset", "data_root": str(tmp_path), "data_prefix": prefix, "pipeline": pipeline,
        "metainfo": {"classes": scenes.CLASSES},
    })  # fmt: skip
    assert len(dataset) == 3
    names = ADE20KDataset.METAINFO["classes"]
    assert {name: names.index(name) + 1 for name in scenes.CLASSES} == scenes.LABELS
    for index in range(3):
        raw = cv2.imread(str(tmp_path / f"annotations/validation/scene_valid_{index:06d}.png"), cv2.IMREAD_UNCHANGED)
        want = np.vectorize({value: i for i, value in enumerate(scenes.LABELS.values())}.get)(raw)
        assert np.array_equal(dataset[index]["data_samples"].gt_sem_seg.data[0].numpy(), want)


def test_scenes_have_all_classes():
    found = {int(value) for seed in range(40) for value in np.unique(scenes.scene(64, np.random.default_rng(seed))[1])}
    assert found == set(scenes.LABELS.values())


def test_an_image_is_the_same_whatever_the_number_of_images(tmp_path):
    """A folder holds the images of the last call only."""
    scenes.write(tmp_path / "again", train=3, validation=2, size=48)
    for folder, count in (("again", 1), ("few", 1), ("more", 2)):
        scenes.write(tmp_path / folder, train=count, validation=count)
    again, few, more = (
        {path.relative_to(tmp_path / folder): path.read_bytes() for path in (tmp_path / folder).rglob("scene_*")}
        for folder in ("again", "few", "more")
    )
    assert (len(few), len(more)) == (4, 8)
    assert again == few
    assert few.items() < more.items()


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scenes", str(tmp_path / "x"), "--train", "2", "--validation", "1"])
    scenes.main()
    assert "2 training and 1 validation scenes" in capsys.readouterr().out
    assert len(list((tmp_path / "x").rglob("*.png"))) == 3


# --- corruptions ----------------------------------------------------------------------------------------------------


IMAGE = np.random.default_rng(0).integers(0, 255, (40, 56, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_corruption_is_reproducible_and_leaves_the_random_state(name):
    step = TRANSFORMS.build({"type": "Corrupt", "name": name, "severity": 2})
    before = np.random.get_state()[1].copy(), random.getstate()

    def run(file):
        return step({"img": IMAGE.copy(), "img_path": f"somewhere/{file}.jpg"})["img"]

    one = run("one")
    np.random.random()  # what was drawn elsewhere does not matter
    assert np.array_equal(run("one"), one)
    assert one.shape == IMAGE.shape
    assert one.dtype == np.uint8
    assert not np.array_equal(one, IMAGE)
    random_ones = {"glass_blur", "motion_blur", "snow", "spatter", "fog", "frost"}
    if name.endswith("noise") or name in random_ones:
        assert not np.array_equal(run("two"), one)
    assert random.getstate() == before[1]


def test_colors_are_those_of_the_image():
    """Images are BGR in mmseg and RGB for the corruptions: more saturation keeps a blue pixel blue."""
    blue = np.zeros((40, 40, 3), dtype=np.uint8)
    blue[..., 0], blue[..., 1:] = 200, 100
    made = Corrupt("saturate", 5).transform({"img": blue, "img_path": "x.jpg"})["img"]
    assert made[..., 0].mean() > made[..., 2].mean()


def test_the_protocol():
    assert len(CORRUPTIONS) == 16
    assert sum(len(severities(name)) for name in CORRUPTIONS) == 4 * 3 + 12 * 5


def test_a_corruption_follows_the_loading_of_the_image():
    pipeline = Config({"p": [{"type": "LoadImageFromFile"}, {"type": "Resize", "scale": (4, 4)}]}).p
    made = distort(pipeline, "fog", 3)
    assert [step["type"] for step in made] == ["LoadImageFromFile", "Corrupt", "Resize"]
    assert len(pipeline) == 2


class TestSuites(HostSuites):
    committed = ("time/mmseg", "seg/shapes")
