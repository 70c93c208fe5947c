"""What fairseq's transformer_lm takes: see devtools.support."""

from pathlib import Path

import torch
from conftest import SHAPE, build

from devtools.support import check


def test_the_table_of_support():
    def loss(attention):
        model = build("quest_transformer_lm", *SHAPE, "--attention", attention)
        return model(torch.randint(4, 9, (2, 7)))[0].pow(2).mean()

    check(Path(__file__).with_name("support.json"), "fairseq", loss, {})
