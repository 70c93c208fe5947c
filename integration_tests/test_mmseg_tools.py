"""mmsegmentation's own tools/train.py and tools/test.py, unmodified, on a shrunk Segmenter and generated scenes."""

import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import mmseg
import pytest
import torch
from mmengine import Config
from mmengine.dataset import InfiniteSampler
from mmengine.logging import MessageHub, MMLogger
from mmengine.optim import OptimWrapper
from mmseg.visualization import SegLocalVisualizer

import quest_mmseg
from quest_core import AttentionMismatchWarning
from quest_core.errors import CheckpointError
from quest_suites.mmseg import scenes

environment = "quest-mmseg"

TOOLS = Path(mmseg.__file__).parent / ".mim" / "tools"
SHIPPED = Path(quest_mmseg.__file__).parent / "configs/segmenter_vit-t_mask_1xb8-160k_ade20k-512x512.py"
BASE = Path(mmseg.__file__).parent / ".mim/configs/segmenter/segmenter_vit-t_mask_8xb1-160k_ade20k-512x512.py"
ITERATIONS = 4
ATTENTIONS = ("standard", "quest", "quest+gqa(kv_heads=1)")

CONFIG = """
_base_ = {base!r}
norm = dict(_delete_=True, type="LN", eps=1e-6, requires_grad=True)
data_preprocessor = dict(size=(32, 32))
model = dict(
    {kind}
    pretrained=None,
    data_preprocessor=data_preprocessor,
    backbone=dict(img_size=(32, 32), patch_size=8, embed_dims=24, num_layers=2, num_heads=2),
    decode_head=dict(in_channels=24, channels=24, embed_dims=24, num_layers=1, num_heads=2),
    test_cfg=dict(_delete_=True, mode="slide", crop_size=(32, 32), stride=(24, 24)),
)
pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", reduce_zero_label=True),
    dict(type="RandomCrop", crop_size=(32, 32), cat_max_ratio=0.75),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackSegInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", reduce_zero_label=True),
    dict(type="PackSegInputs"),
]
img_ratios = [0.75, 1.0]
tta_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="TestTimeAug", transforms=[
        [dict(type="Resize", scale_factor=r, keep_ratio=True) for r in img_ratios],
        [dict(type="RandomFlip", prob=p, direction="horizontal") for p in (0.0, 1.0)],
        [dict(type="LoadAnnotations", reduce_zero_label=True)],
        [dict(type="PackSegInputs")],
    ]),
]
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False,
                        dataset=dict(data_root="scenes", pipeline=pipeline))
val_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(data_root="scenes", pipeline=test_pipeline))
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(lr=0.01))
custom_hooks = [dict(type="EMAHook", momentum=0.1)]
train_cfg = dict(max_iters={iterations}, val_interval={iterations})
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=2))
env_cfg = dict(dist_cfg=dict(backend="gloo"))
randomness = dict(seed=0)
log_level = "WARNING"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mmseg")
    scenes.write(made / "scenes", train=6, validation=2, size=48)
    for name, kind in (("stock", ""), ("ours", 'type="quest_mmseg.EncoderDecoder", attention="standard",')):
        (made / f"{name}.py").write_text(CONFIG.format(base=str(BASE), kind=kind, iterations=ITERATIONS))
    shipped = CONFIG.format(base=str(SHIPPED), kind="", iterations=ITERATIONS)
    (made / "shipped.py").write_text(shipped.replace("batch_size=2, ", ""))
    return made


@pytest.fixture(scope="module")
def tool(folder):
    """tool("train.py", ...) runs the tool as a command would, in this process, from the folder of the scenes."""

    def run(name, *arguments):
        for kind in (MMLogger, MessageHub, SegLocalVisualizer):  # kept by name for the life of a process
            kind._instance_dict.clear()
        before = sys.argv, os.getcwd()
        sys.argv = [name, *arguments]
        os.chdir(folder)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.simplefilter("always", AttentionMismatchWarning)
                runpy.run_path(str(TOOLS / name), run_name="__main__")
        finally:
            sys.argv = before[0]
            os.chdir(before[1])

    return run


@pytest.fixture(scope="module")
def trained(folder, tool):
    """The work folder of a training, which runs once."""

    def train(attention):
        name = "".join(letter for letter in attention if letter.isalnum())
        if not (folder / name).exists():
            config = "stock.py" if attention == "stock" else "ours.py"
            chosen = [] if attention == "stock" else [f"model.attention={attention}"]
            tool("train.py", config, "--work-dir", name, "--cfg-options", f"experiment_name={name}", *chosen)
        return folder / name

    return train


def scalars(work):
    """Every line that mmengine logged, of all runs in a work folder."""
    lines = [line for path in sorted(work.glob("*/vis_data/scalars.json")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def losses(work):
    return [line["loss"] for line in scalars(work) if "loss" in line]


def test_standard_has_the_losses_and_scores_of_stock(trained):
    stock, ours = trained("stock"), trained("standard")
    assert len(losses(stock)) == ITERATIONS
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-5)
    scores = [[line["mIoU"] for line in scalars(work) if "mIoU" in line] for work in (stock, ours)]
    assert len(scores[0]) == 1
    assert scores[1] == pytest.approx(scores[0], abs=0.02)  # mmseg rounds to two digits


@pytest.mark.slow
def test_custom_imports_are_early_enough(folder):
    """In a process that imports the plugin by a shipped config, or by `quest run`."""
    before = sorted(folder.iterdir())
    wrong = ["--cfg-options", "model.attention=quset"]
    quest = str(Path(sys.executable).with_name("quest"))
    for start, config in (([sys.executable], "shipped.py"), ([quest, "run"], "ours.py")):
        command = [*start, str(TOOLS / "train.py"), config, *wrong]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert "did you mean 'quest'" in done.stderr, done.stderr
    assert sorted(folder.iterdir()) == before


def test_train_validate_and_test(trained, tool):
    attention = "quest+gqa(kv_heads=1)"
    work = trained(attention)
    checkpoint = work / f"iter_{ITERATIONS}.pth"
    stored = torch.load(checkpoint, weights_only=False)
    assert "ema_state_dict" in stored
    assert stored["state_dict"]["backbone.layers.0.attn.attn.in_proj_weight"].shape == (24 + 2 * 12, 24)
    options = ["--cfg-options", f"model.attention={attention}"]
    tool("test.py", "ours.py", str(checkpoint), "--work-dir", f"{work}-test", *options)
    (found,) = Path(f"{work}-test").glob("*/*.json")
    validated = [line["mIoU"] for line in scalars(work) if "mIoU" in line][-1]
    assert json.loads(found.read_text())["mIoU"] == pytest.approx(validated, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_killed_run_resumes_as_if_it_had_not_been(attention, folder, trained, tool):
    work = Path(f"{trained(attention)}-killed")
    run = ["train.py", "ours.py", "--work-dir", str(work), "--cfg-options", f"model.attention={attention}"]
    killed = os.fork()  # a new Python would take seconds to import mmseg
    if killed == 0:
        steps = itertools.count(1)
        stock = OptimWrapper.step

        def step(*arguments, **options):
            if next(steps) == ITERATIONS:  # after the forward and backward pass
                os.kill(os.getpid(), signal.SIGKILL)
            stock(*arguments, **options)

        OptimWrapper.step = step
        try:
            tool(*run, "experiment_name=killed")
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(killed, 0)[1]) == signal.SIGKILL
    assert (work / "last_checkpoint").read_text().endswith("iter_2.pth")
    tool(*run, "experiment_name=resumed", "--resume")
    # The steps after the killed process's last checkpoint are done again.
    assert [line["step"] for line in scalars(work) if "loss" in line] == [1, 2, 3, 3, 4]
    straight = losses(trained(attention))
    assert losses(work)[:3] == straight[:3]
    if hasattr(InfiniteSampler, "skip"):  # onedl-mmengine passes over what was trained on without drawing its crops
        return
    assert losses(work)[3:] == straight[2:]
    states = [torch.load(path / f"iter_{ITERATIONS}.pth", weights_only=False) for path in (work, trained(attention))]
    for part in ("state_dict", "ema_state_dict"):
        for name, value in states[1][part].items():
            assert torch.equal(states[0][part][name], value), (part, name)


@pytest.mark.slow
def test_test_time_augmentation(folder, trained, tool):
    tool("test.py", "ours.py", str(trained("standard") / f"iter_{ITERATIONS}.pth"), "--tta", "--work-dir", "tta")
    assert list((folder / "tta").glob("*/*.json"))


RANKS = """
import json, os, runpy, sys, torch
from mmengine.logging import MessageHub, MMLogger
from mmseg.visualization import SegLocalVisualizer
torch.set_num_threads(1)
torch.cuda.set_device = lambda device: None
for command in json.loads(sys.argv[1]):
    for kind in (MMLogger, MessageHub, SegLocalVisualizer):
        kind._instance_dict.clear()
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
torch.distributed.barrier()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # a thread of gloo that is still there when the interpreter goes would abort the process
"""
DDP = ["model_wrapper_cfg.type=MMDistributedDataParallel", "model_wrapper_cfg.device_ids=None"]
FLEXIBLE = """
_base_ = "ours.py"
runner_type = "FlexibleRunner"
custom_hooks = []
strategy = dict({strategy})
"""
STRATEGIES = {
    "ddp": 'type="DDPStrategy", model_wrapper=dict(type="MMDistributedDataParallel", device_ids=None)',
    "fsdp": """type="FSDPStrategy",
    model_wrapper=dict(type="MMFullyShardedDataParallel", use_orig_params=True, device_id="cpu"),
    state_dict_cfg=dict(state_dict_type="FULL_STATE_DICT", state_dict_config=dict(type="FullStateDictConfig"),
                        optim_state_dict_config=dict(type="FullOptimStateDictConfig")),""",
}


@pytest.fixture(scope="module")
def sides(folder):
    """All that two processes run, in one start of them: torchrun and --launcher pytorch, over gloo.

    mmengine sets the CUDA device even where there is none. On a GPU the wrapper of DDP is mmengine's default, with the
    rank's own device, and so is FSDP's.
    """
    script = folder / "ranks.py"
    script.write_text(RANKS)
    for name, strategy in STRATEGIES.items():
        (folder / f"flexible-{name}.py").write_text(FLEXIBLE.format(strategy=strategy))

    commands = []

    def add(name, work, given, *options):
        command = [str(TOOLS / name), *given, "--launcher", "pytorch", "--work-dir", work, "--cfg-options", *options]
        commands.append([*command, f"experiment_name={len(commands)}"])

    for attention in ("stock", *ATTENTIONS):
        stock = attention == "stock"
        work, config = f"ddp-{attention}", "stock.py" if stock else "ours.py"
        options = DDP if stock else [*DDP, f"model.attention={attention}"]
        add("train.py", work, [config], "train_cfg.max_iters=2", *options)
        add("train.py", work, [config, "--resume"], *options)
        if stock:
            continue
        add("test.py", f"{work}-test", ["ours.py", f"{work}/iter_{ITERATIONS}.pth"], *options)
    add("train.py", "shipped-2", ["shipped.py"], *DDP)
    for name in STRATEGIES:
        add("train.py", f"flexible-{name}", [f"flexible-{name}.py"], "model.attention=quest")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(script)]
    done = subprocess.run(
        [*torchrun, json.dumps(commands)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return folder


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.distributed
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_two_processes_train_validate_resume_and_test(attention, sides):
    work = sides / f"ddp-{attention}"
    assert [line["step"] for line in scalars(work) if "loss" in line] == [1, 2, 3, 4]
    stock = losses(sides / "ddp-stock")
    assert len(stock) == ITERATIONS
    if attention == "standard":
        assert losses(work) == pytest.approx(stock, rel=1e-5)
    else:
        assert losses(work) != pytest.approx(stock, rel=1e-5)
    (found,) = Path(f"{work}-test").glob("*/*.json")
    validated = [line["mIoU"] for line in scalars(work) if "mIoU" in line][-1]
    tested, _ = json.JSONDecoder().raw_decode(found.read_text())  # each rank of mmengine writes it
    assert tested["mIoU"] == pytest.approx(validated, abs=0.02)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.distributed
def test_a_shipped_config_keeps_its_batch_and_schedule_on_two_processes(sides, tool):
    tool("train.py", "shipped.py", "--work-dir", "shipped-1")
    works = {processes: sides / f"shipped-{processes}" for processes in (1, 2)}
    for processes, work in works.items():
        assert Config.fromfile(work / "shipped.py").train_dataloader.batch_size * processes == 8
        assert [line["step"] for line in scalars(work) if "loss" in line] == [1, 2, 3, 4]
    rates = [[line["lr"] for line in scalars(work) if "loss" in line] for work in works.values()]
    assert rates[1] == rates[0]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_share_one_model(sides, tool):
    """mmengine's FSDP against its DDP by the same runner; the checkpoint is whole and remembers its attention."""
    works = [sides / f"flexible-{name}" for name in STRATEGIES]
    assert len(losses(works[0])) == ITERATIONS
    assert losses(works[1]) == pytest.approx(losses(works[0]), rel=1e-5)
    ddp, fsdp = (torch.load(work / f"iter_{ITERATIONS}.pth", weights_only=False)["state_dict"] for work in works)
    assert [f"module.{name}" for name in fsdp] == list(ddp)  # mmengine's DDPStrategy keeps the wrapper's name
    for name, value in fsdp.items():
        torch.testing.assert_close(value, ddp[f"module.{name}"], msg=name)
    checkpoint = works[1] / f"iter_{ITERATIONS}.pth"
    tool("test.py", "ours.py", str(checkpoint), "--work-dir", "fsdp-test", "--cfg-options", "model.attention=quest")
    with pytest.raises(CheckpointError, match="trained with attention 'quest', and the model has 'standard'"):
        tool("test.py", "ours.py", str(checkpoint), "--work-dir", "fsdp-test")
