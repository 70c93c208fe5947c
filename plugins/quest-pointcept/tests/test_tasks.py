"""The suites, shortened, and the scenes they use."""

import math

import numpy as np
import pytest
import torch
from real_pointcept import RAW_LABELS

from devtools.cells import HostSuites, check_resume, smoke_cell
from quest_suites.pointcept import scenes, tasks
from quest_suites.pointcept.suites import SUITES

# --- scenes -----------------------------------------------------------------------------------------------------------


def test_scenes_are_what_their_seed_says():
    one, again, other = scenes.scan(3), scenes.scan(3), scenes.scan(4)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not np.array_equal(one.points, other.points)
    assert one.points.dtype == one.strength.dtype == np.float32
    assert 3000 < len(one.labels) < 32 * 240
    assert np.abs(one.points).max() < scenes.RANGE + 2
    assert 0 <= one.strength.min() <= one.strength.max() <= 1


def test_every_class_is_seen():
    counts = sum(np.bincount(scenes.scan(seed, rays=120).labels, minlength=16) for seed in range(12))
    assert len(counts) == len(scenes.CLASSES) == len(RAW_LABELS) == 16
    assert (counts > 0).all(), dict(zip(scenes.CLASSES, counts, strict=True))


def test_the_ground_lies_where_it_should():
    seen = scenes.scan(0)
    flat = np.isin(seen.labels, [scenes.CLASSES.index(name) for name in ("driveable_surface", "sidewalk", "terrain")])
    assert np.abs(seen.points[flat, 2] + scenes.SENSOR_HEIGHT).max() < 0.15


def test_no_scene_is_in_both_splits():
    assert set(scenes.seeds("train", 5000)).isdisjoint(scenes.seeds("val", 5000))


# --- points/scenes ----------------------------------------------------------------------------------------------------


def test_a_stopped_cell_continues_at_its_last_epoch_and_says_what_it_did(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(tasks, "RINGS", 8)
    monkeypatch.setattr(tasks, "RAYS", 60)
    one = check_resume(tasks.run_scenes, smoke_cell(SUITES, tmp_path, "points/scenes"), tmp_path, share=0.5)
    assert len(one.series["train_loss"]) == 2
    assert one.details["injected"].startswith("attention=quest in 8 modules")
    assert one.metrics["miou"] == pytest.approx(np.nanmean(list(one.details["iou"].values())), abs=1e-9)
    assert capfd.readouterr().out == ""
    other = tasks.run_scenes(smoke_cell(SUITES, tmp_path, "points/scenes", "standard"), lambda *_: None)
    assert other.series != one.series
    assert other.details["parameters"] == one.details["parameters"]


def test_intersection_over_union():
    confusion = torch.zeros(16, 16, dtype=torch.long)
    confusion[0, 0], confusion[0, 1], confusion[1, 1] = 6, 2, 4
    iou = tasks.intersection_over_union(confusion)
    assert (iou["barrier"], iou["bicycle"]) == (6 / 8, 4 / 6)
    assert math.isnan(iou["bus"])


def test_one_point_of_each_voxel():
    seen = scenes.scan(0, rings=8, rays=60)
    for random in (None, np.random.default_rng(0)):
        x, grid, label = tasks.voxels(seen, 0.5, random)
        assert len(np.unique(grid, axis=0)) == len(grid) == len(x) == len(label)
        assert grid.min() == 0
    x, grid, _ = tasks.voxels(seen, 0.5, None)
    np.testing.assert_array_equal(np.floor((x[:, :3] - seen.points.min(0)) / 0.5).astype(int), grid)


# --- suites -----------------------------------------------------------------------------------------------------------


class TestSuites(HostSuites):
    committed = ("points/scenes", "time/pointcept")
