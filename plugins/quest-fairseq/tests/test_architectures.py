"""`--attention` on every architecture of fairseq that has attention, by its command line and its own forward pass."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DECODER, ENCODER, dictionary, options
from fairseq.models import ARCH_MODEL_INV_REGISTRY, MODEL_REGISTRY, build_model
from fairseq.tasks.hubert_pretraining import HubertPretrainingConfig
from torch import Tensor

import quest_core

LAYERS = "[(16, 10, 5)] + [(16, 3, 2)]"
MT = [*ENCODER, *DECODER]
KERNELS = ["--encoder-kernel-size-list", "[3,3]", "--decoder-kernel-size-list", "[3,3]"]
SPEECH = ["--conv-feature-layers", LAYERS, "--final-dim", "8", *ENCODER]
TOKENS = torch.randint(4, 20, (2, 7), generator=torch.Generator().manual_seed(0))
SOUND = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
PAIRS = (TOKENS, torch.tensor([7, 7]), TOKENS)
FRAMES = (torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([24, 20]), TOKENS)

ARCHITECTURES: dict[str, tuple[list[str], tuple[Any, ...], int]] = {
    "transformer_lm": (DECODER, (TOKENS,), 2),
    "roberta": ([*ENCODER, "--max-positions", "32"], (TOKENS,), 2),
    "bart_base": (MT, PAIRS, 6),
    "transformer": (MT, PAIRS, 6),
    "transformer_align": (MT, PAIRS, 6),
    "lightconv": ([*MT, *KERNELS], PAIRS, 2),
    "wav2vec2": (SPEECH, (SOUND, None, False), 2),
    "hubert": (SPEECH, (SOUND, None, None, False, True), 2),
    "s2t_transformer": ([*MT, "--conv-channels", "16"], FRAMES, 6),
    "s2t_conformer": ([*MT, "--conv-channels", "16", "--attn-type", "None"], FRAMES, 6),
}
"""Model -> options, inputs, modules of attention."""


def make(arch, *arguments):
    args = options(arch, *arguments)
    vars(args).update(input_feat_per_channel=8, input_channels=1, required_seq_len_multiple=1, label_rate=50)
    words = dictionary()
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, dictionaries=[words])
    task.cfg, task.dictionary = HubertPretrainingConfig(), words
    torch.manual_seed(0)
    return build_model(args, task).eval()


def call(model, inputs):
    with torch.no_grad():
        torch.manual_seed(1)
        out = model(*inputs)
    out = out[0] if isinstance(out, tuple) else next(x for x in out.values() if isinstance(x, Tensor) and x.dim() > 2)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_on_the_command_line_of_every_architecture(name):
    arguments, inputs, sites = ARCHITECTURES[name]
    stock, quest = (make(f"{prefix}{name}", *arguments) for prefix in ("", "quest_"))
    standard = make(f"quest_{name}", *arguments, "--attention", "standard")
    assert len(quest.attention_report.replacements) == sites
    want = call(stock, inputs)
    torch.testing.assert_close(call(standard, inputs), want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(call(quest, inputs), want, atol=1e-5)
    with pytest.raises((RuntimeError, quest_core.CheckpointError), match="attention_is_not_standard"):
        stock.load_state_dict(quest.state_dict())


def test_every_model_and_preset_of_fairseq_has_a_twin():
    for stock, kind in MODEL_REGISTRY.items():
        if kind.__module__.startswith("fairseq.models."):
            ours = ARCH_MODEL_INV_REGISTRY.get(f"quest_{stock}", [])
            assert ours == [f"quest_{preset}" for preset in ARCH_MODEL_INV_REGISTRY.get(stock, [])]
    assert "quest_roberta_large" in ARCH_MODEL_INV_REGISTRY["quest_roberta"]
    stock, ours = (vars(options(f"{prefix}transformer_lm_wiki103")) for prefix in ("", "quest_"))
    assert {key for key in ours if ours[key] != stock.get(key)} == {"arch"}


# --- an attention for each part -------------------------------------------------------------------------------------


PATHS = {"encoder": "encoder.layers.1.self_attn", "decoder": "decoder.layers.1.self_attn"}
PATHS["cross"] = "decoder.layers.1.encoder_attn"


def parts(model):
    """The attention of each part."""
    return {part: str(model.get_submodule(path).mechanism.config) for part, path in PATHS.items()}


def test_each_part_takes_an_attention_of_its_own():
    cross = ["--attention-cross", "quest+gqa(ratio=2)"]
    model, twin = (make("quest_transformer", *MT, "--attention-encoder", "sinkhorn", *cross) for _ in range(2))
    assert parts(model) == {"encoder": "sinkhorn", "decoder": "quest", "cross": "quest+gqa(ratio=2)"}
    report = model.attention_report
    assert report.attention == "encoder: sinkhorn; decoder: quest; cross: quest+gqa(ratio=2)"
    assert [len(report.replacements), report.left_alone] == [6, {}]
    assert call(model, PAIRS).isfinite().all()
    twin.load_state_dict(model.state_dict())
    other = make("quest_transformer", *MT, "--attention-encoder", "quest", *cross)
    with pytest.raises(quest_core.CheckpointError, match="sinkhorn"):
        other.load_state_dict(model.state_dict())
    stock = make("transformer", *MT)
    model = make("quest_transformer", *MT, "--attention", "elliptical", "--attention-encoder", "standard")
    assert parts(model) == {"encoder": "standard", "decoder": "elliptical", "cross": "elliptical"}
    encoded = [one.encoder(*PAIRS[:2])["encoder_out"][0] for one in (model, stock)]
    torch.testing.assert_close(*encoded, rtol=1e-5, atol=1e-5)
