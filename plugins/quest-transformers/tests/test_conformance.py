"""Every architecture that the plugin names, through the suite that all adapters inherit."""

import pytest
import torch
from models import CONFIGS, SITES, build, inputs

import quest_core
from quest_core.testing import AdapterConformance
from quest_transformers import TransformersAdapter
from quest_transformers.anatomy import is_attention, regroups


class Model(AdapterConformance, sites=2):
    adapter = TransformersAdapter()
    model = ""

    def __init_subclass__(cls, **attributes):
        cls.model = cls.__name__.removeprefix("Test").lower()
        super().__init_subclass__(sites=SITES.get(cls.model, 2), **attributes)

    def make_model(self):
        return build(self.model)

    def make_inputs(self):
        return (inputs(self.model),)

    def run(self, model, arguments):
        return model(**arguments[0]).logits


class Padded(Model):
    def make_padded(self):
        one = inputs(self.model, padded=True)
        real = one["attention_mask"].bool()
        other = {**one, "input_ids": torch.where(real, one["input_ids"], 3)}
        if self.model in ("bart", "t5"):
            return (one,), (other,), lambda out: out
        return (one,), (other,), lambda out: out[real]


class Causal(Padded, refused=("sinkhorn", "quest+kdgqa(kv_heads=2)", "linear")):
    mechanisms = tuple(name for name in AdapterConformance.mechanisms if name != "sinkhorn")


class TestBert(Padded):
    refused = ("linear",)  # the model has dropout, and linear attention has no weights to drop


class TestVit(Model, refused=("linear",)):
    if not all(regroups(m) for m in build("vit").modules() if is_attention(m)):  # an older transformers
        refused = ("linear", "quest+gqa(kv_heads=2)")
        test_a_host_checkpoint_loads_into_fewer_key_heads = None


class TestGpt2(Causal):
    refused = ("sinkhorn", "quest+gqa(kv_heads=2)")  # one layer makes q, k and v, and is split into equal parts
    test_a_host_checkpoint_loads_into_fewer_key_heads = None

    def test_initial_norms_are_set_in_a_fresh_model(self):
        with pytest.raises(quest_core.UnsupportedError, match="not Linear layers of one role each"):
            quest_core.inject(self.stock(), "quest(init=5)", adapter=self.adapter, fresh=True)


class TestLlama(Causal):
    pass


class TestQwen3(Causal, variant=True):
    calibrates = False  # it normalizes queries after their projection


class TestMistral(Causal, variant=True):
    pass


class TestBart(Causal):
    pass


if "t5" in CONFIGS:

    class TestT5(Causal):
        pass
