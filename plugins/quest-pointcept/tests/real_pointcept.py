"""Pointcept's own tools/train.py, unmodified, with and without this plugin, on generated datasets.

PT-v3m1, m2 and m3 segment scenes in nuScenes' layout (of `quest_suites.pointcept.scenes`) from Pointcept's nuScenes
configuration as `_base_`, made small below; Sonata, Concerto and PPT are in `pretraining.py`. On a machine without CUDA
the trainer needs `cpu/` on PYTHONPATH, which conftest.py sets.
"""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pretraining
import torch

from quest_suites.pointcept.scenes import scan, seeds

MODELS = ("PT-v3m1", "PT-v3m2", "PT-v3m3")
PRETRAINING = tuple(pretraining.CONFIGS)
RAW_LABELS = (9, 14, 15, 17, 18, 21, 2, 12, 22, 23, 24, 25, 26, 27, 28, 30)
"""The label in nuScenes' lidarseg files that becomes each class."""
SCENES = {"train": 16, "val": 4, "rings": 16, "rays": 120}

# Every model of Pointcept's nuScenes configuration, made small. m2 and m3 have no norms that know the dataset, m3 turns
# heads in three directions, which needs features in sixes.
SMALL = """
_base_ = [{base!r}]
{plugin}
model = dict(
    backbone_out_channels=24,
    backbone=dict(
        {delete}type={model!r}, in_channels=4, order=["z", "z-trans", "hilbert", "hilbert-trans"], stride=(2, 2),
        enc_depths=(2, 2, 2), enc_channels=(24, 48, 96), enc_num_head=(2, 4, 8), enc_patch_size=(64, 64, 64),
        dec_depths=(1, 1), dec_channels=(24, 48), dec_num_head=(2, 4), dec_patch_size=(64, 64),
        drop_path=0.1, shuffle_orders=True, enable_flash=False{attention},
    ),
)
data = dict(train=dict(data_root={data!r}), val=dict(data_root={data!r}), test=dict(data_root={data!r}))
epoch = eval_epoch = 2
batch_size, num_worker, seed = 2, 1, 0
enable_amp, enable_wandb, mix_prob = False, False, 0
hooks = [
    dict(type=name)
    for name in ("CheckpointLoader", "ModelHook", "InformationWriter", "SemSegEvaluator", "CheckpointSaver")
]
"""
WATCHED = 'hooks.append(dict(type="WatchAttention", every=4))'
PLUGIN = 'custom_imports = dict(imports=["quest_pointcept"], allow_failed_imports=False)'


class Run(NamedTuple):
    """What one training printed: the loss of every step, the mIoU after every epoch, the plugin's report, all lines."""

    losses: list[float]
    mious: list[float]
    report: str
    lines: list[str]


def config(root: Path, model: str, attention: str | None, data: Path, folder: Path) -> Path:
    """A native configuration; `attention` is None for stock Pointcept."""
    path = folder / "config.py"
    folder.mkdir(parents=True, exist_ok=True)
    plugin, asked = ("", "") if attention is None else (PLUGIN, f", attention={attention!r}")
    if model in PRETRAINING:
        text = pretraining.config(root, model, asked, data, plugin)
    else:
        base = str(root / "configs/nuscenes/semseg-pt-v3m1-0-base.py")
        delete = "" if model == "PT-v3m1" else "_delete_=True, "
        text = SMALL.format(base=base, plugin=plugin, model=model, delete=delete, attention=asked, data=str(data))
        text += WATCHED if plugin else ""
    path.write_text(text)
    return path


def write_nuscenes(folder: Path, *, train: int, val: int, rings: int, rays: int) -> None:
    """Write `train` and `val` scenes as Pointcept reads nuScenes: ``info/*.pkl`` and binary files under ``raw/``."""
    for split, count in (("train", train), ("val", val)):
        infos = []
        for seed in seeds(split, count):
            seen = scan(seed, rings=rings, rays=rays)
            token = f"street{seed:06d}"
            rows = np.zeros((len(seen.labels), 5), np.float32)  # x, y, z, intensity in 0..255, ring
            rows[:, :3], rows[:, 3] = seen.points, 255 * seen.strength
            info = {
                "lidar_path": f"samples/LIDAR_TOP/{token}.pcd.bin",
                "gt_segment_path": f"lidarseg/v1.0-trainval/{token}_lidarseg.bin",
                "lidar_token": token,
            }
            for key, data in (("lidar_path", rows), ("gt_segment_path", np.array(RAW_LABELS, np.uint8)[seen.labels])):
                path = folder / "raw" / info[key]
                path.parent.mkdir(parents=True, exist_ok=True)
                data.tofile(path)
            infos.append(info)
        path = folder / "info" / f"nuscenes_infos_10sweeps_{split}.pkl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(infos))


def write_data(folder: Path) -> None:
    """Write the generated datasets of all configurations."""
    write_nuscenes(folder, **SCENES)
    pretraining.write_rooms(folder / "rooms")


# Importing Pointcept and what it needs takes longer than these trainings, so it is done once; every run is a fork, in
# which tools/train.py is `__main__` as always. What has seen a GPU must not be forked: there every run is a process.
STARTER = """
import json, os, runpy, subprocess, sys, traceback
commands, forks = json.loads(sys.argv[1])
if forks:
    import pointcept.engines.test, pointcept.engines.train
for argv, log in commands:
    if not forks:
        with open(log, "ab") as out:
            child = subprocess.Popen([sys.executable, *argv], stdout=out, stderr=out).pid
    elif (child := os.fork()) == 0:
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        sys.argv = argv
        status = 0
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except BaseException:
            status = 1
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    os.waitpid(child, 0)
"""


def train(root: Path, *configs: Path, gpus: int = 1, options: tuple[str, ...] = ()) -> list[Run]:
    """Run tools/train.py with one configuration after the other; raises RuntimeError with its last lines if one fails.

    Args:
        root: the checkout.
        gpus: processes, each on a GPU of its own.
        options: further ``key=value`` for the trainer's --options.
    """
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    commands = []
    for config in configs:
        arguments = ["--config-file", str(config), "--num-gpus", str(gpus), "--options"]
        arguments += [f"save_path={config.parent / 'exp'}", *options]
        log = config.with_suffix(".log")
        log.unlink(missing_ok=True)
        commands.append(([str(root / "tools/train.py"), *arguments], str(log)))
    starter = [sys.executable, "-c", STARTER, json.dumps([commands, not torch.cuda.is_available()])]
    subprocess.run(starter, cwd=configs[0].parent, env=environment, check=True)
    return [_read(Path(log).read_text().splitlines()) for _, log in commands]


def _read(lines: list[str]) -> Run:
    if any(line.startswith("Traceback") for line in lines):
        raise RuntimeError("\n".join(lines[-40:]))
    return Run(
        [float(m[1]) for line in lines if (m := re.search(r"Train: \[.* loss: ([\d.]+)", line))],
        [float(m[1]) for line in lines if (m := re.search(r"Val result: mIoU/mAcc/allAcc ([\d.]+)", line))],
        next((m[1] for line in lines if (m := re.search(r"\] (attention=.+ in \d+ module.*)", line))), ""),
        lines,
    )
