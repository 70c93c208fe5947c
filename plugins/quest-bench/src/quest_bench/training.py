"""Train a small model in phases of epochs, each of which continues after a kill; used by gqa, explain and aft."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from quest_core.benchmarks import Cell, load_state, save_state

Curves = dict[str, list[float]]
"""A name -> its values, one an epoch."""


class DivergedError(Exception):
    """The loss is not finite. A suite returns NaN, which counts as a lost seed."""


def fit(
    cell: Cell,
    phase: str,
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    count: int,
    *,
    epochs: int,
    batch: int,
    rate: float,
    weight_decay: float,
    measure: Callable[[], Mapping[str, float]],
    progress: Callable[[float, str], None],
    select: str | None = None,
    best: Callable[[list[float]], float] = max,
) -> Curves:
    """Train with AdamW and a cosine schedule that starts at the full rate and ends at 0.

    The state of every phase is saved after each epoch. The order of the samples depends only on the seed and the epoch.

    Args:
        cell: its workdir keeps the state; its seed orders the samples.
        phase: a name that the cell uses once.
        model: trained in place.
        loss: the mean loss of the samples with these indices [b].
        count: samples; an epoch shows each once.
        epochs, batch, rate, weight_decay: of this phase.
        measure: called after each epoch, with the model in evaluation and without gradients.
        progress: called after each epoch with the share of this phase.
        select: the model ends with the weights of the epoch that has the best of this measurement; None for the last
            epoch.
        best: max or min.

    Returns:
        ``train_loss`` and what `measure` gives, by epoch.

    Raises:
        DivergedError: the mean loss of an epoch is not finite.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=weight_decay)
    steps = epochs * math.ceil(count / batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    torch.manual_seed(cell.seed)
    saved = load_state(cell) or {}  # sets the random generators as they were
    curves: Curves = {}
    kept: Mapping[str, Tensor] | None = None
    if state := saved.get(phase):
        curves, kept = state["curves"], state["kept"]
        for part in (model, optimizer, schedule):
            part.load_state_dict(state[type(part).__name__])
    for epoch in range(len(curves.get("train_loss", ())), epochs):
        model.train()
        losses = []
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * cell.seed + epoch))
        for picked in order.split(batch):
            value = loss(picked)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            losses.append(value.detach())
        mean = torch.stack(losses).mean().item()
        if not math.isfinite(mean):
            raise DivergedError(f"{phase}: the loss of epoch {epoch + 1} is {mean}")
        model.eval()
        with torch.no_grad():
            found = {"train_loss": mean, **measure()}
        for name, number in found.items():
            curves.setdefault(name, []).append(number)
        if select and curves[select].index(best(curves[select])) == epoch:
            kept = copy.deepcopy(model.state_dict())
        parts = {type(part).__name__: part.state_dict() for part in (model, optimizer, schedule)}
        save_state(cell, {**saved, phase: {"curves": curves, "kept": kept, **parts}})
        progress((epoch + 1) / epochs, f"{phase} epoch {epoch + 1} loss {mean:.3f}")
    if kept is not None:
        model.load_state_dict(kept)
    model.eval()
    return curves
