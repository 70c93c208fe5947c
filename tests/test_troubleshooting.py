"""docs/troubleshooting.md quotes messages: each heading is produced here, and each message here has a heading."""

import importlib
import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from models import encoder
from torch import nn

import quest_core
from quest_core import AttentionConfig, cli
from quest_core.hosts import launch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "troubleshooting.md"
HEADINGS = re.findall(r"^### `(.+)`$", PAGE.read_text(), re.MULTILINE)


class HouseAttention(nn.Module):
    """An attention by its name that no adapter knows."""


def injected(attention):
    return quest_core.inject(encoder(), attention)[0]


class OwnAttention(nn.MultiheadAttention):
    def attend(self, x):
        return self(x, x, x)[0]


def kept():
    block = nn.Module()
    block.attention = OwnAttention(8, 2)
    block.attend = block.attention.attend
    quest_core.inject(block, "quest")


def warned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        injected("quest").load_state_dict(encoder().state_dict())


def no_plugin():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "plugins", list)
        launch.choose_plugins(None)


def heads(*dims):
    return [torch.zeros(1, 2, 3, dim) for dim in dims]  # [B, H, N, D]


def not_on_pypi():
    """pip looks nowhere, so no answer of a server decides."""
    command = [sys.executable, "-m", "pip", "download", "--no-index", "--no-deps", "quest-core"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    variables["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    raise RuntimeError(done.stderr)


def more_than_tensors():
    file = io.BytesIO()
    torch.save(Path("x"), file)
    file.seek(0)
    torch.load(file, weights_only=True)


def without_numpy():
    code = "import sys; sys.modules['numpy'] = None; import torch; torch.from_numpy(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    raise RuntimeError(done.stderr)


# The framework's own messages: a test of its plugin produces each.
PRODUCED_BY_PLUGINS = {
    "operator torchvision::nms does not exist": ("timm", "mmseg"),
    "No module named 'mmcv._ext'": ("mmseg",),
    "No module named 'pkg_resources'": ("mmseg",),
}
PRODUCERS = {
    "No matching distribution": not_on_pypi,
    "torch_scatter": lambda: importlib.import_module("torch_scatter"),  # the core's environment has no host
    "Weights only": more_than_tensors,
    "initialize NumPy": without_numpy,
    "is not a mechanism": lambda: AttentionConfig.parse("qest"),
    "has no option": lambda: AttentionConfig.parse("quest(color=1)"),
    "which does not divide": lambda: quest_core.inject(encoder(), "quest+gqa(kv_heads=3)"),
    "has no attention that": lambda: quest_core.inject(nn.Linear(2, 2), "quest"),
    "would replace": lambda: quest_core.inject(nn.ModuleList([encoder(), HouseAttention()]), "quest"),
    "in its place does not have": kept,
    "attention dropout": lambda: quest_core.inject(encoder(dropout=0.1), "linear"),
    "is wrapped in": lambda: quest_core.inject(nn.DataParallel(encoder()), "quest"),
    "no plugin for": lambda: quest_core.inject(encoder(), "quest", adapter="nothing"),
    "this checkpoint was trained": lambda: injected("sigmoid").load_state_dict(injected("quest").state_dict()),
    "Unexpected key(s)": lambda: encoder().load_state_dict(injected("quest").state_dict()),
    "these weights were trained": warned,
    "has head_dim": lambda: quest_core.attention(*heads(4, 5, 4), "quest"),
    "has a state": lambda: quest_core.attention(*heads(4, 4, 4), "elliptical"),
    "cannot be causal": lambda: quest_core.attention(*heads(4, 4, 4), "sinkhorn", is_causal=True),
    "nothing to run": lambda: sys.exit(cli.main(["run"])),
    "no plugin can be used": no_plugin,
}


def test_every_heading_has_one_producer():
    producers = PRODUCERS.keys() | PRODUCED_BY_PLUGINS.keys()
    assert [h for h in HEADINGS if sum(key in h for key in producers) != 1] == []
    assert [key for key in producers if not any(key in h for h in HEADINGS)] == []
    for message, plugins in PRODUCED_BY_PLUGINS.items():
        for plugin in plugins:
            test = PAGE.parents[1] / "plugins" / f"quest-{plugin}" / "tests" / "test_messages.py"
            assert message in test.read_text()


@pytest.mark.parametrize("heading", [h for h in HEADINGS if h not in PRODUCED_BY_PLUGINS])
def test_the_message_is_the_one_on_the_page(heading, capsys):
    (produce,) = (made for key, made in PRODUCERS.items() if key in heading)
    with pytest.raises((Exception, SystemExit)) as caught:  # the pattern below is the check
        produce()
    said = str(caught.value) + capsys.readouterr().err
    pattern = ".*".join(re.escape(part) for part in heading.split("…"))
    assert re.search(pattern, said, re.DOTALL), said
