"""Operations on tensors below the formulas: unit vectors, masks, products of shared heads, blocks of queries."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .compat import autocast_dtype, is_eager, is_exporting_graph, is_tracing, may_read, until_changed, wider

PLAIN_WEIGHTS = 2**23  # with this many weights per call or more, B·H·N·M, they come in blocks: 32 MiB of float32
BLOCK_WEIGHTS = 2**20  # weights per block, unless that would be fewer than `BLOCK_ROWS` queries
SMALL = 2**15  # entries up to which five small operations are faster than one whose call takes 15 µs
BLOCK_ROWS = 64  # least number of queries per block, below which matrix products are thin


def unit(x: Tensor) -> Tensor:
    """Return x / ‖x‖₂ over the last axis, in the dtype of x [..., D]; a zero vector and its gradient stay zero.

    Norms are float32 (float64 for float64). Norms outside 1e-19 to 1e19 (1e-154 to 1e154) may round to zero or
    infinity; the result is zero then.
    """
    # The heads of a projection [B, N, H, D] are read in the order of memory. An exporter may not know the strides.
    turned = x.dim() == 4 and not is_exporting_graph() and x.stride(1) < x.stride(2)
    x = x.transpose(1, 2) if turned else x
    # The hand-written derivative takes half the time of the recorded one. Transforms and compilers need the formula.
    by_hand = x.requires_grad and torch.is_grad_enabled() and is_eager()
    out = (_unit_by_hand if by_hand else _divide)(x)[0]
    return out.transpose(1, 2) if turned else out


def _divide(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / ‖x‖₂ [..., D], and ‖x‖₂ [..., 1] in float32 or float64: infinity for a zero vector."""
    dtype, least = (torch.float64, 1e-154) if x.dtype == torch.float64 else (torch.float32, 1e-19)
    # A CPU converts half types several times slower inside another operation; a GPU does it without a copy in memory.
    wide = x.to(dtype) if x.is_cpu and x.dtype != dtype else x  # PyTorch checks also a conversion that changes nothing
    norm: Tensor = torch.linalg.vector_norm(wide, 2, -1, True, dtype=dtype)
    # One operation, whose derivative is 0 where it replaces the norm; torch.onnx.export(dynamo=False) lacks it.
    norm = norm.masked_fill(norm <= least, math.inf) if is_tracing() else torch.threshold(norm, least, math.inf)
    if x.dtype == dtype:
        return x / norm, norm
    if (x.requires_grad and torch.is_grad_enabled()) or not is_eager():
        return (wide / norm).to(x.dtype), norm
    return wide.div_(norm).to(x.dtype) if x.is_cpu else torch.div(x, norm, out=torch.empty_like(x)), norm


class _Unit(torch.autograd.Function):
    """x / ‖x‖₂ and 1 / ‖x‖₂; both are returned so that the derivative, made of them, has a derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        out, norm = _divide(x)
        inverse = norm.reciprocal()  # [..., 1]
        ctx.save_for_backward(out, inverse)
        ctx.set_materialize_grads(False)
        return out, inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_inverse: Tensor | None) -> Tensor | None:
        out, inverse = ctx.saved_tensors
        total = None if grad is None else _unit_gradient(grad, out, inverse)
        if grad_inverse is not None:  # d 1/‖x‖ = −(dx·x̄) / ‖x‖²
            change = -grad_inverse * inverse.square() * out.to(inverse.dtype)
            total = change if total is None else total + change
        return total if total is None or total.dtype == out.dtype else total.to(out.dtype)


def _unit_gradient(grad: Tensor, out: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient (dx − (dx·x̄) x̄) / ‖x‖ [..., D], for dx = `grad`, x̄ = `out` and 1 / ‖x‖ = `inverse`."""
    if not (out.is_cpu or out.dtype == inverse.dtype or torch.is_grad_enabled()):  # half the memory traffic on a GPU
        scaled = inverse * grad
        along = (out * scaled).sum(-1, keepdim=True)  # [..., 1]
        return torch.addcmul(scaled, out, along, value=-1, out=torch.empty_like(out))
    wide = out if out.dtype == inverse.dtype else out.to(inverse.dtype)
    plain = wide.is_cpu and type(wide) is type(grad) is Tensor and not torch.is_grad_enabled() and is_eager()
    if plain and wide.numel() > SMALL:
        # The derivative of weight normalization, with v = x̄ and g = 1 / ‖x‖: one pass over the memory instead of five.
        rows = [x.reshape(-1, x.shape[-1]).contiguous() for x in (grad.to(wide.dtype), wide, inverse)]
        found: Tensor = torch.ops.aten._weight_norm_interface_backward.default(*rows, torch.ones_like(rows[2]), 0)[0]
        return found.view(out.shape)
    along = inverse * (wide * grad).sum(-1, keepdim=True)
    return (inverse * grad).addcmul(wide, along, value=-1)


_unit_by_hand: Callable[[Tensor], tuple[Tensor, Tensor]] = _Unit.apply


def widen(x: Tensor) -> Tensor:
    """Return `x` in float32, or in float64 if it has that type."""
    return x.to(wider(x.dtype))


def result_type(x: Tensor) -> torch.dtype:
    """Return the type of a matrix product with `x`: under autocast the lower one, except for float64."""
    lower = autocast_dtype(x.device.type)
    return x.dtype if lower is None or x.dtype == torch.float64 else lower


def local(parameter: Tensor) -> Tensor:
    """Return the part of a parameter for the heads of this rank; all of it without tensor parallelism.

    A mechanism that :class:`quest_core.tools.parallel.HeadParallel` divides reads its parameters by this function.
    """
    if type(parameter) in (Tensor, nn.Parameter) or not torch.distributed.is_available():
        return parameter
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(parameter, DTensor):
        return parameter
    if all(isinstance(placement, Replicate) for placement in parameter.placements):
        # Each rank's gradient comes from its own heads. `redistribute` does nothing here, and sums on the way back.
        shared = parameter.redistribute(placements=parameter.placements)
        return shared.to_local(grad_placements=[Partial()] * len(parameter.placements))
    return parameter.to_local()


def logits(q: Tensor, k: Tensor, scale: float, grouped: bool, residual: Tensor | None = None) -> Tensor:
    """Return scale · q kᵀ (+ residual), [B, H, N, M], for q [B, H, N, D] and k [B, G, M, D].

    If `grouped`, H/G consecutive query heads share a key head; else G = H.
    """
    q = q if scale == 1 else q * scale
    scores = _product(q, k.transpose(-2, -1), grouped)  # not mT, which the tracing exporter to ONNX does not know
    return scores if residual is None else scores + residual


def apply_weights(weights: Tensor, v: Tensor, grouped: bool) -> Tensor:
    """Return weights [B, H, N, M] times v [B, G, M, Dv], [B, H, N, Dv]; `grouped` as in `logits`."""
    return _product(weights.to(v.dtype), v, grouped)  # an additive mask of a wider type has widened the weights


def _product(one: Tensor, two: Tensor, grouped: bool) -> Tensor:
    """Return one @ two, [B, H, ., .], for one [B, H, ., .] and two [B, G, ., .]; `grouped` as in `logits`."""
    if grouped:
        shared = one.unflatten(1, (-1, one.shape[1] // two.shape[1]))  # [B, G, H/G, ., .]
        out: Tensor = (shared @ two.unsqueeze(2)).flatten(1, 2)
    elif is_exporting_graph():  # which fixes a B of 1 in the example where `@` may broadcast
        out = torch.bmm(one.flatten(0, 1), two.flatten(0, 1)).unflatten(0, one.shape[:2])
    else:
        out = one @ two
    return out


def drop(weights: Tensor, dropout_p: float) -> Tensor:
    """Return the weights after dropout."""
    return F.dropout(weights, dropout_p) if dropout_p > 0 else weights


def plain_mask(mask: Tensor | None, device: torch.device) -> Tensor | None:
    """Return a causal bias of torch.nn.attention.bias as a boolean mask [N, M] on `device`; other masks as they are."""
    if mask is None or type(mask) is Tensor:
        return mask
    # Imported late: the module imports torch._dynamo, which would double the time of `import quest_core`.
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(mask, CausalBias):
        return mask
    n, m = mask.seq_len_q, mask.seq_len_kv
    shift = m - n if mask.variant == CausalVariant.LOWER_RIGHT else 0
    return torch.ones(n, m, dtype=torch.bool, device=device).tril(shift)


def expand_mask(mask: Tensor, q: Tensor, k: Tensor, cached: int = 0) -> Tensor:
    """Return a mask as [B, H, N, M], without copying it; it covers `cached` further keys before those of k.

    If an operation broadcasts, torch.onnx.export(dynamo=True) fixes every size that is 1 in the example.
    """
    return mask.expand(*q.shape[:3], k.shape[2] + cached)


def hide_lowest(mask: Tensor) -> Tensor:
    """Return an additive mask in which every value at or below half of its type's minimum is −inf, and so hides."""
    # Twice the value against the minimum: exporters round constants to float32, and half of float64's would be −inf.
    return mask.masked_fill(mask + mask <= torch.finfo(mask.dtype).min, -math.inf)


def narrow(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask in the type of the queries, in which only −inf hides as before."""
    if dtype != torch.float16 or mask.dtype == dtype:
        return mask.to(dtype)
    most = torch.finfo(dtype).max  # finite numbers beyond it would become infinite
    return mask.to(dtype).clamp(-most, most).masked_fill(mask == -math.inf, -math.inf)


def visible(mask: Tensor) -> Tensor:
    """Return what a mask, boolean or additive (−inf hides), leaves visible: boolean, with four axes."""
    seen = mask if mask.dtype == torch.bool else mask != -math.inf
    return seen[(None,) * (4 - seen.dim())]


def hides_the_future(mask: Tensor, *, only: bool = False) -> bool:
    """Return whether a mask hides every key j > i + M − N from query i, and is not a mask of padding.

    False where it cannot be read, as under a compiler. Reading waits for a GPU, so each mask is read once.

    Args:
        mask: boolean (True = may attend) or additive (−inf and lowest values hide), broadcastable to [B, H, N, M].
        only: whether it must hide nothing else and add nothing, so that is_causal replaces it.
    """
    if not (is_eager() and may_read(mask)):
        return False

    def seen_in(part: Tensor) -> Tensor:
        return visible(part if part.dtype == torch.bool else hide_lowest(part))

    @torch.no_grad()  # or a checkpoint would save tensors here, and find none when it repeats the call
    def found() -> bool:
        n, m = mask.shape[-2:]
        if n > 1 and bool(seen_in(mask[..., :1, -1:]).any()):
            return False  # the first query sees the last key; the rest may be a bias of each pair, so it is not read
        seen = seen_in(mask)
        past = torch.ones(n, m, dtype=torch.bool, device=mask.device).tril(m - n)
        if only:  # visible entries are True, or add 0
            return bool(((seen == past) & (~seen | (mask == (mask.dtype == torch.bool)))).all())
        padding = seen.any(-1, keepdim=True) & seen.any(-2, keepdim=True)
        return bool((past | ~seen).all() & (seen != padding).any() & seen.tril(m - n - 1).any())

    return until_changed(mask, ("hides_the_future", only), found)


def merge_masks(one: Tensor | None, other: Tensor) -> Tensor:
    """Return one mask for both, which are boolean (True = may attend) or additive, broadcastable to each other."""
    if one is None:
        return other
    if other.dtype != torch.bool:
        one, other = other, one
    if other.dtype != torch.bool:
        return one + other
    return one & other if one.dtype == torch.bool else one.masked_fill(~other, -math.inf)


def mask_of_host(hidden: Tensor | None, padding: Tensor | None = None) -> Tensor | None:
    """Return one mask of ours for a host's, boolean (True = hidden) or additive, and `Mechanism.padding_mask`."""
    mask = ~hidden if hidden is not None and hidden.dtype == torch.bool else hidden
    return mask if padding is None else merge_masks(mask, padding)


def merge_causal(mask: Tensor | None, n: int, m: int, device: torch.device) -> Tensor:
    """Return one mask that means `mask` and causal: query i sees keys j ≤ i + M − N, the last query every key."""
    return merge_masks(mask, torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n))


def block_rows(n: int, weights: int) -> int | None:
    """Return how many of `n` queries, of `weights` weights each, make a block; None for all, as in every graph."""
    if not is_eager() or n * weights < PLAIN_WEIGHTS:
        return None
    return max(BLOCK_ROWS, BLOCK_WEIGHTS // weights)


def recompute(formula: Callable[..., Tensor], *tensors: Tensor | None, random: bool = False) -> Tensor:
    """Return formula(*tensors); the backward pass computes it again, with the same random numbers if `random`."""
    out: Tensor = checkpoint(formula, *tensors, use_reentrant=False, preserve_rng_state=random)
    return out


def in_blocks(
    formula: Callable[..., Tensor],
    step: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool = False,
    random: bool = False,
) -> Tensor:
    """Return formula(q, k, v, mask) of blocks of queries, joined; `is_causal` is aligned at the last query.

    Args:
        formula: returns the output of a block; if it draws random numbers, pass `random`.
        step: queries of a block, as `block_rows` returns them.
        is_causal: blocks get only the keys that their last query sees, so that each is a causal problem of its own.
    """
    n, m = q.shape[2], k.shape[2]
    k_dtype, v_dtype, found, stop = k.dtype, v.dtype, [], 0

    def in_given_dtypes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return formula(q, k.to(k_dtype), v.to(v_dtype), mask)

    k, v = widen(k), widen(v)  # because their gradients are sums over blocks
    queries = q.split(step, 2)
    masks = [mask] * len(queries) if mask is None or mask.shape[-2] == 1 else mask.split(step, -2)
    for rows, part in zip(queries, masks, strict=True):
        stop += rows.shape[2]
        seen = slice(max(stop + m - n, 0) if is_causal else m)
        part = part if part is None or part.shape[-1] == 1 else part[..., seen]
        found.append(recompute(in_given_dtypes, rows, k[:, :, seen], v[:, :, seen], part, random=random))
    return torch.cat(found, 2)
