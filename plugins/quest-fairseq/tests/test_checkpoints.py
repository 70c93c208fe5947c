"""Checkpoints: stock ones load, GQA converts them, and another attention is refused unless it is named."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from conftest import Tools, build
from fairseq import checkpoint_utils
from test_tools import perplexity

import quest_core
from quest_fairseq.checkpoints import trained_with

REFUSED = "trained with attention 'standard', and the model has 'quest"


@pytest.fixture
def stock(tools: Tools, lm_data: Path, tmp_path: Path) -> Path:
    """A checkpoint of fairseq's own transformer_lm."""
    tools.train(lm_data, "--save-dir", tmp_path / "stock", arch="transformer_lm", updates=4)
    return tmp_path / "stock" / "checkpoint_last.pt"


def reasons(error: BaseException | None) -> str:
    """What was raised and what it followed from: fairseq's trainer puts an exception of its own on top."""
    return f"{error} {reasons(error.__context__)}" if error else ""


def test_a_stock_checkpoint_goes_on_as_standard(tools: Tools, lm_data: Path, stock: Path) -> None:
    given = ["--attention", "standard", "--save-dir", stock.parent]
    assert "num_updates=5" in tools.train(lm_data, *given, updates=6)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(stock))
    assert trained_with(state["model"]) == ["standard"]


def test_a_stock_checkpoint_does_not_resume_as_quest(tools: Tools, lm_data: Path, stock: Path) -> None:
    with pytest.raises(Exception, match="Cannot load model parameters") as caught:
        tools.train(lm_data, "--attention", "quest", "--save-dir", stock.parent, updates=6)
    assert REFUSED in reasons(caught.value)
    assert "--attention-from 'standard'" in reasons(caught.value)


@pytest.mark.parametrize("attention", ["quest", "quest+gqa(kv_heads=2)"])
def test_fine_tuning_a_stock_checkpoint(
    attention: str, tools: Tools, lm_data: Path, stock: Path, tmp_path: Path
) -> None:
    given = ["--attention", attention, "--finetune-from-model", stock, "--save-dir", tmp_path / "out"]
    with pytest.raises(Exception, match="Cannot load model parameters") as caught:
        tools.train(lm_data, *given)
    assert REFUSED in reasons(caught.value)
    tools.train(lm_data, *given, "--attention-from", "standard", "--lr", "0", updates=1)
    tuned = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "out" / "checkpoint_last.pt"))
    assert trained_with(tuned["model"]) == [attention]
    key = "decoder.layers.0.self_attn.k_proj.weight"
    before = checkpoint_utils.load_checkpoint_to_cpu(str(stock))["model"][key]
    pooled = before.view(2, 2, 8, 32).mean(1).flatten(0, 1) if "gqa" in attention else before
    torch.testing.assert_close(tuned["model"][key], pooled)
    resumed = [*given, "--attention-from", "standard"]  # the same command goes on from its own checkpoint
    assert "num_updates=3" in tools.train(lm_data, *resumed, updates=3)


def test_evaluation_under_another_attention(tools: Tools, lm_data: Path, tmp_path: Path) -> None:
    tools.train(lm_data, "--attention", "quest", "--save-dir", tmp_path)
    checkpoint = tmp_path / "checkpoint_best.pt"
    own = perplexity(tools.evaluate(lm_data, checkpoint))
    with pytest.raises(quest_core.ConfigError, match="trained with attention 'quest', and the model has 'standard'"):
        tools.evaluate(lm_data, checkpoint, "--model-overrides", "{'attention': 'standard'}")
    told = "{'attention': 'standard', 'attention_from': 'quest'}"
    assert perplexity(tools.evaluate(lm_data, checkpoint, "--model-overrides", told)) != own
    with pytest.raises(quest_core.ConfigError, match="--model-overrides"):
        tools.evaluate(lm_data, checkpoint, "--model-overrides", told.replace("'quest'", "'qnorm'"))


def test_averaged_checkpoints_are_still_known(tools: Tools, lm_data: Path, tmp_path: Path) -> None:
    """fairseq's scripts/average_checkpoints.py, which no wheel contains, writes a new dict without any metadata."""
    tools.train(lm_data, "--attention", "quest", "--save-dir", tmp_path)
    states = [torch.load(tmp_path / f"checkpoint{epoch}.pt", weights_only=False) for epoch in (1, 2)]
    averaged = copy.deepcopy(states[0])
    averaged["model"] = OrderedDict((k, sum(state["model"][k] for state in states) / 2) for k in states[0]["model"])
    assert trained_with(averaged["model"]) == []
    torch.save(averaged, tmp_path / "averaged.pt")
    assert 1 < perplexity(tools.evaluate(lm_data, tmp_path / "averaged.pt")) < 40
    with pytest.raises(quest_core.ConfigError, match="trained with attention 'quest'"):
        tools.evaluate(lm_data, tmp_path / "averaged.pt", "--model-overrides", "{'attention': 'qnorm'}")


def test_parameters_of_a_mechanism_are_saved_and_resumed(tools: Tools, lm_data: Path, tmp_path: Path) -> None:
    tools.train(lm_data, "--attention", "qknorm-hs", "--save-dir", tmp_path)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint_last.pt"))["model"]
    learned = [name for name in state if "mechanism" in name]
    assert len(learned) == 2
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(tmp_path / "checkpoint_last.pt")], arg_overrides={"data": str(lm_data)}
    )
    for name in learned:
        torch.testing.assert_close(models[0].state_dict()[name], state[name])


def test_both_ways_in_memory() -> None:
    shape = ["--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-attention-heads", "4"]
    stock, ours = build("transformer_lm", *shape), build("quest_transformer_lm", "--attention", "quest", *shape)
    assert list(stock.state_dict()) == list(ours.state_dict())
    stock.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(stock.state_dict(), strict=True)  # weights at hand, whose origin nobody claims
