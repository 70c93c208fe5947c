"""Runs of a model on inputs of the plugin's own: they find attention that calls no AttentionInterface."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.modeling_utils import PreTrainedModel

from quest_core.errors import InjectionError
from quest_core.hosts.sites import restoring

from .inputs import TRIES, inputs

HELP = (
    "build it without attn_implementation, and say quest_core.inject(model, 'quest', example=batch) with inputs of "
    "your own; to load what was saved after that, say from_pretrained(..., example=batch)"
)


class Example:
    """What `quest_core.inject` takes as an example: it runs parts of a model, each time on other values.

    A part is a model within the model, or, where no run of such a model reaches an attention, a module around it.

    Args:
        model: the whole one, which is a PreTrainedModel or holds some.
        paths: of the modules that have to run; without any, `model` itself runs.

    Raises:
        InjectionError: no inputs can be made that run them.
    """

    def __init__(self, model: Any, paths: Iterable[str]) -> None:
        if any(weight.is_meta for weight in model.parameters()):
            raise InjectionError(
                f"{type(model).__name__} may have attention that only a run of it finds, and is on the meta device; "
                "build it on a CPU"
            )
        self.calls = 0
        self.runs: list[tuple[str, int]] = []  # the path of a module, and which of its inputs
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.failed: dict[tuple[str, int], str] = {}
        missed = list(paths) or [""]
        while missed:
            reached = self._reach(missed[0])
            missed = [path for path in missed if path not in reached]

    def __call__(self, model: nn.Module) -> None:
        """Run the parts, in evaluation mode; `inject` restores their modes."""
        for run in self.runs:
            self._run(*run)

    def _reach(self, path: str) -> set[str]:
        """Add the first run that reaches a module, and return the paths of all that it reaches."""
        why: dict[str, str] = {}
        for part in self._parts(path):
            for number in range(TRIES):
                if (part, number) not in self.failed:
                    reached = self._try(part, number)
                    if path in reached:
                        self.runs.append((part, number))
                        return reached
                why.setdefault(type(self.modules[part]).__name__, self.failed[part, number])
        name = type(self.modules[""]).__name__
        raise InjectionError(
            f"{name} may have attention that only a run of it finds, and no inputs that the plugin makes "
            f"{f'reach {path!r}' if path else 'run it'} "
            f"({'; '.join(f'{kind}: {reason}' for kind, reason in why.items())}); {HELP}"
        )

    def _around(self, path: str) -> Iterator[str]:
        """Yield the path of a module, then those of the modules around it, from the inside."""
        while path:
            yield path
            path = path.rpartition(".")[0]
        yield ""

    def _parts(self, path: str) -> list[str]:
        """Return the paths of the models around a module, from the inside, then those of the modules within them.

        A head comes before its base model, which it may run in another way than users do (Longformer).
        """
        around = [*self._around(path)]
        models = [one for one in around if isinstance(self.modules[one], PreTrainedModel)]
        inner = around[: around.index(models[0])]
        rank = {self.modules[one]: place for place, one in enumerate(models)}

        def order(path: str) -> tuple[int, int]:
            own = rank[self.modules[path]]
            return rank.get(self.modules[path].base_model, own), -own

        models.sort(key=order)
        return models + [one for one in inner if not isinstance(self.modules[one], nn.ModuleList)]

    def _try(self, part: str, number: int) -> set[str]:
        """Return the paths of the modules that run; if the run fails, none, and `failed` says why."""
        self.failed[part, number] = "it runs, and does not reach it"
        ran: set[nn.Module] = set()
        handle = register_module_forward_pre_hook(lambda module, _: ran.add(module))
        try:
            with restoring(self.modules[part]):
                self._run(part, number)
        except Exception as error:  # whatever a model raises on inputs that do not suit it
            self.failed[part, number] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            return set()
        finally:
            handle.remove()
        return {path for path, module in self.modules.items() if module in ran}

    def _run(self, path: str, number: int) -> None:
        part: Any = self.modules[path]
        config = next(one.config for x in self._around(path) if isinstance(one := self.modules[x], PreTrainedModel))
        self.calls += 1
        part.eval()
        part(**inputs(part, config, number, torch.Generator().manual_seed(self.calls)))
