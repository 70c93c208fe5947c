"""Each message in the README's table of messages, as fairseq's tools print it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SHAPE, USER_DIR

README = (Path(__file__).parents[1] / "README.md").read_text()
TABLE = re.search(r"^\| message \|.*\n\|---\|---\|\n((?:\|.*\n)+)", README, re.MULTILINE)
MESSAGES = [said for row in TABLE[1].splitlines() for said in re.findall(r"`([^`]+)`", row.split(" | ")[0])]

LM = ["--task", "language_modeling", "--cpu", "--tokens-per-sample", "24", "--num-workers", "0", *SHAPE]
TRAIN = [*LM, "--optimizer", "adam", "--lr", "0.003", "--batch-size", "8", "--max-update", "1", "--no-save"]


def process(tool, *arguments):
    """What a tool of fairseq prints when it fails in a process of its own, in which no plugin is imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "1"}
    command = [sys.executable, "-m", f"fairseq_cli.{tool}", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_the_one_in_the_readme(message, tools, lm_data, tmp_path):
    hydra = [f"task.data={lm_data}", f"hydra.run.dir={tmp_path}", "common.cpu=true"]
    yaml = ["--config-dir", f"{USER_DIR}/configs", "--config-name", "pydocs", *hydra]
    stock = ["train", lm_data, "--arch", "transformer_lm", *TRAIN]
    evaluate = ["eval_lm", lm_data, "--cpu", "--num-workers", "0", "--tokens-per-sample", "24", "--path"]

    def quest():
        tools.train(lm_data, "--save-dir", tmp_path / "quest", arch="quest_transformer_lm", updates=1)
        return tmp_path / "quest" / "checkpoint_best.pt"

    producers = {
        "invalid choice": lambda: process("train", lm_data, "--arch", "quest_transformer_lm", *TRAIN),
        "KeyError": lambda: process(*evaluate, quest()),
        "Unsupported interpolation": lambda: process("hydra_train", *yaml),
        "Unexpected key(s)": lambda: process(*stock, "--finetune-from-model", quest(), "--save-dir", tmp_path),
        "unrecognized": lambda: process(*stock, "--attention", "quest"),
    }
    (produce,) = (made for key, made in producers.items() if key in message)
    said = produce()
    pattern = ".*".join(re.escape(part.strip()) for part in message.split("..."))
    assert re.search(pattern, said, re.DOTALL), said[-3000:]
