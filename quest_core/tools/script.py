"""quest watch and quest maps: look into the models of a script, without a change of the script."""

import atexit
import copy
import functools
import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..hosts.launch import LOOK
from . import curves
from .pictures import draw_maps
from .watch import Watch

PAUSE = 10  # seconds from one printed measurement to the next, at least
WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
Look = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


def look_at_models(look: Look) -> Callable[[], None]:
    """Call `look` with a model, out of its wrappers, and the arguments of its call, before each; return what ends that.

    A model is a module with parameters that no other module calls. Hooks for all modules do not see keyword arguments
    before a call, so `nn.Module.__call__` is wrapped, as torch.fx does.
    """
    original, inside, ended = nn.Module.__call__, threading.local(), threading.Event()

    @functools.wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if ended.is_set() or getattr(inside, "model", False) or next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        inside.model = True
        try:
            model = module
            while wrapped := WRAPPERS.get(type(model).__name__):
                model = getattr(model, wrapped)
            look(model, args, kwargs)
            return original(module, *args, **kwargs)
        finally:
            inside.model = False

    def end() -> None:
        ended.set()
        if nn.Module.__call__ is call:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    nn.Module.__call__ = call  # type: ignore[method-assign]
    return end


class Script:
    """Watches the first model with attention that the process trains.

    PyTorch's hook for all optimizers counts the steps. A model that cannot be watched is said in one line, and the
    script goes on.
    """

    def __init__(self, every: int, folder: str) -> None:
        self.every, self.folder = every, Path(folder)
        self.watch: Watch | None = None
        self._tried: WeakSet[nn.Module] = WeakSet()
        self._said = (0, -math.inf)  # the latest step that was printed, and when
        self._optimizer: torch.optim.Optimizer | None = None  # the one whose steps count
        self._trained = self._stepped = False  # a model was called in training mode; an optimizer has stepped
        self._steps = register_optimizer_step_post_hook(self._step)
        self._end_search = look_at_models(self._begin)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Watch a model that is about to be called with these arguments, if it trains."""
        if not model.training or not torch.is_grad_enabled() or model in self._tried:
            return
        self._tried.add(model)
        self._trained = True
        try:
            self.watch = Watch(model, every=self.every, example=lambda model: model(*args, **kwargs))
        except Exception as error:  # whatever it is, the script goes on
            say(f"{type(model).__name__} is not watched: {error}")
            return
        self._end_search()
        if is_first():
            self.folder.mkdir(parents=True, exist_ok=True)
            say(f"measures {type(model).__name__} every {self.every} steps; curves: {self.folder / 'watch.html'}")
            atexit.register(self.close)

    def _step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.watch is None:
            if not self._stepped and is_first():
                self._stepped = True
                atexit.register(self.say_nothing_trained)
            return
        if self._optimizer is None:
            own = {id(p) for p in self.watch.model.parameters()}
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return
            self._optimizer = optimizer
        if optimizer is self._optimizer and self.watch.step() and is_first():
            step, layers = self.watch.history[-1]
            with (self.folder / curves.RECORD).open("a") as out:
                out.write(json.dumps({"step": step, "layers": layers}) + "\n")
            if time.monotonic() - self._said[1] >= PAUSE:
                self._say()

    def say_nothing_trained(self) -> None:
        """Print why nothing was measured if each model was in evaluation; at the end of a process that trains."""
        if not self._trained:
            say("nothing was measured; no model was called in training mode; call model.train()")

    def _say(self) -> None:
        """Print the latest measurement."""
        assert self.watch is not None
        step, _ = self.watch.history[-1]
        if step != self._said[0]:
            first, *others = self.watch.remarks() or ["no layer has logits"]
            say("\n  ".join([f"step {step}: {first}", *others]))
        self._said = (step, time.monotonic())

    def close(self) -> None:
        """Stop, give the model back as it was, and draw the page; at the end of the process."""
        self._end_search()
        self._steps.remove()
        if self.watch is not None:
            self.watch.close()
            if self.watch.history:
                self._say()
                curves.draw(self.folder)
            elif not self.watch.remarks():
                say("nothing was measured; the attention of the model was never called in training mode")


class Maps:
    """Draws the attention of every model of the process into `folder`, in the call of this number, from 1.

    `query` and `tokens` are as for `draw_maps`.
    """

    def __init__(self, folder: str, call: int, query: int | None, tokens: list[str] | None) -> None:
        self.folder, self.call, self.query, self.tokens = Path(folder), call, query, tokens
        self._calls: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._drawn: Counter[str] = Counter()
        self._called = False
        self.close = look_at_models(self._draw)

    def _draw(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Draw the maps of a model that is about to be called."""
        self._calls[model] = self._calls.get(model, 0) + 1
        if not is_first():
            return
        if not self._called:
            self._called = True
            atexit.register(self.say_nothing_drawn)
        if self._calls[model] != self.call:
            return
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        images = [x for x in tensors if x.dim() == 4 and x.is_floating_point()]
        ids = [x[0].tolist() for x in tensors if x.dim() == 2 and x.dtype in (torch.int32, torch.int64)]
        tokens = self.tokens or (list(map(str, ids[0])) if ids else None)

        def run(model: nn.Module) -> Any:  # with copies, because a call may fill a cache
            given, named = copy.deepcopy((args, kwargs))
            return model(*given, **named)

        name = type(model).__name__
        self._drawn[name] += 1
        to = self.folder / (f"{name}-{self._drawn[name]}" if self._drawn[name] > 1 else name)
        try:
            found = draw_maps(model, run, to, query=self.query, tokens=tokens, image=images[0] if images else None)
        except Exception as error:  # whatever it is, the script goes on
            say(f"{name} is not drawn: {error}", "maps")
        else:
            say(f"drew {' and '.join(map(str, found))}", "maps")

    def say_nothing_drawn(self) -> None:
        """Print that models were called less often than `call`; at the end of the process."""
        if not self._drawn:
            say(f"nothing was drawn; no model was called {self.call} times", "maps")


def is_first() -> bool:
    """Return whether this process writes and prints: rank 0, or the only one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return not torch.distributed.get_rank()
    return os.environ.get("RANK", "0") == "0"  # torchrun's, also after the group was destroyed


def say(text: str, command: str = "watch") -> None:
    print(f"quest {command}: {text}", file=sys.stderr, flush=True)


def start() -> None:
    """Begin in this process what the environment asks for."""
    asked = json.loads(os.environ[LOOK])  # what one of these takes, and "command"
    {"watch": Script, "maps": Maps}[asked.pop("command")](**asked)
