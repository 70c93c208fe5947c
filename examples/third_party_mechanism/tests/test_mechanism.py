"""Every promise of the mechanism, and a model that trains with it."""

import torch

import quest_core
from quest_core.testing import check_mechanism
from quest_power import Power


def test_it_keeps_its_promises() -> None:
    check_mechanism(Power)


def test_it_is_installed_and_trains_in_a_model() -> None:
    assert "power" in quest_core.list_mechanisms()
    model = torch.nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
    model, report = quest_core.inject(model, "power")
    assert len(report.replacements) == 1
    model(torch.randn(2, 9, 32)).square().mean().backward()
