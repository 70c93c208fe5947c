"""fairseq's tools with checkpoints of other attentions: what is refused, and what `attention_from` accepts."""

import re
import shutil

import pytest
import torch
from conftest import build, reasons
from fairseq import checkpoint_utils
from test_tools import perplexity

import quest_core
from quest_core.checkpoints import ENTRY, decode
from quest_fairseq import averaging

WARNED = "these weights were trained with standard attention and are loaded into attention"


def attentions(path):
    """Return the attention that a checkpoint names."""
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"]
    return {decode(value) for name, value in state.items() if name.endswith(ENTRY)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def stock(tools, lm_data, folder):
    """A checkpoint of fairseq's own transformer_lm."""
    path = folder / "stock" / "checkpoint_last.pt"
    if not path.exists():
        tools.train(lm_data, "--save-dir", path.parent, arch="transformer_lm", updates=4)
    return path


@pytest.fixture
def quest(tools, lm_data, folder):
    """The same of quest_transformer_lm."""
    path = folder / "quest" / "checkpoint_last.pt"
    if not path.exists():
        tools.train(lm_data, "--attention", "quest", "--save-dir", path.parent, updates=2)
    return path


def test_a_stock_checkpoint_goes_on_as_standard_and_back(tools, lm_data, stock, tmp_path):
    shutil.copy(stock, tmp_path)
    given = ["--attention", "standard", "--save-dir", tmp_path]
    assert "num_updates=5" in tools.train(lm_data, *given, updates=6)
    assert attentions(tmp_path / stock.name) == set()
    assert "num_updates=7" in tools.train(lm_data, "--save-dir", tmp_path, arch="transformer_lm", updates=7)


def test_a_run_does_not_go_on_with_another_attention(tools, lm_data, quest, tmp_path):
    shutil.copy(quest, tmp_path)
    before = quest.read_bytes()
    with pytest.raises(Exception, match="Cannot load model parameters") as caught:
        tools.train(lm_data, "--attention", "qnorm", "--save-dir", tmp_path)
    assert "attention_from" in reasons(caught.value)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
    tools.train(lm_data, "--attention", "qnorm", "--save-dir", tmp_path, "--attention-from", "quest")
    assert attentions(tmp_path / "checkpoint_last.pt") == {"qnorm"}


def test_a_run_does_not_go_on_with_an_optimizer_of_larger_projections(tools, lm_data, stock, tmp_path):
    given = ["--attention", "quest+gqa(kv_heads=2)", "--attention-from", "standard", "--restore-file", stock]
    given += ["--save-dir", tmp_path]
    with pytest.raises(quest_core.CheckpointError, match=r"weights of \[16, 32\].*say --reset-optimizer"):
        tools.train(lm_data, *given)
    assert "num_updates=2" in tools.train(lm_data, *given, "--reset-optimizer", updates=2)


@pytest.mark.parametrize("optimizer", ["adafactor", "adagrad"])
def test_runs_with_other_optimizers_go_on(tools, lm_data, tmp_path, optimizer):
    given = ["--attention", "quest", "--save-dir", tmp_path, "--optimizer", optimizer]
    tools.train(lm_data, *given, updates=2)
    assert "num_updates=4" in tools.train(lm_data, *given, updates=4)


def test_fine_tuning_a_stock_checkpoint(tools, lm_data, stock, tmp_path):
    attention = "quest+gqa(kv_heads=2)"
    given = ["--attention", attention, "--finetune-from-model", stock, "--lr", "0"]
    log = tools.train(lm_data, *given, "--save-dir", tmp_path / "warned", updates=1)
    assert log.count(WARNED) == 1
    given += ["--save-dir", tmp_path / "out", "--attention-from", "standard"]
    assert WARNED not in tools.train(lm_data, *given, updates=1)
    assert attentions(tmp_path / "out" / "checkpoint_last.pt") == {attention}
    tuned = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "out" / "checkpoint_last.pt"))["model"]
    key = "decoder.layers.0.self_attn.k_proj.weight"
    before = checkpoint_utils.load_checkpoint_to_cpu(str(stock))["model"][key]
    torch.testing.assert_close(tuned[key], before.view(2, 2, 8, 32).mean(1).flatten(0, 1))
    # The same command goes on from its own checkpoint.
    assert "num_updates=3" in tools.train(lm_data, *given, updates=3)


def test_evaluation_under_another_attention(tools, lm_data, quest):
    own = perplexity(tools.evaluate(lm_data, quest))
    for said in ("{'attention': 'standard'}", "{'model': {'attention': 'standard'}}"):
        with pytest.raises(quest_core.CheckpointError, match="'quest', and the model has 'standard'"):
            tools.evaluate(lm_data, quest, "--model-overrides", said)
    overrides = "{'attention': 'standard', 'attention_from': 'quest'}"
    assert perplexity(tools.evaluate(lm_data, quest, "--model-overrides", overrides)) != own
    with pytest.raises(quest_core.CheckpointError, match="attention_from is 'qnorm'"):
        tools.evaluate(lm_data, quest, "--model-overrides", overrides.replace("'quest'", "'qnorm'"))
    with pytest.raises(quest_core.ConfigError, match="'transformer_lm' does not read attention='quest'"):
        tools.evaluate(lm_data, quest, "--model-overrides", "{'model': {'_name': 'transformer_lm'}}")


def test_an_override_of_a_stock_checkpoint_is_not_ignored(tools, lm_data, stock):
    """fairseq drops overrides that a checkpoint's options do not have."""
    with pytest.raises(quest_core.ConfigError, match="'transformer_lm' does not read attention='quest'.*_name"):
        tools.evaluate(lm_data, stock, "--model-overrides", "{'attention': 'quest'}")
    overrides = "{'attention': 'qnorm', 'model': {'_name': 'quest_transformer_lm'}}"
    log = tools.evaluate(lm_data, stock, "--model-overrides", overrides)
    assert f"{WARNED} 'qnorm'" in log
    overrides = overrides.replace("{'attention'", "{'attention_from': 'standard', 'attention'")
    assert WARNED not in tools.evaluate(lm_data, stock, "--model-overrides", overrides)


def test_averages_and_moving_averages(tools, lm_data, tmp_path):
    """Of a mechanism with parameters and buffers, which are resumed as well."""
    attention = "qknorm-hs+dgqa(kv_heads=2)"
    given = ["--attention", attention, "--save-dir", tmp_path, "--store-ema", "--ema-decay", "0.9", "--ema-fp32"]
    tools.train(lm_data, *given)
    assert "num_updates=8" in tools.train(lm_data, *given, updates=8)
    checkpoint_utils.save_ema_as_checkpoint(str(tmp_path / "checkpoint_last.pt"), str(tmp_path / "ema.pt"))
    newest = ["--inputs", f"{tmp_path}", "--num-epoch-checkpoints", "2"]
    averaging.main(["average", *newest, "--output", f"{tmp_path}/averaged.pt"])
    for name in ("ema.pt", "averaged.pt"):
        assert attentions(tmp_path / name) == {attention}
        assert 1 < perplexity(tools.evaluate(lm_data, tmp_path / name)) < 40
        with pytest.raises(quest_core.CheckpointError, match=re.escape(f"trained with attention '{attention}'")):
            tools.evaluate(lm_data, tmp_path / name, "--model-overrides", "{'attention': 'qnorm'}")


def test_an_average_is_the_mean_of_one_runs_weights(tools, lm_data, tmp_path):
    for attention in ("quest", "qnorm"):
        tools.train(lm_data, "--attention", attention, "--save-dir", tmp_path / attention, updates=8)
    one, two = (tmp_path / "quest" / f"checkpoint{epoch}.pt" for epoch in (1, 2))
    averaging.main(["average", "--inputs", f"{one}", f"{two}", "--output", f"{tmp_path}/mean.pt"])
    first, second, mean = (torch.load(p, weights_only=False)["model"] for p in (one, two, tmp_path / "mean.pt"))
    key = "decoder.layers.0.self_attn.k_proj.weight"
    torch.testing.assert_close(mean[key], (first[key] + second[key]) / 2)
    with pytest.raises(quest_core.CheckpointError, match=r"attention_is_not_standard' is 'quest' in .* and 'qnorm' in"):
        averaging.average([one, tmp_path / "qnorm" / "checkpoint1.pt"])
    state = torch.load(two, weights_only=False)
    entries = [name for name in state["model"] if name.endswith(ENTRY)]
    other = torch.load(tmp_path / "qnorm" / "checkpoint1.pt", weights_only=False)["model"]
    state["model"][entries[1]] = other[entries[1]]
    torch.save(state, tmp_path / "mixed.pt")
    with pytest.raises(quest_core.CheckpointError, match=r"layers\.1.*' is 'quest' in .* and 'qnorm' in"):
        averaging.average([one, tmp_path / "mixed.pt"])
    with pytest.raises(quest_core.CheckpointError, match="expected 9 checkpoints of epochs .*, found 2"):
        averaging.newest(tmp_path / "quest", 9)


def test_checkpoints_that_cannot_be_averaged_are_an_error_of_the_command(tmp_path, capsys):
    (tmp_path / "torn.pt").write_bytes(b"PK\3\4")
    for given, said in (
        (["--inputs", tmp_path, "--num-epoch-checkpoints", "2"], "expected 2 checkpoints of epochs"),
        (["--inputs", tmp_path / "lost.pt"], "No such file"),
        (["--inputs", tmp_path / "torn.pt"], "zip archive"),
    ):
        with pytest.raises(SystemExit, match="2"):
            averaging.main(["average", *map(str, given), "--output", f"{tmp_path}/mean.pt"])
        assert said in capsys.readouterr().err
    assert not (tmp_path / "mean.pt").exists()


def test_layers_that_are_pruned_keep_their_attention(tools, lm_data, quest):
    """LayerDrop: fairseq renames the keys of the layers that are kept."""
    kept = "'decoder_layers_to_keep': '1'"
    assert perplexity(tools.evaluate(lm_data, quest, "--model-overrides", f"{{{kept}}}")) > 1
    with pytest.raises(quest_core.CheckpointError, match="trained with attention 'quest'"):
        tools.evaluate(lm_data, quest, "--model-overrides", f"{{{kept}, 'attention': 'qnorm'}}")


@pytest.mark.parametrize(
    ("trained", "attention"), [("standard", "qknorm-hs"), ("aft-full", "quest"), ("quest", "aft-full")]
)
def test_attention_from_holds_for_mechanisms_that_learn(trained, attention):
    """Also where positions are learned, which are spelled with the number that the model has."""
    source = build("quest_transformer_lm", "--attention", trained)
    model = build("quest_transformer_lm", "--attention", attention, "--attention-from", trained)
    model.load_state_dict(source.state_dict())
    key = "decoder.layers.0.self_attn.k_proj.weight"
    torch.testing.assert_close(model.state_dict()[key], source.state_dict()[key])
