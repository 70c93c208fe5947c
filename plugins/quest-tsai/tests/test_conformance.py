"""Every architecture of tsai with attention of its own, through the suite that all adapters inherit."""

import pytest
import torch
from tsai.models.ConvTranPlus import ConvTranPlus
from tsai.models.GatedTabTransformer import GatedTabTransformer
from tsai.models.PatchTST import PatchTST
from tsai.models.RNNAttention import RNNAttention
from tsai.models.RNNAttentionPlus import LSTMAttentionPlus
from tsai.models.TabFusionTransformer import TabFusionTransformer, TSTabFusionTransformer
from tsai.models.TabTransformer import TabTransformer
from tsai.models.TSiTPlus import TSiTPlus
from tsai.models.TSPerceiver import TSPerceiver
from tsai.models.TST import TST
from tsai.models.TSTPlus import MultiTSTPlus, TSTPlus

import quest_core
from quest_core.testing import AdapterConformance
from quest_tsai import TsaiAdapter

SMALL = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_ff": 32, "dropout": 0.1}
CLASSES = {"color": ["red", "green", "blue"], "size": ["small", "large"]}


class Series(AdapterConformance, sites=2):
    """Architectures on series [B, 3, 12] of five classes."""

    adapter = TsaiAdapter()
    kind: type
    options = SMALL

    def make_model(self):
        return self.kind(3, 5, 12, **self.options)

    def make_inputs(self):
        return (torch.randn(4, 3, 12),)


class Masked(Series):
    """Architectures that hide the time steps in which every feature is NaN."""

    def make_padded(self):
        one, other = torch.randn(4, 3, 12), torch.randn(4, 3, 12)
        other[:, :, :7] = one[:, :, :7]
        one[:, :, 7:], other[:, :, 7:] = float("nan"), float("nan")
        return (one,), (other,), lambda out: out


class TestTSTPlus(Masked):
    kind, options = TSTPlus, {**SMALL, "attn_dropout": 0.1}


class TestTSTPlusDropout(Masked, variant=True):
    """No scores passed on, dropout on the weights: the masks must come from tsai's own stream."""

    kind, options = TSTPlus, {**SMALL, "res_attention": False, "attn_dropout": 0.3}


class TestTSTPlusOddHeads(Series, variant=True):
    """d_k differs from d_model / n_heads: tsai's factor still follows the width."""

    kind, options = TSTPlus, {**SMALL, "d_k": 6, "d_v": 3}


class TestTSTPlusAttentionMask(Series, variant=True):
    kind, options = TSTPlus, {**SMALL, "attn_mask": (torch.arange(12)[:, None] - torch.arange(12)).abs() > 3}


class TestTSTPlusAdditiveMask(Series, variant=True):
    kind, options = TSTPlus, {**SMALL, "attn_mask": torch.linspace(-2, 1, 144).view(12, 12)}


class TestMultiTSTPlus(Series, variant=True, sites=4):
    def make_model(self):
        return MultiTSTPlus([1, 2], 5, 12, **SMALL)


class TestTSiTPlus(Series):
    kind, options = TSiTPlus, {"depth": 2, "d_model": 16, "n_heads": 4, "dropout": 0.1, "attn_dropout": 0.1}


class TestTST(Series):
    kind = TST


class TestPatchTST(Series):
    def make_model(self):
        return PatchTST(3, None, 12, pred_dim=4, patch_len=4, stride=2, attn_dropout=0.1, **SMALL)


class TestPatchTSTDecomposed(Series, variant=True, sites=4):
    def make_model(self):
        return PatchTST(3, None, 12, 4, patch_len=4, stride=2, decomposition=True, res_attention=False, **SMALL)


class TestTSPerceiver(Series):
    sites = 4  # two cross-, two self-attentions; later layers share the second pair

    def make_model(self):
        return TSPerceiver(
            3, 5, 12, n_latents=6, d_latent=16, n_layers=3, cross_n_heads=2, self_n_heads=4, attn_dropout=0.1
        )


class TestConvTran(Series, sites=1):
    kind, options = ConvTranPlus, {}


class TestConvTranVector(Series, variant=True, sites=1):
    kind, options = ConvTranPlus, {"rel_pos_encode": "vector"}


class TestConvTranPlain(Series, variant=True, sites=1):
    kind, options = ConvTranPlus, {"rel_pos_encode": None}


class TestRNNAttention(Series):
    kind, options = RNNAttention, {"hidden_size": 16, "encoder_layers": 2, "n_heads": 4, "d_ff": 32}


class TestLSTMAttentionPlus(TestRNNAttention, variant=True):
    kind = LSTMAttentionPlus


class Tabular(AdapterConformance, sites=2):
    adapter = TsaiAdapter()

    def test_copies_and_pickles(self):
        with torch.no_grad():  # tsai keeps the weights of the last call, which no copy survives with a gradient
            super().test_copies_and_pickles()


class TestTabTransformer(Tabular):
    kind = TabTransformer

    def make_model(self):
        return self.kind(CLASSES, ["weight"], 5, d_model=16, n_layers=2, n_heads=4)

    def make_inputs(self):
        return torch.randint(0, 2, (4, 2)), torch.randn(4, 1)


class TestTabFusionTransformer(TestTabTransformer):
    kind = TabFusionTransformer


class TestGatedTabTransformer(TestTabTransformer, variant=True):
    kind = GatedTabTransformer


class TestTSTabFusionTransformer(Tabular, variant=True):
    def make_model(self):
        return TSTabFusionTransformer(3, 5, 12, CLASSES, ["weight"], d_model=16, n_layers=2, n_heads=4)

    def make_inputs(self):
        return ((torch.randn(4, 3, 12), (torch.randint(0, 2, (4, 2)), torch.randn(4, 1))),)


@pytest.mark.parametrize("attention", ["sinkhorn", "quest+pgqa(kv_heads=2)"])
def test_a_triangular_mask_refuses_what_cannot_be_causal(attention):
    later = torch.ones(12, 12).triu(1).bool()
    model = TSTPlus(3, 5, 12, attn_mask=later, attention=attention, **SMALL)
    with pytest.raises(quest_core.UnsupportedError, match="cannot be causal"):
        model(torch.randn(2, 3, 12))
