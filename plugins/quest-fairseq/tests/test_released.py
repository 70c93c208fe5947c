"""The shortcut around attention in the encoder layers of fairseq 0.12.2, and that later versions have none."""

from __future__ import annotations

import pytest
import torch
from conftest import build

from quest_core import inject
from quest_fairseq import FairseqAdapter

SHAPE = ["--decoder-layers", "1", "--decoder-embed-dim", "16", "--decoder-attention-heads", "4"]
SHAPE += ["--encoder-layers", "2", "--encoder-embed-dim", "16", "--encoder-attention-heads", "4"]


@pytest.mark.parametrize("attention", ["standard", "quest", "quest+gqa(kv_heads=2)"])
def test_a_loaded_encoder_still_calls_its_attention(attention: str) -> None:
    """In evaluation, without gradients, after loading a checkpoint: when 0.12.2 goes around its attention."""
    state = build("quest_transformer", "--attention", attention, *SHAPE).state_dict()
    model = build("quest_transformer", "--attention", attention, *SHAPE).eval()
    model.load_state_dict(state)
    converted = build("transformer", *SHAPE).eval()
    converted.load_state_dict(build("transformer", *SHAPE).state_dict())
    for loaded in (model, inject(converted, attention, adapter=FairseqAdapter())[0]):
        seen: list[object] = []
        for layer in loaded.encoder.layers:
            layer.self_attn.mechanism.score.register_forward_hook(lambda *call, seen=seen: seen.append(call))
        with torch.no_grad():
            loaded.encoder(torch.randint(4, 20, (3, 7)), torch.full((3,), 7))
        assert len(seen) == 2
