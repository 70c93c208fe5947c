"""calibrate: replace standard attention of a pretrained model by quest, with almost no change at first."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..compat import same_random_state
from ..config import STANDARD, AttentionConfig, AttentionSpec
from ..errors import ConfigError, InjectionError, InputError, UnsupportedError
from ..hosts.adapter import Adapter
from ..hosts.finding import UNIVERSAL, WRITTEN_OUT
from ..hosts.inject import inject
from ..hosts.plugins import adapter as find_adapter
from ..hosts.sites import run_example
from ..mechanism import Mechanism, count_kv_heads
from ..mechanisms.base import Dims
from .monitor import Monitor

Run: TypeAlias = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class LayerCalibration:
    """The calibration of one attention module, a value per key/value head of the host."""

    path: str  # the module's dotted path
    key_norms: tuple[float, ...]  # mean ‖k‖₂ over the visible keys of the batches
    factors: tuple[float, ...]  # what the query projection was multiplied with


@dataclass(frozen=True)
class CalibrationReport:
    """What `calibrate` did. Changes of outputs are RMS(change) / RMS(outputs of the standard model), all batches."""

    attention: str  # the mechanism, as AttentionConfig writes it
    layers: tuple[LayerCalibration, ...]  # one per attention module, in the order of the forward pass
    uncalibrated: float  # how far the outputs move if attention is only replaced
    calibrated: float  # the same with the factors folded in

    def __str__(self) -> str:
        count = len(self.layers)
        return (
            f"attention={self.attention} calibrated in {count} module{'s' * (count > 1)}: the output changes by "
            f"{self.calibrated:.3g} of its RMS ({self.uncalibrated:.3g} uncalibrated)"
        )


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    attention: AttentionSpec = "quest",
    *,
    adapter: str | Adapter | None = None,
    forward: Run | None = None,
) -> tuple[nn.Module, CalibrationReport]:
    """Replace standard attention by quest, in place, so that fine-tuning starts from nearly the attention that was.

    Standard logits are q kᵀ / √D = (‖k‖/√D) · q k̄ᵀ, quest's are q k̄ᵀ. The mean of ‖k‖ over the batches, times 1/√D, is
    folded into each head's query projection. What is lost, because ‖k‖ differs between the keys of a head, the report
    says. Fine-tune afterwards.

    >>> model, report = quest_core.calibrate(model, batches)
    >>> print(report)
    attention=quest calibrated in 3 modules: the output changes by 0.185 of its RMS (0.244 uncalibrated)

    Measuring runs on a copy of the model, in evaluation and without gradients. The model keeps its parameter objects,
    but an optimizer's state for the old scale is stale. On any error the model is untouched.

    Args:
        model: a model with standard attention, stock or injected, that an adapter knows.
        batches: a few inputs like those of training. All are kept and run three times.
        attention: quest, with any normalizer, and a grouping only if it leaves every query head its own key head.
        adapter: as in :func:`quest_core.inject`.
        forward: ``forward(model, batch)`` returns the output to compare, a tensor or a nest of tuples, lists and
            mappings of tensors; by default the model is called with a batch as with the `example` of `inject`.

    Returns:
        The model, as inject returns it, and the report.

    Raises:
        ConfigError: the attention is not quest, or its grouping shares key heads; or the model's is not standard.
        InputError: no batches, no tensors in the output, or an attention that the batches never reached.
        UnsupportedError: no adapter can scale the queries, or attention modules share parameters.
        InjectionError, PluginError: as in inject.
    """
    target = AttentionConfig.parse(attention)
    refuse_uncalibratable(target)
    run = forward or run_example
    batches = list(batches)
    if not batches:
        raise InputError("calibrate was given no batches; it measures key norms on a few inputs like those of training")
    with same_random_state(model), torch.no_grad():
        twin = copy.deepcopy(model).eval()
        try:
            twin, replaced = inject(twin, _source(twin), adapter=adapter)
        except InjectionError as error:
            raise InjectionError(
                f"calibrate scales the projection of queries, and needs an adapter that knows it: {error}. Attention "
                "that an example finds is fine-tuned without calibration"
            ) from error
        if unknown := [row.path for row in replaced.replacements if row.adapter in (UNIVERSAL, WRITTEN_OUT)]:
            raise UnsupportedError(
                f"calibrate scales the projection of queries, which an adapter knows; '{unknown[0]}' was found by an "
                "example; use quest_core.inject(model, 'quest', example=batch), and fine-tune"
            )
        given = adapter if isinstance(adapter, Adapter) else None
        owners = [(row.path, given or find_adapter(row.adapter)) for row in replaced.replacements]
        refuse_shared(twin, [path for path, _ in owners])
        layers, wanted = _measure(twin, owners, batches, run, target)
        twin, _ = inject(twin, target, adapter=adapter)
        uncalibrated = _change(twin, batches, wanted, run)
        _fold(twin, owners, layers)
        calibrated = _change(twin, batches, wanted, run)
    # Every step has succeeded on the copy, so the model itself can follow.
    model, _ = inject(model, target, adapter=adapter)
    _fold(model, owners, layers)
    return model, CalibrationReport(str(target), tuple(layers), uncalibrated, calibrated)


def refuse_uncalibratable(target: AttentionConfig) -> None:
    """Raise ConfigError unless `calibrate` can fit this attention to standard attention."""
    mixing = [part.name for part in target.components if "heads" in part.reads]
    if not (target.components[0].unit_keys and leaves(target, "query")):
        raise _uncalibratable(target, "its score is not quest")
    if mixing:
        raise _uncalibratable(target, f"'{mixing[0]}' gives query heads other key heads than they were trained with")


def _uncalibratable(target: AttentionConfig, why: str) -> ConfigError:
    return ConfigError(
        f"attention '{target}' cannot be calibrated: {why}; calibrate takes 'quest', 'quest+sigmoid' and the like: "
        "score quest, and every query head its own key head"
    )


def _source(model: nn.Module) -> AttentionConfig:
    """Return the attention that the model has now: standard, with the options that an injection gave it."""
    found = {module.config for module in model.modules() if isinstance(module, Mechanism)}
    if len(found) > 1 or not all(leaves(config, "query") and leaves(config, "key") for config in found):
        raise ConfigError(
            "calibrate starts from a model with one standard attention, but this one has: "
            f"{', '.join(sorted(map(str, found)))}; give it the model as it was pretrained"
        )
    return found.pop() if found else STANDARD


def leaves(config: AttentionConfig, role: str) -> bool:
    """Return whether the dot products take "query" or "key" as the projections made it."""
    part, x = config.components[0], torch.ones(1, 1, 1, 1)
    pointwise = part.axis == "score" and not part.reads
    return pointwise and getattr(config.build(part, Dims(1, 1, 1)), role)(x) is x


def refuse_shared(model: nn.Module, paths: list[str]) -> None:
    """Raise UnsupportedError for a parameter of two attention modules, which would be scaled by the factors of both."""
    for one, other in itertools.combinations(paths, 2):
        if not set(model.get_submodule(one).parameters()).isdisjoint(model.get_submodule(other).parameters()):
            raise UnsupportedError(f"'{one}' and '{other}' share parameters, so neither can be scaled by itself")


def _measure(
    model: nn.Module, owners: list[tuple[str, Adapter]], batches: list[Any], run: Run, target: AttentionConfig
) -> tuple[list[LayerCalibration], list[list[Tensor]]]:
    """Return the factors of every attention module of an injected standard model, and its outputs on every batch."""
    ratios, monitors = [], []
    for path, owner in owners:
        site = next(site for site in owner.sites(model) if site.path == path)
        if count_kv_heads(target, site.num_heads) != site.num_heads:
            why = f"'{path}' has {site.num_heads} query heads, which were trained with a key head each"
            raise _uncalibratable(target, why)
        found = [module for module in site.module.modules() if isinstance(module, Mechanism)]
        if len(found) != 1:
            raise UnsupportedError(f"'{path}' has {len(found)} attention mechanisms, so its queries have no one factor")
        wanted_score = Mechanism(target, num_heads=site.num_heads, head_dim=site.head_dim, projected=True).score
        ratios.append(found[0].score.scale(site.head_dim) / wanted_score.scale(site.head_dim))
        monitors.append(Monitor(found[0], logits=False))
    outputs = [_tensors(run(model, batch)) for batch in batches]
    if not any(outputs):
        raise InputError("the model's output holds no floating-point tensor; say with forward= what to compare")
    layers = []
    for (path, _), ratio, monitor in zip(owners, ratios, monitors, strict=True):
        monitor.remove()
        seen = list(monitor.collect().values())
        norms = seen[0]["key_norm_mean"] if seen else [math.nan]
        if not all(map(math.isfinite, norms)):
            raise InputError(
                f"'{path}' saw no key, or none with a finite norm, in the {len(batches)} given batches, so its factors "
                "are unknown; give batches (or a forward=) that run all of the model"
            )
        layers.append(LayerCalibration(path, tuple(norms), tuple(norm * ratio for norm in norms)))
    return layers, outputs


def _tensors(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a nest of mappings and sequences, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    return [tensor for item in output for tensor in _tensors(item)] if isinstance(output, tuple | list) else []


def _change(model: nn.Module, batches: list[Any], before: list[list[Tensor]], run: Run) -> float:
    """Return the RMS of the change of the outputs over the RMS of `before`."""
    change = total = 0.0
    for batch, old in zip(batches, before, strict=True):
        for was, now in zip(old, _tensors(run(model, batch)), strict=True):
            change += float((now.double() - was.double()).square().sum())
            total += float(was.double().square().sum())
    return math.sqrt(change / total) if total else math.nan


def _fold(model: nn.Module, owners: list[tuple[str, Adapter]], layers: list[LayerCalibration]) -> None:
    for (path, owner), layer in zip(owners, layers, strict=True):
        owner.scale_queries(model.get_submodule(path), torch.tensor(layer.factors, dtype=torch.float64))
