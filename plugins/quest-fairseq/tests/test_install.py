"""What install() changes, what uninstall() restores, and what is refused or reported before anything is trained."""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import USER_DIR, Tools, build, options, reasons, task
from fairseq import models
from omegaconf import OmegaConf

import quest_core
from quest_fairseq import FairseqAdapter
from quest_fairseq.patches import OPTIONS

SMALL = ["--decoder-layers", "1", "--decoder-embed-dim", "16", "--decoder-attention-heads", "4"]


@pytest.fixture
def uninstalled() -> Iterator[FairseqAdapter]:
    adapter = FairseqAdapter()
    adapter.uninstall()
    yield adapter
    adapter.install()


def test_uninstall_restores_fairseq(uninstalled: FairseqAdapter) -> None:
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


def test_files_import_each_other_one_way() -> None:
    """In any order, each in a new process."""
    names = ("adapter", "attention", "config", "models", "patches", "transformer_xl")
    imports: dict[str, set[str]] = {}
    for name in names:
        source = Path(USER_DIR, f"{name}.py").read_text()
        found = re.findall(r"^ *from (?:\.(\w+) import|\. import ([\w, ]+))", source, re.MULTILINE)
        imports[name] = {part for one, many in found for part in [one, *many.split(", ")] if part in names}
    while imports:
        free = [name for name, needs in imports.items() if not needs & imports.keys()]
        assert free, f"import cycle: {imports}"
        for name in free:
            del imports[name]


# --- fail early -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("model", ["transformer_lm", "transformer_lm_wiki103", "transformer", "transformer_xl"])
def test_misspelt_attention_is_refused_while_the_command_line_is_read(
    model: str, option: str, tools: Tools, tmp_path: Path
) -> None:
    given = ["--user-dir", USER_DIR, "--arch", f"quest_{model}", f"--{option.replace('_', '-')}", "qwest"]
    given += ["--task", "translation" if model == "transformer" else "language_modeling", "--optimizer", "adam"]
    with pytest.raises(quest_core.ConfigError, match="did you mean 'quest'"):
        tools("train", "no-data", *given, "--save-dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_stock_model_refuses_attention_on_the_command_line(tools: Tools, lm_data: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        tools.train(lm_data, "--attention", "quest", "--save-dir", tmp_path / "out", arch="transformer_lm")
    assert not (tmp_path / "out").exists()


def hydra(tools: Tools, folder: Path, data: Path, change: dict[str, Any]) -> None:
    """fairseq-hydra-train with the options of pydocs.yaml and a change."""
    yaml = OmegaConf.load(Path(USER_DIR) / "configs" / "pydocs.yaml")
    yaml = OmegaConf.merge(yaml, {"task": {"data": str(data)}, "common": {"cpu": True, "user_dir": USER_DIR}}, change)
    OmegaConf.save(yaml, folder / "changed.yaml")
    save = f"checkpoint.save_dir={folder}/out"
    tools("hydra_train", "--config-dir", folder, "--config-name", "changed", save, "hydra.run.dir=.")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": {"attention": "qwest"}}, "did you mean 'quest'"),
        ({"model": {"attention_from": "qwest"}}, "did you mean 'quest'"),
        ({"model": {"attention": "quest(inti=5)"}}, "did you mean 'init'"),
        ({"model": {"attention": "quest(init=no)"}}, "init"),
        ({"model": {"atention": "quest"}}, "Key 'atention' not in"),
        ({"attention": "quest"}, "Key 'attention' not in 'FairseqConfig'"),
        ({"common": {"attention_from": "quest"}}, "Key 'attention_from' not in 'CommonConfig'"),
        ({"task": {"attention": "quest"}}, "Key 'attention' not in 'LanguageModelingConfig'"),
        ({"model": {"_name": "transformer_lm", "attention": "quest"}}, "Key 'attention' not in"),
        (
            {"model": {"_name": "transformer"}},
            "'transformer' does not read attention='quest'.*did you mean 'quest_transformer'",
        ),
        ({"model": {"_name": "lstm_lm"}}, "'lstm_lm' does not read attention='quest'"),
    ],
    ids=str,
)
def test_a_yaml_whose_attention_nothing_reads_is_refused(
    change: dict[str, Any], why: str, tools: Tools, lm_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:  # hydra prints the error
        hydra(tools, tmp_path, lm_data, change)
    assert re.search(why, reasons(caught.value))
    assert not (tmp_path / "out").exists()


def test_a_namespace_whose_attention_nothing_reads_is_refused() -> None:
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


def test_the_log_file_has_the_report_and_the_warning(tools: Tools, lm_data: Path, tmp_path: Path) -> None:
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
    for said in ("attention=quest in 2 modules", "these weights were trained with standard attention"):
        assert log_file.read_text().count(said) == 1
        assert log.count(said) == 1


@pytest.mark.slow
def test_the_report_is_printed_where_nothing_listens() -> None:
    """In Python without logging."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from conftest import build; build('quest_transformer_lm')"
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "attention=quest in" in done.stderr
