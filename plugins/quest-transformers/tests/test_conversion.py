"""Models whose queries quest_core.calibrate cannot scale."""

import pytest
import torch
from models import build, inputs

import quest_core
import quest_transformers  # noqa: F401
from quest_core.errors import UnsupportedError


def test_queries_that_no_projection_scales_are_refused():
    model = build("qwen3")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(UnsupportedError, match="normalized after their projections \\(q_norm, k_norm\\)"):
        quest_core.calibrate(model, [inputs("qwen3")], "quest")
    assert model.config.attention is None
    assert model.state_dict().keys() == before.keys()
    with pytest.raises(UnsupportedError, match="projections are not Linear layers of one role each"):
        quest_core.calibrate(build_neox(), [{"input_ids": torch.randint(3, 50, (2, 7))}], "quest")


def build_neox():
    import transformers as hf
    from models import BERT

    return hf.AutoModelForCausalLM.from_config(hf.GPTNeoXConfig(**BERT))
