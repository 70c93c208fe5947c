"""Change modules in place, all or none: draft every change first, which may raise, then assign, which cannot.

    made = draft(host, Replacement)  # has the parameters, sub-modules and attributes of `host`
    made.mechanism = Mechanism(...)  # `host` is not changed
    assign(made)                     # `host` is what `made` is: same object, other class

`restore` undoes `assign`, unless parameters were replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

OWNED = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
"""The dictionaries of nn.Module, of which a draft has copies: parameters, buffers, sub-modules and hooks."""
HOOKS = tuple(name for name in OWNED if "hook" in name)
ORIGIN = "_draft_of"
FORMER = "_former"


@dataclass(frozen=True)
class Former:
    """The state of a module before `assign`."""

    kind: type[nn.Module]
    values: dict[str, Any]  # attributes and sub-modules that have been overwritten or removed
    added: tuple[str, ...]  # attributes and sub-modules that it did not have
    hooks: tuple[tuple[str, Any], ...]  # that it did not have: the dictionary of nn.Module, and the key
    reparametrized: bool  # parameters have been overwritten, and are not kept


def draft(module: nn.Module, kind: type[Any] | None = None) -> Any:
    """Return a stand-in for `module`, of class `kind` or the module's class before `assign`, that may be changed.

    It has the attributes of the module before `assign`, so a second injection starts from the host. `__init__` does not
    run. TypeError if objects of the module's class cannot become objects of `kind`.
    """
    made: Any = object.__new__(type(module))
    state = made.__dict__
    state |= vars(module) | {name: value.copy() for name, value in vars(module).items() if name in OWNED}
    former = state.get(FORMER)
    if former is not None:
        _undo(state, former)
    state[ORIGIN] = module
    made.__class__ = kind or host_class(module)
    return made


def assign(made: nn.Module) -> None:
    """Turn a module, and those inside it that have drafts, into their drafts."""
    for one in [one for one in made.modules() if is_draft(one)]:
        module, state = vars(one)[ORIGIN], {name: value for name, value in vars(one).items() if name != ORIGIN}
        children = state["_modules"]
        children |= {name: origin_of(child) for name, child in children.items() if child is not None}
        first = module if FORMER not in state else draft(module)  # as the host was
        was, now = _items(vars(first)), _items(state)
        state[FORMER] = Former(
            host_class(module),
            {name: value for name, value in was.items() if name not in now or now[name] is not value},
            tuple(now.keys() - was.keys()),
            tuple((name, key) for name in HOOKS for key in state[name] if key not in vars(first)[name]),
            any(vars(module)["_parameters"].get(name) is not p for name, p in state["_parameters"].items())
            or (FORMER in state and state[FORMER].reparametrized),
        )
        bound = state["_load_state_dict_pre_hooks"]
        bound |= {key: type(hook)(hook.hook, module) for key, hook in bound.items() if hook.with_module}
        for name in OWNED:  # the module's own dictionaries stay, because handles of hooks refer to them
            own = vars(module)[name]
            own.clear()
            own.update(state[name])
            state[name] = own
        vars(module).clear()
        vars(module).update(state)
        module.__class__ = type(one)


def restore(module: nn.Module) -> None:
    """Make a module what it was before `assign`, whose `Former` says that no parameters were replaced."""
    former = vars(module).pop(FORMER)
    _undo(vars(module), former)
    module.__class__ = former.kind


def host_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before `assign`, or has."""
    former = vars(module).get(FORMER)
    return type(module) if former is None else former.kind


def is_draft(module: nn.Module) -> bool:
    """Return whether a module stands in for another one."""
    return ORIGIN in vars(module)


def origin_of(made: nn.Module) -> nn.Module:
    """Return the module that a draft stands in for; a module that is not a draft is its own."""
    return vars(made).get(ORIGIN, made)  # type: ignore[no-any-return]


def _items(state: dict[str, Any]) -> dict[str, Any]:
    """Return attributes and sub-modules by name."""
    hidden = {*OWNED, ORIGIN, FORMER}
    items = {name: value for name, value in state.items() if name not in hidden}
    return items | dict(state["_modules"])


def _undo(state: dict[str, Any], former: Former) -> None:
    for name in former.added:
        state.pop(name, None)
        state["_modules"].pop(name, None)
    for name, key in former.hooks:
        state[name].pop(key, None)
    for name, value in former.values.items():
        (state["_modules"] if isinstance(value, nn.Module) else state)[name] = value
