"""What install() changes, what uninstall() restores, and what is refused or reported before anything is trained."""

import argparse
import json
import logging
import re
from pathlib import Path

import pytest
from conftest import DECODER, USER_DIR, build, options, reasons, task
from fairseq import models

import quest_core
from devtools.running import python
from devtools.wrong import WRONG as COMMON
from quest_fairseq import FairseqAdapter

SMALL = [*DECODER, "--decoder-layers", "1"]


@pytest.fixture
def uninstalled():
    adapter = FairseqAdapter()
    adapter.uninstall()
    yield adapter
    adapter.install()


def test_uninstall_restores_fairseq(uninstalled):
    registries = [value for name, value in vars(models).items() if name.endswith("_REGISTRY")]
    assert len(registries) == 6
    assert not [name for registry in registries for name in registry if name.startswith("quest_")]
    stock = build("transformer_lm", *SMALL)
    assert type(stock.decoder.layers[0].self_attn).__module__ == "fairseq.modules.multihead_attention"
    with pytest.raises(SystemExit):
        options("quest_transformer_lm")
    assert not [handler for handler in logging.getLogger("quest_core").handlers if "quest" in type(handler).__module__]
    for _ in range(2):
        uninstalled.install()
        model = build("quest_transformer_lm", "--attention", "quest", *SMALL)
        assert type(model.decoder.layers[0].self_attn).__module__ == "quest_fairseq.attention"
        assert str(model.attention_report).startswith("attention=quest in 1 module")


# --- fail early -----------------------------------------------------------------------------------------------------


SHARED = [(given, said) for given, said in COMMON if "attention" in given and "allow_partial" not in given]
"""Without those that argparse and hydra refuse themselves, or that are right because the attention has a default."""


def words(given):
    """The options of a mapping as words of a command line."""
    texts = (x if isinstance(x, str) else json.dumps(x, separators=(",", ":")) for x in given.values())
    return " ".join(f"--{key.replace('_', '-')}={text}" for key, text in zip(given, texts, strict=True))


WRONG = {
    **{
        f"quest_transformer_lm {words(given)}": said
        for given, said in SHARED
        if isinstance(given["attention"], (str, dict))  # all else is text here
    },
    "quest_transformer_lm_wiki103 --attention qwest": "did you mean 'quest'",
    "quest_transformer_lm --attention elliptical --decoder-layerdrop 0.1": "--decoder-layerdrop 0",
    "quest_transformer_lm --attention-decoder elliptical --decoder-layerdrop 0.1": "decoder_layerdrop",
    "quest_transformer --attention elliptical-quest --encoder-layerdrop 0.2": "encoder_layerdrop",
    "quest_transformer --attention-encoder qwest": "did you mean 'quest'",
    "quest_transformer --attention-cross qwest": "did you mean 'quest'",
    "quest_transformer_lm --attention-cross quest": "--attention-cross .*has decoder attention; leave",
    "quest_transformer_lm --attention-encoder quest": "--attention-encoder",
    "quest_transformer --attention-decoder sinkhorn": "the decoder attention of quest_transformer: .*be causal",
    "quest_transformer --attention-cross linear --attention-dropout 0.1": "the cross attention .*dropout",
    "quest_transformer_lm --decoder-attention-heads 4 --attention gqa(kv_heads=3)": "kv_heads",
    "quest_roberta --attention qwest": "did you mean 'quest'",
    "quest_bart_base --attention qwest": "did you mean 'quest'",
    "quest_wav2vec2 --attention elliptical --encoder-layerdrop 0.1": "encoder_layerdrop",
    "quest_s2t_transformer_s --attention qwest": "did you mean 'quest'",
    "quest_transformer_xl --attention qwest": "did you mean 'quest'",
    "quest_transformer_lm --watch-attention -1": "--watch-attention is -1; expected a positive number, or 0",
    "quest_transformer_lm --qk-clip -2.5": "--qk-clip is -2.5; expected",
    "transformer_lm --attention quest": None,
    "quest_transformer_lm --atention quest": None,
    "quest_transfomer_lm --attention quest": None,
}
"""Wrong command lines and what is said about them; None where it is the command line's own parser that refuses."""


@pytest.mark.parametrize("given", WRONG)
def test_a_wrong_command_line_is_one_error_before_anything_is_made(given, tools, tmp_path):
    said, arguments = WRONG[given], ["--task", "language_modeling", "--save-dir", tmp_path / "out", "--arch"]
    with pytest.raises(SystemExit if said is None else quest_core.QuestError, match=said):
        tools("train", "no-data", "--user-dir", USER_DIR, *arguments, *given.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arch", "arguments", "why"),
    [
        ("quest_lightconv", ["--attention-encoder", "quest"], "--attention-encoder .*has cross attention; leave"),
        ("quest_lstm", [], "has no attention"),
        ("quest_transformer", ["--attention-cross", "aft-full"], "'aft-full' counts the positions of queries"),
    ],
)
def test_what_the_model_cannot_have_is_one_error(arch, arguments, why):
    with pytest.raises(quest_core.QuestError, match=why):
        build(arch, *arguments)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"attention": "quest"}, "Key 'attention' not in 'FairseqConfig'"),
        ({"model": {"_name": "transformer_lm", "attention": "quest"}}, "Key 'attention' not in"),
        (
            {"model": {"_name": "transformer"}},
            "'transformer' does not read attention='quest'.*did you mean 'quest_transformer'",
        ),
        ({"model": {"attention": "elliptical", "decoder_layerdrop": 0.1}}, "set decoder_layerdrop to 0"),
        *(({"model": given}, said) for given, said in SHARED),
    ],
    ids=str,
)
def test_a_wrong_yaml_is_refused_before_anything_is_made(change, why, tools, lm_data, tmp_path):
    with pytest.raises(SystemExit) as caught:  # hydra prints the error
        tools.hydra(tmp_path, lm_data, **change)
    assert re.search(why, reasons(caught.value))
    assert not (tmp_path / "out").exists()


def test_a_namespace_whose_attention_nothing_reads_is_refused():
    """Models with options in the old manner take any."""
    args = argparse.Namespace(**{**vars(options("transformer", *SMALL)), "attention": "quest"})
    with pytest.raises(quest_core.ConfigError, match="'transformer' does not read attention='quest'"):
        models.build_model(args, task())
    args.attention, args.attention_from = None, "quest"
    with pytest.raises(quest_core.ConfigError, match="'transformer' does not read attention_from='quest'"):
        models.build_model(args, task())
    args.attention_from = args.attention = "standard"
    assert models.build_model(args, task())


# --- the log --------------------------------------------------------------------------------------------------------


def test_the_log_file_has_the_report_and_the_warning(tools, lm_data, tmp_path):
    """`--log-file` gets what fairseq_cli.train logs, and nothing that other loggers do."""
    tools.train(lm_data, "--save-dir", tmp_path / "stock", arch="transformer_lm", updates=1)
    log_file = tmp_path / "train.log"
    given = ["--attention", "quest", "--save-dir", tmp_path / "out", "--log-file", log_file]
    try:
        log = tools.train(lm_data, *given, "--finetune-from-model", tmp_path / "stock/checkpoint_last.pt", updates=1)
    finally:
        handlers = logging.getLogger("fairseq_cli.train").handlers
        for handler in handlers[:]:
            handlers.remove(handler)
            handler.close()
    report = "attention=quest in 2 modules", "; kernel=scaled_dot_product_attention"
    for said in (*report, "these weights were trained with standard attention"):
        assert log_file.read_text().count(said) == 1
        assert log.count(said) == 1


@pytest.mark.slow
def test_the_report_is_printed_where_nothing_listens():
    """In Python without logging."""
    code = "from conftest import build; build('quest_transformer_lm')"
    assert "attention=quest in" in python("-c", code, cwd=Path(__file__).parent)[1]
