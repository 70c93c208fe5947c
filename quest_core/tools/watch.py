"""Watch measures attention at every n-th step of a training, for loggers and in words."""

import math
import statistics
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from ..errors import ConfigError, check_sizes
from ..notices import say
from .clip import QKClip
from .monitor import Monitor, borrow

LARGE = 100  # QK-clip's threshold for the largest logit (arXiv:2507.20534)
OVERFLOW = 65504  # the largest number of float16
SOON = 1000  # steps
SATURATED = 0.1  # nats; weights of 0.98 and 0.02 have this entropy
PAGE = "https://quest-attention.github.io/quest/watching/"
Number: TypeAlias = Callable[[list[float]], float]
OVER_HEADS: dict[str, Number] = {"min": min, "mean": statistics.fmean, "max": max}
TOTALS: dict[str, Number] = {"max_logit": max, "entropy": statistics.fmean}


class Watch:
    """Measures the attention of a model at every n-th step of its training.

    >>> with quest_core.Watch(model, every=100) as watch:
    ...     for batch in batches:
    ...         train_step(model, batch)
    ...         logger.log(watch.step())  # {} between; else {"attention/layers.0.self_attn/max_logit/max": 31.2, ...}

    A model without attention of quest_core gets the mechanism `standard` meanwhile. The steps that are not measured run
    without hooks, except with `clip`. Forward passes in evaluation do not count. :class:`quest_core.Monitor` explains
    the numbers.

    Args:
        model: the model itself, without DistributedDataParallel or torch.compile around it.
        every: the steps n, 2n, 3n, ... are measured, and the first.
        example: as in :func:`quest_core.inject`, for attention that no adapter knows.
        clip: a threshold for :class:`quest_core.QKClip`, which then watches every step; None for no clipping.
        steps: how many were taken before, in a run that goes on.

    Raises:
        ConfigError: `every` is not a positive whole number, `steps` is not a whole number, or as QKClip.
        InjectionError: the model has no attention that can be measured.
        UnsupportedError: as QKClip.

    Attributes:
        steps: how many steps were taken, with those before.
        history: what was measured: (step, {path: {name: [a float per head]}}), the oldest first.
        latest: what `step` returned at the latest measurement; {} before the first.
    """

    def __init__(
        self, model: nn.Module, *, every: int = 100, example: Any = None, clip: float | None = None, steps: int = 0
    ) -> None:
        check_sizes(every=every)
        if not isinstance(steps, int) or steps < 0:
            raise ConfigError(f"steps is {steps!r}; give the steps taken before as a whole number of at least 0")
        self.model, self.every, self.steps = model, every, steps
        self.history: list[tuple[int, dict[str, Any]]] = []
        self.latest: dict[str, float] = {}
        self._unseen: dict[str, str] = {}
        self._give_back = borrow(model, example)
        try:
            self._clip = None if clip is None else QKClip(model, clip)
        except Exception:
            self._give_back()
            raise
        self._monitor: Monitor | None = Monitor(model, in_evaluation=False)

    def step(self) -> dict[str, float]:
        """Say that a step has ended; return what was measured in it, or {}.

        Returns:
            {"attention/path/name/min": float, and the same with mean and max}, over the heads of a layer, and
            "attention/max_logit" and "attention/entropy": the largest and the mean over all heads. NaN if a head has
            NaN, as in a training that has diverged, or if it saw no pair of a query and a key.
        """
        self.steps += 1
        values = {}
        if self._monitor is not None:
            seen, before, self._unseen = self._monitor.collect(), self._unseen, self._monitor.unseen()
            self._stop()
            if self._unseen != before:
                for line in not_measured(self._unseen):
                    say(line)
            if seen:
                self.history.append((self.steps, seen))
                self.latest = values = summary(seen)
        if self._clip is not None:
            self._clip.step()
        if (self.steps + 1) % self.every == 0:
            self._monitor = Monitor(self.model, in_evaluation=False)
        return values

    def names(self) -> list[str]:
        """Return the keys that `step` can return, for logs whose columns stand before the first step.

        Attention whose logits the host forms leaves some of them out, see :class:`quest_core.Monitor`.
        """
        with Monitor(self.model) as monitor:
            seen = {path: {name: [0.0] for name in layer.names()} for path, layer in monitor.layers.items()}
        return list(summary(seen))

    def remarks(self) -> list[str]:
        """Return what the latest measurement found, in words, and the layers that could not be observed."""
        (then, before), (step, now) = [(0, {}), (0, {}), *self.history][-2:]
        return remarks(now, before, step - then) + not_measured(self._unseen)

    def close(self) -> None:
        """Stop, and leave the model as it was. `history` stays."""
        self._stop()
        if self._clip is not None:
            self._clip.close()
        self._give_back()

    def _stop(self) -> None:
        if self._monitor is not None:
            self._monitor.remove()
            self._monitor = None

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def summary(seen: dict[str, Any]) -> dict[str, float]:
    """Return what `Monitor.collect` returned as `Watch.step` does; NaN where a head has NaN."""
    every = {name: [value for layer in seen.values() for value in layer.get(name, [])] for name in TOTALS}
    out = {f"attention/{name}": _over(TOTALS[name], values) for name, values in every.items() if values}
    for path, names in seen.items():
        for name, heads in names.items():
            out |= {f"attention/{path}/{name}/{way}": _over(take, heads) for way, take in OVER_HEADS.items()}
    return out


def _over(take: Number, values: list[float]) -> float:
    """Return ``take(values)``, or NaN if one of them is, which `min` and `max` may overlook."""
    return math.nan if any(map(math.isnan, values)) else take(values)


def not_measured(unseen: dict[str, str]) -> list[str]:
    """Return a line of what `Monitor.unseen` returned, or none."""
    return [f"not measured: {', '.join(unseen)}: {next(iter(unseen.values()))}"] if unseen else []


def remarks(now: dict[str, Any], before: dict[str, Any], steps: int) -> list[str]:
    """Return in words what `Monitor.collect` returned `now` and `steps` of a training `before`; 0 for another training.

    A line for the layer with the largest logit, and for each other layer whose logits are above 100 or NaN, or
    whose softmax is saturated; then a link to what people do about it.
    """
    logits = {
        path: [-math.inf if math.isnan(value) else value for value in names["max_logit"]]
        for path, names in now.items()
        if "max_logit" in names
    }
    lines, alarm = [], False
    for i, (path, heads) in enumerate(sorted(logits.items(), key=lambda item: -max(item[1]))):
        names, top, head = now[path], max(heads), heads.index(max(heads))
        if lost := sum(map(math.isnan, names["max_logit"])):
            lines.append(f"{path}: in {lost} of {len(heads)} heads a logit is NaN, or every key is hidden")
            alarm = True
            continue
        saturated = [entropy for entropy in names.get("entropy", ()) if entropy < SATURATED]
        if top > LARGE or saturated:
            alarm = True
        elif i:
            continue
        words = f"{path}, head {head}: the largest logit is {top:.4g}"
        if steps > 0 and path in before:
            words += _growth(before[path]["max_logit"][head], top, steps)
        if "logit_bound" not in names and "query_norm_max" in names:
            words += f"; with unit keys (quest) it would be at most {names['query_norm_max'][head]:.4g}"
        if saturated:
            words += f"; the softmax is saturated in {len(saturated)} of {len(heads)} heads"
            words += f" (entropy {min(saturated):.2g} nats)"
        lines.append(words)
    if alarm:
        lines.append(f"what people do about it: {PAGE}#ways-to-keep-logits-small")
    return lines


def _growth(before: float, now: float, steps: int) -> str:
    """Return in words how fast a largest logit grows, and when float16 overflows if that is soon."""
    if not (0 < before < math.inf and 0 < now < math.inf):
        return ""
    growth = (now / before) ** (1 / steps) - 1
    left = math.log(OVERFLOW / now) / math.log1p(growth) if growth > 0 else 0
    soon = before >= LARGE and 0 < left < SOON  # the first steps grow faster than the later ones
    return f" ({growth:+.2%} per step)" + (f"; at this rate float16 overflows in {left:.0f} steps" if soon else "")
