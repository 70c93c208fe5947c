"""transformers without this plugin refuses its models and its names."""

from __future__ import annotations

import pytest
from models import build

from quest_core.checkpoints import ENTRY

LOAD = """
import sys
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained('.', {options})
    print('loaded')
except Exception as error:
    print(type(error).__name__, error)
print([name for name in sys.modules if name.startswith('quest_transformers')])
"""


@pytest.mark.slow
def test_a_saved_model_is_refused_by_its_name(fresh_python, tmp_path):
    build("gpt2", attention="quest").save_pretrained(tmp_path)
    printed = fresh_python(LOAD.format(options=""), tmp_path)
    assert 'ValueError Specified `attn_implementation="quest"` is not supported' in printed
    assert "\n[]" in printed


@pytest.mark.slow
def test_only_another_implementation_loads_it_and_reports_the_key(fresh_python, tmp_path):
    build("gpt2", attention="quest").save_pretrained(tmp_path)
    printed = fresh_python(LOAD.format(options="attn_implementation='sdpa'"), tmp_path)
    assert "loaded" in printed
    assert ENTRY in printed
    assert "UNEXPECTED" in printed


@pytest.mark.slow
def test_the_name_is_refused(fresh_python, tmp_path):
    build("gpt2").save_pretrained(tmp_path)
    printed = fresh_python(LOAD.format(options="attn_implementation='quest'"), tmp_path)
    assert 'ValueError Specified `attn_implementation="quest"` is not supported' in printed


def test_quest_run_imports_the_plugin(fresh_python, tmp_path):
    build("gpt2").save_pretrained(tmp_path)
    (tmp_path / "train.py").write_text(
        LOAD.format(options="attn_implementation='quest', attention_from='standard'")
        + "print('quest_core' in sys.modules)"
    )
    printed = fresh_python("from quest_core.hosts.launch import run\nrun(['train.py'], ['transformers'])", tmp_path)
    assert "loaded" in printed
    assert "attention=quest in 2 modules" in printed


@pytest.mark.slow
def test_a_pickled_model_loads(fresh_python, tmp_path):
    import torch

    torch.save(build("gpt2", attention="quest+sigmoid").eval(), tmp_path / "model.pt")
    printed = fresh_python(
        "import torch\nmodel = torch.load('model.pt', weights_only=False)\n"
        "ids = torch.ones(2, 5, dtype=torch.long)\nmask = torch.ones_like(ids)\nmask[0, :2] = 0\n"
        "print(model(input_ids=ids, attention_mask=mask).logits.shape, model.config.attention)",
        tmp_path,
    )
    assert "quest+sigmoid" in printed
