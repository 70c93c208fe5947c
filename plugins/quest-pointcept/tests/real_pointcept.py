"""Pointcept's own tools/train.py, unmodified, with and without this plugin, on generated datasets.

    python tests/real_pointcept.py --pointcept path/to/Pointcept [--out pointcept-real.md]

Three runs of two epochs for each model: stock Pointcept, `attention="standard"` and `attention="quest"`, from the same
seed. PT-v3m1, m2 and m3 segment scenes in nuScenes' layout (`quest_suites.pointcept.scenes`) from Pointcept's nuScenes
configuration as `_base_`, made small below; Sonata, Concerto and PPT are in `pretraining.py`. On a machine without CUDA
the trainer runs with `cpu/` on its path.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pretraining
import torch

from quest_suites.pointcept.scenes import write_nuscenes

CPU = Path(__file__).parent / "cpu"
MODELS = ("PT-v3m1", "PT-v3m2", "PT-v3m3")
PRETRAINING = tuple(pretraining.CONFIGS)
ATTENTIONS = (None, "standard", "quest")
"""Stock Pointcept, as its configuration has it."""

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
    plugin = "" if attention is None else PLUGIN
    if model in PRETRAINING:
        path.write_text(pretraining.config(root, model, attention, data, plugin))
        return path
    path.write_text(
        SMALL.format(
            base=str(root / "configs/nuscenes/semseg-pt-v3m1-0-base.py"),
            plugin=plugin,
            model=model,
            delete="" if model == "PT-v3m1" else "_delete_=True, ",
            attention="" if attention is None else f", attention={attention!r}",
            data=str(data),
        )
    )
    return path


def write_data(folder: Path) -> None:
    """Write the generated datasets of all configurations."""
    write_nuscenes(folder, **SCENES)
    pretraining.write_rooms(folder / "rooms")


# Importing Pointcept and what it needs takes longer than these trainings, so it is done once; every run is a fork, in
# which tools/train.py is `__main__` as always. What has seen a GPU must not be forked: there every run is a process.
STARTER = """
import json, os, pathlib, runpy, signal, subprocess, sys, time, traceback
commands, forks = json.loads(sys.argv[1])
if forks:
    import pointcept.engines.test, pointcept.engines.train
for argv, log, last in commands:
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
    while last and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if os.path.exists(log) and last in pathlib.Path(log).read_text():
            os.kill(child, signal.SIGKILL)
            break
        time.sleep(0.02)
    os.waitpid(child, 0)
"""


def train(
    root: Path, *configs: Path, gpus: int = 1, options: tuple[str, ...] = (), killed_after: str | None = None
) -> list[Run]:
    """Run tools/train.py with one configuration after the other; raises RuntimeError with its last lines if one fails.

    Args:
        root: the checkout.
        gpus: processes, each on a GPU of its own.
        options: further ``key=value`` for the trainer's --options.
        killed_after: the line of the trainer after which it gets SIGKILL; None lets it end.
    """
    cuda = torch.cuda.is_available()
    paths = [str(root), *([] if cuda else [str(CPU)]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    commands = []
    for config in configs:
        arguments = ["--config-file", str(config), "--num-gpus", str(gpus), "--options"]
        arguments += [f"save_path={config.parent / 'exp'}", *options]
        log = config.with_suffix(".log")
        log.unlink(missing_ok=True)
        commands.append(([str(root / "tools/train.py"), *arguments], str(log), killed_after))
    starter = [sys.executable, "-c", STARTER, json.dumps([commands, not cuda])]
    subprocess.run(starter, cwd=configs[0].parent, env=environment, check=True)
    return [_read(Path(log).read_text().splitlines(), killed_after) for _, log, _ in commands]


def _read(lines: list[str], killed_after: str | None) -> Run:
    # The loader's threads of a process that is being killed may complain of a missing answer.
    killed = killed_after is not None and any(killed_after in line for line in lines)
    if not killed and any(line.startswith("Traceback") for line in lines):
        raise RuntimeError("\n".join(lines[-40:]))
    return Run(
        [float(m[1]) for line in lines if (m := re.search(r"Train: \[.* loss: ([\d.]+)", line))],
        [float(m[1]) for line in lines if (m := re.search(r"Val result: mIoU/mAcc/allAcc ([\d.]+)", line))],
        next((m[1] for line in lines if (m := re.search(r"\] (attention=.+ in \d+ module.*)", line))), ""),
        lines,
    )


def commit(root: Path) -> str:
    """The checkout's commit, and whether a file differs from it."""
    git = ["git", "-C", str(root)]
    name = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout
    return f"{name}{' with changes' if changed.strip() else ', no file changed'}"


def rows(model: str, runs: dict[str | None, Run]) -> list[str]:
    """Rows of a table for the runs of a model, by attention."""
    made = []
    for attention, run in runs.items():
        away = [abs(a - b) for a, b in zip(run.losses, runs[None].losses, strict=True)]
        same = "–" if attention is None else f"{max(away):.4f}"
        half = len(run.losses) // 2
        means = " → ".join(f"{sum(part) / half:.4f}" for part in (run.losses[:half], run.losses[half:]))
        scores = [" → ".join(f"{100 * miou:.2f}" for miou in run.mious)] if run.mious else []
        made.append(f"| {' | '.join([model, attention or 'stock Pointcept', means, same, *scores])} |")
    return made


def log(model: str, attention: str | None, run: Run) -> list[str]:
    """What a run printed that matters, as Markdown."""
    kept = [line for line in run.lines if re.search(r"\] attention=|Num params|Train: \[|Val result:", line)]
    kept = [re.sub(r"^\[\S+ \S+ INFO (\S+) line \d+ \d+\] ", r"\1: ", line) for line in kept]
    kept = [re.sub(r"Data [\d.]+ \([\d.]+\) Batch [\d.]+ \([\d.]+\) Remain \S+ ", "", line) for line in kept]
    return [f"### {model}, {attention or 'stock Pointcept'}", "", "```", *kept, "```", ""]


def report(root: Path, runs: dict[str, dict[str | None, Run]]) -> str:
    """The Markdown file of all runs, by model and attention."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()}-core CPU"
    table = [row for model in MODELS for row in rows(model, runs[model])]
    pretrained = [row for model in PRETRAINING for row in rows(model, runs[model])]
    logs = [line for model in runs for attention, run in runs[model].items() for line in log(model, attention, run)]
    return TEXT.format(
        commit=commit(root),
        scenes=SCENES,
        steps=SCENES["train"] // 2,
        rooms=pretraining.ROOMS,
        machine=f"{device}, Python {platform.python_version()}, torch {torch.__version__}",
        table="\n".join(table),
        pretrained="\n".join(pretrained),
        logs="\n".join(logs),
    )


TEXT = """# Pointcept's own trainer, with and without quest-pointcept

Pointcept at commit {commit}; its tools/train.py, two epochs for each run.
Machine: {machine}.
Written by `python tests/real_pointcept.py --pointcept ROOT` in plugins/quest-pointcept.

`standard` draws the same random numbers as stock Pointcept, so its losses must be the same to rounding; what is shown
is the greatest difference over all steps, of numbers that Pointcept prints with four decimals. `quest` must train.
Losses are means over the steps of an epoch. The models are tiny and see two epochs, in which attention hardly leaves
the uniform one that it starts from: mIoU says that evaluation runs, and nothing about quality.

## Segmentation

Epochs of {steps} steps on {scenes[train]} + {scenes[val]} generated scenes in nuScenes' layout.

| model | attention | loss, epoch 1 → 2 | greatest difference from stock Pointcept | mIoU % after epoch 1 → 2 |
|---|---|---|---:|---|
{table}

## Pretraining

Sonata-v1m1 and Concerto-v1m1 (PT-v3m2, a student and the teacher that follows it) and PPT-v1m2 (PT-v3m1 with norms for
each dataset, by the MultiDatasetTrainer), from Pointcept's own configurations made small, on {rooms} generated rooms.

| model | attention | loss, epoch 1 → 2 | greatest difference from stock Pointcept |
|---|---|---|---:|
{pretrained}

On a CPU three things are not Pointcept's own, here as above. `.cuda()` changes nothing; spconv's CPU build is mended by
`quest_pointcept.train_on_cpu`; and `pointops.knn_query`, by which Sonata's and Concerto's losses match the points of
two views and whose kernel (`knn_query_cuda`) needs CUDA, is computed by PyTorch. Concerto's image encoder is a DINOv2
with registers, as in its configuration, but with two layers that were never trained, as its weights would be
downloaded. Of PPT, v1m1 and v1m3 are left out: their heads need CLIP's weights.

## Logs

{logs}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pointcept", type=Path, required=True, metavar="ROOT", help="a checkout with its requirements"
    )
    parser.add_argument("--out", type=Path, default=Path("pointcept-real.md"), help="the Markdown file to write")
    options = parser.parse_args()
    root = options.pointcept.resolve()
    if not torch.cuda.is_available():
        runpy.run_path(str(CPU / "sitecustomize.py"))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_data(data)
        runs: dict[str, dict[str | None, Run]] = {}
        for model in (*MODELS, *PRETRAINING):
            paths = [config(root, model, one, data, Path(folder) / f"{model}-{one}") for one in ATTENTIONS]
            runs[model] = dict(zip(ATTENTIONS, train(root, *paths), strict=True))
            print(*rows(model, runs[model]), sep="\n", flush=True)
    options.out.write_text(report(root, runs))


if __name__ == "__main__":
    main()
