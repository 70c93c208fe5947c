"""The hook WatchAttention: what Pointcept's log, TensorBoard and W&B get, next to a float64 computation.

The model is torch-pointcloud's. The registry, the base class of hooks, the trainer and wandb are stand-ins, because no
package index has Pointcept; tests/test_pointcept.py runs the hook in its own trainer.
"""

import sys
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from clouds import clouds, segmentation
from torch.utils.tensorboard import SummaryWriter

from devtools.logits import check, clipped, recorded, scalars
from quest_pointcept import watching


@pytest.fixture
def hook(monkeypatch):
    """The class that the plugin registers; `sent` is what W&B got."""
    wandb, builder = Mock(), Mock()
    stand_ins = {"": Mock(), ".engines": Mock(), ".engines.hooks": Mock(), ".engines.hooks.builder": builder}
    stand_ins[".engines.hooks.default"] = Mock(HookBase=object)
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, f"pointcept{name}", module)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    watching.register()
    made = builder.HOOKS.register_module.call_args.kwargs["module"]
    made.sent = wandb.log.call_args_list
    return made


def train(model, steps, writer, hook):
    """Call a hook as Pointcept's trainer does that resumes after an epoch of ten steps.

    Returns:
        its log and the calls of attention of each step.
    """
    lines, seen, optimizer = [], [], torch.optim.SGD(model.parameters(), 0.1)
    hook.trainer = trainer = SimpleNamespace(
        model=model, writer=writer, logger=SimpleNamespace(info=lines.append), cfg=SimpleNamespace(enable_wandb=True),
        epoch=1, train_loader=range(10), comm_info={},
    )  # fmt: skip
    hook.before_epoch()
    for trainer.comm_info["iter"] in range(steps):
        with recorded() as calls:
            model(*clouds(45, 30)).square().mean().backward()
        seen.append(calls)
        optimizer.step()
        optimizer.zero_grad()
        hook.after_step()
    hook.after_train()
    return lines, seen


@pytest.mark.parametrize("attention", [None, "quest"])
def test_the_log_and_the_writer_get_what_attention_does(hook, tmp_path, attention):
    """And queries are clipped after every step."""
    model = segmentation(attention=attention)
    kinds = [type(module) for module in model.modules()]
    with clipped() as factors, SummaryWriter(tmp_path) as writer:
        lines, seen = train(model, 4, writer, hook(every=2, clip=1e-6))
    assert len(factors) == 4
    assert all(factors)
    curves = scalars(tmp_path)
    assert list(curves) == [11, 12, 14]
    for line, step, sent in zip(lines, curves, hook.sent, strict=True):
        assert sent == call(pytest.approx({"Iter": step, **curves[step]}), step=step)
        check(curves[step], seen[step - 11], rel=1e-4)
        assert line.startswith(f"Step {step} max_logit: {curves[step]['attention/max_logit']:.4g} entropy: ")
    assert [type(module) for module in model.modules()] == kinds
