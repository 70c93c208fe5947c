"""Change modules in place, all or none: draft every change first, which may raise, then assign, which cannot.

    made = draft(host, Replacement)  # has the parameters, sub-modules and attributes of `host`
    made.mechanism = Mechanism(...)  # `host` is not changed
    assign(made)                     # `host` is what `made` is: same object, other class

`restore` undoes `assign`, unless parameters were replaced.
"""

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
        module, state = origin_of(one), {name: value for name, value in vars(one).items() if name != ORIGIN}
        children = state["_modules"]
        children |= {name: origin_of(child) for name, child in children.items() if child is not None}
        state[FORMER] = _former(module, state)
        hooks = state["_load_state_dict_pre_hooks"]  # some are bound to the draft
        hooks |= {key: type(hook)(hook.hook, module) for key, hook in hooks.items() if hook.with_module}
        for name in OWNED:  # the module's own dictionaries stay, because handles of hooks refer to them
            own = vars(module)[name]
            own.clear()
            own.update(state[name])
            state[name] = own
        vars(module).clear()
        vars(module).update(state)
        module.__class__ = type(one)


def _former(module: nn.Module, state: dict[str, Any]) -> Former:
    """Return what makes `module`, which is about to get `state`, the host's own again."""
    earlier: Former | None = state.get(FORMER)  # of an assignment that this one replaces
    host = module if earlier is None else draft(module)
    was, now = _attributes_and_children(vars(host)), _attributes_and_children(state)
    replaced = any(module._parameters.get(name) is not p for name, p in state["_parameters"].items())
    return Former(
        kind=host_class(module),
        values={name: value for name, value in was.items() if name not in now or now[name] is not value},
        added=tuple(now.keys() - was.keys()),
        hooks=tuple((name, key) for name in HOOKS for key in state[name] if key not in vars(host)[name]),
        reparametrized=replaced or (earlier is not None and earlier.reparametrized),
    )


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


def _attributes_and_children(state: dict[str, Any]) -> dict[str, Any]:
    hidden = {*OWNED, ORIGIN, FORMER}
    return {name: value for name, value in state.items() if name not in hidden} | dict(state["_modules"])


def _undo(state: dict[str, Any], former: Former) -> None:
    for name in former.added:
        state.pop(name, None)
        state["_modules"].pop(name, None)
    for name, key in former.hooks:
        state[name].pop(key, None)
    for name, value in former.values.items():
        children = state["_modules"]
        holder, other = (children, state) if isinstance(value, nn.Module) else (state, children)
        other.pop(name, None)
        holder[name] = value
