"""Load checkpoints of another attention by every loader of timm; the table is in docs/checkpoints.md."""

import functools

import pytest
import timm
import torch
from timm.models import load_checkpoint, resume_checkpoint
from timm.utils import CheckpointSaver, ModelEmaV3

import quest_timm  # noqa: F401  # timm accepts attention= from here on
from devtools import matrix

WEIGHT = "blocks.1.attn.proj.weight"
TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 5}


def make(attention, attention_from=None, seed=1, **options):
    torch.manual_seed(seed)
    asked = {} if attention == "stock" else {"attention": attention, "attention_from": attention_from}
    return timm.create_model("vit_tiny_patch16_224", **{**TINY, **asked, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything that timm writes of a model that was trained with each attention."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("stock", "quest"):
        model = make(name, seed=0)
        average = ModelEmaV3(model, decay=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(2, 3, 16, 16)).square().sum().backward()
        optimizer.step()
        average.update(model)
        (folder / name).mkdir()
        saver = CheckpointSaver(model, optimizer, model_ema=average, checkpoint_dir=str(folder / name))
        saver.save_checkpoint(0, metric=0.5)
        torch.save(model.state_dict(), folder / f"{name}.pth")
        average.update(model)
        torch.save(average.module.state_dict(), folder / f"{name}-average.pth")
    return folder


# Each loader: (folder, checkpoint, model, attention_from) -> the loaded WEIGHT, and that of the checkpoint.


def build(folder, checkpoint, model, attention_from=None):
    file = folder / checkpoint / "last.pth.tar"
    made = make(model, attention_from, checkpoint_path=str(file))
    return made.state_dict()[WEIGHT], torch.load(file, weights_only=False)["state_dict_ema"][WEIGHT]


def pretrained(folder, checkpoint, model, attention_from=None, **options):
    file = folder / f"{checkpoint}.pth"
    overlay = {"file": str(file), "num_classes": 5, "input_size": (3, 16, 16)}
    made = make(model, attention_from, pretrained=True, pretrained_cfg_overlay=overlay, **options)
    return made.state_dict()[WEIGHT], torch.load(file, weights_only=True)[WEIGHT]


def resume(folder, checkpoint, model, attention_from=None):
    made, file = make(model, attention_from), folder / checkpoint / "last.pth.tar"
    resume_checkpoint(made, str(file), log_info=False)
    return made.state_dict()[WEIGHT], torch.load(file, weights_only=False)["state_dict"][WEIGHT]


def file(folder, checkpoint, model, attention_from=None, end=".pth", **options):
    made, path = make(model, attention_from), folder / f"{checkpoint}{end}"
    load_checkpoint(made, str(path), **options)
    return made.state_dict()[WEIGHT], torch.load(path, weights_only=True)[WEIGHT]


LOADERS = {
    "`create_model(checkpoint_path=)`": build,
    "`create_model(pretrained=True)`": pretrained,
    "`create_model(pretrained=True, num_classes=)`": functools.partial(pretrained, num_classes=3),
    "`resume_checkpoint`": resume,
    "`load_checkpoint`": file,
    "`load_checkpoint(strict=False)`": functools.partial(file, strict=False),
    "`ModelEmaV3`": functools.partial(file, end="-average.pth"),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_checkpoint_of_another_attention(loader, folder):
    matrix.check_loader(functools.partial(LOADERS[loader], folder), "timm", loader, among=LOADERS)
