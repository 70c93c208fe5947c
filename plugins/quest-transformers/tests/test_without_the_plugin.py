"""transformers without this plugin refuses its models and its names."""

import pytest
import torch
from models import build

from devtools.running import python
from quest_core.checkpoints import ENTRY

LOAD = """
import sys
from transformers import AutoModelForCausalLM
for folder, options in {cases}:
    try:
        AutoModelForCausalLM.from_pretrained(folder, **options)
        print('loaded')
    except Exception as error:
        print(type(error).__name__, error)
print([name for name in sys.modules if name.startswith('quest_transformers')])
"""


@pytest.mark.slow
def test_a_saved_model_and_the_name_are_refused(tmp_path):
    """Only another implementation loads the model, and the key is reported."""
    build("gpt2", attention="quest").save_pretrained(tmp_path / "quest")
    build("gpt2").save_pretrained(tmp_path / "stock")
    cases = [("quest", {}), ("stock", {"attn_implementation": "quest"}), ("quest", {"attn_implementation": "sdpa"})]
    printed = "".join(python("-c", LOAD.format(cases=cases), cwd=tmp_path))
    assert printed.count('ValueError Specified `attn_implementation="quest"` is not supported') == 2
    assert printed.count("loaded") == 1
    assert ENTRY in printed
    assert "UNEXPECTED" in printed
    assert "\n[]" in printed


@pytest.mark.slow
def test_quest_run_imports_the_plugin(tmp_path):
    build("gpt2").save_pretrained(tmp_path)
    options = {"attn_implementation": "quest", "attention_from": "standard"}
    (tmp_path / "train.py").write_text(LOAD.format(cases=[(".", options)]))
    code = "from quest_core.cli import main; main(['run', '--host', 'transformers', 'train.py'])"
    printed = "".join(python("-c", code, cwd=tmp_path))
    assert "loaded" in printed
    assert "attention=quest in 2 modules" in printed


@pytest.mark.slow
def test_a_pickled_model_loads(tmp_path):
    torch.save(build("gpt2", attention="quest+sigmoid").eval(), tmp_path / "model.pt")
    printed, _ = python(
        "-c",
        "import torch\nmodel = torch.load('model.pt', weights_only=False)\n"
        "ids = torch.ones(2, 5, dtype=torch.long)\nmask = torch.ones_like(ids)\nmask[0, :2] = 0\n"
        "print(model(input_ids=ids, attention_mask=mask).logits.shape, model.config.attention)",
        cwd=tmp_path,
    )
    assert "quest+sigmoid" in printed
