"""Train a small model in phases of epochs, each of which continues after a kill."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quest_suites.contract import Cell, Progress, load_state, save_state

Curves = dict[str, list[float]]
"""A name -> its values, one an epoch; or as many an epoch, where it is measured in steps."""


class Float16Products(TorchDispatchMode):
    """Compute matrix products of float16 tensors on a CPU in float32, and round them.

    PyTorch's own CPU kernel accumulates in float32 too, as the tensor cores of a GPU do, so only the order of a sum
    differs. On a CPU without float16 instructions it is a plain loop.
    """

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.PRODUCTS or any(x.dtype != torch.float16 or x.device.type != "cpu" for x in args):
            return func(*args, **(kwargs or {}))
        return func(*(x.float() for x in args), **(kwargs or {})).half()


@dataclass
class Fit:
    """A finished phase."""

    series: Curves  # `train_loss` and what was measured, by epoch
    selected: int  # the epoch, from 0, that `select` chose: the first with its best value; without it, the last
    weights: Mapping[str, Tensor]  # of that epoch
    diverged: str = ""  # which loss was not finite; a suite then returns NaN, which counts as a lost seed


def fit(
    cell: Cell,
    phase: str,
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    count: int,
    options: Mapping[str, Any],
    *,
    measure: Callable[[], Mapping[str, float | list[float]]],
    progress: Progress,
    select: str | None = None,
    best: Callable[[list[float]], float] = max,
    draw: torch.Generator | None = None,
    clip: float = math.inf,
    scale_loss: bool = False,
    after: Callable[[int], object] = lambda step: None,
) -> Fit:
    """Train with AdamW and a cosine schedule that starts at the full rate and ends at 0.

    The state of every phase is saved after each epoch, and of one that diverged at its end.

    Args:
        cell: its workdir keeps the state; its seed orders the samples.
        phase: a name that the cell uses once.
        model: trained in place; it ends with the weights of the last epoch, in evaluation.
        loss: the mean loss of the samples with these indices [b].
        count: samples; an epoch shows each once.
        options: epochs, batch, rate and weight_decay of this phase, and warmup: steps in which the rate rises to its
            value, none if left out.
        measure: called after each epoch, with the model in evaluation and without gradients. A list is a value for
            each of some steps of the epoch.
        select: the measurement that chooses an epoch; None for the last one.
        best: max or min.
        draw: gives the order of the samples; without it, the order depends only on the seed and the epoch.
        clip: the largest norm of the gradients.
        after: called after each step of the optimizer with its number, from 1.
    """
    epochs, batch, warmup = options["epochs"], options["batch"], options.get("warmup", 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options["rate"], weight_decay=options["weight_decay"])
    steps = epochs * math.ceil(count / batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    scaler = torch.amp.GradScaler(next(model.parameters()).device.type, enabled=scale_loss)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    torch.manual_seed(cell.seed)
    saved = load_state(cell) or {}  # sets the random generators as they were
    found = Fit({}, 0, {})
    if state := saved.get(phase):
        found = state["found"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
        if draw:
            draw.set_state(state["draw"])

    def keep() -> None:
        state = {"found": found, "draw": draw and draw.get_state()}
        save_state(cell, {**saved, phase: state | {name: part.state_dict() for name, part in parts.items()}})

    for epoch in range(len(found.series.get("train_loss", ())), 0 if found.diverged else epochs):
        model.train()
        losses = []
        order = draw or torch.Generator().manual_seed(1000 * cell.seed + epoch)
        for picked in torch.randperm(count, generator=order).split(batch):
            value = loss(picked)
            optimizer.zero_grad()
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            if clip < math.inf:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            after(schedule.last_epoch)
            losses.append(value.detach())
        mean = torch.stack(losses).mean().item()
        if not math.isfinite(mean):
            found.diverged = f"{phase}: the loss of epoch {epoch + 1} is {mean}"
            keep()
            break
        model.eval()
        with torch.no_grad():
            values = {"train_loss": mean, **measure()}
        for name, seen in values.items():
            found.series.setdefault(name, []).extend(seen if isinstance(seen, list) else [seen])
        chosen = found.series[select] if select else []
        if not select or chosen.index(best(chosen)) == epoch:
            found.selected = epoch
            found.weights = copy.deepcopy(model.state_dict())
        keep()
        progress((epoch + 1) / epochs, f"{phase} epoch {epoch + 1} loss {mean:.3f}")
    if found.diverged:
        progress(1.0, found.diverged)
    model.eval()
    return found
