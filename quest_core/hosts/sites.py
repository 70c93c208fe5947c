"""The class of the sites that an example finds, and the run of the example.

The forward of such a module stays the host's. It runs in a TorchFunctionMode, which changes the attention and nothing
else; it is active only inside that forward and in its thread, so PyTorch is not patched and other models pay nothing.
"""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from ..compat import INDUCTOR, fx_node, is_compiling, require, same_random_state, uncompiled
from ..config import AttentionConfig
from ..drafts import draft, host_class
from ..errors import UnsupportedError
from ..mechanism import Mechanism
from ..projections import is_linear

HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads")
"""Attributes that hold the number of heads. A module with one of them and two Linear layers looks like attention."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The facts that an example showed about the attention of one module."""

    path: str  # of the module
    heads: int  # query heads; 1 where they are not known
    kv_heads: int  # key/value heads
    head_dim: int  # features of a query head
    causal: bool = False  # every later key was hidden
    cross: bool = False  # queries and keys had different numbers of tokens
    repeated: bool = False  # one forward attended more than once
    note: str = ""  # a remark for the report
    query: Tensor | None = field(default=None, compare=False)  # without values: has the device and the type of queries

    does: ClassVar[Any]  # a verb and its object, for messages
    flags: ClassVar[tuple[str, ...]] = ("causal", "cross", "repeated")  # true if so in one of several forwards
    optional: ClassVar[Mapping[str, Any]] = {"note": ""}  # what fields become that differ between forwards

    def join(self, other: Any) -> Any:
        """Return what two forwards of one module have in common; UnsupportedError if they need two mechanisms."""
        common = {name: getattr(self, name) or getattr(other, name) for name in self.flags}
        common |= {name: x for name, x in self.optional.items() if getattr(self, name) != getattr(other, name)}
        made = replace(self, **common)
        for name in (one.name for one in fields(self) if one.compare and one.name not in common):
            one, two = getattr(made, name), getattr(other, name)
            if one != two:
                how = f"other {name}" if isinstance(one, tuple) else f"{name}={one} and with {name}={two}"
                raise UnsupportedError(
                    f"it {self.does} with {how}, and a site has one mechanism; write an adapter that makes "
                    "two: https://quest-attention.github.io/quest/writing-an-adapter/"
                )
        return made


def without_factors(pair: Iterable[Tensor], factors: Iterable[float]) -> list[Tensor]:
    """Return q and k divided by factors of the host."""
    return [x if factor == 1 else x * (1 / factor) for x, factor in zip(pair, factors, strict=False)]


class FoundSite(nn.Module):
    """Mixed into the class of a site.

    A subclass adds as few names as possible, because a host's method of the same name would be overridden.
    """

    mechanism: Mechanism
    found_attention: Any  # a Call or a Written

    def attention_mode(self) -> Any:
        """Return the TorchFunctionMode of one forward, whose `finish` raises UnsupportedError if it saw no attention.

        None leaves the forward as the host's.
        """
        raise NotImplementedError

    def __init_subclass__(cls) -> None:
        """Pass by the hook of the host, which may register its subclasses by name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the host's forward with another attention.

        Raises:
            UnsupportedError: its attention is not written as it was when the mechanism was injected.
        """
        if (node := fx_node(self, args, kwargs)) is not None:
            return node
        compiling = is_compiling()
        if compiling and self.mechanism.monitor is not None and torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(FoundSite.forward)(self, *args, **kwargs)
        mode = self.attention_mode()
        if mode is None:
            return super().forward(*args, **kwargs)
        if compiling:
            require("torch.compile of attention that an example found", (2, 6))
        forward = super().forward
        if self.mechanism.monitor is not None and not compiling:  # a graph of a part of it would show nothing
            forward = uncompiled(forward)
        with mode:
            out = forward(*args, **kwargs)
        mode.finish()
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the host's class, because this one is made while the program runs."""
        made = super().__reduce_ex__(protocol)
        return (_empty, (type(self).__mro__[1], host_class(self)), *made[2:])


@functools.cache
def _site_class(kind: Any, host: Any) -> Any:
    """Return the subclass of `kind` and `host`; names stay the host's, because hosts and wrappers look for names."""

    @functools.wraps(host.forward)  # a host may read which arguments it takes
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    body = {name: getattr(host, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(host.__name__, (kind, host), {**body, "forward": forward})


def _empty(kind: Any, host: Any) -> Any:
    """Return a site without attributes, for copies and pickles to fill."""
    return object.__new__(_site_class(kind, host))


def site_draft(kind: type[FoundSite], module: nn.Module, found: Any) -> Any:
    """Return the draft of `module` as a site; its parameters are the same objects."""
    site_class: Any = _site_class  # mypy takes classes for arguments that cannot be cached
    made = draft(module, site_class(kind, host_class(module)))
    made.found_attention = replace(found, query=None)
    return made


def refuse_checkpoint(path: str) -> None:
    """Raise UnsupportedError if the running site attends inside an activation checkpoint or a torch.autograd.Function.

    Their backward pass may repeat the attention outside of the site, as the host's. Nothing to do while compiling.
    """
    if is_compiling():
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals is not globals():  # until FoundSite.forward
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise UnsupportedError(
                f"'{path}' attends inside an activation checkpoint of its own, which would repeat it with the host's "
                "attention; turn that off and checkpoint the whole module"
            )
        if (context := _context(frame)) is not None and any(context.needs_input_grad):
            raise UnsupportedError(
                f"'{path}' attends inside {type(context).__name__}, whose backward may repeat it with the host's "
                "attention; call the attention outside of a torch.autograd.Function"
            )
        frame = frame.f_back


def _context(frame: FrameType) -> Any:
    """Return the context of the torch.autograd.Function whose forward a frame runs, its first argument; or None."""
    names = frame.f_code.co_varnames if frame.f_code.co_name == "forward" else ()
    first = frame.f_locals.get(names[0]) if names else None
    return first if isinstance(first, torch.autograd.function.FunctionCtx) else None


def in_compiled_graph(site: nn.Module) -> bool:
    """Return whether a graph of torch.compile makes the call that a mode sees; it was changed when it was compiled.

    False while compiling. Such graphs are code of Inductor or torch.fx. A site may hold code of torch.fx too, whose
    calls are the host's. The compiler of PyTorch before 2.6 does not see the mode: UnsupportedError.
    """
    if is_compiling():
        return False
    frame: Any = sys._getframe(2)  # that calls the mode
    if frame.f_code is handle_torch_function.__code__:  # for a function in Python, such as einsum
        frame = frame.f_back.f_back
    owner = frame.f_locals.get("self") if frame.f_code.co_filename.startswith("<eval_with_key>") else None
    found = isinstance(owner, nn.Module) and all(owner is not module for module in site.modules())
    found = found or str(frame.f_globals.get("__name__")).startswith(INDUCTOR)
    if found:
        require("a compiled function inside of attention that an example found", (2, 6))
    return found


def in_autograd_function() -> bool:
    """Return whether the running module has called a torch.autograd.Function, whose backward would not see a change.

    That of an activation checkpoint repeats the forward, and sees it; so does one around the module, which calls it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        if _context(frame) is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def in_double(x: Tensor) -> Tensor:
    """Return a tensor in float64, or complex128."""
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def common_norm(vectors: Tensor, tolerance: float) -> float | None:
    """Return the norm that all vectors [..., D] have; None if norms differ, or all vectors are one."""
    vectors = in_double(vectors).flatten(0, -2)
    norms = vectors.norm(dim=-1)
    if len(norms) < 2 or bool(((vectors - vectors[0]).norm(dim=-1) < 1e-3 * norms[0]).all()):
        return None
    mean = norms.mean().item()
    return mean if norms.std().item() < tolerance * mean else None


KEPT = "the host multiplies queries or keys by factors of its own, which stay"


def norm_note(norm: float | None) -> str:
    """Return a remark for the report on keys that all have one norm."""
    if norm is None:
        return ""
    return f"the host's keys have norm {norm:.3g} already, so unit keys change at most the scale"


def beyond_operands(config: AttentionConfig, *, softmax_stays: bool = True) -> str | None:
    """Return why preparing queries and keys is not enough for `config`, or None.

    If `softmax_stays` is False, another normalizer can take its place.
    """
    if config.family is not None:
        return f"'{config.family}' forms no weights, and the host's own code does"
    for part in config.components:
        if part.axis == "grouping" and (part.reshapes or part.reads):
            return f"'{part.name}' chooses key/value heads, and the host's own code does"
        if part.axis == "score" and (part.reads or part.chained):
            return f"'{part.name}' reads more than a query and a key"
        if not part.leaves_softmax() and (softmax_stays or part.axis != "normalizer"):
            return f"'{part.name}' acts inside the host's own code, around its softmax"
    return None


def within(path: str, others: Iterable[str]) -> bool:
    """Return whether `path` is one of the others or inside one of them."""
    return any(path == other or other == "" or path.startswith(other + ".") for other in others)


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a module is attention by its class, or has a number of heads and at least two projections."""
    kind = getattr(module, "original_name", type(module).__name__)  # of a scripted or traced module
    if isinstance(module, nn.MultiheadAttention) or re.search(r"attention$|attn$", kind, re.I):
        return True
    linear = sum(map(is_linear, module.children()))
    return linear > 1 and any(isinstance(vars(module).get(name), int) for name in HEADS)


def unknown_attention(
    model: nn.Module, known: Iterable[str], attends: Callable[[nn.Module], bool] = looks_like_attention
) -> dict[str, nn.Module]:
    """Return the modules, by path, that are attention and are neither in one of the known paths nor around one."""
    ours = {id(inner) for path in known for inner in model.get_submodule(path).modules()}
    return {
        path: module
        for path, module in model.named_modules()
        if attends(module) and not any(id(inner) in ours for inner in module.modules())
    }


def run_example(model: nn.Module, example: Any) -> Any:
    """Return the output of a model for a tensor, a tuple or list of arguments, a mapping of them, or a function."""
    if isinstance(example, Mapping):
        return model(**example)
    if isinstance(example, tuple | list):
        return model(*example)
    return example(model) if callable(example) else model(example)


@contextlib.contextmanager
def restoring(model: nn.Module) -> Iterator[None]:
    """Run a model in the block without gradients; at the end its modules and the random state are as they were.

    So a module that fills a buffer and counts how much of it is filled gets both back. A module that makes layers or
    parameters when it first runs keeps them, and with them its other attributes and the contents of its buffers.
    Modes are restored in all modules, so the block may call `eval`.
    """
    modes = {module: module.training for module in model.modules()}
    kept = [
        (module, _layout(module), _attributes(module), [(x, x.clone()) for x in module.buffers(recurse=False)])
        for module in modes
    ]
    with torch.no_grad():
        try:
            with same_random_state(model):
                yield
        finally:
            for module, layout, attributes, values in kept:
                module.training = modes[module]
                if _layout(module) == layout:
                    _restore(module, attributes)
                    for buffer, before in values:
                        # A buffer that was made in inference mode can change only there.
                        with torch.inference_mode() if buffer.is_inference() else contextlib.nullcontext():
                            buffer.copy_(before)


def _layout(module: nn.Module) -> tuple[type, list[int], list[int]]:
    """Return the class of a module, and which modules and parameters it has."""
    return type(module), [*map(id, module._modules.values())], [*map(id, module._parameters.values())]


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes of a module, each with a copy if it is a list, dict or set."""
    return {name: (x, x.copy() if type(x) in (list, dict, set) else None) for name, x in vars(module).items()}


def _restore(module: nn.Module, attributes: Mapping[str, tuple[Any, Any]]) -> None:
    """Give a module the attributes that `_attributes` returned."""
    own = vars(module)
    for name in own.keys() - attributes.keys():
        del own[name]
    for name, (value, contents) in attributes.items():
        if contents is not None:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(contents)
        own[name] = value
