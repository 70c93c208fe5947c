"""calibrate: replace standard attention of a pretrained model by quest, with almost no change at first."""

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import same_random_state
from ..config import STANDARD, AttentionConfig, AttentionSpec
from ..errors import ConfigError, InjectionError, InputError, UnsupportedError
from ..hosts.adapter import Adapter
from ..hosts.finding import UNIVERSAL, WRITTEN_OUT
from ..hosts.functions import tensors
from ..hosts.inject import inject
from ..hosts.plugins import adapter as find_adapter
from ..hosts.sites import run_example
from ..mechanism import Mechanism
from ..mechanisms.base import Dims
from ..projections import Projected
from .monitor import Monitor

BY_EXAMPLE = "it was found by an example, which does not show which projection makes its queries"


@dataclass(frozen=True)
class LayerCalibration:
    """The calibration of one attention module."""

    path: str  # the module's dotted path
    key_norms: tuple[float, ...]  # of each key head, mean ‖k‖₂ over the visible keys of the batches
    factors: tuple[float, ...]  # of each query head, what its query projection was multiplied by


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
    forward: Callable[[nn.Module, Any], Any] | None = None,
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
        attention: quest, with any normalizer, and a grouping only if it keeps the key heads of the model.
        adapter: as in :func:`quest_core.inject`.
        forward: ``forward(model, batch)`` returns the output to compare, a tensor or a nest of tuples, lists and
            dicts of tensors; by default the model is called with a batch as with the `example` of `inject`.

    Returns:
        The model, as inject returns it, and the report.

    Raises:
        ConfigError: the attention is not quest, or its grouping takes key heads away; or the model's is not standard.
        InputError: no batches, no tensors in the output, or an attention that the batches never reached.
        UnsupportedError: no adapter can scale the queries, or attention modules share parameters.
        InjectionError, PluginError: as in inject.
    """
    target = AttentionConfig.parse(attention)
    refuse_uncalibratable(target)
    if isinstance(batches, Mapping | Tensor):
        raise InputError(f"batches must be a list of inputs; found one {type(batches).__name__}; write [batch]")
    batches = list(batches)
    if not batches:
        raise InputError("calibrate was given no batches; it measures key norms on a few inputs like those of training")

    def outputs() -> list[Tensor]:
        return [x for x in tensors((forward or run_example)(twin, batch) for batch in batches) if x.is_floating_point()]

    with same_random_state(model), torch.no_grad():
        twin = copy.deepcopy(model).eval()
        try:
            twin, replaced = inject(twin, _current_attention(twin), adapter=adapter)
        except InjectionError as error:
            raise InjectionError(
                f"calibrate scales the projection of queries, and needs an adapter that knows it: {error}. Attention "
                "that an example finds is fine-tuned without calibration"
            ) from error
        owners = {row.path: row.adapter for row in replaced.replacements}
        if found := [path for path, owner in owners.items() if owner in (UNIVERSAL, WRITTEN_OUT)]:
            raise UnsupportedError(f"'{found[0]}': {BY_EXAMPLE}; use inject, and fine-tune without calibration")
        refuse_shared(twin, list(owners))
        before = [_mechanism(twin, path) for path in owners]
        with Monitor(nn.ModuleList(before), logits=False) as monitor:
            wanted = outputs()
        if not wanted:
            raise InputError("the model's output holds no floating-point tensor; say with forward= what to compare")
        twin, _ = inject(twin, target, adapter=adapter)
        seen, layers = monitor.collect(), []
        for i, (path, old) in enumerate(zip(owners, before, strict=True)):
            layers.append(_factors(path, old, _mechanism(twin, path), seen.get(str(i), {})))
        changes = [_change(wanted, outputs())]
        _fold(twin, layers, owners, adapter)
        changes.append(_change(wanted, outputs()))
    # Every step has succeeded on the copy, so the model itself can follow.
    model, _ = inject(model, target, adapter=adapter)
    _fold(model, layers, owners, adapter)
    return model, CalibrationReport(str(target), tuple(layers), *changes)


def refuse_uncalibratable(target: AttentionConfig) -> None:
    """Raise ConfigError unless `calibrate` can fit this attention to standard attention."""
    mixing = [part.name for part in target.components if "heads" in part.reads]
    if not (target.components[0].unit_keys and leaves_unchanged(target, "query")):
        raise _uncalibratable(target, "its score is not quest")
    if mixing:
        raise _uncalibratable(target, f"'{mixing[0]}' gives query heads other key heads than they were trained with")


def _uncalibratable(target: AttentionConfig, why: str) -> ConfigError:
    return ConfigError(
        f"attention '{target}' cannot be calibrated: {why}; calibrate takes 'quest', 'quest+sigmoid' and the like: "
        "score quest, and all key heads of the trained model"
    )


def _current_attention(model: nn.Module) -> AttentionConfig:
    """Return the attention that the model has now: standard, with the options that an injection gave it."""
    found = {module.config for module in model.modules() if isinstance(module, Mechanism)}
    if len(found) > 1 or not all(leaves_unchanged(config, "query", "key") for config in found):
        raise ConfigError(
            "calibrate starts from a model with one standard attention, but this one has: "
            f"{', '.join(sorted(map(str, found)))}; give it the model as it was pretrained"
        )
    return found.pop() if found else STANDARD


def leaves_unchanged(config: AttentionConfig, *roles: str) -> bool:
    """Return whether the dot products take "query", "key" or both as the projections made them."""
    part, x = config.components[0], torch.ones(1, 1, 1, 1)
    if part.axis != "score" or part.reads:
        return False
    score = config.build(part, Dims(1, 1, 1))
    return all(getattr(score, role)(x) is x for role in roles)


def refuse_shared(model: nn.Module, paths: list[str]) -> None:
    """Raise UnsupportedError for a parameter of two attention modules, which would be scaled by the factors of both."""
    for one, other in itertools.combinations(paths, 2):
        if not set(model.get_submodule(one).parameters()).isdisjoint(model.get_submodule(other).parameters()):
            raise UnsupportedError(f"'{one}' and '{other}' share parameters, so neither can be scaled by itself")


def scale_queries(
    model: nn.Module, path: str, factor: Tensor, owner: str | None, given: str | Adapter | None = None
) -> None:
    """Multiply the query projection of each head of the attention at `path` by `factor` [H], in place.

    Args:
        owner: the name of the adapter that replaced it; None if it was built with its mechanism.
        given: that adapter itself, if it is not installed.

    Raises:
        UnsupportedError: it is not known which projection makes the queries.
    """
    module = model.get_submodule(path)
    if owner in (UNIVERSAL, WRITTEN_OUT):
        raise UnsupportedError(BY_EXAMPLE)
    if owner is not None:
        (given if isinstance(given, Adapter) else find_adapter(owner)).scale_queries(module, factor)
    elif isinstance(module, Projected):
        module.projections.scale(module, module.head_sizes, "q", factor)
    else:
        raise UnsupportedError("it is not known which projection makes the queries")


def _mechanism(model: nn.Module, path: str) -> Mechanism:
    found = [part for part in model.get_submodule(path).modules() if isinstance(part, Mechanism)]
    if len(found) != 1:
        raise UnsupportedError(f"'{path}' has {len(found)} attention mechanisms, so its queries have no one factor")
    return found[0]


def _factors(path: str, old: Mechanism, new: Mechanism, seen: dict[str, list[float]]) -> LayerCalibration:
    """Return the factors of an attention module, from its mechanisms before and after and what a Monitor has seen."""
    assert old.dims is not None  # a model is injected with its sizes
    assert new.dims is not None
    if new.dims.kv_heads != old.dims.kv_heads:
        raise _uncalibratable(new.config, f"'{path}' was trained with {old.dims.kv_heads} key heads")
    norms = seen.get("key_norm_mean", [math.nan])
    if not all(map(math.isfinite, norms)):
        raise InputError(
            f"'{path}' saw no key, or none with a finite norm, in the given batches, so its factors are unknown; give "
            "batches (or a forward=) that run all of the model"
        )
    ratio = old.score.scale(old.dims.head_dim) / new.score.scale(new.dims.head_dim)
    shared = old.dims.num_heads // len(norms)  # query heads of a key head
    return LayerCalibration(path, tuple(norms), tuple(norm * ratio for norm in norms for _ in range(shared)))


def _change(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the RMS of the change of the outputs over the RMS of `before`."""
    change = sum(float((b.double() - a.double()).square().sum()) for a, b in zip(before, after, strict=True))
    total = sum(float(a.double().square().sum()) for a in before)
    return math.sqrt(change / total) if total else math.nan


def _fold(model: nn.Module, layers: list[LayerCalibration], owners: dict[str, str], adapter: Any) -> None:
    """Multiply the query projection of each layer by its factors; `owners` are the names of the adapters."""
    for layer in layers:
        factor = torch.tensor(layer.factors, dtype=torch.float64)
        scale_queries(model, layer.path, factor, owners[layer.path], adapter)
