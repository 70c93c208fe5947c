"""Load checkpoints of another attention through every door of tsai and fastai; the table is in docs/checkpoints.md."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from fastai.callback.tracker import SaveModelCallback
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tsai.basics import TSClassification, TSClassifier, load_all, load_learner
from tsai.callback.MVP import MVP

import quest_tsai  # noqa: F401  # tsai accepts attention= from here on
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
WEIGHT = "backbone.encoder.layers.1.self_attn.W_Q.weight"

LABELS = np.arange(24) % 3
SERIES = np.sin(np.arange(12) * (LABELS[:, None, None] + 1) * 0.4 + np.arange(3)[:, None]).astype(np.float32)


def learner(folder, name, seed=1, attention_from=None, arch="TSTPlus", n_layers=2, **options):
    torch.manual_seed(seed)
    asked = {"attention": SPECS[name], "attention_from": attention_from}
    return TSClassifier(
        SERIES, LABELS, splits=(list(range(16)), list(range(16, 24))), tfms=[None, TSClassification()], bs=8,
        arch=arch, path=folder, device="cpu", **options,
        arch_config={
            "n_layers": n_layers, "d_model": 16, "n_head" + "s" * (arch == "TSTPlus"): 4,
            **{option: value for option, value in asked.items() if value is not None},
        },
    )  # fmt: skip


def fit(learn, cbs=None, lr=1e-3):
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, lr, cbs=cbs)
    return learn


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything that tsai, fastai and PyTorch write of a model that was trained with each attention."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in SPECS:
        learn = learner(folder, name, seed=0)
        average = AveragedModel(learn.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        fit(learn, SaveModelCallback(fname=f"{name}-with-optimizer", with_opt=True))
        average.update_parameters(learn.model)
        learn.save(name, with_opt=False)
        learn.save_all(folder / f"{name}-all")
        learn.export(f"{name}.pkl")
        first = {key: x.clone() for key, x in learn.model.state_dict().items()}
        average.update_parameters(fit(learn).model)
        second = learn.model.state_dict()
        torch.save(average.state_dict(), folder / f"{name}-average.pth")
        torch.save({key: (first[key] + second[key]) / 2 for key in first}, folder / f"{name}-mean.pth")
    return folder


# Each door: (folder, checkpoint, model, attention_from) -> the loaded model and the weight WEIGHT in the checkpoint.


def stored(file):
    state = torch.load(file, weights_only=False)  # fastai stores its own list class with the optimizer's state
    return state.get("model", state)


def resume(folder, checkpoint, model, attention_from=None, **options):
    name = checkpoint if options.get("with_opt") is False else f"{checkpoint}-with-optimizer"
    learn = learner(folder, model, attention_from=attention_from).load(name, **options)
    return learn.model, stored(folder / "models" / f"{name}.pth")[WEIGHT]


def resume_without_optimizer(*arguments):
    return resume(*arguments, with_opt=False)


def resume_non_strictly(*arguments):
    return resume(*arguments, strict=False)


def fine_tune(folder, checkpoint, model, attention_from=None):
    file = folder / "models" / f"{checkpoint}.pth"
    learn = learner(folder, model, attention_from=attention_from, pretrained=True, weights_path=file)
    return learn.model, stored(file)[WEIGHT]


def pretrain(folder, checkpoint, model, attention_from=None):
    """MVP loads the weights when training starts; a learning rate of 0 leaves them as they are."""
    learn = learner(folder, model, attention_from=attention_from)
    file = folder / "models" / f"{checkpoint}.pth"
    fit(learn, MVP(weights_path=file, target_dir=folder / "mvp"), lr=0.0)
    return learn.model, stored(file)[WEIGHT]


def exported(folder, checkpoint, model, attention_from=None):
    assert checkpoint == model
    learn, again = load_learner(folder / f"{checkpoint}.pkl"), load_all(folder / f"{checkpoint}-all")
    torch.testing.assert_close(again.model.state_dict(), learn.model.state_dict())
    return learn.model, stored(folder / "models" / f"{checkpoint}.pth")[WEIGHT]


def moving_average(folder, checkpoint, model, attention_from=None):
    average = AveragedModel(learner(folder, model, attention_from=attention_from).model)
    state = torch.load(folder / f"{checkpoint}-average.pth", weights_only=True)
    average.load_state_dict(state)
    return average.module, state[f"module.{WEIGHT}"]


def mean(folder, checkpoint, model, attention_from=None):
    state = torch.load(folder / f"{checkpoint}-mean.pth", weights_only=True)
    made = learner(folder, model, attention_from=attention_from).model
    made.load_state_dict(state)
    return made, state[WEIGHT]


def plain(folder, checkpoint, model, attention_from=None):
    state = stored(folder / "models" / f"{checkpoint}.pth")
    made = learner(folder, model, attention_from=attention_from).model
    made.load_state_dict(state)
    return made, state[WEIGHT]


DOORS = {
    "`learn.load`, `SaveModelCallback`": resume,
    "`learn.load(with_opt=False)`": resume_without_optimizer,
    "`learn.load(strict=False)`": resume_non_strictly,
    "`pretrained=True, weights_path=`": fine_tune,
    "`MVP(weights_path=)`": pretrain,
    "`load_learner`, `load_all`": exported,
    "moving average (`AveragedModel`)": moving_average,
    "mean of two checkpoints": mean,
    "`load_state_dict`": plain,
}
COMPARED = {door: function for door, function in DOORS.items() if function is not exported}


def outcome(door, *arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made, weight = door(*arguments)
        except CheckpointError:
            return "refused"
        except RuntimeError as error:
            if "Unexpected key" in str(error) and ENTRY in str(error):
                return "unexpected"
            marked = f"{WEIGHT.replace('W_Q', 'W_K')}: copying a param with shape"
            return "refused" if marked in str(error) else str(error)
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
        if checkpoint == model or door is not exported
    }
    for (_, checkpoint, model), result in found.items():
        plain_pair = {checkpoint, model} <= {"stock", "standard"}
        assert (result == "loads") == (checkpoint == model or plain_pair)
    written = matrix.table(found)
    assert matrix.committed(PAGE, "checkpoints-tsai") == written, f"write into {PAGE.name}:\n{written}"


@pytest.mark.parametrize(
    ("checkpoint", "model"),
    [("quest", "sigmoid"), ("quest", "standard"), ("stock", "quest"), ("stock", "gqa"), ("quest", "gqa"),
     ("stock", "qknorm-hs"), ("qknorm-hs", "gqa"), ("qknorm-hs", "standard")],
)  # fmt: skip
@pytest.mark.parametrize("door", COMPARED.values(), ids=COMPARED)
def test_attention_from_opens_every_door(folder, door, checkpoint, model):
    named = SPECS[checkpoint] or "standard"
    assert outcome(door, folder, checkpoint, model, named) == "loads"
    assert outcome(door, folder, checkpoint, model, "qknorm") == "refused"


def test_weights_of_the_host_are_pooled_into_fewer_heads_by_every_door(folder):
    for door in COMPARED.values():
        made, _ = door(folder, "stock", "gqa", "standard")
        file = {moving_average: "stock-average.pth", mean: "stock-mean.pth"}.get(door, "models/stock.pth")
        state = {key.removeprefix("module."): x for key, x in torch.load(folder / file, weights_only=True).items()}
        for name in ("W_K", "W_V"):
            key = WEIGHT.replace("W_Q", name)
            pooled = state[key].view(2, 2, 4, 16).mean(1).view(8, 16)
            torch.testing.assert_close(made.state_dict()[key].view(8, 16), pooled)


def test_without_the_plugin(folder, fresh_python):
    """Strict loading names the key, other loading the key projections, whose shapes are not stock's."""
    learner(folder, "quest", arch="TransformerModel", n_layers=1).save("torch", with_opt=False)
    printed = fresh_python(
        "import sys, warnings\n"
        "import numpy as np\n"
        "from tsai.basics import TSClassification, TSClassifier\n"
        "labels = np.arange(24) % 3\n"
        "def learner(arch='TSTPlus', n_layers=2, **options):\n"
        "    return TSClassifier(np.zeros((24, 3, 12), np.float32), labels,\n"
        "        splits=(list(range(16)), list(range(16, 24))),\n"
        "        tfms=[None, TSClassification()], bs=8, arch=arch, path='.', device='cpu', **options,\n"
        "        arch_config={'n_layers': n_layers, 'd_model': 16, 'n_head' + 's' * (arch == 'TSTPlus'): 4})\n"
        "for name, options in (('quest', {}), ('quest', {'with_opt': False}), ('quest-with-optimizer', {}),\n"
        "                      ('quest-with-optimizer', {'with_opt': False}), ('quest', {'strict': False}),\n"
        "                      ('sigmoid', {'strict': False}), ('torch', {'strict': False})):\n"
        "    made = learner('TransformerModel', 1) if name == 'torch' else learner()\n"
        "    try:\n"
        "        made.load(name, **options)\n"
        "        print('silent', name, options)\n"
        "    except RuntimeError as error:\n"
        f"        strict = 'Unexpected key' in str(error) and '{ENTRY}' in str(error)\n"
        "        print(strict, *(line.split(':')[0] for line in str(error).splitlines() if 'size' in line))\n"
        "learner(pretrained=True, weights_path='models/quest.pth')\n"
        "assert not any(name.startswith('quest') for name in sys.modules if name != 'quest_tsai_environment')\n",
        folder,
    )
    keys = [f"backbone.encoder.layers.{i}.self_attn.W_K.weight" for i in (0, 1)]
    refused = "".join(f" \tsize mismatch for {key}" for key in keys)
    torchs = " \tsize mismatch for transformer_encoder.layers.0.self_attn.in_proj_weight"
    lines = printed.splitlines()
    assert lines[:7] == [f"True{refused}"] * 4 + [f"False{refused}"] * 2 + [f"False{torchs}"]
    assert lines[7] == f"check unmatched_layers: {keys}"
