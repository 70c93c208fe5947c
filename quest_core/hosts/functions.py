"""The functions of PyTorch that following knows: what they do to entries, and how their arguments are read.

Each group below is one rule of following.py or search.py. A function in none of them is unknown: activations pass, and
logits become odd. Names are those of `name_of`.
"""

import functools
import numbers
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import may_read, until_changed


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- groups, by name --------------------------------------------------------------------------------------------------

MOVES = _words(
    "view reshape permute transpose swapaxes swapdims movedim moveaxis flatten unflatten squeeze unsqueeze expand "
    "expand_as getitem narrow select chunk split tensor_split unbind t T mT H adjoint contiguous clone detach repeat "
    "repeat_interleave tile roll flip index_select view_as reshape_as broadcast_to diagonal unfold cat concat "
    "concatenate stack gather take_along_dim pad alias as_strided setitem"
)
"""Functions that only move entries."""
JOINS = _words("cat concat concatenate stack")
"""Those of `MOVES` that make one tensor of several."""
MOVES_ONE = MOVES - JOINS - {"pad", "setitem"}
"""Those of `MOVES` whose result holds entries of one tensor only."""
WRITES = _words("copy index_copy scatter")
"""Functions that write entries of another tensor into a part of one."""
KEEPS = _words(
    "add sub neg masked_fill where to float double half bfloat16 type type_as cpu cuda dropout alpha_dropout "
    "nan_to_num tril triu view_as_complex view_as_real identity"
)
"""Functions that shift, hide or drop entries, or change their type."""
SUMS = ("add", "sub", "rsub")
"""Functions that add two tensors, or subtract them."""
SCALES = ("mul", "div")
"""Functions that multiply entries."""
BOUNDS = _words("max maximum clamp clamp_min clamp_max minimum")
"""Functions that keep entries between bounds, if they have some."""
SHIFTS = _words("max amax logsumexp")
"""Functions whose number of a row changes no softmax of that row if it is subtracted from all of it."""
NORMS = _words("norm vector_norm linalg_vector_norm square pow")
"""Functions of which norms are made."""
ACTIVATIONS = _words(
    "relu relu6 leaky_relu prelu elu selu celu gelu silu mish softplus tanh sigmoid hardtanh hardsigmoid hardswish"
)
"""Functions that stand between two layers."""
BY_HAND = _words("exp exp2 log_softmax gumbel_softmax softmin")
"""Functions that are half a softmax, or another one."""
PROJECTIONS = {"linear": -1, "conv1d": -2, "conv2d": -3, "conv3d": -4} | {
    f"conv_transpose{n}d": -1 - n for n in (1, 2, 3)
}
"""Functions that multiply by weights, with the axis of the features that they return."""
PRODUCTS = {
    "matmul": ("input", "other"),
    "bmm": ("input", "mat2"),
    "mm": ("input", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
    "addmm": ("input", "mat1", "mat2"),
    "einsum": ("equation",),
}
"""Functions that multiply two tensors, with the names of their first arguments."""
ADDS = ("addmm", "baddbmm")
"""Those that add another tensor to their product."""
OTHER_PRODUCTS = _words(
    "tensordot inner addbmm bilinear multi_dot chain_matmul cdist cosine_similarity linalg_vecdot mv"
)
"""Functions that multiply two tensors in a way that is not prepared."""
SOFTMAX = "softmax"
PRODUCTS_AND_SOFTMAX: dict[Any, str] = {
    getattr(owner, name): name
    for name in (*PRODUCTS, SOFTMAX)
    for owner in (torch, Tensor, nn.functional)
    if hasattr(owner, name)
} | {
    Tensor.__matmul__: "matmul",
    Tensor.baddbmm_: "baddbmm",
    Tensor.addmm_: "addmm",
    torch.linalg.matmul: "matmul",
    torch.special.softmax: SOFTMAX,
}
"""Products and softmaxes, by function: the only ones that are read while compiling."""
ALIASES = {"truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub"} | {
    prefix + name: name.replace("true", "") for name in ("add", "sub", "mul", "div", "truediv") for prefix in "ir"
}
ALIASES |= {"rsub": "rsub", "rdiv": "rdiv", "rtruediv": "rdiv"}
"""Other names: of operators, of functions in place, and of reflected ones, whose operands change places."""
_names: dict[Any, str] = {**PRODUCTS_AND_SOFTMAX}  # what `name_of` has answered
FAR = 1e3  # bounds beyond it do not change logits
NO_EQUATION = ("", "", "")
"""The equation of a product of vectors, or of more than two tensors."""


# --- arguments --------------------------------------------------------------------------------------------------------


def name_of(func: Any) -> str:
    """Return the name of a function, method or property of tensors, one for ``a * b``, ``a *= b`` and torch.mul."""
    if (name := _names.get(func)) is None:
        name = getattr(func, "__name__", "")
        name = (func.__self__.__name__ if name == "__get__" else name).strip("_")
        name = _names[func] = ALIASES.get(name, name)
    return name


def number(x: Any) -> float | None:
    """Return a number, or the only entry of a tensor, as a float; None for everything else."""
    if isinstance(x, numbers.Real):
        return float(x)
    if isinstance(x, Tensor) and x.numel() == 1 and may_read(x):
        return until_changed(x, "number", lambda: float(x.detach()))
    return None


def from_last(dim: int | None, axes: int) -> int:
    """Return the axis of a softmax, counted from the last of `axes`, -1; None means what it means in PyTorch."""
    dim = (0 if axes in (0, 1, 3) else 1) if dim is None else dim
    return dim if dim < 0 else dim - max(axes, 1)


def alpha(rest: dict[str, Any]) -> float:
    """Return the factor of baddbmm or addmm on its product, or of add or sub on what it adds."""
    return float(rest.get("alpha", 1.0))


def operands(name: str, args: Any, kwargs: Any) -> tuple[list[Any], Any, Any, dict[str, Any]] | None:
    """Return (head, a, b, rest), so that func(*head, a, b, **rest) is the product; None if it is not of two tensors."""
    rest = dict(kwargs)
    given = list(args)
    if name == "einsum" and len(given) == 2 and isinstance(given[1], list | tuple):
        given = [given[0], *given[1]]
    given += [rest.pop(key) for key in PRODUCTS[name][len(given) :] if key in rest]
    count = 2 if len(PRODUCTS[name]) == 2 else 3
    if len(given) != count or (name == "einsum" and not isinstance(given[0], str)):
        return None
    return given[:-2], given[-2], given[-1], rest


def equation(name: str, head: list[Any], a: Tensor, b: Tensor) -> tuple[str, str, str] | None:
    """Return the letters of the axes of both operands and of their product; None for products of vectors."""
    return _letters(head[0] if name == "einsum" else None, a.dim(), b.dim())


def is_counted(name: str, args: Any) -> bool:
    """Return whether a call of `PRODUCTS_AND_SOFTMAX` counts: of a softmax, or of a product that sums over something.

    An einsum that does not makes a table, such as ``i,j->ij`` of positions and frequencies, which hosts cache.
    """
    if name != "einsum" or not isinstance(args[0], str):
        return True
    inputs, arrow, result = args[0].partition("->")
    letters = [s for s in inputs if s.isalpha()]
    return any(s not in result if arrow else letters.count(s) > 1 for s in letters)


@functools.lru_cache
def _letters(given: str | None, first: int, second: int) -> tuple[str, str, str] | None:
    """Return `equation` for einsum's string, or None for a matrix product, and the numbers of axes."""
    if given is None:
        if min(first, second) < 2:
            return None
        batch = "ABCDEFGHIJ"
        one, two = (batch[len(batch) - axes + 2 :] for axes in (first, second))
        return one + "nd", two + "dm", max(one, two, key=len) + "nm"
    inputs, arrow, result = given.replace(" ", "").partition("->")
    one, two = inputs.split(",")
    more = [max(axes - len(letters.replace("...", "")), 0) for axes, letters in ((first, one), (second, two))]
    if not arrow:
        result = ("..." if "..." in inputs else "") + "".join(
            letter for letter in sorted(set(one + two) - {"."}) if (one + two).count(letter) == 1
        )
    rare = "αβγδεζηθικ"
    one, two = (s.replace("...", rare[len(rare) - n :]) for s, n in ((one, more[0]), (two, more[1])))
    return one, two, result.replace("...", rare[len(rare) - max(more) :])


def entries_from(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors whose entries a function takes, its `input` first; none if it takes their shapes only."""
    if name.endswith("_like") or name.startswith("new_"):
        return []
    if name == "setitem":
        args = (args[0], args[2])
    elif name.endswith("_as") or name == "to":
        args, kwargs = args[:1], {}
    return list(tensors((*args, *kwargs.values())))


def tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of arguments or results, also in lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)
        elif isinstance(value, dict):
            yield from tensors(value.values())


def map_tensors(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a nest of dicts, lists and tuples with each tensor changed."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, dict):
        return {key: map_tensors(value, change) for key, value in values.items()}
    return type(values)(map_tensors(x, change) for x in values) if type(values) in (list, tuple) else values


def is_far(args: Any, kwargs: Any) -> bool:
    """Return whether all bounds of clamp, max or maximum are too far to change logits."""
    given = (*args[1:], *(v for k, v in kwargs.items() if k in ("min", "max", "other")))
    bounds = [number(x) for x in given if x is not None]
    return bool(bounds) and all(x is not None and abs(x) >= FAR for x in bounds)


def holds_numbers(x: Tensor) -> bool:
    """Return whether a tensor holds numbers, and neither a mask nor an index."""
    return x.is_floating_point() or x.is_complex()
