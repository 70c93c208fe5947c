"""power: everything that its Part declares, and a model that runs with it."""

import torch

import quest_core
from quest_core.testing import MechanismConformance
from quest_power import PARTS


class TestPower(MechanismConformance):
    mechanism = PARTS[0]


def test_it_is_installed_and_runs_in_a_model() -> None:
    model = torch.nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
    model, report = quest_core.inject(model, "power")
    assert len(report.replacements) == 1
    model(torch.randn(2, 9, 32)).square().mean().backward()
