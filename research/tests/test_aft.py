"""aft/*: what is predicted from what, bits, and the measurements of a cell."""

from pydoc_data.topics import topics

import pytest
import torch
from cells import cell, run

from quest_core.errors import ConfigError
from quest_research.suites import aft, language

SHAPE = {"width": 16, "heads": 2}


def test_every_byte_is_predicted_from_those_before_it():
    tokens, following = language.pieces(torch.arange(11), 3)
    assert tokens.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert following.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    with pytest.raises(ConfigError, match="11 bytes, fewer than a piece of 11 needs"):
        language.pieces(torch.arange(11), 11)


def test_the_parts_of_the_text_do_not_overlap():
    parts = aft.splits(cell("aft/causal", "text=64", smoke=False), {})
    written = "\n".join(topics[name] for name in sorted(topics)).encode()
    found = [bytes(part[0].flatten().tolist()) for part in parts]
    tenth = len(written) // 10
    for text, start in zip(found, (0, len(written) - 2 * tenth, len(written) - tenth), strict=True):
        assert text == written[start : start + len(text)]
    assert len(found[0]) <= len(written) - 2 * tenth
    assert len(found[1]) <= tenth


def test_pixels_are_averages_and_follow_a_start():
    images = torch.zeros(1, 28, 28)
    images[0, :14, 14:] = 1.0
    images[0, 14:, :14] = 0.25
    tokens, following = aft.pixels(images, 2)
    assert following.tolist() == [[0, 255, 64, 0]]
    assert tokens.tolist() == [[256, 0, 255, 64]]


@pytest.mark.parametrize("attention", ["standard", "aft-simple", "aft-local(window=4)", "aft-full"])
def test_no_token_sees_a_later_one(attention):
    torch.manual_seed(0)
    model = aft.Decoder(attention, 12, SHAPE | {"layers": 2}).eval()
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 8] = (tokens[:, 8] + 1) % 256
    one, other = model(tokens), model(changed)
    torch.testing.assert_close(one[:, :8], other[:, :8])
    assert not torch.allclose(one[:, 8:], other[:, 8:])


def test_bits_are_logarithms_of_probabilities():
    model = aft.Decoder("quest", 8, SHAPE | {"layers": 1}).eval()
    batch = (torch.randint(256, (5, 8)), torch.randint(256, (5, 8)))
    wanted = -model(batch[0]).softmax(-1).gather(2, batch[1][..., None]).log2().mean().item()
    assert language.bits(model, batch) == pytest.approx(wanted, rel=1e-5)
    torch.nn.init.zeros_(model.out.weight)
    torch.nn.init.zeros_(model.out.bias)
    assert language.bits(model, batch) == pytest.approx(8)  # 256 values alike


@pytest.mark.parametrize("task", ["text=64", "text=256", "image=14"])
def test_a_cell_measures(data, task):
    result = run(cell("aft/causal", task, "aft-local(window=8)", data))
    assert 0 < result.metrics["bits"] < 9
    assert result.metrics["time of standard"] > 0
    assert len(result.series["validation"]) == 1
