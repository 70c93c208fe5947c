"""Models that people try first work, are saved and loaded, or are an error that says why; docs/coverage.csv is true."""

import contextlib
import datetime
import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from quest_transformers.inputs import inputs

spec = importlib.util.spec_from_file_location("docs_coverage", Path(__file__).parents[3] / "docs" / "coverage.py")
coverage = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(coverage)

FIRST = {  # model type -> the ways of its modules, or the words of the error
    "bloom": "written out 2",
    "deberta-v2": "written out 4",
    "falcon": "universal 4",
    "gemma2": "transformers 4",
    "gemma3": "torch 1, transformers 8",
    "gpt_oss": "transformers 4",
    "idefics": "transformers 12",
    "jamba": "transformers 2",
    "mimo_v2_flash": "transformers 4",
    "mpt": "written out 4",
    "qwen3_5": "transformers 5",
    "qwen3_next": "transformers 1",
    "rf_detr": "transformers 4, universal 2",
    "sam": "transformers 7, universal 4",
    "sam2": "transformers 7, universal 12",
    "siglip": "torch 1, transformers 8",
    "swinv2": "it is cosine attention",
    "wavlm": "universal 4",
}


def needs(model_type):
    if model_type not in hf.CONFIG_MAPPING:
        pytest.skip(f"transformers {hf.__version__} has no {model_type}")


def built(config, attention=None):
    torch.manual_seed(0)
    options = {} if attention is None else {"attn_implementation": attention}
    return hf.AutoModel.from_config(config, **options).eval()


def outputs(model):
    """Return the tensors of a run on inputs of the plugin's own; none where the whole model does not run on them."""
    for number in range(2):  # the main input only, or several
        made = inputs(model, model.config, number, torch.Generator().manual_seed(1))
        torch.manual_seed(0)
        with torch.no_grad(), contextlib.suppress(Exception):
            return [x for x in model(**made).to_tuple() if isinstance(x, torch.Tensor)]
    return []


# The slow ones are large, or what they do is in another model and in OWN of test_architectures.py.
SLOW = {"gemma2", "gemma3", "gpt_oss", "idefics", "qwen3_5", "sam", "sam2"}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FIRST]
)
def test_models_that_people_try_first(model_type, tmp_path):
    needs(model_type)
    config, _ = next(coverage.configs(model_type))
    models = []
    made = coverage.judge(lambda: models.append(built(config, "quest")) or models[0])
    if made["outcome"] != "taken":
        assert FIRST[model_type] in made["reason"]
        return
    assert made["ways"] == FIRST[model_type]
    want, (quest,) = outputs(built(config)), models
    for one, other in zip(outputs(built(config, "standard")), want, strict=True):
        torch.testing.assert_close(one, other)
    got = outputs(quest)
    assert not want or any(not torch.allclose(one, other, atol=1e-6) for one, other in zip(got, want, strict=True))
    quest.save_pretrained(tmp_path)
    again = hf.AutoModel.from_pretrained(tmp_path).eval()
    assert again.config.attention == "quest"
    assert coverage.judge(lambda: again) == made
    for one, other in zip(outputs(again), got, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("model_type", ["lxmert", "neomme", pytest.param("perceiver", marks=pytest.mark.slow)])
def test_models_with_configs_and_inputs_of_their_own(model_type):
    needs(model_type)
    assert coverage.attempt("transformers", model_type).outcome == "taken"


@pytest.mark.slow
def test_a_sample_of_the_coverage_is_as_its_data_say():
    rows = [row for row in coverage.read().values() if row.package == "transformers" and row.outcome == "taken"]
    for row in random.Random(datetime.date.today().toordinal()).sample(rows, 20):
        assert coverage.attempt("transformers", row.name) == row
