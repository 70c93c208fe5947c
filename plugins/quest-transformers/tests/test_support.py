"""What BERT of transformers takes: see devtools.support."""

from pathlib import Path

import torch
from models import BERT
from transformers import BertConfig, BertModel

import quest_transformers  # noqa: F401
from devtools.support import check


def test_the_table_of_support():
    def loss(attention, **options):
        model = BertModel._from_config(BertConfig(**BERT, attn_implementation=attention, **options))
        return model(torch.randint(50, (2, 9))).last_hidden_state.pow(2).mean()

    settings = {"`attention_probs_dropout_prob=0`": {"attention_probs_dropout_prob": 0.0}}
    check(Path(__file__).with_name("support.json"), "transformers", loss, settings)
