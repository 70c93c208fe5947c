"""Load checkpoints of another attention by every loader of tsai and fastai; the table is in docs/checkpoints.md."""

import functools

import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, X, classifier
from fastai.callback.tracker import SaveModelCallback
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tsai.basics import load_all, load_learner
from tsai.callback.MVP import MVP

import quest_tsai  # noqa: F401  # tsai accepts attention= from here on
from devtools import matrix
from devtools.running import python
from quest_core.checkpoints import ENTRY

WEIGHT = "backbone.encoder.layers.1.self_attn.W_Q.weight"


def learner(folder, name, attention_from=None, seed=1, **options):
    torch.manual_seed(seed)
    return classifier(folder, None if name == "stock" else name, attention_from, **options)


def fit(learn, cbs=None, lr=1e-3):
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, lr, cbs=cbs)
    return learn


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything that tsai, fastai and PyTorch write of a model that was trained with each attention."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("stock", "quest"):
        learn = learner(folder, name, seed=0)
        average = AveragedModel(learn.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        fit(learn, SaveModelCallback(fname=f"{name}-with-optimizer", with_opt=True))
        average.update_parameters(learn.model)
        learn.save(name, with_opt=False)
        learn.save_all(folder / f"{name}-all")
        learn.export(f"{name}.pkl")
        average.update_parameters(fit(learn).model)
        torch.save(average.state_dict(), folder / f"{name}-average.pth")
    return folder


# Each loader: (folder, checkpoint, model, attention_from) -> the loaded WEIGHT, and that of the checkpoint.


def stored(file):
    state = torch.load(file, weights_only=False)  # fastai stores its own list class with the optimizer's state
    return state.get("model", state)


def resume(folder, checkpoint, model, attention_from=None, end="-with-optimizer", **options):
    learn = learner(folder, model, attention_from).load(f"{checkpoint}{end}", **options)
    return learn.model.state_dict()[WEIGHT], stored(folder / "models" / f"{checkpoint}{end}.pth")[WEIGHT]


def fine_tune(folder, checkpoint, model, attention_from=None):
    file = folder / "models" / f"{checkpoint}.pth"
    learn = learner(folder, model, attention_from, pretrained=True, weights_path=file)
    return learn.model.state_dict()[WEIGHT], stored(file)[WEIGHT]


def pretrain(folder, checkpoint, model, attention_from=None):
    """MVP loads the weights when training starts; a learning rate of 0 leaves them as they are."""
    learn = learner(folder, model, attention_from)
    file = folder / "models" / f"{checkpoint}.pth"
    fit(learn, MVP(weights_path=file, target_dir=folder / "mvp"), lr=0.0)
    return learn.model.state_dict()[WEIGHT], stored(file)[WEIGHT]


def moving_average(folder, checkpoint, model, attention_from=None):
    average = AveragedModel(learner(folder, model, attention_from).model)
    state = torch.load(folder / f"{checkpoint}-average.pth", weights_only=True)
    average.load_state_dict(state)
    return average.module.state_dict()[WEIGHT], state[f"module.{WEIGHT}"]


LOADERS = {
    "`learn.load`": resume,
    "`learn.load(with_opt=False)`": functools.partial(resume, end="", with_opt=False),
    "`learn.load(strict=False)`": functools.partial(resume, strict=False),
    "`pretrained=True, weights_path=`": fine_tune,
    "`MVP(weights_path=)`": pretrain,
    "`AveragedModel`": moving_average,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_checkpoint_of_another_attention(loader, folder):
    matrix.check_loader(functools.partial(LOADERS[loader], folder), "tsai", loader, among=LOADERS)


def test_an_exported_learner_has_its_attention(folder):
    learn, again = load_learner(folder / "quest.pkl"), load_all(folder / "quest-all")
    torch.testing.assert_close(again.model.state_dict(), learn.model.state_dict())
    assert any(name.endswith(ENTRY) for name in learn.model.state_dict())


@pytest.mark.parametrize("loader", [name for name in LOADERS if name != "`AveragedModel`"])
def test_key_heads_of_the_host_are_pooled(loader, folder):
    made = learner(folder, "quest+gqa(kv_heads=2)").model.state_dict()
    assert LOADERS[loader](folder, "stock", "quest+gqa(kv_heads=2)", "standard")[0].shape == made[WEIGHT].shape


ALONE = """
import quest_suites_environment
import logging, sys, warnings
import numpy as np
from tsai.basics import TSClassification, TSClassifier, load_learner
from tsai.models.TSTPlus import TSTPlus
from tsai.models.utils import transfer_weights
labels = np.arange(24) % 3
for options in ({}, {'with_opt': False}, {'strict': False}):
    learn = TSClassifier(np.zeros((24, 3, 20), np.float32), labels, path='.', device='cpu', arch='TSTPlus', bs=8,
        splits=(list(range(16)), list(range(16, 24))), tfms=[None, TSClassification()],
        arch_config={'n_layers': 2, 'd_model': 16, 'n_heads': 4, 'd_ff': 32})
    try:
        learn.load('quest', **options)
        print('silent')
    except RuntimeError as error:
        print('Unexpected key' in str(error) and 'ENTRY' in str(error))
assert not any(name.startswith('quest') for name in sys.modules if name != 'quest_suites_environment')
learn = load_learner('quest.pkl')
np.testing.assert_allclose(learn.get_X_preds(np.load('x.npy'))[0], np.load('wanted.npy'), rtol=1e-4, atol=1e-6)
print(learn.model.attention_report)
logging.basicConfig(filename='train.log', level=logging.INFO)
import quest_tsai
model = TSTPlus(3, 3, 20, attention='quest', n_layers=2, d_model=16, n_heads=4, d_ff=32)
warnings.simplefilter('ignore')
transfer_weights(model, 'models/stock.pth', device='cpu')
print(model.attention_report)
""".replace("ENTRY", ENTRY)


@pytest.mark.slow
def test_a_process_that_does_not_import_the_plugin(folder):
    """Strict loading names the key, other loading is silent, an exported learner imports the plugin.

    tsai and fastai keep no log of their own, so reports and warnings are in the one on the root logger.
    """
    np.save(folder / "x.npy", X[:4])
    np.save(folder / "wanted.npy", load_learner(folder / "quest.pkl").get_X_preds(X[:4].copy())[0].numpy())
    printed = python("-c", ALONE, cwd=folder, path=[ENVIRONMENT])[0].splitlines()
    assert printed[:3] == ["True", "True", "silent"]
    assert len([line for line in printed if "attention=quest in 2 modules" in line]) == 2
    log = [line for line in (folder / "train.log").read_text().splitlines() if "quest_core" in line]
    assert log[0] == f"INFO:quest_core:{printed[-1]}"
    assert log[1].startswith("WARNING:quest_core:these weights were trained with standard attention")
    assert len(log) == 2
