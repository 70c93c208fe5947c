"""The contract between a plugin's benchmark tasks and `quest bench`.

A package declares its suites as data in a module of their own (README of quest-bench: the keys), under the entry-point
group ``quest.suites``: ``tsai = "quest_suites.tsai.suites:SUITES"``. It implements each suite as one
function ``run(cell, progress) -> Result`` under the entry-point group ``quest.benchmarks``. One call trains and
evaluates one cell: one task, one attention, one seed.

Functions for suites: `save_state` and `load_state` let a killed cell continue, `train_steps` trains step by step,
`sweep` at several learning rates, `observe` looks at the attention of a model, and `own_trainer` runs a
framework's own training script. :mod:`quest_suites.timing` times a step against the host's own.
"""

import importlib
import io
import itertools
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from quest_core.errors import PluginError
from quest_core.hosts.inject import REPORT
from quest_core.tools.monitor import Monitor

STATE = "state.pt"
"""The file in a cell's workdir that `save_state` writes. `quest bench` deletes it when the cell has a result."""
SAVE_STEPS = 50
"""The most steps of `train_steps` that a killed cell loses."""


@dataclass(frozen=True)
class Cell:
    """One unit of work."""

    suite: str  # its name, e.g. "ts/uea"
    task: str  # inside the suite, e.g. "JapaneseVowels"
    attention: str  # as text (see AttentionConfig)
    seed: int  # seeds everything that is random in the cell
    smoke: bool  # shorten the run to seconds; the numbers then mean nothing
    data: Path | None  # a folder with the user's own data in its official layout, or None for what the suite brings
    options: Mapping[str, Any]  # of the suite, as declared, converted and with defaults filled in
    workdir: Path  # for checkpoints and logs of the cell; kept when it is stopped, so that a suite can continue there
    data_fingerprint: str | None = None  # a hash of the content of the task's files in `data`


@dataclass
class Result:
    """What a cell found. All values are plain numbers, texts, lists and mappings, so that it writes as JSON."""

    metrics: dict[str, float]  # the suite's own metric is among them
    series: dict[str, list[float]] = field(default_factory=dict)  # name -> values over training, for plots
    details: dict[str, Any] = field(default_factory=dict)  # whatever else a reader of one cell may want


Progress: TypeAlias = Callable[[float, str], None]
"""progress(fraction done in 0..1, a short text such as "epoch 12 accuracy 0.97")."""

Run: TypeAlias = Callable[[Cell, Progress], Result]


def save_state(cell: Cell, state: Mapping[str, Any]) -> None:
    """Write what a suite needs to continue after this epoch, and the state of every random generator.

    The file in the cell's workdir is whole or absent, however the process ends. `state` is what `torch.save` can write.
    """
    generators: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        generators["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state_all()
    path = cell.workdir / STATE
    neighbor = path.with_suffix(".new")
    written = io.BytesIO()  # into a file, torch.save raises a RuntimeError that does not name a full disk
    torch.save({"cell": _identity(cell), "state": dict(state), "generators": generators}, written)
    try:
        neighbor.write_bytes(written.getbuffer())
        os.replace(neighbor, path)
    finally:
        neighbor.unlink(missing_ok=True)  # its part would keep a full disk full


def _identity(cell: Cell) -> list[Any]:
    """Return everything that determines the numbers of a cell."""
    return [cell.suite, cell.task, cell.attention, cell.seed, cell.smoke, dict(cell.options), cell.data_fingerprint]


def load_state(cell: Cell) -> dict[str, Any] | None:
    """Return the mapping of the last `save_state` and set the random generators as they were.

    Returns:
        None at a first start, and if the file is of another cell or cannot be read, which is printed.
    """
    path = cell.workdir / STATE
    if not path.is_file():
        return None
    try:
        found = torch.load(path, map_location="cpu", weights_only=False)  # a file of this cell's own
    except Exception as error:  # torch raises many types for a torn file
        print(f"{path} cannot be read ({error!r:.200}), so the cell starts again", flush=True)
        return None
    if found["cell"] != _identity(cell):
        return None
    generators = found["generators"]
    random.setstate(generators["python"])
    torch.set_rng_state(generators["torch"])
    if "numpy" in generators:
        importlib.import_module("numpy").random.set_state(generators["numpy"])
    if "cuda" in generators and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(generators["cuda"])
    return dict(found["state"])


def about(model: nn.Module) -> dict[str, Any]:
    """Return the details of a result that describe its model: what was replaced, and the number of parameters."""
    return {"injected": str(getattr(model, REPORT)), "parameters": sum(p.numel() for p in model.parameters())}


def train_steps(
    cell: Cell,
    progress: Progress,
    steps: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    loss: Callable[[int], torch.Tensor],
    clip: float = math.inf,
) -> list[float]:
    """Train step by step, and return the losses. A killed cell continues at its last multiple of `SAVE_STEPS`.

    Args:
        generator: draws the batches of `loss`, which is called with the number of a step, from 0.
        clip: the largest norm of the gradients.
    """
    losses: list[float] = []
    if state := load_state(cell):
        losses = state["losses"]
        generator.set_state(state["generator"])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(len(losses), steps):
        value = loss(step)
        optimizer.zero_grad()
        value.backward()
        if clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(value.item())
        if (step + 1) % SAVE_STEPS == 0:
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_state(cell, {"losses": losses, "generator": generator.get_state(), **kept})
        progress((step + 1) / steps, f"step {step + 1} loss {losses[-1]:.3f}")
    return losses


def own_trainer(
    name: str, command: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a framework's own training script in a folder; yield each line that it prints, and print it too.

    Raises:
        PluginError: the script, by its `name`, failed, with its last line.
    """
    last = "it printed nothing"
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
                yield line
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise PluginError(f"{name} ended with status {process.returncode}: {last}; log.txt has the rest")


# --- several learning rates -----------------------------------------------------------------------------------------

WITHIN = 1.0
"""A rate is good if its accuracy is at most this far below that of the best rate, in points."""


@dataclass
class Trained:
    """One training of a cell."""

    accuracy: float  # on the test split at the epoch that is best in validation, in %; of guessing if it diverged
    validation: float  # on the validation split at that epoch, in %
    series: dict[str, list[float]]  # name -> values by epoch
    diverged: bool = False  # whether a loss was not finite
    rate: float = math.nan  # the learning rate, which `sweep` sets
    details: dict[str, Any] = field(default_factory=dict)  # of the training, if a result names them


def sweep(
    lowest: float,
    count: int,
    train: Callable[[float, str, Progress], Trained],
    progress: Progress,
    keep: Cell | None = None,
) -> dict[str, Trained]:
    """Train at learning rates half a decade apart; return what `train` does, by name.

    Args:
        train: called with each rate, its name "lr=R" and the progress of its share.
        keep: the cell, if `train` saves no state of its own: a killed cell continues at the rate that it was at.
    """
    done: dict[str, Trained] = (load_state(keep) or {}) if keep else {}
    for place in range(count):
        rate = lowest * 10 ** (place / 2)
        name = f"lr={rate:.2g}"
        if name not in done:
            done[name] = train(rate, name, part(progress, place, count))
            done[name].rate = rate
            if keep:
                save_state(keep, done)
    return done


def sweep_cell(
    cell: Cell, lowest: float, run: Run, progress: Progress, guess: Callable[[Result], float] = lambda one: math.nan
) -> dict[str, Trained]:
    """Return the `sweep` of a cell over its option ``lr``, at as many rates as its option ``rates`` says.

    Args:
        run: runs the cell at one rate, in a folder of its own; the result has the metric ``accuracy``, and the series
            ``train_loss`` and ``validation``.
        guess: returns the accuracy of a run that diverged.
    """

    def once(rate: float, name: str, progress: Progress) -> Trained:
        folder = cell.workdir / name
        folder.mkdir(exist_ok=True)
        one = run(replace(cell, workdir=folder, options={**cell.options, "lr": rate}), progress)
        shutil.rmtree(folder)
        if all(map(math.isfinite, one.series["train_loss"])):
            return Trained(one.metrics["accuracy"], max(one.series["validation"]), one.series, details=one.details)
        return Trained(guess(one), guess(one), one.series, diverged=True, details=one.details)

    count = min(cell.options["rates"], 2) if cell.smoke else cell.options["rates"]
    return sweep(lowest, count, once, progress, keep=cell)


def at_best_rate(done: Mapping[str, Trained]) -> Result:
    """Return the result of a `sweep` at the rate that is best in validation, the first of equals that did not diverge.

    Returns:
        Metrics ``accuracy``, NaN if all rates diverged, and ``validation``, at the rate that is best in validation;
        ``diverged``, a number of rates. Series by epoch. If there are several rates, ``accuracy/lr=R`` at each, and the
        names of series end on ``/lr=R`` too. Details ``chosen``, the name of the rate, and those of its training.
    """
    chosen, every = _best(done), over_rates(done)
    best, several = done[chosen], len(done) > 1
    metrics = {"accuracy": every.metrics["best accuracy"]}
    metrics |= {name: every.metrics[name] for name in every.metrics if several and name.startswith("accuracy/")}
    metrics |= {"validation": best.validation, "diverged": every.metrics["diverged"]}
    return Result(metrics, every.series if several else best.series, {"chosen": chosen, **best.details})


def _best(done: Mapping[str, Trained]) -> str:
    """Return the name of the rate that is best in validation, the first of equals that did not diverge."""
    return max(done, key=lambda name: -math.inf if done[name].diverged else done[name].validation)


def over_rates(done: Mapping[str, Trained]) -> Result:
    """Return the result of a `sweep`, in which a rate that diverged stays.

    Returns:
        Metrics ``accuracy``, the mean over the rates, and ``accuracy/lr=R`` at each; ``best accuracy``, at the rate
        that is best in validation among those that did not diverge, NaN if all did; ``range``, see `width_of_range`;
        and ``diverged``, a number of rates. Series with names that end on ``/lr=R``. Details ``diverged``, their names.
    """
    scores, best = {name: one.accuracy for name, one in done.items()}, done[_best(done)]
    return Result(
        {
            "accuracy": sum(scores.values()) / len(scores),
            **{f"accuracy/{name}": score for name, score in scores.items()},
            "best accuracy": math.nan if best.diverged else best.accuracy,
            "range": width_of_range([-math.inf if one.diverged else one.accuracy for one in done.values()]),
            "diverged": float(sum(one.diverged for one in done.values())),
        },
        {f"{key}/{name}": values for name, one in done.items() for key, values in one.series.items()},
        {"diverged": [name for name, one in done.items() if one.diverged]},
    )


def width_of_range(scores: Sequence[float]) -> float:
    """Return the decades of neighboring rates, half a decade apart, that are within `WITHIN` points of the best.

    Each rate stands for half a decade, so the result is at least 0.5; it is 0 if all diverged, which is a score of −∞.
    Of several best rates the one with the most such neighbors counts.
    """
    best = max(scores)
    runs = ([*run] for near, run in itertools.groupby(scores, lambda score: score >= best - WITHIN) if near)
    return max(len(run) for run in runs if best in run) / 2 if best > -math.inf else 0.0


def part(progress: Progress, place: int, count: int) -> Progress:
    """Return the progress of the `place`-th of `count` trainings in a cell."""
    return lambda share, text: progress((place + share) / count, text)


@torch.no_grad()
def observe(model: nn.Module, *inputs: Any) -> dict[str, float]:
    """Return what a Monitor sees of `model(*inputs)` in evaluation.

    Returns:
        ``max_logit``, the largest logit, and ``entropy`` (nats), ``query_norm`` and ``key_norm``, the means over all
        layers and heads; NaN for what the mechanism of a layer has not, and where a layer computes NaN.
    """
    model.eval()
    with Monitor(model) as monitor:
        model(*inputs)
    seen: list[dict[str, Any]] = list(monitor.collect().values())

    def every(name: str) -> list[float]:
        return [value for layer in seen for value in layer.get(name, [math.nan])]

    means = {name: every(key) for name, key in (("entropy", "entropy"), ("query_norm", "query_norm_mean"))}
    means["key_norm"] = every("key_norm_mean")
    largest = max(every("max_logit"), key=lambda value: (math.isnan(value), value))
    return {"max_logit": largest, **{name: sum(own) / len(own) for name, own in means.items()}}
