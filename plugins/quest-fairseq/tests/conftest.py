"""A tiny corpus, fairseq's command-line tools in this process, and models built without a task's files."""

import argparse
import copy
import functools
import importlib
import logging
import random
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.dataclass import utils
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import quest_fairseq
from quest_suites.fairseq.tasks import preprocess

USER_DIR = str(Path(quest_fairseq.__file__).parent)
SHAPE = ["--decoder-layers", "2", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64"]
SHAPE += ["--decoder-attention-heads", "4", "--share-decoder-input-output-embed"]
ENCODER = ["--encoder-layers", "2", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32"]
ENCODER += ["--encoder-attention-heads", "4"]
DECODER = [part.replace("encoder", "decoder") for part in ENCODER]
"""Options of smaller parts; of an option that is given again, the last one counts."""


class Tools:
    """fairseq-train and its relatives by their own command-line functions, which the console scripts call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
        self.monkeypatch, self.caplog, self.capsys = monkeypatch, caplog, capsys

    def __call__(self, tool: str, *arguments: Any) -> str:
        """Run fairseq_cli.`tool` and return what it logged and printed."""
        # fairseq keeps the best loss of a process's former training there, and would then not save this one's best.
        vars(checkpoint_utils.save_checkpoint).pop("best", None)
        self.monkeypatch.setattr(sys, "argv", [f"fairseq-{tool}", *map(str, arguments)])
        self.caplog.clear()
        self.capsys.readouterr()
        with warnings.catch_warnings(), self.caplog.at_level(logging.INFO):
            warnings.simplefilter("ignore")  # fairseq's use of hydra, torch and numpy
            importlib.import_module(f"fairseq_cli.{tool}").cli_main()
        return self.caplog.text + self.capsys.readouterr().out

    def train(self, data: Path, *arguments: Any, arch: str = "quest_transformer_lm", updates: int = 6) -> str:
        """A few updates of a language model."""
        given = [data, "--task", "language_modeling", "--arch", arch, "--cpu", "--user-dir", USER_DIR]
        given += ["--optimizer", "adam", "--lr", "0.003", "--tokens-per-sample", "24", "--seed", "3"]
        given += ["--log-format", "simple", "--log-interval", "1", "--num-workers", "0", "--max-update", updates]
        given += ["--batch-size", "8", "--required-batch-size-multiple", "1"]
        return self("train", *given, *SHAPE, *arguments)

    def evaluate(self, data: Path, checkpoint: Path, *arguments: Any) -> str:
        """fairseq-eval-lm with a sliding window."""
        given = [data, "--path", checkpoint, "--cpu", "--user-dir", USER_DIR, "--tokens-per-sample", "24"]
        given += ["--context-window", "8", "--sample-break-mode", "none", "--num-workers", "0", "--batch-size", "8"]
        given += ["--required-batch-size-multiple", "1"]
        return self("eval_lm", *given, *arguments)

    def hydra(self, folder: Path, data: Path, **changes: Any) -> None:
        """fairseq-hydra-train with the options of pydocs.yaml and changes, into `folder`/out."""
        given = {"task": {"data": str(data)}, "common": {"cpu": True, "user_dir": USER_DIR}}
        yaml = OmegaConf.merge(OmegaConf.load(Path(USER_DIR) / "configs" / "pydocs.yaml"), given, changes)
        OmegaConf.save(yaml, folder / "changed.yaml")
        save = f"checkpoint.save_dir={folder}/out"
        self("hydra_train", "--config-dir", folder, "--config-name", "changed", save, f"hydra.run.dir={folder}")


@pytest.fixture
def tools(monkeypatch, caplog, capsys):
    return Tools(monkeypatch, caplog, capsys)


def texts() -> dict[str, list[str]]:
    """Sentences in which each word follows from the one before."""
    draw = random.Random(0)
    made: dict[str, list[str]] = {}
    for split, sentences in (("train", 60), ("valid", 12), ("test", 12)):
        made[split] = []
        for _ in range(sentences):
            start, length = draw.randrange(24), draw.randrange(4, 12)
            made[split].append(" ".join(f"w{(start + 5 * i + draw.randrange(2)) % 24}" for i in range(length)))
    return made


@pytest.fixture(scope="session")
def lm_data(tmp_path_factory):
    """What fairseq-preprocess makes of a tiny text."""
    folder = tmp_path_factory.mktemp("lm") / "bin"
    preprocess(folder, texts())
    return folder


@pytest.fixture(scope="session")
def mt_data(tmp_path_factory):
    """The same for translation: the target is the source backwards."""
    folder = tmp_path_factory.mktemp("mt") / "bin"
    pairs = {}
    for split, lines in texts().items():
        pairs[f"{split}.aa"] = lines
        pairs[f"{split}.bb"] = [" ".join(reversed(line.split())) for line in lines]
    preprocess(folder, pairs, pair=("aa", "bb"))
    return folder


@pytest.fixture(scope="session", autouse=True)
def _compose_once():
    """hydra takes half a second for the options of a command. It reads their defaults and each override once."""
    compose, compared = utils.compose, set()
    parsed = functools.cache(OverridesParser.create().parse_rule)
    composed = functools.cache(lambda groups: compose("config", overrides=[*groups], strict=False))

    def once(name, overrides, strict):
        groups = tuple(given for given in overrides if "." not in given.partition("=")[0])
        cfg = copy.deepcopy(composed(groups))
        others = [parsed(given, "override") for given in overrides if given not in groups]
        ConfigLoaderImpl._apply_overrides_to_config(others, cfg)
        if groups not in compared:
            compared.add(groups)
            assert cfg == compose(name, overrides=overrides, strict=strict)
        return cfg

    with mock.patch.object(utils, "compose", once):
        yield


@pytest.fixture(scope="session", autouse=True)
def _leave_logging_alone():
    """fairseq's tools add handlers to the root logger, which would write to streams that pytest has closed."""
    handlers = logging.root.handlers[:]
    yield
    logging.root.handlers[:] = handlers


# --- models without data --------------------------------------------------------------------------------------------


def dictionary(words: int = 20) -> Dictionary:
    made = Dictionary()
    for i in range(words):
        made.add_symbol(f"w{i}")
    return made


def task(words: int = 20) -> Any:
    symbols = dictionary(words)
    return SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols)


def options(arch: str, *arguments: str) -> argparse.Namespace:
    """The options of an architecture as fairseq-train reads them."""
    from fairseq.options import get_training_parser, parse_args_and_arch

    given = ["data", "--arch", arch, "--user-dir", USER_DIR, *arguments]
    given += ["--task", "translation" if arch.endswith("transformer") else "language_modeling"]
    args = parse_args_and_arch(get_training_parser(), input_args=given)
    args.tokens_per_sample = args.max_target_positions = args.max_source_positions = 32
    return args


def build(arch: str, *arguments: str, words: int = 20) -> Any:
    """A model of an architecture, with options as on the command line."""
    from fairseq.models import build_model

    return build_model(options(arch, *arguments), task(words))


def reasons(error: BaseException | None) -> str:
    """Return an exception's text and those it followed from: fairseq's trainer raises one of its own on top."""
    return f"{error} {reasons(error.__context__)}" if error else ""
