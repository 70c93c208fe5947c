"""The sequences of recall/mqar and recall/mad."""

import re
from random import Random

import pytest
import torch

from quest_research.suites.mad import BLANK, LAST, TASKS, FromTheLast
from quest_research.suites.recall import IGNORED, sequences


def test_every_key_comes_once_more_and_its_value_is_wanted_there():
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


@pytest.mark.parametrize(("task", "lengths"), [("in-context", {1}), ("fuzzy", {1, 2, 3}), ("noisy", {1})])
def test_a_value_is_wanted_where_its_key_was_seen_before(task, lengths):
    dice, found, noise = Random(0), set(), 0
    for _ in range(50):
        tokens, wanted = TASKS[task][1](dice)
        text = "".join("abcdefghABCDEFGH................"[token] for token in tokens)
        value_of = {}
        expected = [IGNORED] * 70
        for pair in re.finditer("([a-h]+)([A-H]+)", text):
            if value := value_of.get(pair[1]):
                expected[pair.end(1) - 1 : pair.end(2) - 1] = [8 + ord(letter) - ord("A") for letter in value]
                found.add(len(pair[1]))
            value_of.setdefault(*pair.groups())
        assert wanted[:-6] == expected[: len(wanted) - 6]  # the last pair may be cut
        noise += text.count(".")
    assert found == lengths
    assert (0.15 < noise / 3200 < 0.25) if task == "noisy" else not noise


def test_copies_and_facts_are_wanted_where_they_are_not_seen():
    dice = Random(0)
    facts = {}
    for _ in range(50):
        tokens, wanted = TASKS["copying"][1](dice)
        end = tokens.index(LAST) + 1
        assert [token for token in tokens[: end - 1] if token != BLANK] == wanted[end:]
        assert set(tokens[end:]) == {BLANK}
        assert set(wanted[:end]) == {IGNORED}
        tokens, wanted = TASKS["memorization"][1](dice)
        assert not set(tokens) & set(wanted)
        assert all(facts.setdefault(*fact) == fact[1] for fact in zip(tokens[::2], wanted[1::2], strict=True))


def test_a_decoder_sees_only_the_last_token():
    x = torch.randn(2, 9, 8)
    decode = FromTheLast(8)
    assert torch.equal(decode(x), decode(torch.cat([torch.zeros(2, 8, 8), x[:, -1:]], 1)))
