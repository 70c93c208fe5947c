"""Load checkpoints of another attention through every door of timm; the table is in docs/checkpoints.md."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import timm
import torch
from timm.models import load_checkpoint, resume_checkpoint
from timm.utils import CheckpointSaver, ModelEmaV3

import quest_timm  # noqa: F401  # timm accepts attention= from here on
from quest_core import AttentionMismatchWarning, CheckpointError
from quest_core.checkpoints import ENTRY
from quest_core.testing import matrix

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"
SPECS = {
    "stock": None,
    "standard": "standard",
    "quest": "quest",
    "gqa": "quest+gqa(kv_heads=2)",
    "sigmoid": "sigmoid",
    "qknorm-hs": "qknorm-hs",
}
NAMES = ("stock", "standard", "quest", "gqa", "sigmoid")
WEIGHT = "blocks.1.attn.proj.weight"
TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 5}


def make(name, attention_from=None, seed=1, **options):
    torch.manual_seed(seed)
    asked = {"attention": SPECS[name], "attention_from": attention_from if SPECS[name] else None}
    given = {option: value for option, value in asked.items() if value is not None}
    return timm.create_model("vit_tiny_patch16_224", **TINY, **given, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything that timm writes of a model that was trained with each attention."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in SPECS:
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


def last(folder, checkpoint):
    return folder / checkpoint / "last.pth.tar"


# Each door: (folder, checkpoint, model, attention_from) -> the loaded model and the weight WEIGHT in the checkpoint.


def build(folder, checkpoint, model, attention_from=None):
    file = last(folder, checkpoint)
    made = make(model, attention_from, checkpoint_path=str(file))
    return made, torch.load(file, weights_only=False)["state_dict_ema"][WEIGHT]


def pretrained(folder, checkpoint, model, attention_from=None):
    file = folder / f"{checkpoint}.pth"
    overlay = {"file": str(file), "num_classes": 5, "input_size": (3, 16, 16)}
    made = make(model, attention_from, pretrained=True, pretrained_cfg_overlay=overlay)
    return made, torch.load(file, weights_only=True)[WEIGHT]


def resume(folder, checkpoint, model, attention_from=None):
    made, file = make(model, attention_from), last(folder, checkpoint)
    resume_checkpoint(made, str(file), log_info=False)
    return made, torch.load(file, weights_only=False)["state_dict"][WEIGHT]


def non_strict(folder, checkpoint, model, attention_from=None):
    made, file = make(model, attention_from), folder / f"{checkpoint}.pth"
    load_checkpoint(made, str(file), strict=False)
    return made, torch.load(file, weights_only=True)[WEIGHT]


def average(folder, checkpoint, model, attention_from=None):
    made, file = make(model, attention_from), folder / f"{checkpoint}-average.pth"
    load_checkpoint(made, str(file))
    return made, torch.load(file, weights_only=True)[WEIGHT]


def plain(folder, checkpoint, model, attention_from=None):
    made, state = make(model, attention_from), torch.load(folder / f"{checkpoint}.pth", weights_only=True)
    made.load_state_dict(state)
    return made, state[WEIGHT]


DOORS = {
    "`create_model(checkpoint_path=)`, `--initial-checkpoint`": build,
    "`create_model(pretrained=True)`": pretrained,
    "`resume_checkpoint`, `--resume`": resume,
    "`load_checkpoint(strict=False)`": non_strict,
    "moving average (`ModelEmaV3`)": average,
    "`load_state_dict`": plain,
}


def outcome(door, *arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made, weight = door(*arguments)
        except CheckpointError:
            return "refused"
        except RuntimeError as error:
            if ENTRY in str(error):
                return "unexpected"
            return "refused" if "size mismatch for blocks.0.attn.qkv.weight" in str(error) else str(error)
    torch.testing.assert_close(made.state_dict()[WEIGHT], weight)
    said = [w for w in caught if issubclass(w.category, AttentionMismatchWarning)]
    assert len(said) <= 1  # and not one a layer
    return "warns" if said else "loads"


def test_no_door_lets_another_attention_in_silently(folder):
    found = {
        (name, checkpoint, model): outcome(door, folder, checkpoint, model)
        for name, door in DOORS.items()
        for checkpoint in NAMES
        for model in NAMES
    }
    for (_, checkpoint, model), result in found.items():
        plain_pair = {checkpoint, model} <= {"stock", "standard"}
        assert (result == "loads") == (checkpoint == model or plain_pair)
    written = matrix.table(found)
    assert matrix.committed(PAGE, "checkpoints-timm") == written, f"write into {PAGE.name}:\n{written}"


@pytest.mark.parametrize(
    ("checkpoint", "model"),
    [("quest", "sigmoid"), ("quest", "standard"), ("stock", "quest"), ("stock", "gqa"), ("quest", "gqa"),
     ("stock", "qknorm-hs"), ("qknorm-hs", "gqa"), ("qknorm-hs", "standard")],
)  # fmt: skip
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_attention_from_opens_every_door(folder, door, checkpoint, model):
    named = SPECS[checkpoint] or "standard"
    assert outcome(door, folder, checkpoint, model, named) == "loads"
    assert outcome(door, folder, checkpoint, model, "qknorm") == "refused"
