"""The conformance suite on PyTorch's own modules and on the example of a plugin, and that it sees what is broken."""

import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import quest_core
from quest_core.hosts.adapter import HostAttention
from quest_core.hosts.torch import TorchAdapter
from quest_core.testing import AdapterConformance
from quest_core.testing.conformance import NUMBERS

EXAMPLE = Path(__file__).parents[1] / "examples" / "third_party_plugin"
sys.path += [str(EXAMPLE / "src"), str(EXAMPLE / "tests")]

import stand_in  # noqa: E402
from test_adapter import TestEncoder  # noqa: E402, which pytest runs here

from quest_toy.adapter import FusedAttention, ToyAdapter  # noqa: E402


class TestTorchEncoder(AdapterConformance, sites=2):
    adapter, dropout = TorchAdapter(), 0.1

    def make_model(self):
        layer = nn.TransformerEncoderLayer(16, 4, 32, self.dropout, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    def make_inputs(self):
        return (torch.randn(2, 7, 16),)

    def make_padded(self):
        x, padding = torch.randn(2, 7, 16), torch.zeros(2, 7, dtype=torch.bool)
        padding[0, 4:] = True
        other = torch.where(padding[..., None], 9.0, x)
        return (x, None, padding), (other, None, padding), lambda out: out[~padding]


class TestTorchEncoderWithoutDropout(TestTorchEncoder):
    """Without dropout on the weights, mechanisms without weights apply too."""

    dropout = 0.0
    mechanisms = (*AdapterConformance.mechanisms, "linear", "cosine", "aft-simple", "aft-full", "aft-local")


class TestTorchDecoder(AdapterConformance, sites=4):
    """Causal self-attention and cross-attention."""

    adapter = TorchAdapter()
    mechanisms = tuple(name for name in AdapterConformance.mechanisms if name != "sinkhorn")  # it cannot be causal

    def make_model(self):
        return nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, 0.1), 2)

    def make_inputs(self):
        return (torch.randn(6, 2, 16), torch.randn(5, 2, 16), nn.Transformer.generate_square_subsequent_mask(6))

    def run(self, model, inputs):
        target, memory, mask = inputs
        return model(target, memory, tgt_mask=mask.to(target.dtype))


def test_the_tests_of_a_variant_exist():
    assert set(NUMBERS) <= vars(AdapterConformance).keys()


def test_a_base_class_that_refuses_nothing_drops_no_test_of_those_that_inherit():
    name = "test_what_the_host_cannot_honor_is_refused_by_name"
    base = type("Base", (AdapterConformance,), {"adapter": ToyAdapter()})
    assert not getattr(base, name)
    assert getattr(type("Inherits", (base,), {"refused": ("linear",)}), name) is vars(AdapterConformance)[name]


class Fallback(FusedAttention):
    """The worst bug that this project can have: it returns the host's own attention."""

    forward = stand_in.FusedAttention.forward


class OtherMask(FusedAttention):
    def forward(self, x, keep=None):
        return super().forward(x, None if keep is None else ~keep)


class Untrained(FusedAttention):
    @classmethod
    def adopt(cls, *arguments, **options):
        made = super().adopt(*arguments, **options)
        made.mechanism.requires_grad_(False)
        return made


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Fallback, TestEncoder.test_every_attention_goes_through_its_mechanism),
        (Fallback, TestEncoder.test_mechanisms_equal_their_reference_inside_the_host),
        (OtherMask, TestEncoder.test_padding_never_matters),
        (Untrained, TestEncoder.test_parameters_of_a_mechanism_are_frozen_with_the_projections),
    ],
)
def test_the_suite_catches_a_broken_adapter(broken, test):
    class Broken(ToyAdapter):
        replacements: ClassVar[dict[str, type[HostAttention]]] = {"stand_in.FusedAttention": broken}

    suite = TestEncoder()
    suite.adapter = Broken()
    with pytest.raises(AssertionError):
        test(suite)


def test_query_heads_that_share_a_key_head_are_calibrated_by_its_norm():
    model = stand_in.Model(16, 4, depth=2, num_kv_heads=2)
    before = model.layers[0].q_proj.weight.detach().clone()
    _, report = quest_core.calibrate(model, [torch.randn(2, 7, 16)], adapter=ToyAdapter())
    layer = report.layers[0]
    assert layer.factors == pytest.approx([norm / 2 for norm in layer.key_norms for _ in range(2)])  # 1/√D = 1/2
    rows = torch.tensor(layer.factors).repeat_interleave(4)
    torch.testing.assert_close(model.layers[0].q_proj.weight, before * rows[:, None])


def test_a_host_without_dropout_trains():
    model = stand_in.Model(16, 4, depth=2)
    for layer in model.layers:
        del layer.attn_drop
    quest_core.inject(model, "quest", adapter=ToyAdapter())
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(model.train()(x), model.eval()(x))
