"""The sequences of recall/mqar."""

from __future__ import annotations

import torch

from quest_research.suites.recall import IGNORED, sequences


def test_every_key_comes_once_more_and_its_value_is_wanted_there() -> None:
    tokens, wanted = sequences(50, 8, 64, torch.Generator().manual_seed(0))
    for row, answers in zip(tokens.tolist(), wanted.tolist(), strict=True):
        value_of = dict(zip(row[:16:2], row[1:16:2], strict=True))
        assert len(value_of) == 8
        assert all(0 < key < 32 <= value < 64 for key, value in value_of.items())
        asked = [place for place, answer in enumerate(answers) if answer != IGNORED]
        assert sorted(row[place] for place in asked) == sorted(value_of)
        assert all(answers[place] == value_of[row[place]] for place in asked)
        assert not any(token for place, token in enumerate(row) if place >= 16 and place not in asked)
    distance = (wanted != IGNORED).double().mean(0)[16::2]
    assert distance[0] > 2 * distance[-1]  # a power law
