"""quest watch: measure the model that a training script trains, without a change of the script."""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from .curves import RECORD, draw
from .watch import PAGE, Watch

WATCHED = "QUEST_WATCH"
"""The environment variable of watched processes, "100:/folder": steps from one measurement to the next, and where the
measurements are written."""
WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


class Script:
    """Watches the first model with attention that the process trains.

    PyTorch's hooks for all modules find the model, and then are removed; its hook for all optimizers counts the steps.
    A model that cannot be watched is said in one line, and the script goes on.
    """

    def __init__(self, every: int, folder: Path) -> None:
        self.every, self.folder = every, folder
        self.watch: Watch | None = None
        self._depth = 0
        self._tried: set[int] = set()
        self._optimizer: torch.optim.Optimizer | None = None  # the one whose steps count
        self._search = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        self._steps = register_optimizer_step_post_hook(self._step)

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self._depth += 1
        outermost = self._depth == 1 and module.training and torch.is_grad_enabled()
        if outermost and id(module) not in self._tried and next(module.parameters(), None) is not None:
            self._tried.add(id(module))

            def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                handle.remove()
                self._begin(module, args, kwargs)

            handle = module.register_forward_pre_hook(begin, with_kwargs=True)  # its next call, which shows keywords

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Watch the model that is about to be called with these arguments."""
        if self.watch is not None:
            return
        while wrapped := WRAPPERS.get(type(module).__name__):
            module = getattr(module, wrapped)
        try:
            self.watch = Watch(module, every=self.every, example=lambda model: model(*args, **kwargs))
        except Exception as error:  # whatever it is, the script goes on
            say(f"{type(module).__name__} is not watched: {error}")
            return
        for handle in self._search:
            handle.remove()
        if is_first():
            self.folder.mkdir(parents=True, exist_ok=True)
            say(f"measures {type(module).__name__} every {self.every} steps; curves: {self.folder / 'watch.html'}")
            atexit.register(self.close)

    def _step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.watch is None:
            return
        if self._optimizer is None:
            own = {id(p) for p in self.watch.model.parameters()}
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return
            self._optimizer = optimizer
        if optimizer is self._optimizer and self.watch.step() and is_first():
            step, layers = self.watch.history[-1]
            with (self.folder / RECORD).open("a") as out:
                out.write(json.dumps({"step": step, "layers": layers}) + "\n")
            say(f"step {step}: {in_short(layers)}")
            for line in self.watch.remarks():
                say(f"  {line} ({PAGE})")

    def close(self) -> None:
        """Stop, give the model back as it was, and draw the page; at the end of the process."""
        for handle in (*self._search, self._steps):
            handle.remove()
        if self.watch is not None:
            self.watch.close()
            if self.watch.history and is_first():
                draw(self.folder)


def in_short(layers: dict[str, Any]) -> str:
    """Return the largest logit and the range of entropies over all layers and heads, as a line shows them."""
    top = [(max(names["max_logit"]), path) for path, names in layers.items() if "max_logit" in names]
    entropy = [value for names in layers.values() for value in names.get("entropy", [])]
    if not top:
        return "no layer has logits"
    return f"largest logit {max(top)[0]:.4g} ({max(top)[1]}), entropy {min(entropy):.2g} to {max(entropy):.2g} nats"


def is_first() -> bool:
    """Return whether this process writes and prints: rank 0, or the only one."""
    return (
        not (torch.distributed.is_available() and torch.distributed.is_initialized())
        or not torch.distributed.get_rank()
    )


def say(text: str) -> None:
    print(f"quest watch: {text}", file=sys.stderr, flush=True)


def start() -> None:
    """Begin in this process what the environment asks for."""
    every, _, folder = os.environ[WATCHED].partition(":")
    Script(int(every), Path(folder))
