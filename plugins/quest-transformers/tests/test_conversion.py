"""quest_core.calibrate: from standard attention to quest with calibrated queries."""

import pytest
import torch
from models import build, inputs

import quest_core
import quest_transformers  # noqa: F401
from quest_core.errors import UnsupportedError


@pytest.mark.parametrize("name", ["gpt2", "llama", "bart", "vit"])
def test_a_converted_model_is_nearer_to_what_it_was(name, tmp_path):
    model = build(name)
    with torch.no_grad():  # logits far from 0, where attention matters
        for parameter in model.parameters():
            parameter.mul_(4)
    batches = [inputs(name) for _ in range(3)]
    made, report = quest_core.calibrate(model, batches, "quest")
    assert made is model
    assert report.calibrated < report.uncalibrated
    assert model.config.attention == "quest"
    model.eval().save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again(**batches[0]).logits, model(**batches[0]).logits)


def test_data_may_be_tensors():
    model, report = quest_core.calibrate(build("gpt2"), [torch.randint(3, 50, (2, 7))], "quest")
    assert len(report.layers) == 2
    assert model.config.attention == "quest"


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
