"""ts/uea: UEA multivariate time-series classification, trained by tsai's own TSClassifier.

The model and its training are those of the QUEST paper (A.5.6), which follows thuml/Time-Series-Library: a 3-layer
post-norm Transformer with a class token, batch 16, RAdam at a constant 1e-3, gradients clipped at norm 4, at most 100
epochs, stopped after 10 without a better accuracy.

The option ``select`` names the epoch whose test accuracy is reported:

- ``validation``: the best one on a fifth of the training series, which are held out; training stops on them too.
- ``last``: the last of all epochs. Nothing is held out, and training does not stop early.
- ``paper``: the best one on the test split, which training stops on too. **These numbers are optimistic**, and more so
  for an attention whose curve is noisier.

Differences from that library: series are standardised with the statistics of the training split for both
splits (the library gives each split its own), and the projections are torch.nn.MultiheadAttention's, with its
initialization. Series of unequal length are padded with zeros after standardisation, unmasked in the paper's
architecture as in the library; tsai's TSTPlus gets NaN there and masks it.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quest_core.errors import ConfigError
from quest_core.hosts.inject import inject
from quest_suites.contract import Cell, Progress, Result, about, at_best_rate, load_state, save_state, sweep_cell

from .data import find, read

VALIDATION_SHARE = 0.2
GRADIENT_CLIP = 4.0
SMOKE_EPOCHS = 2
SMOKE_SERIES = 64


class ClassTokenTransformer(nn.Module):
    """The paper's classifier: token embedding by convolution, class token, post-norm encoder, linear layer."""

    def __init__(
        self, c_in: int, c_out: int, seq_len: int, *, d_model: int, layers: int, heads: int, dropout: float
    ) -> None:
        from tsai.models.positional_encoders import PositionalEncoding

        super().__init__()
        self.embedding = nn.Conv1d(c_in, d_model, 3, padding=1, padding_mode="circular", bias=False)
        nn.init.kaiming_normal_(self.embedding.weight, nonlinearity="leaky_relu")
        self.register_buffer(
            "position", PositionalEncoding(seq_len, d_model, normalize=False), persistent=False
        )  # [L, E]
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


def run_uea(cell: Cell, progress: Progress) -> Result:
    """Train and evaluate one dataset with one attention and one seed, at one learning rate or at several.

    Returns:
        What `train` returns for one rate; else what `at_best_rate` returns, with the series and details of `train`.
    """
    if cell.options["rates"] == 1:
        return train(cell, progress)
    if cell.options["select"] != "validation":
        raise ConfigError(
            f"several rates need select=validation, which chooses one of them; found: {cell.options['select']}; fix: "
            "leave select out, or --set rates=1"
        )
    return at_best_rate(sweep_cell(cell, cell.options["lr"], train, progress))


def train(cell: Cell, progress: Progress) -> Result:
    """Train and evaluate at the rate ``lr``.

    Returns:
        Metrics ``accuracy`` (on the test split, in %, of the epoch that `select` chooses), ``last_accuracy``
        and ``epochs``; series ``train_loss``, ``accuracy`` and, with select=validation,
        ``validation`` by epoch.
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
    x, y, splits = load(cell, padding=math.nan if options["architecture"] == "TSTPlus" else 0.0)
    epochs = min(options["epochs"], SMOKE_EPOCHS) if cell.smoke else options["epochs"]

    set_seed(cell.seed, reproducible=True)
    arch, arch_config = architecture(cell, x.shape[1], len(np.unique(y)), x.shape[2])
    losses: list[float] = []
    accuracies: list[float] = []  # on the test split
    validation: list[float] = []
    batches: list[Tensor] = []  # losses of this epoch
    select = options["select"]
    steering = validation if select == "validation" else accuracies  # the accuracy that chooses the epoch

    def is_over() -> bool:
        """Whether all epochs were run, or the last `patience` of them brought nothing better."""
        waited = len(steering) - 1 - last_best(steering) if steering else 0
        return len(losses) >= epochs or (select != "last" and waited >= options["patience"])

    class Watch(Callback):
        """Records losses and accuracies, and stops as Time-Series-Library does: an equal accuracy counts as better."""

        order = 70  # after the recorder has measured the epoch

        def after_batch(self) -> None:
            if self.training:
                batches.append(self.learn.loss.detach().as_subclass(Tensor))

        def after_epoch(self) -> None:
            losses.append(torch.stack(batches).mean().item())
            batches.clear()
            found = 100 * float(self.recorder.values[-1][-1])
            if select == "validation":
                validation.append(found)
                found = test_accuracy(self.learn)
            accuracies.append(found)
            kept = {name: part.state_dict() for name, part in (("model", self.learn.model), ("opt", self.learn.opt))}
            kept |= {"loaders": [loader.rng.getstate() for loader in self.learn.dls.loaders]}
            save_state(cell, {"losses": losses, "accuracies": accuracies, "validation": validation, **kept})
            measured = "validation accuracy" if validation else "accuracy"
            progress(len(losses) / epochs, f"epoch {len(losses)} {measured} {steering[-1]:.2f}")
            if is_over():
                raise CancelFitException

    watched = splits.get("validation", splits["test"])
    learn = TSClassifier(
        x,
        y,
        splits=(splits["train"], watched),
        tfms=[None, TSClassification()],
        bs=[options["batch_size"], evaluation_batch(len(watched))],
        drop_last=False,
        arch=arch,
        arch_config=arch_config,
        loss_func=CrossEntropyLossFlat(),
        opt_func=partial(OptimWrapper, opt=torch.optim.RAdam),
        lr=options["lr"],
        cbs=[GradientClip(GRADIENT_CLIP), Watch()],
        path=cell.workdir,
    )
    classes = list(learn.dls.vocab)
    test_y = torch.tensor([classes.index(label) for label in y[splits["test"]]])
    test_x = torch.from_numpy(x[splits["test"]])  # [series, features, time steps]

    def test_accuracy(learner: Any) -> float:
        """Measure the test split in %; nothing random is drawn."""
        learner.model.eval()
        with torch.no_grad():
            right = [
                (learner.model(block.to(learner.dls.device)).argmax(1).cpu() == wanted).sum().item()
                for block, wanted in zip(test_x.split(64), test_y.split(64), strict=True)
            ]
        learner.model.train()
        return 100 * float(sum(right)) / len(test_y)

    if state := load_state(cell):
        learn.model.load_state_dict(state["model"])
        learn.create_opt()
        learn.opt.load_state_dict(state["opt"])
        for loader, draws in zip(learn.dls.loaders, state["loaders"], strict=True):
            loader.rng.setstate(draws)
        for series, kept in ((losses, "losses"), (accuracies, "accuracies"), (validation, "validation")):
            series += state[kept]
    if not is_over():
        with learn.no_bar(), learn.no_logging():
            learn.fit(epochs - len(losses))

    best = len(accuracies) - 1 if select == "last" else last_best(steering)
    return Result(
        metrics={"accuracy": accuracies[best], "last_accuracy": accuracies[-1], "epochs": float(len(accuracies))},
        series={"train_loss": losses, "accuracy": accuracies, **({"validation": validation} if validation else {})},
        details={
            "reported_epoch": best + 1,
            **about(learn.model),
            "series_train": len(splits["train"]),
            "series_validation": len(splits.get("validation", ())),
            "series_test": len(splits["test"]),
            "features": x.shape[1],
            "time_steps": x.shape[2],
        },
    )


def architecture(cell: Cell, features: int, classes: int, time_steps: int) -> tuple[Any, dict[str, Any]]:
    """Return the arguments `arch` and `arch_config` of TSClassifier: the paper's model, or the name of tsai's own."""
    options = cell.options
    sizes = {"d_model": options["d_model"], "dropout": options["dropout"]}
    if options["architecture"] == "TSTPlus":
        from quest_tsai import TsaiAdapter

        TsaiAdapter().install()
        sizes |= {"n_layers": options["layers"], "n_heads": options["heads"], "d_ff": 2 * options["d_model"]}
        return "TSTPlus", {**sizes, "attention": cell.attention}
    model = ClassTokenTransformer(
        features, classes, time_steps, layers=options["layers"], heads=options["heads"], **sizes
    )
    inject(model, cell.attention, adapter="torch", fresh=True)
    return model, {}


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


def load(cell: Cell, padding: float) -> tuple[np.ndarray, np.ndarray, dict[str, list[int]]]:
    """Return standardised, padded series [n, features, longest], labels [n] and the indices of each split.

    The splits are "train", "test", and with the option select=validation also "validation": a fifth of each class of
    the training file, drawn with the cell's seed. Statistics are those of "train".
    """
    series: list[np.ndarray] = []
    labels: list[str] = []
    splits: dict[str, list[int]] = {}
    for name, path in zip(("train", "test"), find(cell.task, cell.data), strict=True):
        found, y = read(path)
        kept: Sequence[int] = range(len(found))
        if cell.smoke:  # a test series of a class that the shortened training lacks cannot be scored
            kept = kept[:: max(1, len(found) // SMOKE_SERIES)]
            kept = [i for i in kept if name == "train" or y[i] in labels]
        splits[name] = list(range(len(series), len(series) + len(kept)))
        series += [found[i] for i in kept]
        labels += [y[i] for i in kept]
    if cell.options["select"] == "validation":
        splits["train"], splits["validation"] = hold_out(splits["train"], labels, cell.seed)
    train = np.concatenate([series[i] for i in splits["train"]], axis=1)  # [features, all time steps]
    mean, deviation = train.mean(1, keepdims=True), train.std(1, keepdims=True)
    x = np.full((len(series), len(mean), max(one.shape[1] for one in series)), padding, dtype=np.float32)
    for row, one in zip(x, series, strict=True):
        row[:, : one.shape[1]] = (one - mean) / (deviation + 1e-8)
    return x, np.array(labels), splits


def hold_out(train: list[int], labels: list[str], seed: int) -> tuple[list[int], list[int]]:
    """Split indices into training and validation: a fifth of each class, at least one where the class has two."""
    rng = np.random.default_rng(seed)
    held: list[int] = []
    for label in sorted({labels[i] for i in train}):
        own = [i for i in train if labels[i] == label]
        count = max(1, round(VALIDATION_SHARE * len(own))) if len(own) > 1 else 0
        held += [int(i) for i in rng.permutation(own)[:count]]
    if not held:
        raise ConfigError("no class has two training series, so none can be held out; use --set select=last")
    return [i for i in train if i not in set(held)], sorted(held)
