"""Trains one shrunk Segmenter under two builds of mmcv, with mmsegmentation's own tools/train.py, and compares them.

  python plugins/quest-mmseg/benchmarks/mmcv_builds.py path/to/python-with-mmcv-lite path/to/python-with-mmcv

Both Pythons have quest-mmseg installed. Every loss that is printed, every scalar that is stored and every tensor of the
last checkpoint is compared, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

ATTENTIONS = ("stock", "standard", "quest", "quest+gqa(kv_heads=1)")
CONFIG = """
_base_ = "mmseg::segmenter/segmenter_vit-t_mask_8xb1-160k_ade20k-512x512.py"
data_preprocessor = dict(size=(64, 64))
model = dict(
    {kind}
    pretrained=None,
    data_preprocessor=data_preprocessor,
    backbone=dict(img_size=(64, 64), patch_size=8, embed_dims=48, num_layers=4, num_heads=3, drop_path_rate=0.1),
    decode_head=dict(in_channels=48, channels=48, embed_dims=48, num_heads=3),
    test_cfg=dict(_delete_=True, mode="slide", crop_size=(64, 64), stride=(48, 48)),
)
crop = dict(type="RandomCrop", crop_size=(64, 64), cat_max_ratio=0.75)
load = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations", reduce_zero_label=True)]
flip = dict(type="RandomFlip", prob=0.5)
pack = [dict(type="PackSegInputs")]
train_dataloader = dict(batch_size=4, num_workers=0, persistent_workers=False,
                        dataset=dict(data_root="scenes", pipeline=[*load, crop, flip, *pack]))
val_dataloader = dict(num_workers=0, persistent_workers=False,
                      dataset=dict(data_root="scenes", pipeline=[*load, *pack]))
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(lr=0.01))
custom_hooks = [dict(type="EMAHook", momentum=0.05)]
train_cfg = dict(max_iters={iterations}, val_interval={iterations})
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval={iterations}))
env_cfg = dict(dist_cfg=dict(backend="gloo"))
randomness = dict(seed=0, deterministic=True)
"""
START = """
import runpy, sys
from pathlib import Path
import mmseg, quest_mmseg
tool = Path(mmseg.__file__).parent / ".mim" / "tools" / "train.py"
sys.argv[0] = str(tool)
runpy.run_path(str(tool), run_name="__main__")
"""
VERSIONS = """
import mmcv, mmengine, mmseg, sys, torch
import mmcv._ext
ops = "with" if getattr(mmcv._ext, "__file__", None) else "without"
print(f"mmcv {mmcv.__version__} {ops} compiled ops, mmengine {mmengine.__version__}, mmseg {mmseg.__version__}, "
      f"torch {torch.__version__}, Python {sys.version.split()[0]}")
"""
COMPARE = """
import sys, torch
one, two = (torch.load(path, map_location="cpu", weights_only=False) for path in sys.argv[1:])
count = 0
for part in ("state_dict", "ema_state_dict"):
    assert list(one[part]) == list(two[part]), part
    for name, value in one[part].items():
        assert value.dtype == two[part][name].dtype and torch.equal(value, two[part][name]), name
        count += 1
momenta = [state["momentum_buffer"] for state in one["optimizer"]["state"].values()]
for own, other in zip(momenta, two["optimizer"]["state"].values(), strict=True):
    assert torch.equal(own, other["momentum_buffer"])
print(f"{count} tensors and {len(momenta)} momenta equal")
"""


def run(python: str, *arguments: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{python} {' '.join(arguments)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def train(python: str, attention: str, work: str, iterations: int, folder: Path) -> tuple[list[str], list[dict]]:
    """What was printed of every loss, and the scalars of every step but the times."""
    kind = "" if attention == "stock" else f'type="quest_mmseg.EncoderDecoder", attention="{attention}",'
    (folder / "config.py").write_text(CONFIG.format(kind=kind, iterations=iterations))
    run(python, "-c", START, "config.py", "--work-dir", work, folder=folder)
    (log,) = (folder / work).glob("*/*.log")
    printed = re.findall(r"loss: ([\d.]+)", log.read_text())
    (stored,) = (folder / work).glob("*/vis_data/scalars.json")
    lines = [json.loads(line) for line in stored.read_text().splitlines()]
    return printed, [{key: value for key, value in line.items() if "time" not in key} for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs=2, help="a Python with one build of mmcv; its dependencies and ours beside it")
    parser.add_argument("--iterations", type=int, default=40, help="training iterations (default: 40)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for python in given.python:
            print(run(python, "-W", "ignore", "-c", VERSIONS, folder=folder).strip(), flush=True)
        sizes = ["--train", "24", "--validation", "4"]
        run(given.python[0], "-m", "quest_mmseg.bench.scenes", "scenes", *sizes, folder=folder)
        for index, attention in enumerate(ATTENTIONS):
            works = [f"{index}-{side}" for side in (0, 1)]
            (printed, stored), (others, other_stored) = (
                train(python, attention, work, given.iterations, folder)
                for python, work in zip(given.python, works, strict=True)
            )
            assert len(printed) == given.iterations, printed
            assert printed == others, (attention, printed, others)
            assert stored == other_stored, (attention, stored, other_stored)
            paths = [str(folder / work / f"iter_{given.iterations}.pth") for work in works]
            equal = run(given.python[0], "-c", COMPARE, *paths, folder=folder).strip()
            scores = [line["mIoU"] for line in stored if "mIoU" in line]
            print(
                f"{attention}: {len(printed)} printed losses equal ({printed[0]} -> {printed[-1]}), "
                f"{len(stored)} records equal, mIoU {scores[-1]}, {equal}",
                flush=True,
            )


if __name__ == "__main__":
    main()
