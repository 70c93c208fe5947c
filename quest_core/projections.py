"""Where a module keeps its query, key and value projections, and how these are cut, loaded and scaled.

    class Attention(Projected):
        projections = Packed("qkv")  # or Separate("q_proj", "k_proj", "v_proj")

A name is that of a Linear sub-module, or of a parameter of the module itself. Rows are ordered by role (all of q, then
all of k, then all of v), and by head inside a role; `head_sizes` counts them. With two query heads, one key/value head
and 64 features per head, `Packed("qkv")` has 256 rows: q in 0 to 127, k in 128 to 191, v in 192 to 255.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .checkpoints import compare_layers
from .compat import FxLeaf, wider
from .config import AttentionConfig
from .drafts import assign, draft, is_draft
from .errors import InputError, UnsupportedError


def pool_heads(projection: Tensor, num_heads: int, kv_heads: int, *, fresh: bool = False) -> Tensor:
    """Return the weight [G·D, E] or bias [G·D] of G heads, one for each group of the H heads of `projection`.

    It is the mean of the group, which keeps most of what a multi-head checkpoint has learned (Ainslie et al., 2023,
    section 2.1). Of `fresh` weights it is the first head, because the mean would divide their spread by √(H/G).

    Raises:
        InputError: `num_heads` does not divide the rows, or `kv_heads` does not divide `num_heads`.
    """
    if len(projection) % num_heads or num_heads % kv_heads:
        raise InputError(
            f"the {num_heads} heads of a projection with {len(projection)} rows cannot be pooled into {kv_heads}: a "
            "checkpoint converts only where kv_heads divides the heads"
        )
    groups = projection.unflatten(0, (kv_heads, num_heads // kv_heads, -1))  # [G, H/G, D, ...]
    pooled: Tensor = groups[:, 0] if fresh else groups.mean(1)
    return pooled.flatten(0, 1)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is torch's Linear, or another library's of this name (PyTorch Geometric's)."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Linear"


@dataclass(frozen=True)
class HeadSizes:
    """How many heads the projections make, and how wide each is."""

    num_heads: int  # query heads H
    kv_heads: int  # key/value heads G
    head_dim: int  # features D of a query head
    key_dim: int  # features Dk of a key head; D except for aft-conv
    value_dim: int  # features Dv of a value head
    host_kv_heads: int | None = None  # key/value heads of the host's own model, where it has fewer than query heads

    @property
    def widths(self) -> tuple[int, int, int]:
        """Rows of q (H·D), of k (G·Dk) and of v (G·Dv)."""
        return self.num_heads * self.head_dim, self.kv_heads * self.key_dim, self.kv_heads * self.value_dim

    @property
    def full(self) -> "HeadSizes":
        """The sizes of the host: all its key/value heads, of D key features."""
        return replace(self, kv_heads=self.host_kv_heads or self.num_heads, key_dim=self.head_dim)

    def rows(self, roles: str) -> int:
        """Return the number of rows of `roles`, such as "qkv" or "k"."""
        return sum(width for role, width in zip("qkv", self.widths, strict=True) if role in roles)


@dataclass(frozen=True)
class Projections:
    """Which sub-modules or parameters of a module hold rows of which role. Add two to describe one module by both.

    A name that a module lacks (or has as None) is skipped, as long as each role is found somewhere.
    """

    entries: tuple[tuple[str, str], ...]  # each Linear or parameter, with its roles, a part of "qkv" in order of rows

    def __add__(self, other: "Projections") -> "Projections":
        return Projections(self.entries + other.entries)

    def rows(self, module: nn.Module, sizes: HeadSizes, role: str) -> dict[str, Tensor]:
        """Return the rows [heads·features, ...] of a role, "q", "k" or "v", of every parameter that has any, by name.

        The rows are views outside of autograd, which may be written.

        Raises:
            UnsupportedError: no name holds the role, or a weight is computed from other parameters.
            InputError: a parameter has another number of rows than `sizes` says.
        """
        found = {}
        for name, roles, value in self._find(module, role):
            wanted, start = sizes.rows(roles), sizes.rows(roles[: roles.index(role)])
            if not _has_rows(value, wanted):
                raise InputError(f"'{name}' is {_describe(value)}; {sizes} needs {wanted} rows")
            for key, parameter in _parameters(module, name, value).items():
                found[key] = _by_rows(parameter.detach(), wanted).narrow(0, start, sizes.rows(role))
        return found

    @torch.no_grad()
    def scale(self, module: nn.Module, sizes: HeadSizes, role: str, factor: Tensor) -> None:
        """Multiply the rows of each head, bias included, by its factor, [H] for "q" or [G], in place.

        Raises as `rows`, before anything has changed; InputError also for another number of factors.
        """
        heads = sizes.num_heads if role == "q" else sizes.kv_heads
        if factor.shape != (heads,):
            raise InputError(f"the factors have shape {list(factor.shape)}; '{role}' has {heads} heads")
        for rows in self.rows(module, sizes, role).values():
            by_head = rows.unflatten(0, (heads, -1)).movedim(0, -1)  # [D, ..., heads]
            by_head.copy_(by_head * factor.to(by_head.device, wider(by_head.dtype)))

    @torch.no_grad()
    def norms(self, module: nn.Module, sizes: HeadSizes, role: str) -> Tensor:
        """Return the expected norm of each head's queries, keys or values, [H] or [G] in float64; raises as `rows`.

        For inputs of independent features with mean 0 and variance 1, as LayerNorm makes them, E‖W x + b‖² is
        ‖W‖² + ‖b‖² with the Frobenius norm of the head's rows.
        """
        heads = sizes.num_heads if role == "q" else sizes.kv_heads
        by_head = [rows.double().view(heads, -1) for rows in self.rows(module, sizes, role).values()]
        return torch.cat(by_head, dim=1).norm(dim=1)  # type: ignore[no-any-return]

    @torch.no_grad()
    def shrink(self, module: nn.Module, sizes: HeadSizes, *, fresh: bool) -> None:
        """Make the projections of a module smaller, where `sizes` has fewer key heads or key features.

        The parameters are new objects. The Linears stay the same objects, or are drafts if `module` is a draft.
        InputError if they were reduced to other sizes before; UnsupportedError as `rows`.
        """
        held = self._find(module, "kv")
        if all(_has_rows(value, sizes.rows(roles)) for _, roles, value in held):
            return
        for name, roles, value in held:
            if not _has_rows(value, sizes.full.rows(roles)):
                raise InputError(
                    f"'{name}' of this {type(module).__name__} is {_describe(value)}, but {sizes.num_heads} heads "
                    f"have {sizes.full.rows(roles)} rows: its keys and values were reduced already. Build the model "
                    "again to choose another attention"
                )
        larger = [entry for entry in held if sizes.rows(entry[1]) != sizes.full.rows(entry[1])]
        # A list, because a weight that cannot be changed raises here, before another is changed.
        for name, roles, value, parameters in [(*entry, _parameters(module, entry[0], entry[2])) for entry in larger]:
            owner: Any = module if isinstance(value, Tensor) else draft(value)
            for key, old in parameters.items():
                smaller = _reduce(old.detach(), roles, sizes, fresh=fresh)
                owner._parameters[key.rpartition(".")[2]] = nn.Parameter(smaller, old.requires_grad)
            if owner is not module:
                owner.out_features = sizes.rows(roles)
                module._modules[name] = owner
                if not is_draft(module):
                    assign(owner)

    def load(self, module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, sizes: HeadSizes) -> None:
        """Pool the entries of a state dict that have all heads of the host, in place.

        Other entries stay: those that fit already, and those of a wrong shape, which PyTorch reports by name.
        """
        if sizes == sizes.full:
            return
        for name, roles in self.entries:
            value = getattr(module, name, None)
            owned = {name: value} | {f"{name}.{leaf}": getattr(value, leaf, None) for leaf in ("weight", "bias")}
            for key, own in owned.items():
                given, rows = state_dict.get(prefix + key), sizes.full.rows(roles)
                if isinstance(own, Tensor) and isinstance(given, Tensor) and rows in (*given.shape[:1], given.numel()):
                    pooled = _reduce(given, roles, sizes, fresh=False)
                    if own.shape == pooled.shape != given.shape:
                        state_dict[prefix + key] = pooled

    def _find(self, module: nn.Module, roles: str) -> list[tuple[str, str, nn.Module | Tensor]]:
        """Return the entries with any of `roles` that `module` has, each with its Linear or parameter."""
        found = ((name, own, getattr(module, name, None)) for name, own in self.entries if set(own) & set(roles))
        held = [(name, own, value) for name, own, value in found if isinstance(value, nn.Module | Tensor)]
        for role in roles:
            if not any(role in own for _, own, _ in held):
                names = ", ".join(repr(name) for name, own in self.entries if role in own) or "no name at all"
                raise UnsupportedError(
                    f"the projections of {type(module).__name__} are described wrongly: '{role}' should be in {names}, "
                    "of which the module has none; correct its `projections`"
                )
        return held


class Packed(Projections):
    """Each name holds rows of several roles: `Packed("qkv")`, or `Packed("to_kv", roles="kv")`."""

    def __init__(self, *names: str, roles: str = "qkv") -> None:
        super().__init__(tuple((name, roles) for name in names))


class Separate(Projections):
    """Each name holds rows of one role: `Separate("q_proj", "k_proj", "v_proj")`, or `Separate(q="to_q")`."""

    def __init__(self, q: str | None = None, k: str | None = None, v: str | None = None) -> None:
        super().__init__(tuple((name, role) for name, role in ((q, "q"), (k, "k"), (v, "v")) if name is not None))


class Projected(FxLeaf):
    """A module with projections of described layout; a checkpoint with all heads of the host is pooled on load."""

    projections: ClassVar[Projections]
    head_sizes: HeadSizes
    config: AttentionConfig

    if TYPE_CHECKING:  # a host's module holds what it holds without types

        def __getattr__(self, name: str) -> Any: ...

    @property
    def kv_heads(self) -> int:
        """Key/value heads G."""
        return self.head_sizes.kv_heads

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        compare_layers(self, state_dict, prefix, *arguments)  # before this layer's own weights are copied
        self.projections.load(self, state_dict, prefix, self.head_sizes)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def init_norms(model: nn.Module) -> None:
    """Scale fresh projections to the norms that options of the attention ask for, such as `quest(init=12)`.

    A host that initializes its layers later than our constructors do calls it afterwards. It scales every `Projected`
    in `model`, itself included. A second call changes nothing.

    Raises:
        UnsupportedError: weights are parametrized, have no values yet (meta device), or are zeros; nothing has changed.
    """
    parts = [part for part in model.modules() if isinstance(part, Projected)]
    for part in parts:
        norm_factors(part)  # raises before anything changes
    for part in parts:
        for role, factor in norm_factors(part).items():  # again: an earlier part may share the projection
            part.projections.scale(part, part.head_sizes, role, factor)


def norm_factors(part: Projected) -> dict[str, Tensor]:
    """Return what `init_norms` multiplies the heads by, [H] for "q" and [G] for "k"; raises as `init_norms` does."""
    factors = {}
    for role, norm in part.config.initial_norms.items():
        now = part.projections.norms(part, part.head_sizes, role)
        if now.is_meta or not bool((now > 0).all()):
            why = "are on the meta device" if now.is_meta else "of some heads are zeros"
            raise UnsupportedError(
                f"attention '{part.config}' sets the initial norm of '{role}', but its projections in "
                f"{type(part).__name__} {why}; initialize them first, or leave the option out"
            )
        factors[role] = norm / now
    return factors


def _parameters(module: nn.Module, name: str, value: nn.Module | Tensor) -> dict[str, nn.Parameter]:
    """Return the parameters of one entry by name; UnsupportedError if its weight is not a plain parameter."""
    found: dict[str, nn.Parameter | None] = {}
    if isinstance(value, Tensor):
        found = {name: module._parameters.get(name)}
    elif is_linear(value) and not (value._modules or value._buffers or len(value._parameters) != 2):
        found = {f"{name}.{leaf}": value._parameters.get(leaf) for leaf in ("weight", "bias")}
    parameters = {key: parameter for key, parameter in found.items() if parameter is not None}
    weight = parameters.get(name, parameters.get(f"{name}.weight"))
    # Wrapper subclasses of Tensor (torchao's int8, DTensor) look like floats, but have no rows to change.
    if weight is None or not weight.is_floating_point() or hasattr(weight, "__tensor_flatten__"):
        kind = type(value if weight is None or type(weight) is nn.Parameter else weight).__name__
        raise UnsupportedError(
            f"the weights of '{name}' ({kind}) are parametrized (weight_norm, LoRA, quantization, ...), so their rows "
            "cannot be changed; choose the attention and calibrate first, or remove that"
        )
    return parameters


def _has_rows(value: nn.Module | Tensor, rows: int) -> bool:
    if isinstance(value, Tensor):
        return rows in (value.shape[0], value.numel())
    width = getattr(value, "out_features", None)  # a quantized weight has another shape
    return rows == (len(getattr(value, "weight", ())) if width is None else width)


def _describe(value: nn.Module | Tensor) -> str:
    return f"a parameter of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {value}"


def _by_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return [rows, ...], or a bias [H, D] or [1, 1, H·D], as [rows, ...], a view."""
    return tensor if tensor.shape[0] == rows else tensor.view(rows)


def _reduce(full: Tensor, roles: str, sizes: HeadSizes, *, fresh: bool) -> Tensor:
    """Return the rows that `sizes` needs, made from those of `sizes.full`."""
    by_rows, parts = _by_rows(full, sizes.full.rows(roles)), []
    for role, rows in zip(roles, by_rows.split([sizes.full.rows(r) for r in roles]), strict=True):
        if role != "q":
            rows = pool_heads(rows, sizes.full.kv_heads, sizes.kv_heads, fresh=fresh)
        if role == "k":  # the features of a head are reduced as heads of one feature each would be
            features = sizes.kv_heads * sizes.head_dim, sizes.kv_heads * sizes.key_dim
            rows = pool_heads(rows, *features, fresh=fresh)
        parts.append(rows)
    made = torch.cat(parts)
    return made if by_rows.dim() == full.dim() else made.view(*full.shape[:-1], -1)
