"""fairseq's Transformer-XL: through the suite that all adapters inherit, and through fairseq-train."""

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import USER_DIR
from test_tools import losses, perplexity
from transformers.models.transfo_xl import TransfoXLConfig, TransfoXLLMHeadModel

import quest_core
from quest_core.testing import AdapterConformance
from quest_fairseq import FairseqAdapter
from quest_fairseq.transformer_xl import RelativeAttention
from quest_suites.fairseq.tasks import configuration

SIZES = {"d_model": 16, "d_embed": 16, "n_head": 4, "d_head": 4, "d_inner": 32, "n_layer": 2}
SHAPE = "--n-layer 2 --d-model 16 --n-head 4 --d-head 4 --d-inner 32 --mem-len 12 --dropout 0.1 --dropatt 0.1"


class TestTransformerXL(AdapterConformance, sites=2):
    """Tokens [B, T] with a memory of earlier hidden states."""

    adapter = FairseqAdapter()
    mechanisms = ("quest", "qnorm", "qknorm-hs", "qknorm-ds", "quest+sigmoid")
    refused = ("gqa(kv_heads=2)", "sinkhorn", "linear", "elliptical", "aft-full")
    compiles = False  # the host asks for values of tensors in its forward

    test_autocast = None  # transformers' adaptive softmax fails under autocast by itself

    def make_model(self):
        config = TransfoXLConfig(vocab_size=20, cutoffs=[10], dropatt=0.1, mem_len=6, **SIZES)
        model = TransfoXLLMHeadModel(config)
        with torch.no_grad():
            for layer in model.transformer.layers:
                layer.dec_attn.qkv_net.weight.mul_(20)  # so that attention is more than an average
        return model

    def make_inputs(self):
        return torch.randint(4, 20, (3, 7)), torch.randint(4, 20, (3, 5))

    def run(self, model, inputs):
        first = model(inputs[0], return_dict=True)
        return model(inputs[1], mems=first.mems, return_dict=True).prediction_scores

    def test_a_host_checkpoint_loads_into_fewer_key_heads(self):
        """One projection makes queries, keys and values, so there are never fewer: see `refused`."""
        assert self.grouping() is None


def injected(attention):
    """Return the first layer of a small model without a memory."""
    model = TransfoXLLMHeadModel(TransfoXLConfig(vocab_size=20, cutoffs=[10], mem_len=0, **SIZES)).eval()
    quest_core.inject(model, attention, adapter=FairseqAdapter())
    return model.transformer.layers[0].dec_attn


def logits_of(layer, hidden, positions):
    """What the normalizer of a replaced layer is given: [B, H, N, M], the relative term included."""
    mechanism, calls = layer.mechanism, []

    def spy(q, k, v, **rest):
        calls.append(type(mechanism).forward_with_logits(mechanism, q, k, v, **rest))
        return calls[0]

    mechanism.forward_with_logits = spy
    layer(hidden, positions)
    del mechanism.forward_with_logits
    return calls[0][2].detach()


@pytest.mark.parametrize("attention", ["standard", "quest"])
def test_scaled_queries_scale_both_terms_of_the_logits(attention):
    """(q + u)·k + (q + w)·r: the biases u and w are parts of the queries."""
    layer = injected(attention)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    hidden, positions = torch.randn(5, 2, 16), torch.randn(5, 16)
    before, factor = logits_of(layer, hidden, positions), torch.tensor([0.5, 1, 2, 3], dtype=torch.float64)
    FairseqAdapter().scale_queries(layer, factor)
    after = logits_of(layer, hidden, positions)
    torch.testing.assert_close(after, before * factor.float()[:, None, None], rtol=1e-4, atol=1e-4)


def test_every_logit_is_bounded_by_the_queries():
    """Keys and relative positions of any length: a row's logits stay within ‖q + u‖ + ‖q + w‖."""
    layer = injected("quest")
    with torch.no_grad():
        layer.r_net.weight.mul_(1000)
        layer.qkv_net.weight[16:].mul_(1000)
    hidden, positions = torch.randn(5, 2, 16), torch.randn(5, 16)
    logits = logits_of(layer, hidden, positions)
    q = layer.qkv_net(hidden)[..., :16].view(5, 2, 4, 4).permute(1, 2, 0, 3)
    bound = (q + layer.r_w_bias[:, None]).norm(dim=-1) + (q + layer.r_r_bias[:, None]).norm(dim=-1)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    assert (logits.abs() <= bound[..., None] + 1e-5)[..., seen].all()


def test_the_papers_model_has_the_papers_size():
    """151M: the shipped yaml on WikiText-103's dictionary, without memory for its weights."""
    model = configuration("wikitext103-transformer-xl").model
    sizes = {name: model[name] for name in ("d_model", "n_head", "d_head", "d_inner", "n_layer", "div_val", "mem_len")}
    config = TransfoXLConfig(vocab_size=267_744, cutoffs=list(model.cutoffs), d_embed=model.d_model, **sizes)
    with torch.device("meta"):
        made = TransfoXLLMHeadModel(config)
    assert sum(parameter.numel() for parameter in made.parameters()) == 151_123_537


def train(tools, data, *arguments, updates=4):
    given = "--task truncated_bptt_lm --cpu --optimizer adam --lr 0.003 --tokens-per-sample 12 --batch-size 4 "
    given += f"--num-workers 0 --max-update {updates} --log-format simple --log-interval 1 {SHAPE}"
    return tools("train", data, "--user-dir", USER_DIR, *given.split(), *arguments)


def test_trains_as_stock_and_evaluates_with_a_longer_memory(tools, lm_data, tmp_path):
    stock = train(tools, lm_data, "--arch", "transformer_xl", "--save-dir", tmp_path / "stock", updates=9)
    given = ["--arch", "quest_transformer_xl", "--attention", "standard", "--save-dir", tmp_path / "ours"]
    assert losses(train(tools, lm_data, *given, updates=9)) == losses(stock)
    assert len(losses(stock)) > 18
    quest = ["--arch", "quest_transformer_xl", "--attention", "quest", "--save-dir", tmp_path / "quest"]
    train(tools, lm_data, *quest)
    log = train(tools, lm_data, *quest, updates=6)
    assert re.findall(r"num_updates=(\d)", log) == ["5", "6"]
    evaluate = [lm_data, "--path", tmp_path / "quest" / "checkpoint_best.pt", "--task", "truncated_bptt_lm", "--cpu"]
    evaluate += ["--user-dir", USER_DIR, "--tokens-per-sample", "8", "--batch-size", "1", "--num-workers", "0"]
    longer = "{'mem_len': 40, 'clamp_len': 20, 'same_length': True}"
    assert 1 < perplexity(tools("eval_lm", *evaluate, "--model-overrides", longer)) < 60
    with pytest.raises(quest_core.CheckpointError, match="trained with attention 'quest'"):
        tools("eval_lm", *evaluate, "--model-overrides", "{'attention': 'standard'}")


@pytest.mark.parametrize("facts", [{"reads": ("tokens",)}, {"stateful": True}])
def test_scores_that_depend_on_other_tokens_are_refused(facts):
    part = SimpleNamespace(**{"name": "one", "chained": False, "axis": "score", "reads": (), "stateful": False} | facts)
    assert "'one' depends on other tokens" in RelativeAttention.refuses(None, "", SimpleNamespace(components=[part]))
