"""fairseq's language model and translation model, through the suite that all adapters inherit."""

import pytest
import torch
from conftest import DECODER, ENCODER, build
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

import quest_core
from quest_core.testing import AdapterConformance
from quest_fairseq import FairseqAdapter

CAUSAL = ("quest", "qnorm", "qknorm-hs", "qknorm-ds", "qknorm", "quest+sigmoid")
LM = [*DECODER, "--dropout", "0.1"]
MT = [*LM, *ENCODER]


def tokens(batch, length):
    return torch.randint(4, 20, (batch, length))


class LanguageModel(AdapterConformance, sites=2):
    """Tokens [B, T] -> logits [B, T, V]."""

    adapter = FairseqAdapter()
    mechanisms = CAUSAL

    def make_inputs(self):
        return (tokens(3, 9),)

    def make_padded(self):
        real = tokens(3, 6)
        one, other = (torch.cat([real, torch.full((3, width), 1)], dim=1) for width in (2, 5))
        return (one,), (other,), lambda out: out[:, :6]


class TestLanguageModel(LanguageModel, refused=("sinkhorn", "kdgqa(kv_heads=2)", "pgqa(kv_heads=2)")):
    """Without attention dropout, so that families, which have no weights to drop, are tried as well."""

    def make_model(self):
        return build("transformer_lm", *LM)


class TestLanguageModelFewHeads(LanguageModel, variant=True):
    """Learned positions, a factor for each head, layers that are computed again for the backward pass."""

    def make_model(self):
        return build("transformer_lm", *LM, "--decoder-learned-pos", "--checkpoint-activations", "--scale-heads")

    compiles = False  # fairseq's own checkpointed layers cannot be


class TestTranslation(AdapterConformance, sites=6, refused=("sinkhorn", "aft-full", "linear", "aft-simple")):
    """Encoder, decoder and cross-attention, with dropout on the weights, whose masks come from fairseq's own stream."""

    adapter = FairseqAdapter()
    mechanisms = CAUSAL
    compiles = False  # the modules are those of the language model, which is compiled above; this would take a minute

    def make_model(self):
        return build("transformer", *MT, "--attention-dropout", "0.1")

    def make_inputs(self):
        return tokens(3, 7), torch.full((3,), 7), tokens(3, 5)

    def make_padded(self):
        source, target = tokens(3, 6), tokens(3, 5)
        one, other = (torch.cat([torch.full((3, width), 1), source], dim=1) for width in (2, 4))
        lengths = torch.full((3,), 6)
        return (one, lengths, target), (other, lengths, target), lambda out: out


@pytest.mark.parametrize(
    ("extra", "reason"),
    [(["--quant-noise-pq", "0.1"], "quant_noise"), (["--cross-self-attention", "--no-cross-attention"], "cross_self")],
)
def test_options_of_fairseqs_own_attention_are_refused(extra, reason):
    with pytest.raises(quest_core.UnsupportedError, match=f"{reason}.*leave the option out"):
        quest_core.inject(build("transformer", *MT, *extra), "quest", adapter=FairseqAdapter())


@pytest.mark.parametrize("attention", ["quest", "quest+sigmoid", "elliptical"])
def test_keys_hidden_by_a_mask_of_numbers_are_hidden_in_every_sense(attention):
    """fairseq's encoder layers turn 1 into -1e8 and not into -inf; a mask keeps two documents apart."""
    sizes = TransformerConfig()
    sizes.encoder.embed_dim = sizes.encoder.ffn_embed_dim = 16
    sizes.encoder.attention_heads, sizes.dropout, sizes.attention_dropout = 2, 0.0, 0.0
    layers = torch.nn.ModuleList(TransformerEncoderLayerBase(sizes) for _ in range(2)).eval()
    quest_core.inject(layers, attention)

    def run(x, mask):
        for layer in layers:
            x = layer(x, None, attn_mask=mask)
        return x

    x, free = torch.randn(8, 1, 16), torch.zeros(4, 4)
    both = run(x, torch.ones(8, 8) - torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)))
    torch.testing.assert_close(both, torch.cat([run(x[:4], free), run(x[4:], free)]), rtol=1e-5, atol=1e-5)
