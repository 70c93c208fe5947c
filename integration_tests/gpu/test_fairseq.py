"""fairseq's Transformer language model by fairseq-train and its own --fp16 and --bf16."""

import functools
import importlib
import random
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed in this Python")

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from fairseq_cli.preprocess import main as preprocess

import quest_fairseq

from .training import HostTraining, Run, compiler, now

environment = "quest-fairseq"

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"layers": 2, "width": 32, "heads": 4, "tokens": 70, "batch": 2, "words": 24, "sentences": 300},
    "cuda": {"layers": 6, "width": 512, "heads": 8, "tokens": 512, "batch": 16, "words": 2000, "sentences": 60000},
}


@functools.cache
def corpus(device):
    """A folder as fairseq-preprocess makes it: sentences in which each word follows from the one before."""
    words, sentences = SIZES[device]["words"], SIZES[device]["sentences"]
    folder = Path(tempfile.mkdtemp(prefix="quest-fairseq-"))
    draw = random.Random(0)
    for split, count in (("train", sentences), ("valid", 8)):
        lines = []
        for _ in range(count):
            start, length = draw.randrange(words), draw.randrange(4, 12)
            lines.append(" ".join(f"w{(start + 5 * i + draw.randrange(2)) % words}" for i in range(length)) + "\n")
        (folder / split).write_text("".join(lines))
    given = ["--only-source", "--trainpref", folder / "train", "--validpref", folder / "valid", "--workers", "1"]
    parser = options.get_preprocessing_parser()
    preprocess(parser.parse_args([*map(str, given), "--destdir", str(folder / "bin")]))
    return str(folder / "bin")


def without_tpu(given):
    """What fairseq-hydra-train reads: on a command line, --bf16 implies --tpu."""
    cfg = convert_namespace_to_omegaconf(given)
    cfg.common.tpu = False
    return cfg


class TestFairseq(HostTraining):
    host = "fairseq"
    # Two distributions bring the package: the release, and a build of the main branch.
    distribution = metadata.packages_distributions()["fairseq"][0]
    model = "transformer_lm, 6 layers, width 512, 8 heads, 512 tokens, batch 16"
    half_on_cpu: ClassVar = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def train(self, attention, *, device, precision, steps, compiled=False):
        sizes = SIZES[device]
        arch = ["--arch", "transformer_lm"] if attention is None else ["--arch", "quest_transformer_lm"]
        arch += [] if attention is None else ["--attention", attention]
        given = [corpus(device), *arch, "--task", "language_modeling", "--optimizer", "adam", "--lr", "0.001"]
        given += ["--user-dir", str(Path(quest_fairseq.__file__).parent), "--share-decoder-input-output-embed"]
        given += ["--tokens-per-sample", sizes["tokens"], "--batch-size", sizes["batch"], "--seed", "1"]
        given += ["--decoder-layers", sizes["layers"], "--decoder-attention-heads", sizes["heads"], "--dropout", "0"]
        given += ["--decoder-embed-dim", sizes["width"], "--decoder-ffn-embed-dim", 2 * sizes["width"]]
        given += ["--distributed-world-size", "1"]  # one process, however many GPUs there are
        given += ["--max-update", steps, "--num-workers", "0", "--no-save", "--disable-validation"]
        given += ["--required-batch-size-multiple", "1", "--log-format", "none", "--save-dir", tempfile.gettempdir()]
        # Gradients in one piece ask for the current GPU.
        half = ["--fp16", *(["--fp16-no-flatten-grads"] if device == "cpu" else [])]
        given += {"fp32": [], "fp16": half, "bf16": ["--bf16"]}[precision] + ["--cpu"] * (device == "cpu")
        losses = []
        seconds = []
        step = Trainer.train_step

        def watched(trainer, *arguments, **named):
            if compiled and not losses:
                torch.compiler.reset()
                trainer.model.compile(backend=compiler(device))
            started = now(device)
            logged = step(trainer, *arguments, **named)
            seconds.append(now(device) - started)
            if logged is not None:  # None where --fp16 overflowed while its scale was still too large
                losses.append(float(logged["loss"]))
            return logged

        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fairseq's use of hydra, torch and numpy
            patch.setattr(Trainer, "train_step", watched)
            patch.setattr(sys, "argv", ["fairseq-train", *map(str, given)])
            train = importlib.import_module("fairseq_cli.train")
            patch.setattr(train, "convert_namespace_to_omegaconf", without_tpu)
            train.cli_main()
        return Run(losses[:steps], seconds[-steps:])
