"""`init` and `key_init`: the norms that queries and keys of a fresh model start with, and that trained ones keep."""

import copy

import pytest
import torch
import transformers as hf
from models import BERT, CLASSES, SEQ2SEQ_MODELS, build, inputs

from quest_core import CheckpointError, ConfigError, UnsupportedError, calibrate
from quest_transformers import TransformersAdapter

STARTED = "quest(init=5, key_init=2)"


def norms(model, role="q"):
    """The norms of each head, by path."""
    adapter = TransformersAdapter()
    return {
        site.path: part.projections.norms(part, part.head_sizes, role).tolist()
        for site in adapter.sites(model)
        for part in adapter.projections(site.module)
    }


@pytest.mark.parametrize("name", ["bert", "vit", "llama", *SEQ2SEQ_MODELS])
def test_from_config_starts_as_asked_and_what_was_saved_is_not_scaled(name, tmp_path):
    model = build(name, attention=STARTED)
    for role, norm in (("q", 5), ("k", 2)):
        assert all(heads == pytest.approx([norm] * len(heads)) for heads in norms(model, role).values())
    assert "queries start with norms 5 to 5" in str(model.attention_report)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(tmp_path)
    loaded = CLASSES.get(name, hf.AutoModelForCausalLM).from_pretrained(tmp_path)
    assert norms(loaded) == norms(model)
    assert loaded.config.attention == model.config.attention


def test_each_role_starts_as_its_own_attention_says():
    choice = {"encoder": "qnorm", "decoder": "quest(init=5)", "cross": "standard"}
    found = norms(build("bart", attention=choice))
    assert {path for path, heads in found.items() if heads == pytest.approx([5] * 4)} == {
        path for path in found if ".decoder." in path and path.endswith("self_attn")
    }


def test_pretrained_weights_are_not_scaled(tmp_path):
    build("llama").save_pretrained(tmp_path)
    options = {"attn_implementation": "quest(init=5)", "attention_from": "standard"}
    with pytest.raises(CheckpointError, match="sets the norms of new projections"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    with pytest.raises(ConfigError, match="this model may be trained"):
        build("llama").set_attn_implementation("quest(init=5)")


def test_a_model_inside_a_new_one_keeps_its_weights():
    config = hf.BertConfig(**BERT)
    encoder = hf.AutoModel.from_config(config, attn_implementation="quest(init=5)")
    with torch.no_grad():
        encoder.encoder.layer[0].attention.self.query.weight.mul_(2)
    before = norms(encoder)
    other = copy.deepcopy(config)
    other.is_decoder = other.add_cross_attention = True
    decoder = hf.AutoModelForCausalLM.from_config(other, attn_implementation="quest(init=5)")
    after = norms(hf.EncoderDecoderModel(encoder=encoder, decoder=decoder))
    assert {path: after[f"encoder.{path}"] for path in before} == before


def test_norms_that_no_projection_sets_are_refused():
    """A start, and the factors of quest_core.calibrate."""
    with pytest.raises(UnsupportedError, match="they are normalized after their projections"):
        build("qwen3", attention="quest(init=5)")
    model = build("qwen3")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(UnsupportedError, match="normalized after their projections \\(q_norm, k_norm\\)"):
        calibrate(model, [inputs("qwen3")], "quest")
    assert model.config.attention is None
    torch.testing.assert_close(dict(model.state_dict()), before)
    model = hf.AutoModelForCausalLM.from_config(hf.GPTNeoXConfig(**BERT))
    with pytest.raises(UnsupportedError, match="projections are not Linear layers of one role each"):
        calibrate(model, [{"input_ids": torch.randint(3, 50, (2, 7))}], "quest")
