"""ts/uea: UEA multivariate time-series classification, trained by tsai's own TSClassifier.

The protocol is that of the QUEST paper (A.5.6), which follows thuml/Time-Series-Library: a 3-layer post-norm
Transformer with a class token, batch 16, RAdam at a constant 1e-3, gradients clipped at norm 4, at most 100 epochs,
stopped after 10 without a better accuracy.

**Numbers are optimistic.** The protocol has no validation split: it stops on the accuracy of the test split and reports
the best accuracy there. Mechanisms can be compared with each other because all are treated alike.

Differences from that library: series are standardised with the statistics of the training split for both
splits (the library gives each split its own), and the projections are torch.nn.MultiheadAttention's, with its
initialisation. Series of unequal length are padded with zeros after standardisation, unmasked in the paper's
architecture as in the library; tsai's TSTPlus gets NaN there and masks it.
"""

from __future__ import annotations

import importlib.util
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quest_core.benchmarks import Cell, Progress, Result
from quest_core.errors import ConfigError, InputError, PluginError
from quest_core.hosts.injection import inject

PROTOCOL = (
    "Early stopping and the reported accuracy both use the test split, as in Time-Series-Library: optimistic, alike "
    "for all mechanisms. Standardised with training statistics; padded with zeros (paper) or masked NaN (TSTPlus)."
)
GRADIENT_CLIP = 4.0
SMOKE_EPOCHS = 2
SMOKE_SERIES = 64


class ClassTokenTransformer(nn.Module):
    """The paper's classifier: token embedding by convolution, class token, post-norm encoder, linear layer.

    Args:
        c_in: features of the series.
        c_out: classes.
        seq_len: time steps L.
        d_model: features of a token; the feed-forward part has twice as many.
        layers: encoder layers.
        heads: attention heads.
        dropout: after the embedding and in the encoder.
    """

    def __init__(
        self, c_in: int, c_out: int, seq_len: int, *, d_model: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Conv1d(c_in, d_model, 3, padding=1, padding_mode="circular", bias=False)
        nn.init.kaiming_normal_(self.embedding.weight, nonlinearity="leaky_relu")
        self.register_buffer("position", sinusoids(seq_len, d_model), persistent=False)  # [L, E]
        self.class_token = nn.Parameter(torch.empty(1, 1, d_model).normal_(std=0.02))
        self.dropout = nn.Dropout(dropout)
        # nn.TransformerEncoder copies one layer, so all its layers would start with the same weights.
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(d_model, heads, 2 * d_model, dropout, "gelu", batch_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, c_out)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, L] -> class logits [B, classes], read from the class token only."""
        x = x.as_subclass(Tensor)
        tokens = self.dropout(self.embedding(x).transpose(1, 2) + self.position)  # [B, L, E]
        tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1)  # [B, 1 + L, E]
        for layer in self.encoder:
            tokens = layer(tokens)
        logits: Tensor = self.head(self.norm(tokens[:, 0]))
        return logits


def sinusoids(length: int, width: int) -> Tensor:
    """Return sinusoidal positions [length, width] (Vaswani et al., 2017, 3.5)."""
    step = torch.arange(length)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(step * frequency)
    table[:, 1::2] = torch.cos(step * frequency)[:, : width // 2]
    return table


def run_uea(cell: Cell, progress: Progress) -> Result:
    """Train and evaluate one dataset with one attention and one seed.

    Args:
        cell: `task` is the dataset's name; `data` a folder with NAME_TRAIN.ts and NAME_TEST.ts (or NAME/NAME_TRAIN.ts
            and so on, as the archive unpacks), or None for the datasets in the aeon wheel.
        progress: called after each epoch.

    Returns:
        Metrics ``accuracy`` (the best on the test split, in %), ``last_accuracy``, ``epochs`` and
        ``seconds_per_epoch``; series ``train_loss`` and ``accuracy`` by epoch.

    Raises:
        ConfigError: an option is invalid, or the data is missing.
        InputError: a series has missing values.
    """
    from fastai.callback.core import CancelFitException
    from fastai.callback.training import GradientClip
    from fastai.learner import Callback
    from fastai.losses import CrossEntropyLossFlat
    from fastai.optimizer import OptimWrapper
    from tsai.data.core import TSClassification
    from tsai.tslearner import TSClassifier
    from tsai.utils import set_seed

    options = dict(cell.options)
    if options["d_model"] % options["heads"]:
        raise ConfigError(
            f"option heads is {options['heads']}, which does not divide d_model {options['d_model']}; choose another"
        )
    masked = options["architecture"] == "TSTPlus"
    x, y, splits = load(cell, padding=math.nan if masked else 0.0)
    epochs = min(options["epochs"], SMOKE_EPOCHS) if cell.smoke else options["epochs"]

    set_seed(cell.seed, reproducible=True)
    sizes = {"d_model": options["d_model"], "dropout": options["dropout"]}
    arch: Any = "TSTPlus"
    arch_config: dict[str, Any] = {}
    if masked:
        from .. import TsaiAdapter

        TsaiAdapter().install()
        arch_config = {
            **sizes,
            "n_layers": options["layers"],
            "n_heads": options["heads"],
            "d_ff": 2 * options["d_model"],
            "attention": cell.attention,
        }
    else:
        arch = ClassTokenTransformer(
            x.shape[1], len(np.unique(y)), x.shape[2], layers=options["layers"], heads=options["heads"], **sizes
        )
        inject(arch, cell.attention, adapter="torch", fresh=True)

    losses: list[float] = []
    accuracies: list[float] = []
    batches: list[Tensor] = []

    class Watch(Callback):
        """Records losses and accuracies, and stops as Time-Series-Library does: an equal accuracy counts as better."""

        order = 70  # after the recorder has measured the epoch

        def after_batch(self) -> None:
            if self.training:
                batches.append(self.learn.loss.detach().as_subclass(Tensor))

        def after_epoch(self) -> None:
            losses.append(torch.stack(batches).mean().item())
            batches.clear()
            accuracies.append(100 * float(self.recorder.values[-1][-1]))
            progress(len(losses) / epochs, f"epoch {len(losses)} accuracy {accuracies[-1]:.2f}")
            if len(accuracies) - 1 - last_best(accuracies) >= options["patience"]:
                raise CancelFitException

    learn = TSClassifier(
        x,
        y,
        splits=splits,
        tfms=[None, TSClassification()],
        bs=[options["batch_size"], evaluation_batch(len(splits[1]))],
        drop_last=False,
        arch=arch,
        arch_config=arch_config,
        loss_func=CrossEntropyLossFlat(),
        opt_func=partial(OptimWrapper, opt=torch.optim.RAdam),
        lr=options["lr"],
        cbs=[GradientClip(GRADIENT_CLIP), Watch()],
        path=cell.workdir,
    )
    started = time.perf_counter()
    with learn.no_bar(), learn.no_logging():
        learn.fit(epochs)
    seconds = time.perf_counter() - started

    best = last_best(accuracies)
    return Result(
        metrics={
            "accuracy": accuracies[best],
            "last_accuracy": accuracies[-1],
            "epochs": float(len(accuracies)),
            "seconds_per_epoch": seconds / len(accuracies),
        },
        series={"train_loss": losses, "accuracy": accuracies},
        details={
            "protocol": PROTOCOL,
            "best_epoch": best + 1,
            "injected": str(learn.model.attention_report),
            "parameters": sum(p.numel() for p in learn.model.parameters()),
            "series_train": len(splits[0]),
            "series_test": len(splits[1]),
            "features": x.shape[1],
            "time_steps": x.shape[2],
        },
    )


def last_best(values: list[float]) -> int:
    """Return the index of the largest value, the last one among equals."""
    return max(range(len(values)), key=lambda i: (values[i], i))


def evaluation_batch(series: int) -> int:
    """Return the largest batch size up to 64 whose last slice tsai can address.

    tsai 1.0.1 counts series in the smallest integer type that holds their number and adds the batch size in that type,
    so with NumPy 2 the end of the last batch can wrap around, and the batch is empty without an error.
    """
    from tsai.utils import smallest_dtype

    limit = np.iinfo(smallest_dtype(series)).max
    return next(batch for batch in range(64, 0, -1) if math.ceil(series / batch) * batch <= limit)


def load(cell: Cell, padding: float) -> tuple[np.ndarray, np.ndarray, tuple[list[int], list[int]]]:
    """Return standardised, padded series [n, features, longest], labels [n] and the indices of the two splits."""
    if importlib.util.find_spec("aeon") is None:
        raise PluginError("ts/uea reads .ts files with aeon, which is not installed; pip install --no-deps aeon")
    from aeon.datasets import load_from_ts_file

    series: list[np.ndarray] = []
    labels: list[str] = []
    splits: list[list[int]] = []
    for path in find(cell.task, cell.data):
        read, y = load_from_ts_file(str(path))
        step = max(1, len(read) // SMOKE_SERIES) if cell.smoke else 1
        kept = [np.asarray(one, dtype=np.float64) for one in list(read)[::step]]  # each [features, its length]
        if any(np.isnan(one).any() for one in kept):
            raise InputError(f"{path} has missing values; ts/uea does not fill them in. Interpolate them first")
        splits.append(list(range(len(series), len(series) + len(kept))))
        series += kept
        labels += [str(label) for label in list(y)[::step]]
    train = np.concatenate([series[i] for i in splits[0]], axis=1)  # [features, all time steps]
    mean, deviation = train.mean(1, keepdims=True), train.std(1, keepdims=True)
    x = np.full((len(series), len(mean), max(one.shape[1] for one in series)), padding, dtype=np.float32)
    for row, one in zip(x, series, strict=True):
        row[:, : one.shape[1]] = (one - mean) / (deviation + 1e-8)
    return x, np.array(labels), (splits[0], splits[1])


def find(task: str, data: Path | None) -> tuple[Path, Path]:
    """Return the TRAIN and TEST file of a dataset; raises ConfigError that lists the folders searched."""
    if data is not None and not data.is_dir():
        raise ConfigError(f"data is '{data}', not a folder; give the folder with {task}_TRAIN.ts and {task}_TEST.ts")
    if data is None:
        spec = importlib.util.find_spec("aeon")
        assert spec is not None
        assert spec.origin is not None
        data = Path(spec.origin).parent / "datasets" / "data"
    names = [f"{task}_{split}.ts" for split in ("TRAIN", "TEST")]
    for folder in (data, data / task):
        if all((folder / name).is_file() for name in names):
            return folder / names[0], folder / names[1]
    raise ConfigError(
        f"no {names[0]} and {names[1]} in '{data}' nor in '{data / task}'; unpack the dataset from "
        "timeseriesclassification.com there, or name another folder as data"
    )
