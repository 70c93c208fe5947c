"""Load checkpoints of another attention by every loader of mmengine and mmseg; the table is in docs/checkpoints.md."""

import contextlib
import io
import uuid
import warnings
from collections.abc import Callable
from logging import Handler
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import sample, segmenter
from mmengine.config import Config
from mmengine.logging.logger import MMFormatter
from mmengine.model import ExponentialMovingAverage, PretrainedInit
from mmengine.runner import FlexibleRunner, Runner, load_checkpoint
from mmseg.apis import init_model
from mmseg.registry import MODELS
from torch.utils.data import Dataset

from devtools import matrix
from quest_core import AttentionMismatchWarning
from quest_core.checkpoints import ENTRY
from quest_core.errors import CheckpointError

EMA = [{"type": "EMAHook", "momentum": 0.1, "update_buffers": True}]


class Images(Dataset[Any]):
    """Two random images, as the pipelines of mmseg return them."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return {"inputs": torch.randint(255, (3, 32, 48), dtype=torch.uint8), "data_samples": sample()}


def config(built, **options):
    """The config of a model; "stock" is mmseg's own."""
    return segmenter(**options if built == "stock" else {"attention": built, **options})


def model(built, **options):
    return MODELS.build(config(built, **options))


def run(built, folder, use="train", kind=Runner, **options):
    """Train for one iteration, or test, by a runner of mmengine."""
    loader = {"batch_size": 2, "num_workers": 0, "sampler": {"type": "DefaultSampler"}, "dataset": Images()}
    parts = {"test_dataloader": loader, "test_cfg": {}, "test_evaluator": []}
    if use == "train":
        parts = {"train_dataloader": loader, "train_cfg": {"by_epoch": False, "max_iters": 1}}
        parts["optim_wrapper"] = {"optimizer": {"type": "SGD", "lr": 0.01}}
    hooks = {"logger": None, "checkpoint": None, **options.pop("hooks", {})}
    name = uuid.uuid4().hex  # mmengine keeps a runner's logger under this name
    parts |= {"work_dir": str(folder), "default_hooks": hooks, "experiment_name": name, "default_scope": "mmseg"}
    runner = kind(config(built, **options.pop("model", {})), launcher="none", **parts, **options)
    getattr(runner, use)()


def resume(path, built, work, **options):
    run(built, work, load_from=path, resume=True, **options)


LOADERS: dict[str, Callable[[str, str, Path], Any]] = {
    "`resume`": resume,
    "`resume` with `EMAHook`": lambda *given: resume(*given, custom_hooks=EMA),
    "`resume` of `FlexibleRunner`": lambda *given: resume(*given, kind=FlexibleRunner),
    "`load_from`": lambda path, built, work: run(built, work, load_from=path),
    "`tools/test.py`": lambda path, built, work: run(built, work, "test", load_from=path),
    "`init_model`": lambda path, built, work: init_model(Config({"model": config(built)}), path, "cpu"),
    "`pretrained`": lambda path, built, work: model(built, pretrained=path + ".backbone").init_weights(),
    "`init_cfg` with `prefix`": lambda path, built, _: PretrainedInit(path, prefix="backbone.")(model(built).backbone),
    "`ExponentialMovingAverage`": lambda path, built, work: ExponentialMovingAverage(model(built)).load_state_dict(
        torch.load(path, weights_only=False)["ema_state_dict"]
    ),
    "`load_state_dict`": lambda path, built, work: model(built).load_state_dict(
        torch.load(path, weights_only=False)["state_dict"]
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a run with EMA for each attention; its backbone is in a further file."""
    paths = {}
    for name in ("stock", "quest"):
        folder = tmp_path_factory.mktemp(name)
        hooks = {"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 1}}
        run(name, folder, hooks=hooks, custom_hooks=EMA)
        paths[name] = str(folder / "iter_1.pth")
        state = torch.load(paths[name], weights_only=False)["state_dict"]
        backbone = {key.removeprefix("backbone."): x for key, x in state.items() if key.startswith("backbone.")}
        torch.save(backbone, paths[name] + ".backbone")
    return paths


@pytest.fixture
def logged(monkeypatch):
    """All lines that handlers of mmengine get."""
    lines = []
    stock = Handler.handle

    def handle(handler, record):
        if isinstance(handler.formatter, MMFormatter):
            lines.append(record.getMessage())
        return stock(handler, record)

    monkeypatch.setattr(Handler, "handle", handle)
    return lines


@pytest.mark.timeout(180)
@pytest.mark.parametrize("loader", LOADERS)
def test_a_checkpoint_of_another_attention(loader, trained, tmp_path, logged):
    def load(checkpoint, built):
        """mmengine prints or logs the keys that its own loader leaves out."""
        logged.clear()
        printed = io.StringIO()
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
            warnings.simplefilter("always")
            LOADERS[loader](trained[checkpoint], built, tmp_path)
        messages = {str(w.message) for w in caught if w.category is AttentionMismatchWarning}
        assert messages == {line for line in logged if "fine-tune" in line}, "mmengine's log lacks the warning"
        text = printed.getvalue() + "\n".join(logged)
        if "unexpected key" in text and ENTRY in text:
            raise RuntimeError(text)
        for message in messages:
            warnings.warn(message, AttentionMismatchWarning, stacklevel=1)

    matrix.check_loader(load, "mmseg", loader, among=LOADERS, named=False)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_hosts_attention_beside_another_refuses_weights_of_that(trained, wrapped):
    """mmengine only logs the key; `tools/test.py --tta` loads through a wrapper."""
    config = segmenter()
    config.backbone.update(type="quest_mmseg.VisionTransformer", attention="quest")
    loaded = MODELS.build({"type": "SegTTAModel", "module": config} if wrapped else config)
    with pytest.raises(CheckpointError, match="^'decode_head.layers.0.* trained with attention 'quest', and the model"):
        load_checkpoint(loaded, trained["quest"])


@pytest.mark.filterwarnings("error::quest_core.AttentionMismatchWarning")
def test_attention_from_is_read_in_the_config(trained, tmp_path):
    for built, source in (("sigmoid", "quest"), ("quest", "standard"), ("quest+gqa(kv_heads=2)", "standard")):
        path = trained[{"standard": "stock"}.get(source, source)]
        run(built, tmp_path, load_from=path, model={"attention_from": source})
