"""The hook WatchAttention: what Pointcept's log, TensorBoard and W&B get, next to a float64 computation.

The model is torch-pointcloud's. The registry, the base class of hooks, the trainer and wandb are stand-ins, because no
package index has Pointcept; tests/test_pointcept.py runs the hook in its own trainer.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from clouds import clouds
from test_conformance import Segmentation
from torch.utils.tensorboard import SummaryWriter

from devtools.logits import check, clipped, recorded, scalars
from quest_core import inject
from quest_pointcept import watching


@pytest.fixture
def hook(monkeypatch):
    """The class that the plugin registers; `sent` is what W&B got."""
    made, sent = [], []
    stand_ins = {
        "builder": {"HOOKS": SimpleNamespace(register_module=lambda module: made.append(module))},
        "default": {"HookBase": type("HookBase", (), {})},
    }
    for name, attributes in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, f"pointcept.engines.hooks.{name}", module)
    for package in ("pointcept", "pointcept.engines", "pointcept.engines.hooks"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(log=lambda values, step: sent.append((step, values))))
    watching.register()
    made[0].sent = sent
    return made[0]


def train(model, steps, folder, *hooks):
    """Call hooks as Pointcept's trainer does that resumes after an epoch of ten steps.

    Returns:
        its log and the calls of attention of each step.
    """
    lines, inputs, optimizer = [], clouds(45, 30), torch.optim.SGD(model.parameters(), 0.1)
    trainer = SimpleNamespace(model=model, writer=SummaryWriter(folder), logger=SimpleNamespace(info=lines.append))
    vars(trainer).update(epoch=1, train_loader=range(10), comm_info={}, cfg=SimpleNamespace(enable_wandb=True))
    seen = []
    for own in hooks:
        own.trainer = trainer
        own.before_epoch()
    for trainer.comm_info["iter"] in range(steps):
        with recorded() as calls:
            model(*inputs).square().mean().backward()
        seen.append(calls)
        optimizer.step()
        optimizer.zero_grad()
        for own in hooks:
            own.after_step()
    for own in hooks:
        own.after_train()
    trainer.writer.close()
    return lines, seen


@pytest.mark.parametrize("attention", [None, "quest"])
def test_the_log_and_the_writer_get_what_attention_does(hook, tmp_path, attention):
    torch.manual_seed(0)
    model = Segmentation().make_model().train()
    if attention:
        inject(model, attention)
    kinds = [type(module) for module in model.modules()]
    lines, seen = train(model, 4, tmp_path, hook(every=2))
    curves = scalars(tmp_path)
    assert list(curves) == [11, 12, 14]
    for line, step, (same, sent) in zip(lines, curves, hook.sent, strict=True):
        assert sent == pytest.approx({"Iter": step, **curves[step]})
        assert same == step
        check(curves[step], seen[step - 11], rel=1e-4)
        assert line.startswith(f"Step {step} max_logit: {curves[step]['attention/max_logit']:.4g} entropy: ")
    assert [type(module) for module in model.modules()] == kinds


def test_queries_are_clipped_after_every_step(hook, tmp_path):
    with clipped() as factors:
        train(Segmentation().make_model().train(), 2, tmp_path, hook(clip=1e-6))
    assert len(factors) == 2
    assert all(factors)
