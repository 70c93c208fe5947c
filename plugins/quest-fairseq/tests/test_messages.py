"""Each message in the README's table of messages, as fairseq's tools print it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import SHAPE, USER_DIR, Tools

README = (Path(__file__).parents[1] / "README.md").read_text()
TABLE = re.search(r"^\| what you see \|.*\n\|---\|---\|\n((?:\|.*\n)+)", README, re.MULTILINE)
assert TABLE is not None
MESSAGES = [said for row in TABLE[1].splitlines() for said in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
NOT_MESSAGES = {"transformer", "quest_transformer"}  # models, named next to a message
NOT_MESSAGES.add("wrapped in FullyShardedDataParallel already")  # needs fairscale; quest_core's tests produce it

LM = ["--task", "language_modeling", "--cpu", "--tokens-per-sample", "24", "--num-workers", "0", *SHAPE]
TRAIN = [*LM, "--optimizer", "adam", "--lr", "0.003", "--batch-size", "8", "--max-update", "1", "--no-save"]
SMALL = ["--encoder-layers", "1", "--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "64"]
SMALL += ["--encoder-attention-heads", "4", "--share-all-embeddings", *SHAPE[:-1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("messages")


def process(*command: Any, **variables: str) -> str:
    """What a failing command prints. No plugin is imported."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


def raised(call: Callable[..., object], *arguments: Any) -> str:
    """The messages of an exception and of its causes, and what the parser prints before it ends the process."""
    with pytest.raises((Exception, SystemExit)) as caught:
        call(*arguments)
    chain, error = [], caught.value
    while error is not None:
        chain.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(chain)


def trained(tools: Tools, data: Path, folder: Path, arch: str, *arguments: Any) -> Path:
    """The checkpoint of one update, which is made once."""
    save = folder / arch
    if not save.exists():
        tools.train(data, "--save-dir", save, *arguments, arch=arch, updates=1)
    return save / "checkpoint_best.pt"


def translated(tools: Tools, data: Path, folder: Path, arch: str) -> Path:
    save = folder / arch
    if not save.exists():
        given = [data, "--arch", arch, "--user-dir", USER_DIR, "--cpu", "--optimizer", "adam", "--max-update", "1"]
        given += ["--max-tokens", "400", "--num-workers", "0", "--save-dir", save, *SMALL]
        tools("train", *given)
    return save / "checkpoint_best.pt"


@pytest.mark.slow
@pytest.mark.parametrize("message", [said for said in MESSAGES if said not in NOT_MESSAGES])
def test_the_message_is_the_one_in_the_readme(
    message: str, tools: Tools, lm_data: Path, mt_data: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate = [lm_data, "--cpu", "--num-workers", "0", "--tokens-per-sample", "24"]
    hydra = [f"task.data={lm_data}", f"hydra.run.dir={folder}", "common.cpu=true"]
    yaml = ["--config-dir", f"{USER_DIR}/configs", "--config-name", "pydocs", *hydra]

    def quest() -> Path:
        return trained(tools, lm_data, folder, "quest_transformer_lm")

    def stock() -> Path:
        return trained(tools, lm_data, folder, "transformer_lm")

    producers: dict[str, Callable[[], str]] = {
        "invalid choice": lambda: process("-m", "fairseq_cli.train", lm_data, "--arch", "quest_transformer_lm", *TRAIN),
        "KeyError": lambda: process("-m", "fairseq_cli.eval_lm", *evaluate, "--path", quest()),
        "IndexError": lambda: process(
            "-m", "fairseq_cli.generate", mt_data, "--cpu", "--path",
            translated(tools, mt_data, folder, "quest_transformer"), TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1",
        ),  # without the variable PyTorch 2.6 and later refuse the file first
        "Unsupported interpolation": lambda: process("-m", "fairseq_cli.hydra_train", *yaml),
        "No module named": lambda: process("-I", "-S", "-m", "quest_fairseq"),
        "Cannot load": lambda: raised(
            tools.train, lm_data, "--finetune-from-model", quest(), "--save-dir", folder / "one", "--attention", "qnorm"
        ),
        "Unexpected key(s)": lambda: process(
            "-m", "fairseq_cli.train", lm_data, "--arch", "transformer_lm", *TRAIN, "--finetune-from-model", quest(),
            "--save-dir", folder / "other",
        ),
        "unrecognized": lambda: process("-m", "fairseq_cli.train", lm_data, "--arch", "transformer_lm", *TRAIN,
                                        "--attention", "quest"),
        "Key 'attention'": lambda: process("-m", "fairseq_cli.hydra_train", *hydra, "task=language_modeling",
                                           "model=transformer_lm", "model.attention=quest"),
        "does not read": lambda: raised(
            tools.evaluate, lm_data, stock(), "--model-overrides", "{'attention': 'quest'}"
        ),
        "dataset is empty": lambda: raised(
            tools.train, lm_data, "--save-dir", folder / "empty", "--required-batch-size-multiple", "64"
        ),
        "xla_device": lambda: process("-m", "fairseq_cli.train", lm_data, "--arch", "transformer_lm", *TRAIN, "--bf16"),
        "Weights only": lambda: process(
            "-m", "fairseq_cli.generate", mt_data, "--cpu", "--path", translated(tools, mt_data, folder, "transformer")
        ),
    }  # fmt: skip
    (produce,) = (made for key, made in producers.items() if key in message)
    said = produce() + capsys.readouterr().err
    pattern = ".*".join(re.escape(part.strip()) for part in message.split("..."))
    assert re.search(pattern, said, re.DOTALL), said[-3000:]
