"""Attention however it is written: each spelling is right, or an error that names what is not understood."""

import copy
import functools
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import Host, gradients
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import quest_core
from quest_core import InjectionError, UnsupportedError
from quest_core.hosts.finding import Finding
from quest_core.hosts.torch import TorchAdapter

B, N, H, D = 2, 6, 4, 8
CAUSAL = torch.full((N, N), -math.inf).triu(1)


class Attention(nn.Module):
    """Projections of q, k and v around an attention that `spelling` writes out."""

    def __init__(self, spelling, causal=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)
        self.spelling, self.causal = spelling, causal
        self.dropout, self.softmax, self.identity = nn.Dropout(0.2), nn.Softmax(-1), nn.Identity()
        self.bias = nn.Parameter(torch.randn(H, N, N))
        self.mix = nn.Parameter(torch.eye(H) + 0.1 * torch.randn(H, H))
        self.memory = nn.Parameter(torch.randn(H, N, D))
        self.position = nn.Linear(H * D, H * D)
        self.temperature = nn.Parameter(torch.ones(H, 1, 1))
        self.learned = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.tensor([D**-0.5]), requires_grad=False)

    def forward(self, x, **how):
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))  # [B, H, N, D]
        return self.out(self.spelling(self, q, k, v, **how).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two layers, so that one must not disturb the other."""

    def __init__(self, spelling):
        super().__init__()
        self.layers = nn.ModuleList(Attention(spelling) for _ in range(2))
        self.norm = nn.LayerNorm(H * D)

    def forward(self, x, **how):
        for layer in self.layers:
            x = x + layer(self.norm(x), **how)
        return x


def core():
    """A module without parameters that attends."""
    return Host(lambda _, q, k, v: (q @ k.mT * D**-0.5).softmax(-1) @ v)


def computing(formula, model):
    """A copy of a model whose layers compute a formula."""
    made = copy.deepcopy(model)
    for layer in made.layers:
        layer.spelling = formula
    return made


def weights(q, k, bias=0.0):
    """The formula by hand: softmax(q k̄ᵀ + bias)."""
    logits = torch.einsum("bhid,bhjd->bhij", q, k / k.norm(dim=-1, keepdim=True)) + bias
    return logits.exp() / logits.exp().sum(-1, keepdim=True)


def quest(q, k, v, bias=0.0):
    return torch.einsum("bhij,bhjd->bhid", weights(q, k, bias), v)


RIGHT = {}  # name -> a spelling, and its formula


def right(formula=lambda m, q, k, v: quest(q, k, v)):
    def add(spelling):
        RIGHT[spelling.__name__] = spelling, formula
        return spelling

    return add


# --- where the scale stands -------------------------------------------------------------------------------------------


@right()
def scale_after_product(m, q, k, v):
    return m.dropout(m.softmax(q @ k.transpose(-2, -1) / math.sqrt(D))) @ v


def layer_normed(*tensors):
    return [F.layer_norm(x, (D,)) for x in tensors]


@right(lambda m, q, k, v: quest(*layer_normed(q, k), v))
def scale_on_normed_queries(m, q, k, v):
    q, k = layer_normed(q, k)
    return F.softmax((q * D**-0.5) @ k.mT, dim=-1) @ v


def capped(m, q, k, v):
    logits = torch.einsum("bhid,bhjd->bhij", q, k / k.norm(dim=-1, keepdim=True)) + m.bias
    p = (2 * (logits / 2).tanh()).exp()
    return p / p.sum(-1, keepdim=True) @ v


@right(capped)
def capped_by_tanh(m, q, k, v):
    logits = (q * D**-0.5) @ k.mT + m.bias
    return (torch.tanh(logits / 2) * 2).softmax(-1) @ v


@right(capped)
def capped_in_place(m, q, k, v):
    logits = q @ k.mT
    logits /= math.sqrt(D)
    logits += m.bias
    return (logits.div_(2).tanh_() * 2).softmax(-1) @ v


@right(lambda m, q, k, v: quest(q, k, v, m.bias))
def baddbmm_with_alpha(m, q, k, v):
    bias = m.bias.expand(B, H, N, N).reshape(-1, N, N)
    logits = bias.baddbmm(batch1=q.flatten(0, 1), batch2=k.flatten(0, 1).transpose(1, 2), beta=1.0, alpha=D**-0.5)
    return torch.bmm(logits.softmax(-1, dtype=torch.float32).to(v.dtype), v.flatten(0, 1)).view(B, H, N, D)


@right()
def empty_baddbmm(m, q, k, v):
    empty = torch.empty(B * H, N, N, dtype=q.dtype)
    logits = torch.baddbmm(empty, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=D**-0.5)
    return (logits.view(B, H, N, N).softmax(-1).view(B * H, N, N) @ v.flatten(0, 1)).unflatten(0, (B, H))


@right(lambda m, q, k, v: quest(q, k, v, m.bias))
def baddbmm_in_place(m, q, k, v):
    logits = m.bias.expand(B, H, N, N).reshape(-1, N, N).to(q.dtype, copy=True)
    logits.baddbmm_(q.flatten(0, 1), k.flatten(0, 1).mT, alpha=D**-0.5)
    return logits.view(B, H, N, N).softmax(-1) @ v


def pooled(q):
    """Agents: the mean of pairs of queries."""
    return F.avg_pool1d(q.flatten(0, 1).mT, 2).mT.unflatten(0, (B, H))


@right(lambda m, q, k, v: quest(q, pooled(q), quest(pooled(q), k, v)))
def agents_between_queries_and_keys(m, q, k, v):
    agents = pooled(q)
    values = (agents @ k.mT * D**-0.5).softmax(-1) @ v
    return (q @ agents.mT * D**-0.5).softmax(-1) @ values


def rotated(x):
    """Rotary positions as complex numbers."""
    wide = x.float() if x.dtype == torch.bfloat16 else x  # complex numbers have no halves
    pairs = torch.view_as_complex(wide.unflatten(-1, (D // 2, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones(N, D // 2), ANGLES)).flatten(-2).to(x.dtype)


def adapted(x, factor):
    """As LoRA: a projection and a scaled part."""
    return x + x.flip(-1) * factor


def turned(x, angles):
    """Rotary positions [N, D / 2]."""
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin


def by_parameter(m, x):
    """A product with a parameter, as of projections without nn.Linear."""
    return torch.einsum("bhnd,ed->bhne", x, m.position.weight[:D, :D])


ANGLES = torch.arange(N).float()[:, None].repeat(1, D // 2) / 10


# --- other spellings of the products ----------------------------------------------------------------------------------


@right()
def in_place(m, q, k, v):
    logits = torch.bmm(q.reshape(-1, N, D), k.reshape(-1, N, D).transpose(1, 2))
    logits *= D**-0.5
    logits = logits.view(B, H, N, N)
    logits -= logits.detach().amax(-1, keepdim=True)
    return logits.softmax(-1) @ v


@right()
def einsum_heads_last(m, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, N, H, D]
    w = F.softmax(torch.einsum("bqhd,bkhd->bqkh", q, k) * D**-0.5, dim=2)
    return torch.einsum("bqkh,bkhd->bhqd", w, v)


@right()
def heads_first(m, q, k, v):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [H, B, N, D]
    return ((q @ k.mT * D**-0.5).softmax(-1) @ v).transpose(0, 1)


@right(lambda m, q, k, v: quest(q, k[:, :2].repeat_interleave(2, 1), v[:, :2].repeat_interleave(2, 1)))
def shared_keys(m, q, k, v):
    k, v = k[:, :2], v[:, :2]
    q = q.unflatten(1, (2, 2))
    w = torch.einsum("bghnd,bgmd->bghnm", q, k).mul(D**-0.5).softmax(-1)
    return torch.einsum("bghnm,bgmd->bghnd", w, v).flatten(1, 2)


@right(lambda m, q, k, v: quest(q, k[:, :1].expand_as(q), v[:, :1].expand_as(q)))
def one_key_head(m, q, k, v):
    w = torch.einsum("bhid,bjd->bhij", q * D**-0.5, k[:, 0]).softmax(-1)
    return torch.einsum("bhij,bjd->bhid", w, v[:, 0])


# --- masks, biases and other columns ----------------------------------------------------------------------------------


@right(lambda m, q, k, v: quest(q, k, v, CAUSAL + torch.outer(torch.arange(N), torch.arange(N))))
def mask_by_a_number_and_linear_bias(m, q, k, v):
    place = torch.arange(N, dtype=q.dtype)
    mask = (1.0 - torch.ones(N, N, dtype=q.dtype).tril()) * torch.finfo(q.dtype).min
    logits = q @ k.mT * D**-0.5
    logits += mask + place[:, None] * place
    return logits.softmax(-1) @ v


@right(lambda m, q, k, v: quest(q, k, v, m.bias))
def bias_and_setitem(m, q, k, v):
    padded = torch.full((B, H, N, N + 3), -math.inf, dtype=q.dtype)
    padded[..., :N] = (q * D**-0.5) @ k.mT + m.bias
    return (padded.softmax(-1)[..., :N] @ v).clamp(-1e4, 1e4)


def position_bias(m, q):
    """Of the tokens after the first, as in MViT."""
    return q[..., 1:, :] @ m.memory[..., 1:, :].mT


@right(lambda m, q, k, v: quest(q, k, v, F.pad(position_bias(m, q), (1, 0, 1, 0))))
def bias_added_in_place_to_a_part(m, q, k, v):
    logits = (q * D**-0.5) @ k.mT
    logits[..., 1:, 1:] += position_bias(m, q)
    return logits.softmax(-1) @ v


@right()
def projection_by_names(m, q, k, v):
    q = F.linear(bias=None, input=q, weight=torch.eye(D, dtype=q.dtype))
    return ((q * D**-0.5) @ k.mT).softmax(-1) @ v


def with_sink(m, q, k, v):
    powers = (q @ (k / k.norm(dim=-1, keepdim=True)).mT).exp()
    return powers @ v / (powers.sum(-1, keepdim=True) + math.exp(0.3))


@right(with_sink)
def sink_by_cat(m, q, k, v):
    logits = q @ k.mT * D**-0.5
    sink = torch.full((B, H, N, 1), 0.3, dtype=q.dtype)
    logits = torch.cat([sink, logits], -1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return logits.softmax(-1)[..., 1:] @ v


@right(lambda m, q, k, v: quest(q, k, v, torch.block_diag(*[torch.ones(3, 3, dtype=q.dtype)] * 2).log()))
def rolled_windows(m, q, k, v):
    q, k, v = (x.roll(1, 2).roll(-1, 2).unflatten(2, (2, 3)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    w = m.softmax(q * D**-0.5 @ k.transpose(-2, -1) + q.new_zeros(3, 3))
    return (w @ v).unflatten(0, (B, 2)).transpose(1, 2).flatten(2, 3)


def positions(m):
    waves = torch.arange(N)[:, None] / 10 ** torch.linspace(0, 2, H * D)
    return m.position(waves.sin().to(m.position.weight)).unflatten(-1, (H, D)).transpose(0, 1)  # [H, N, D]


# --- logits of one expression -----------------------------------------------------------------------------------------

PAST = torch.ones(N, N, dtype=torch.bool).tril()
TABLE, SHRINK = torch.rand(N, D), torch.randn(N, 3)
SOFTMAX = functools.partial(torch.softmax, dim=-1)


def joined(x):
    return x.transpose(1, 2).flatten(2)


def attending(logits):
    return lambda m, q, k, v: SOFTMAX(logits(m, q, k)) @ v


def prepared(operands):
    """The formula with other queries and keys, and a bias if there is one."""

    def formula(m, q, k, v):
        q, k, *bias = operands(m, q, k)
        return quest(q, k, v, *bias)

    return formula


LOGITS = {
    lambda m, q, k: (q, k): {
        "scale_on_keys": lambda m, q, k: q @ (k * D**-0.5).mT,
        "scale_on_both": lambda m, q, k: (q / D**0.25) @ (k / D**0.25).mT,
        "no_scale": lambda m, q, k: q @ k.mT,
        "scale_by_root_of_tensor": lambda m, q, k: q @ k.mT / torch.sqrt(torch.tensor(D, dtype=q.dtype)),
        "scale_by_frozen_parameter": lambda m, q, k: q @ k.mT * m.frozen,
        "scale_in_a_tensor_that_stands_first": lambda m, q, k: (m.frozen * q) @ k.mT,
        "scale_of_numpy": lambda m, q, k: q @ k.mT * np.float32(D**-0.5),
        "scale_by_a_tensor_turned_to_the_type_of_queries": lambda m, q, k: q @ k.mT * torch.tensor(D).rsqrt().to(q),
        "heads_apart_from_scaled_logits": lambda m, q, k: (
            (q.flatten(0, 1) @ k.flatten(0, 1).mT).mul(D**-0.5).unflatten(0, (B, H))
        ),
        "heads_apart_from_scaled_queries": lambda m, q, k: (
            joined(q).mul(D**-0.5).unflatten(-1, (H, D)).transpose(1, 2) @ k.mT
        ),
    },
    lambda m, q, k: (q, k, CAUSAL): {
        "causal_mask": lambda m, q, k: (q @ k.mT * D**-0.5).masked_fill(~PAST, -math.inf),
        "mask_by_where": lambda m, q, k: torch.where(PAST, q @ k.mT / D**0.5, torch.finfo(q.dtype).min),
        "mask_by_zeros_and_ones": lambda m, q, k: (
            (q @ k.mT * D**-0.5) * (past := torch.ones(N, N, dtype=q.dtype).tril()) - 1e9 * (1 - past)
        ),
    },
    lambda m, q, k: (q, k, m.bias): {
        "scale_as_alpha": lambda m, q, k: torch.add(m.bias, q @ k.mT, alpha=D**-0.5),
        "scale_as_alpha_of_a_sum_by_names": lambda m, q, k: torch.add(other=q @ k.mT, input=m.bias, alpha=D**-0.5),
    },
    lambda m, q, k: (q, k, (q @ positions(m).mT) * D**-0.5): {
        "relative_positions": lambda m, q, k: (q @ k.mT + q @ positions(m).mT) * D**-0.5,
    },
    lambda m, q, k: (m.memory.expand_as(q), k): {
        "learned_queries": lambda m, q, k: torch.einsum("hid,bhjd->bhij", m.memory, k).mul(D**-0.5),
        "learned_queries_with_the_scale": lambda m, q, k: (m.memory * D**-0.5) @ k.mT,
        "learned_queries_of_every_sample_with_the_scale": lambda m, q, k: (
            (m.memory.expand(B, -1, -1, -1) * D**-0.5) @ k.mT
        ),
    },
    lambda m, q, k: (m.memory.expand_as(q), k + TABLE): {  # the scale may be any
        "queries_that_are_parameters_and_a_table_that_no_module_holds": lambda m, q, k: m.memory @ (k + TABLE.to(k)).mT,
    },
    lambda m, q, k: (q + 0.3 * m.memory, k): {
        "a_parameter_with_a_factor_beside_queries": lambda m, q, k: (q + 0.3 * m.memory) @ k.mT * D**-0.5,
    },
    lambda m, q, k: (q, (1 + m.memory[0, 0]) * k): {
        "weights_that_are_1_at_first_times_keys": lambda m, q, k: q @ ((1 + m.memory[0, 0]) * k).mT * D**-0.5,
    },
    lambda m, q, k: (q * m.learned.exp(), k): {
        "a_learned_factor_without_axes_on_queries": lambda m, q, k: (q * m.learned.exp()) @ k.mT * D**-0.5,
    },
    lambda m, q, k: (q @ m.position.weight[:D, :D], k): {
        "scale_on_a_product_with_a_parameter": lambda m, q, k: (q @ m.position.weight[:D, :D] * D**-0.5) @ k.mT,
    },
    lambda m, q, k: (turned(q, ANGLES), turned(k, ANGLES)): {
        "positions_from_a_table_with_a_factor": lambda m, q, k: (
            (turned(q, table := torch.arange(N, dtype=q.dtype)[:, None].repeat(1, D // 2) * 0.1) * D**-0.5)
            @ turned(k, table).mT
        ),
    },
    lambda m, q, k: (turned(by_parameter(m, q), ANGLES), turned(by_parameter(m, k), ANGLES)): {
        "positions_on_products_with_a_parameter": lambda m, q, k: (
            (turned(by_parameter(m, q), ANGLES.to(q)) * D**-0.5) @ turned(by_parameter(m, k), ANGLES.to(k)).mT
        ),
    },
    lambda m, q, k: (rotated(q), rotated(k)): {
        "complex_rotation_of_scaled_queries": lambda m, q, k: rotated(q * D**-0.5) @ rotated(k).mT,
    },
    lambda m, q, k: (adapted(q, 2.0), k): {
        "adapter_beside_a_projection": lambda m, q, k: adapted(q, 2.0) @ k.mT * D**-0.5,
        "adapter_beside_a_projection_then_the_scale": lambda m, q, k: (adapted(q, 2.0) * D**-0.5) @ k.mT,
    },
    lambda m, q, k: (q * 3, k): {
        "another_factor_beside_the_scale": lambda m, q, k: (q * 3) @ k.mT * D**-0.5,
    },
    lambda m, q, k: (F.normalize(q, dim=-1), k): {
        "scale_on_queries_that_alone_are_normed": lambda m, q, k: (F.normalize(q, dim=-1) * D**-0.5) @ k.mT,
    },
    lambda m, q, k: (F.normalize(q, dim=-1) * 7, k): {
        "another_factor_on_queries_that_alone_are_normed": lambda m, q, k: (F.normalize(q, dim=-1) * 7) @ k.mT,
    },
}
"""Queries, keys and a bias of the formula, and logits that are spelled in these ways."""
RIGHT |= {
    name: (attending(logits), prepared(operands)) for operands, same in LOGITS.items() for name, logits in same.items()
}


# --- other expressions ------------------------------------------------------------------------------------------------


def fewer(x):
    """Keys or values that a layer makes fewer, as Linformer's, [B, H, D, 3]."""
    return x.mT @ SHRINK.to(x)


for name, spelling in {
    "scale_on_queries": lambda m, q, k, v: F.dropout(SOFTMAX(torch.matmul(q * D**-0.5, k.mT)), 0.2, m.training) @ v,
    "keys_first": lambda m, q, k, v: (k @ q.mT * D**-0.5).softmax(-2).mT @ v,
    "einsum_with_odd_letters": lambda m, q, k, v: torch.einsum(
        "xyzK,xyKd->xyzd", SOFTMAX(torch.einsum("...zd, ...Kd -> ...zK", q, k).mul(D**-0.5)), v
    ),
    "one_loop_per_head": lambda m, q, k, v: torch.stack(
        [SOFTMAX(q[:, h] @ k[:, h].mT * D**-0.5) @ v[:, h] for h in range(H)], 1
    ),
    "casts_around_softmax": lambda m, q, k, v: (
        F.softmax(torch.matmul(q, k.mT).float() * D**-0.5, dim=-1, dtype=torch.float32).type_as(v) @ v
    ),
    "inside_of_vmap": lambda m, q, k, v: torch.vmap(lambda q, k, v: SOFTMAX(q @ k.mT * D**-0.5) @ v)(q, k, v),
}.items():
    RIGHT[name] = spelling, lambda m, q, k, v: quest(q, k, v)
RIGHT |= {
    "keys_that_a_layer_makes_fewer": (
        lambda m, q, k, v: SOFTMAX(q @ fewer(k) * D**-0.5) @ fewer(v).mT,
        lambda m, q, k, v: quest(q, fewer(k).mT, fewer(v).mT),
    ),
    "mixed_after_the_softmax": (
        lambda m, q, k, v: torch.einsum("bhij,hg->bgij", SOFTMAX(q @ k.mT * D**-0.5), m.mix) @ v,
        lambda m, q, k, v: torch.einsum("bhij,hg->bgij", weights(q, k), m.mix) @ v,
    ),
}


def heads(m, x):
    """[B, H, N, D] of a projection of x, [B, H, N, D]."""
    return m.position(x.transpose(1, 2).flatten(2)).unflatten(-1, (H, D)).transpose(1, 2)


def chosen(m, w, k):
    index = w.mean((1, 2)).topk(3).indices  # [B, 3]
    return k.gather(2, index[:, None, :, None].expand(-1, H, -1, D))


def by_a_router(m, w, k):
    gates = (k @ m.memory[:, :3].mT).softmax(-1)
    return heads(m, sum(gates[..., i : i + 1] * heads(m, k * (i + 1)) for i in range(3)))


def normed_by_hand(m, w, k):
    """RMSNorm of gated values, a router after it, and a softmax of products by entries that nothing reads."""
    (w.mean(-1) * k.sum(-1)).softmax(-1), (k * heads(m, k)).sum(-1).softmax(-1)
    x = k * heads(m, k).sigmoid()
    x = x * ((x * x).mean(-1, keepdim=True) + 1e-6).rsqrt()
    return k * heads(m, x).softmax(-1)[..., :1]


LINKS = {
    "chosen": chosen,
    "sorted": lambda m, w, k: k[:, :, w.mean((0, 1, 2)).argsort()],
    "hidden": lambda m, w, k: k.masked_fill((w.mean(2) < 1 / N)[..., None], 0.5),
    "shown": lambda m, w, k: torch.where((w.mean(2) < 1 / N)[..., None], k, m.memory),
    "gated": lambda m, w, k: k * (1 - (w * w.log()).sum(-1))[..., None],
    "shifted": lambda m, w, k: k + w.mean(2)[..., None],
    "covered": lambda m, w, k: k + F.linear(w.mean(2), m.bias[0])[..., None],
    "read": lambda m, w, k: heads(m, F.linear(w, m.memory[0].mT)),
    "weighed_by_entries": lambda m, w, k: heads(m, (w[..., None] * k[:, :, None]).sum(3)),
    "of_a_router": by_a_router,
    "of_parameters": lambda m, w, k: heads(m, w @ m.memory),
    "normed": normed_by_hand,
    "decayed": lambda m, w, k: ((w[None] * torch.tensor([0.5, 2.0]).to(w)[:, None, None, None, None]) @ k).sum(0),
    "gated_means": lambda m, w, k: ((k @ k.mT).sigmoid()[:, 0] * w.mean(1))[:, None] @ k,
    "shifted_means": lambda m, w, k: (w.mean(1) + (k @ k.mT)[:, 0])[:, None] @ k,
    "over_keys": lambda m, w, k: k + F.linear(w, m.memory[0].mT) + F.linear(w[0, 0], k[0, 0].mT),
    "diagonal": lambda m, w, k: k + torch.einsum("bhii,hg->bgi", w, m.mix)[..., None],
}
"""How the keys and values of an attention may depend on the weights of the one before it."""


def linked(name, attend, m, q, k, v):
    w = attend(q, k)
    k, two = (LINKS[name](m, w, x) for x in (k, v))
    return w @ v + attend(q, k) @ two


def stock_weights(q, k):
    return (q @ k.mT * D**-0.5).softmax(-1)


RIGHT |= {
    name: (functools.partial(linked, name, stock_weights), functools.partial(linked, name, weights)) for name in LINKS
}


def hidden_by(q, k):
    """Whether pairs are hidden by another product, as by the masks of Mask2Former."""
    return (torch.einsum("bhid,bhjd->bij", q, k).sigmoid() < 0.5).logical_and(~torch.eye(N, dtype=torch.bool))[:, None]


@right(lambda m, q, k, v: quest(q, k, v, torch.zeros(()).masked_fill(hidden_by(v, k), -math.inf)))
def hidden_by_another_product(m, q, k, v):
    return (q @ k.mT * D**-0.5).masked_fill(hidden_by(v, k), -math.inf).softmax(-1) @ v


@right()
def unused_softmax_of_the_largest(m, q, k, v):
    (q.mean(2, keepdim=True) @ k.mT).topk(3).values.softmax(-1)
    return (q @ k.mT * D**-0.5).softmax(-1) @ v


@right()
def cache_by_copy(m, q, k, v):
    cache = k.new_zeros(B + 1, H, 2 * N, D)
    cache[:B, :, :N].copy_(k)
    return (q @ cache[:B, :, :N].mT * 0.7 * D**-0.5).softmax(-1) @ v


# --- several products under one softmax -------------------------------------------------------------------------------


@right()
def blocks_of_keys(m, q, k, v):
    """Each block of keys has a product and a factor of its own, as in BigBird."""
    blocks = [q @ k[:, :, :2].mT * D**-0.5, torch.einsum("bhid,bhjd->bhij", q * D**-0.5, k[:, :, 2:])]
    p = m.dropout(torch.cat(blocks, -1).softmax(-1))
    return p[..., :2] @ v[:, :, :2] + torch.einsum("bhij,bhjd->bhid", p[..., 2:], v[:, :, 2:])


NEAR = [(i, j) for i in range(N) for j in range(1, N) if abs(i - j) < 3]
BAND = torch.full((N, N), -math.inf)
BAND[:, 0] = 0
BAND[tuple(zip(*NEAR, strict=True))] = 0


@right(lambda m, q, k, v: quest(q, k, v, BAND))
def windows_that_overlap(m, q, k, v):
    """Each token sees the first one and two on each side, as in Longformer, by windows of four tokens.

    A row of the band has logits of several windows, so of several copies of its query.
    """
    logits = torch.einsum("bhcdx,bhcdy->bhcxy", q.unfold(2, 4, 2) * D**-0.5, k.unfold(2, 4, 2))
    band = torch.full((B, H, N, 5), -math.inf).to(logits)
    for i, j in NEAR:
        window = min(i, j, 2) // 2
        band[:, :, i, 2 + j - i] = logits[:, :, window, i - 2 * window, j - 2 * window]
    p = torch.cat([q @ k[:, :, :1].mT * D**-0.5, band], -1).softmax(-1)
    values = F.pad(v, (0, 0, 2, 2)).unfold(2, 5, 1)  # [B, H, N, D, 5]
    return p[..., :1] @ v[:, :, :1] + torch.einsum("bhnw,bhndw->bhnd", p[..., 1:], values)


# --- what is refused --------------------------------------------------------------------------------------------------


def probsparse(m, q, k, v):
    """Only the queries that fit some keys best attend (Informer)."""
    index = (q @ k[:, :, ::2].mT).amax(-1).topk(3).indices[..., None].expand(-1, -1, -1, D)
    return v.cumsum(2).scatter(2, index, (q.gather(2, index) @ k.mT * D**-0.5).softmax(-1) @ v)


def top_k(m, q, k):
    logits = q @ k.mT * D**-0.5
    return logits.masked_fill(logits < logits.topk(3, -1).values[..., -1:], -math.inf)


def in_one_buffer(m, q, k):
    both = k.new_zeros(2, *k.shape)
    both[0].copy_(k)
    both[1].copy_(q * D**-0.5)
    return both[1] @ both[0].mT


def without_an_axis(m, q, k, v):
    with pytest.warns(UserWarning, match="Implicit dimension"):
        return F.softmax(q @ k.mT * D**-0.5) @ v  # over the heads


def windows(x):
    """Three tokens around each: [B, H, N, D, 3]."""
    return F.pad(x, (0, 0, 1, 1)).unfold(2, 3, 1)


def edges(m, q, k, v):
    to, source = torch.cartesian_prod(torch.arange(N), torch.arange(N)).mT
    powers = (q[:, :, to] * k[:, :, source]).sum(-1).mul(D**-0.5).exp()
    sums = torch.zeros(B, H, N).index_add(2, to, powers)
    return torch.zeros_like(v).index_add(2, to, v[:, :, source] * powers[..., None]) / sums[..., None]


def two_softmaxes(m, q, k, v):
    logits = q @ k.mT * D**-0.5
    return logits.softmax(-1) @ v + logits.mT.softmax(-1) @ v


def normed(weights):
    return weights / weights.sum(-1, keepdim=True)


def scaled_part(m, q, k):
    both = torch.stack([q, k]).contiguous()
    both[0] *= D**-0.5
    return both[0] @ both[1].mT


def slots(m, q, k, v, mixes=False):
    w = torch.einsum("bhid,bhjd->bhij", q, k).mul(D**-0.5).softmax(dim=2) + 1e-8
    w = torch.einsum("bhij,hg->bgij", w, m.mix) if mixes else w
    return normed(w) @ v


class Recomputing(torch.autograd.Function):
    """A checkpoint as hosts write it by hand."""

    @staticmethod
    def forward(ctx, run, *tensors):
        ctx.run, ctx.tensors = run, tensors
        with torch.no_grad():
            return run(*tensors)

    @staticmethod
    def backward(ctx, grad):
        tensors = [x.detach().requires_grad_() for x in ctx.tensors]
        with torch.enable_grad():
            out = ctx.run(*tensors)
        return (None, *torch.autograd.grad(out, tensors, grad))


def cosines(q, k):
    return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT


def mixed(m, q, k):
    return torch.einsum("bhij,hg->bgij", q @ k.mT * D**-0.5, m.mix)


FACTOR, FACTORS = torch.full((D,), D**-0.5), torch.arange(1, H + 1)[:, None, None] / D


def with_a_feature(q, k, more):
    """Logits of scaled queries to which one unscaled feature is appended, and keys with `more` for it."""
    q, k = (torch.cat([x, y.expand(B, H, N, 1)], -1) for x, y in ((q * D**-0.5, torch.ones(1)), (k, more)))
    return q @ k.mT


@torch.jit.script
def scripted(x):
    return x.flip(-1)


def scaled_behind_a_view(m, q, k):
    turned = (q := q.clone()).mT
    q *= D**-0.5
    return turned.mT @ k.mT


def scaled_parts_of_a_view(m, q, k):
    q = q.clone()
    parts = q[..., : D // 2], q[..., D // 2 :]
    q.view(B, H, N, D).mul_(D**-0.5)
    return torch.cat(parts, -1) @ k.mT


PART = "a factor on its queries or keys is followed by more than moves"


def symmetric(m, q, k):
    logits = q @ k.mT * D**-0.5
    return (logits + logits.mT) / 2


def with_a_memory(m, q, k, v):
    logits = torch.cat([q @ k.mT, q @ m.memory.mT], -1) * D**-0.5
    return logits.softmax(-1) @ torch.cat([v, m.memory.expand_as(v)], 2)


def with_a_parameter_put_in(m, q, k):
    q = q * D**-0.5
    q[:, :, 0] = m.memory[:, 0]
    return q @ k.mT


WRONG = {
    "a product and its transpose": ("a sum of its multiples", symmetric),
    "temperatures of one": ("a tensor of factors", lambda m, q, k: q @ k.mT * D**-0.5 * torch.ones(H, 1, 1)),
    "a parameter put into scaled queries": ("followed by more than moves", with_a_parameter_put_in),
    "a parameter chosen for scaled queries": (
        "followed by more than moves",
        lambda m, q, k: torch.where(torch.arange(N)[:, None] == 0, m.memory, q * D**-0.5) @ k.mT,
    ),
    "an unscaled feature": (PART, lambda m, q, k: with_a_feature(q, k, m.learned)),
    "an unscaled parameter among queries": (
        PART,
        lambda m, q, k: torch.cat([q[:, :, 1:] * D**-0.5, m.memory[:, :1].expand(B, H, 1, D)], 2) @ k.mT,
    ),
    "scaled queries and a slice of a parameter": (
        PART,
        lambda m, q, k: (q * D**-0.5 + m.memory[:, : q.shape[2]]) @ k.mT,
    ),
    "scaled in place": (PART, scaled_part),
    "scaled in place after a view": (PART, scaled_behind_a_view),
    "scaled in place after views of parts": (PART, scaled_parts_of_a_view),
    "scaled, then a script": (
        "a function that PyTorch does not show.*made its queries or keys",
        lambda m, q, k: scripted(q * D**-0.5) @ scripted(k).mT,
    ),
    "cosines": ("cosine attention", lambda m, q, k: cosines(q, k) * 10),
    "cosines of padded keys": (
        "cosine attention",
        lambda m, q, k: (F.normalize(q, dim=-1) @ F.pad(F.normalize(k, dim=-1), (0, 0, 1, 1), value=-1.0).mT * 10)[
            ..., 1:-1
        ],
    ),
    "cosines with temperatures": (
        "cosine attention.*a learned temperature",
        lambda m, q, k: cosines(q, k) * m.temperature.exp(),
    ),
    "learned scale": ("a learned factor", lambda m, q, k: q @ k.mT * m.learned.exp()),
    "learned scale times a number": ("a learned factor", lambda m, q, k: q @ k.mT * (m.learned * D**-0.5)),
    **{
        f"scaled adapter, then {name}": (
            "followed by more than moves|a factor on a part",
            lambda m, q, k, change=change: change(m, adapted(q, 2.0) * D**-0.5) @ k.mT,
        )
        for name, change in {
            "a shift": lambda m, q: q + 1,
            "a norm": lambda m, q: F.layer_norm(q, (D,)),
            "another part": lambda m, q: torch.cat([q[..., : D // 2], m.memory.expand_as(q)[..., D // 2 :]], -1),
            "a learned factor": lambda m, q: q * m.learned,
        }.items()
    },
    "learned scale that is one in the example": (
        "a learned factor",
        lambda m, q, k: q @ k.mT * D**-0.5 * m.temperature,
    ),
    "a cap on another scale": ("tanh caps", lambda m, q, k: 10 * (q @ k.mT * D**-0.5).tanh()),
    "a cap twice": ("tanh", lambda m, q, k: (q @ k.mT * D**-0.5).tanh().tanh()),
    "a cap on one of two": ("a sum of its multiples", lambda m, q, k: (x := q @ k.mT * D**-0.5 / 2) + x.tanh()),
    "near bounds": ("clamp", lambda m, q, k: (q @ k.mT * D**-0.5).clamp(-5, 5)),
    "talking heads": ("talking heads", mixed),
    "talking heads by an MLP": (
        "talking heads",
        lambda m, q, k: (((q @ k.mT).movedim(1, -1) @ m.mix).relu() @ m.mix).movedim(-1, 1),
    ),
    "talking heads by two matrices": (
        "talking heads",
        lambda m, q, k: ((q @ k.mT).movedim(1, -1) @ m.mix @ m.mix).movedim(-1, 1),
    ),
    "talking heads by convolution": (
        "talking heads",
        lambda m, q, k: F.conv2d(q @ k.mT * D**-0.5, m.mix[:, :, None, None]),
    ),
    "top k": ("topk|lt", top_k),
    "memory": ("keys are parameters", lambda m, q, k: q @ m.memory.mT),
    "product by entries and a projected bias": (
        "by entries",
        lambda m, q, k: (q[:, :, :, None] * k[:, :, None]).sum(-1) + F.linear(q, m.memory[0]),
    ),
    "product by entries": ("by entries", lambda m, q, k: (q[:, :, :, None] * k[:, :, None]).sum(-1).mul(D**-0.5)),
    "factors in one buffer": ("a factor on its queries or keys is followed", in_one_buffer),
    "a factor inside the sum": (
        "by entries",
        lambda m, q, k: (q[:, :, :, None] * k[:, :, None] * D**-0.5).double().sum(-1).float(),
    ),
    "cosines by a function": (
        "cosine_similarity",
        lambda m, q, k: F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1).mul(5),
    ),
    "distances": ("cdist", lambda m, q, k: -torch.cdist(q, k)),
    "norms of keys": (
        "adds norms of its queries or keys",
        lambda m, q, k: 2 * q @ k.mT - k.square().sum(-1)[:, :, None],
    ),
    "a factor on the queries of each head": (
        "a tensor of factors is on its queries",
        lambda m, q, k: (q * FACTORS) @ k.mT,
    ),
    "product by linear": ("linear", lambda m, q, k: F.linear(q[0, 0], k[0, 0]).mul(D**-0.5)),
    "einsum of three": ("more than two tensors", lambda m, q, k: torch.einsum("bhid,bhjd,d->bhij", q, k, FACTOR)),
    "product with its own derivative": (
        "an autograd.Function with a derivative of its own",
        lambda m, q, k: Recomputing.apply(lambda q, k: q @ k.mT, q, k),
    ),
    "logits of a kernel": (
        "stands a compiled kernel",
        lambda m, q, k: torch.from_numpy((q @ k.mT).detach().numpy() * D**-0.5),
    ),
}
"""A pattern of the error, and logits that are spelled in this way."""
WRONG = {name: (message, attending(logits)) for name, (message, logits) in WRONG.items()}
WRONG |= {
    "a block of learned keys that is added to another product": (
        "joined with logits of positions",
        lambda m, q, k, v: (
            SOFTMAX(torch.cat([q @ k.mT, q @ m.memory.mT + q @ positions(m).mT], -1) * D**-0.5)[..., :N] @ v
        ),
    ),
    "two contents": ("2 products meet", lambda m, q, k, v: SOFTMAX((q @ k.mT + v @ k.mT) * D**-0.5) @ v),
    "keys of a memory": ("its keys are parameters", with_a_memory),
    "two scales": (
        "products with two scales",
        lambda m, q, k, v: SOFTMAX(q @ k.mT * D**-0.5) @ (SOFTMAX(k @ q.mT * 0.1) @ v),
    ),
    "two softmaxes": ("two softmaxes share one product", two_softmaxes),
    "gumbel": ("gumbel_softmax", lambda m, q, k, v: F.gumbel_softmax(q @ k.mT * D**-0.5, dim=-1) @ v),
    "exponentials by hand": ("exp", lambda m, q, k, v: normed((q @ k.mT * D**-0.5).exp()) @ v),
    "exp of a difference": ("exp", lambda m, q, k, v: ((x := q @ k.mT) - x.logsumexp(-1, keepdim=True)).exp() @ v),
    "exp of log_softmax": ("log_softmax", lambda m, q, k, v: (q @ k.mT * D**-0.5).log_softmax(-1).exp() @ v),
    "slots": ("slot attention", slots),
    "slots that share their weights among heads": ("slot attention", functools.partial(slots, mixes=True)),
    "product by entries and exponentials": (
        "exp",
        lambda m, q, k, v: normed((q[:, :, :, None] * k[:, :, None]).sum(-1).exp()) @ v,
    ),
    "an axis that is not given": ("slot", without_an_axis),
    "windows by entries": (
        "by entries",
        lambda m, q, k, v: (SOFTMAX((q[..., None] * windows(k)).sum(3).mul(D**-0.5)).unsqueeze(3) * windows(v)).sum(-1),
    ),
    "pooled queries by entries": (
        "by entries",
        lambda m, q, k, v: (heads(m, q.mean(2, keepdim=True)) * k).sum(-1).softmax(-1)[..., None] * v,
    ),
    "edges": ("exp", edges),
    "a call with its own derivative": (
        r"inside of a torch\.autograd\.Function, whose derivative would stay",
        lambda m, q, k, v: Recomputing.apply(F.scaled_dot_product_attention, q, k, v),
    ),
    "queries chosen by their products with some keys": ("as to choose among them", probsparse),
    "written out in a checkpoint by hand": (
        "an autograd.Function with a derivative of its own",
        lambda m, q, k, v: Recomputing.apply(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, q, k, v),
    ),
    "values by entries": ("exp", lambda m, q, k, v: (normed((q @ k.mT).exp())[..., None] * v[:, :, None]).sum(-2)),
    "products of vectors": ("mv", lambda m, q, k, v: torch.mv(k[0, 0], q[0, 0, 0]).softmax(-1).expand(B, H, N, N) @ v),
}


# --- what keeps its class ---------------------------------------------------------------------------------------------


def channels(m, q, k, v):
    q, k = F.normalize(q.mT, dim=-1), F.normalize(k.mT, dim=-1)  # [B, H, D, N]
    return ((q @ k.mT * m.temperature).softmax(-1) @ v.mT).mT


def state_space(m, q, k, v):
    decay = torch.einsum("bhnd,hd->bhnd", q.sigmoid(), -m.memory[:, 0].exp()).exp()
    return (decay * v) @ (k.mT @ q)


def random_features(m, q, k, v):
    q, k = ((x @ torch.linspace(-1, 1, D * D).view(D, D)).exp() for x in (q, k))
    return q @ (k.mT @ v)


def frequencies(m, q, k, v):
    """Frequencies times complex parameters, put into zeros (FEDformer)."""
    x = torch.fft.rfft(q, dim=2)
    weight = torch.complex(m.position.weight, m.position.weight)[:D, :D]
    out = torch.zeros_like(x)
    out[:, :, :2] = torch.einsum("bhfd,de->bhfe", x[:, :, :2], weight)
    return torch.fft.irfft(out, n=N, dim=2)


def router(m, q, k, v):
    gates = (q @ m.memory.mT).softmax(-1)
    return sum((gates[..., i : i + 1] * v for i in range(3)), torch.zeros(()))


def additive(m, q, k, v):
    return (m.memory[:, :1] @ (q.mean(2, keepdim=True) + k).tanh().mT).softmax(-1).expand(B, H, N, N) @ v


LEFT = {
    "additive attention": additive,
    "additive attention with a vector": lambda m, q, k, v: (
        ((q[:, :, :, None] + k[:, :, None]).tanh() @ m.memory[0, 0]).softmax(-1) @ v
    ),
    "channels": channels,
    "channels of pooled images": lambda m, q, k, v: channels(m, *(F.max_pool2d(x, (2, 1)) for x in (q, k, v))).repeat(
        1, 1, 2, 1
    ),
    "linear attention": lambda m, q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
    "random features": random_features,
    "state space": state_space,
    "linear attention by entries": lambda m, q, k, v: (q[:, :, :, None] * k[:, :, None]).sum(-1) @ v,
    "squeeze and excite": lambda m, q, k, v: v * q.mean((1, 2), keepdim=True).sigmoid(),
    "router": router,
    "frequencies": frequencies,
}


def make(spelling, attention=None):
    """A model, with `attention` in place of its own if that is given, and its input."""
    torch.manual_seed(0)
    model, x = Model(spelling), torch.randn(B, N, H * D)
    if attention:
        quest_core.inject(model, attention, example=x)
    return model, x


def seeded_gradients(model, x):
    torch.manual_seed(1)  # of dropout
    return gradients(model, x)


@pytest.mark.parametrize("name", RIGHT)
def test_standard_keeps_the_numbers_and_quest_equals_its_formula(name):
    spelling, formula = RIGHT[name]
    model, x = make(spelling)
    by_hand = computing(formula, model).eval().double()
    standard, _ = quest_core.inject(copy.deepcopy(model), "standard", example=x)
    torch.testing.assert_close(seeded_gradients(standard, x), seeded_gradients(model, x), rtol=0, atol=0)
    model.zero_grad()
    model, report = quest_core.inject(model.eval(), "quest", example=x)
    assert [row.adapter for row in report.replacements] == ["written out"] * 2
    torch.testing.assert_close(model(x).double(), by_hand(x.double()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_without_parameters_gets_its_mechanism_where_the_queries_are(device):
    model = Model(lambda m, q, k, v: m.attend(q, k, v))
    for layer in model.layers:
        layer.attend = core()
    model.to(device, torch.bfloat16)
    x = torch.randn(B, N, H * D, device=device, dtype=torch.bfloat16)
    quest_core.inject(model, "qknorm", example=x)
    assert {(p.device.type, p.dtype) for p in model.layers[0].attend.parameters()} == {(device, torch.bfloat16)}
    assert model(x).shape == x.shape


def test_without_values_cosines_are_not_taken_for_products():
    model, x = make(WRONG["cosines"][1])
    with pytest.raises(UnsupportedError, match="tensors without values.*cosines; run the example on a CPU"):
        quest_core.inject(model.to("meta"), "quest", example=x.to("meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_that_are_nearly_equal_are_no_cosine_attention(dtype):
    """As in a fresh model with a LayerNorm whose tokens are alike: the norms differ by 0.5 %, far above rounding."""

    def nearly(x):
        return F.normalize(x, dim=-1) * (1 + 0.005 * torch.linspace(-1.5, 1.5, N).to(x)[:, None])

    model, x = make(lambda m, q, k, v: (nearly(q) @ (3 * nearly(k)).mT * D**-0.5).softmax(-1) @ v)
    _, report = quest_core.inject(model.to(dtype), "quest", example=x.to(dtype))
    assert [row.note for row in report.replacements if "norm" in row.note] == []


def test_logits_of_an_earlier_module_may_be_added():
    def spelling(m, q, k, v, before, by_hand=False):
        logits = q @ F.normalize(k, dim=-1).mT if by_hand else q @ k.mT * D**-0.5
        before.append(logits + before[-1] if before else logits)
        return before[-1].softmax(-1) @ v

    model, x = make(spelling)
    wanted = model(x, before=[], by_hand=True)
    model, _ = quest_core.inject(model, "quest", example=lambda model: model(x, before=[]))
    torch.testing.assert_close(model(x, before=[]), wanted)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_understood_is_refused_by_name(name):
    message, spelling = WRONG[name]
    model, x = make(spelling)
    with pytest.raises((UnsupportedError, InjectionError), match=message):
        quest_core.inject(model, "quest", example=x)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_softmax_attention_keeps_its_class(name):
    model, x = make(LEFT[name])
    finding = Finding(model)
    finding.run(x)
    assert not list(finding.sites())
    whole = nn.Sequential(Model(scale_after_product), model)
    _, report = quest_core.inject(whole, "quest", example=x)
    assert [row.path for row in report.replacements] == ["0.layers.0", "0.layers.1"]
    assert [*report.left_alone] == ["1.layers.0", "1.layers.1"]


def test_what_does_not_run_is_left_as_others_of_its_class_are():
    model, x = make(scale_after_product)
    kind = type("GateAttention", (nn.Linear,), {})
    model.norm, model.unused = nn.Sequential(model.norm, kind(H * D, H * D)), kind(H * D, H * D)
    assert [*quest_core.inject(model, "quest", example=x)[1].left_alone] == ["norm.1", "unused"]


def test_a_module_that_the_example_calls_by_names_is_seen_whole():
    model, x = make(lambda m, q, k, v: q * k.mean(2, keepdim=True).sigmoid() * v)
    whole = nn.ModuleList([Model(scale_after_product), *model.layers])
    _, report = quest_core.inject(whole, "quest", example=lambda whole: [layer(x=x) for layer in whole])
    assert [*report.left_alone] == ["1", "2"]


def kernel(m, q, k, v):
    return torch.from_numpy(q.numpy() @ k.mT.numpy() @ v.numpy())


def test_what_no_function_of_pytorch_computes_may_be_attention_unless_an_adapter_says_no():
    class Adapter(TorchAdapter):
        kernels_attend = False

    model, x = make(kernel)
    whole = nn.Sequential(Model(scale_after_product), model.eval())
    with torch.no_grad():
        with pytest.raises(InjectionError, match="look like attention.*layers.0"):
            quest_core.inject(whole, "quest", example=x)
        _, report = quest_core.inject(whole, "quest", adapter=Adapter(), example=x)
    assert [*report.left_alone] == ["1.layers.0", "1.layers.1"]


# --- at run time ------------------------------------------------------------------------------------------------------


def spelled(name, *tensors, **how):
    return RIGHT[name][0](*tensors, **how)


def injected(name, attention="quest"):
    model, x = make(functools.partial(spelled, name), attention)  # which pickle takes
    return model.eval(), x


@pytest.mark.needs_torch("2.6", "torch.compile of function modes")
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.drawn(15)
def test_compiles_to_one_graph(name):
    model, x = injected(name)
    wanted = model(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), wanted)


@pytest.mark.needs_torch("2.6", "torch.compile of function modes")
@pytest.mark.parametrize("attention", ["quest", "sigmoid"])
@pytest.mark.parametrize("breaks", [(1,), *(pytest.param(x, marks=pytest.mark.slow) for x in ((0,), (2,), (0, 1, 2)))])
@pytest.mark.parametrize("by", ["einsum", *(pytest.param(x, marks=pytest.mark.slow) for x in ("matmul", "baddbmm"))])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_graph_may_break_inside_of_a_site(backend, by, breaks, attention):
    """PyTorch then compiles parts of the host's forward, and runs these graphs in the mode that has changed them."""

    def at(place, x):
        if place in breaks:
            torch._dynamo.graph_break()
        return x

    def spelling(m, q, k, v):
        q = at(0, q)
        if by == "einsum":
            logits = torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5
        elif by == "matmul":
            logits = q @ k.mT * D**-0.5
        else:
            one, two = q.flatten(0, 1), k.flatten(0, 1)
            empty = one.new_zeros(one.shape[0], one.shape[1], two.shape[1])
            logits = torch.baddbmm(empty, one, two.mT, beta=0, alpha=D**-0.5).unflatten(0, q.shape[:2])
        return at(2, F.softmax(at(1, logits), -1)) @ v

    model, x = make(spelling, attention)
    wanted = model.eval()(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(x), wanted)
    with quest_core.Monitor(model) as monitor:
        torch.testing.assert_close(compiled(x), wanted)
        found = monitor.collect(flat=True)
        model(x)
        assert found == pytest.approx(monitor.collect(flat=True))


@pytest.mark.parametrize("name", RIGHT)
def test_copies_and_lower_precisions_compute_the_same(name):
    model, x = injected(name)
    wanted = model(x)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(x), wanted, atol=0.05, rtol=0.05, check_dtype=False)
    half = copy.deepcopy(model).bfloat16()(x.bfloat16())
    torch.testing.assert_close(half, wanted, atol=0.05, rtol=0.05, check_dtype=False)


RUNS = pytest.mark.parametrize("run", [lambda q, k, v: SOFTMAX(q @ k.mT) @ v, F.scaled_dot_product_attention])
"""Attention that is written out, and a call."""


@RUNS
def test_a_checkpoint_repeats_the_same_attention(run):
    model, x = make(lambda m, q, k, v: run(q, k, v), "quest")
    wanted = gradients(model, x)
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    torch.testing.assert_close(gradients(model, x), wanted)


def test_a_checkpoint_inside_of_an_example_is_refused_when_it_runs():
    def inside(m, q, k, v):
        return checkpoint(scale_after_product, m, q, k, v, use_reentrant=False)

    model, x = make(inside, "quest")
    with pytest.raises(UnsupportedError, match="inside an activation checkpoint"):
        model(x)


def changed(m, q, k, v, way=""):
    logits = k @ q.mT if way == "swapped" else q @ k.mT
    logits = logits + PAST if way == "bias before" else logits
    logits = logits * {"factor": 0.3, "near factor": 1.003 * D**-0.5}.get(way, D**-0.5)
    logits = logits.tanh() if way == "function" else logits
    logits = logits.gather(-1, logits.argsort(-1)) if way == "sorted" else logits
    if way in ("samples", "heads"):
        logits = logits * (q.new_tensor([[1.0], [2.0]]) if way == "samples" else m.temperature.exp())[..., None, None]
    if way == "queries":
        return logits.softmax(-2) @ v
    if way == "path":
        return torch.linalg.vector_norm(logits, dim=-1, keepdim=True) * v
    if way == "longer":
        return (logits.softmax(-1) @ logits.softmax(-1)) @ v
    return logits.softmax(-1) @ v + (F.scaled_dot_product_attention(q, v, v) if way == "a call too" else 0)


@pytest.mark.parametrize(
    "way",
    [
        "factor",
        "near factor",
        "bias before",
        "function",
        "sorted",
        "path",
        "longer",
        "samples",
        "heads",
        "queries",
        "a call too",
    ],
)
def test_another_way_than_in_the_example_is_refused(way):
    model, x = make(changed, "quest")
    with pytest.raises(UnsupportedError, match=r"'layers.0' .* not written as in the example"):
        model(x, way=way)


S = D**-0.5


def biased_behind_a_view(m, q, k):
    z = q @ k.mT
    z.view(B * H, N, N).add_(1 + PAST)
    return z * S


def used_again(m, q, k):
    z = q @ k.mT
    scaled = (z * S).add_(1 + PAST)
    return scaled - z.amax(-1, keepdim=True)


def multiplied_in_place(m, q, k):
    z = q @ k.mT
    z *= S
    return z


SCALED = {  # name -> logits, the bias in them, and how often they are multiplied by a number
    "product": (lambda m, q, k: q @ k.mT * S + PAST, 1, 0),
    "reflected": (lambda m, q, k: torch.mul(S, q @ k.mT) + PAST, 1, 0),
    "reflected tensor": (lambda m, q, k: torch.tensor(S) * (q @ k.mT) + PAST, 1, 0),
    "quotient": (lambda m, q, k: q @ k.mT / torch.tensor(D).sqrt() + PAST, 1, 0),
    "in place": (lambda m, q, k: multiplied_in_place(m, q, k) + PAST, 1, 0),
    "moved": (lambda m, q, k: (torch.einsum("bhid,bhjd->bijh", q, k) * S).permute(0, 3, 1, 2) + PAST, 1, 0),
    "a tensor of one entry": (lambda m, q, k: q @ k.mT * torch.full((1,), S, dtype=q.dtype) + PAST, 1, 1),
    "by keywords": (lambda m, q, k: torch.mul(input=q @ k.mT, other=S) + PAST, 1, 1),
    "two factors": (lambda m, q, k: q @ k.mT * 0.5 * (S / 0.5) + PAST, 1, 2),
    "after a bias": (lambda m, q, k: (q @ k.mT + PAST) * S, S, 1),
    "after a bias behind a view": (biased_behind_a_view, S, 1),
    "after a bias of baddbmm": (
        lambda m, q, k: torch.baddbmm(PAST.to(q), q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, N, N) * S,
        S,
        1,
    ),
    "after a padding": (lambda m, q, k: (F.pad(q @ k.mT, (0, 1), value=0.5) * S)[..., :-1] + PAST, 1, 1),
    "with another use": (used_again, 1, 1),
    "of what a module returns": (lambda m, q, k: m.identity(q @ k.mT) * S + PAST, 1, 1),
}


class Multiplications(TorchDispatchMode):
    """Counts those of logits by a number."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.strip("_")
        self.count += name in ("mul", "div") and args[0].dim() == 4 and D not in args[0].shape
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SCALED)
def test_a_factor_on_the_product_is_left_out_where_nothing_else_takes_it(name):
    logits, bias, count = SCALED[name]
    model, x = make(attending(logits))
    model.double()
    wanted = computing(lambda m, q, k, v: quest(q, k, v, bias * PAST), model)
    quest_core.inject(model, "quest", example=x.double())
    torch.testing.assert_close(gradients(model, x.double()), gradients(wanted, x.double()))
    with torch.no_grad(), Multiplications() as counted:
        model(x.double())
    assert counted.count == 2 * count


def test_a_factor_that_is_left_out_still_turns_the_product_to_its_type():
    def logits(m, q, k):
        z = q @ k.mT * torch.full((1,), S)
        m.seen = z.dtype
        return z.to(q.dtype)

    model, x = make(attending(logits), "quest")
    model.bfloat16()(x.bfloat16())
    assert model.layers[0].seen == torch.float32


def test_a_counter_of_flops_counts_where_the_scale_is_a_tensor():
    model, x = make(attending(lambda m, q, k: q @ k.mT / torch.tensor(D).sqrt()))
    counts = []
    for _ in ("stock", "quest"):
        wanted = model(x)
        with FlopCounterMode(display=False) as counted:
            assert torch.equal(model(x), wanted)
        counts.append(counted.get_total_flops())
        quest_core.inject(model, "quest", example=x)
    assert counts[0] == counts[1] > 0


def gated(m, q, k, v, formula=None):
    q, k = q * q.mean((1, 2, 3), keepdim=True).sigmoid(), k * k.mean((1, 3), keepdim=True).sigmoid()
    return quest(q, k, v) if formula else (q @ k.mT * D**-0.5).softmax(-1) @ v


@pytest.mark.parametrize("shape", [(1, N), (1, 1), (B, 1)])
def test_gates_of_one_entry_are_gates(shape):
    model, x = make(gated)
    one = torch.randn(*shape, H * D)
    wanted = model(one, formula=True)
    quest_core.inject(model, "quest", example=x)
    torch.testing.assert_close(model(one), wanted)


def test_a_buffer_is_no_gate():
    model, x = make(attending(lambda m, q, k: (q * m.factor) @ k.mT * D**-0.5))
    for layer in model.layers:
        layer.register_buffer("factor", torch.ones(1))
    quest_core.inject(model, "quest", example=x)
    model(x)
    model.layers[0].factor.fill_(3)
    with pytest.raises(UnsupportedError, match="multiplies its queries by 3, and in the example by 1"):
        model(x)


def test_logits_of_which_the_largest_is_subtracted_are_not_those_of_a_sigmoid():
    model, x = make(in_place)
    with pytest.raises(UnsupportedError, match="the host subtracts a number from each row"):
        quest_core.inject(model, "quest+sigmoid", example=x)
    quest_core.inject(model, "quest", example=x)
    with quest_core.Monitor(model) as monitor:
        model(x)
        assert "subtracts a number from the logits" in str(monitor.unseen())


@RUNS
@pytest.mark.parametrize(
    ("repeat", "inside"),
    [
        (functools.partial(checkpoint, use_reentrant=False), "an activation checkpoint of its own"),
        (functools.partial(checkpoint, use_reentrant=True), "an activation checkpoint of its own"),
        (Recomputing.apply, "RecomputingBackward"),
    ],
)
def test_a_checkpoint_inside_of_a_site_is_refused(run, repeat, inside):
    model, x = make(lambda m, q, k, v: repeat(run, q, k, v) if m.training else run(q, k, v))
    quest_core.inject(model.eval(), "quest", example=x)
    model(x)
    with pytest.raises(UnsupportedError, match=f"inside {inside}"):
        model.train()(x)


@RUNS
@pytest.mark.parametrize("repeat", [functools.partial(checkpoint, use_reentrant=True), Recomputing.apply])
def test_a_checkpoint_around_a_module_has_no_derivative_of_its_own(run, repeat):
    model, x = make(lambda m, q, k, v: run(q, k, v))
    outer = Host(lambda m, x: repeat(m.inner, x), inner=model)
    _, report = quest_core.inject(outer, "quest", example=x.requires_grad_())
    assert len(report.replacements) == 2
    found = []
    for one in (outer, model):
        one(x).square().sum().backward()
        found.append(x.grad)
        x.grad = None
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("place", ["positional", "out"])
def test_a_softmax_with_a_type_or_a_place_for_its_result(place):
    def spelling(m, q, k, v):
        logits = q @ k.mT * D**-0.5
        if place == "out":
            torch.softmax(logits, -1, out=logits)
            return logits @ v
        return (torch.softmax(logits, -1, torch.float64) @ v.double()).float()

    model, x = make(spelling)
    by_hand = computing(lambda m, q, k, v: (q @ F.normalize(k, dim=-1).mT - math.log(N)).sigmoid() @ v, model)
    with torch.no_grad():
        quest_core.inject(model, "quest+sigmoid", example=x)
        torch.testing.assert_close(model(x), by_hand(x))


def test_a_module_of_a_sites_class_that_did_not_run_is_refused():
    class Dropped(Model):
        def forward(self, x):
            return self.layers[0](x)

    x = torch.randn(B, N, H * D)
    with pytest.raises(InjectionError, match=r"leave 1 as they are.*'layers.1'"):
        quest_core.inject(Dropped(scale_after_product), "quest", example=x)


def test_a_second_run_that_fails_is_named():
    calls = []

    def spelling(m, q, k, v):
        calls.append(m)
        if len(calls) > 2:  # after both layers of the first run
            raise ValueError("lengths must be sorted")
        return ((q @ k.mT + v @ k.mT) * D**-0.5).softmax(-1) @ v

    model, x = make(spelling)
    with pytest.raises(UnsupportedError, match="a run on other values.* failed: ValueError: lengths must be sorted"):
        quest_core.inject(model, "quest", example=x)


@pytest.mark.parametrize("attend", ["written out", "universal"])
def test_the_site_is_where_the_host_multiplies_queries_by_its_factor(attend):
    def inner(_, q, k, v):
        if attend == "universal":
            return F.scaled_dot_product_attention(q, k, v, scale=1.0)
        return (q @ k.mT).softmax(-1) @ v

    model, x = make(lambda m, q, k, v: m.inner(q * m.factor, k, v))
    for layer in model.layers:
        layer.factor, layer.inner = D**-0.5, Host(inner)
    by_hand = computing(lambda m, q, k, v: quest(q, k, v), model)
    _, report = quest_core.inject(model, "quest", example=x)
    assert [(row.path, row.adapter) for row in report.replacements] == [(f"layers.{i}", attend) for i in (0, 1)]
    torch.testing.assert_close(model(x), by_hand(x))
    model.layers[0].factor = 0.5
    with pytest.raises(UnsupportedError, match="multiplies its queries by 0.5, and in the example by 0.35"):
        model(x)


def test_a_scaled_part_may_be_added_later_to_what_has_no_factor():
    """As LoRA does, which multiplies its part by a number."""

    def spelling(m, q, k, v, part=0.0):
        return ((q + part * v if part else q) @ k.mT * D**-0.5).softmax(-1) @ v

    model, x = make(spelling)
    by_hand = computing(lambda m, q, k, v, part: quest(q + part * v, k, v), model)
    quest_core.inject(model, "quest", example=x)
    torch.testing.assert_close(model(x, part=2.0), by_hand(x, part=2.0))


@pytest.mark.parametrize("length", [N, 2 * N])
def test_a_table_is_made_once_and_is_no_product_of_the_attention(length):
    """Its einsum runs in the example, and later only for longer inputs."""

    def spelling(m, q, k, v):
        if not hasattr(m, "angles") or len(m.angles) < q.shape[2]:
            m.angles = torch.einsum("i,j->ij", torch.arange(q.shape[2]).float(), 10.0 ** -torch.arange(D // 2))
        q, k = (turned(x, m.angles[: q.shape[2]]) for x in (q, k))
        return (q @ k.mT * D**-0.5).softmax(-1) @ v

    model, x = Model(spelling), torch.randn(B, N, H * D)
    quest_core.inject(model, "quest", example=x)
    for tokens in (N, length, N):
        x = torch.randn(B, tokens, H * D)
        found = model(x)
        fresh = Model(spelling)
        fresh.load_state_dict({key: value for key, value in model.state_dict().items() if "mechanism" not in key})
        quest_core.inject(fresh, "quest", example=x)
        torch.testing.assert_close(found, fresh(x))


class OneHead(nn.Module):
    """Attention of one head, for tokens with or without an axis for the batch; its logits may have a term of places."""

    def __init__(self, places):
        super().__init__()
        self.q, self.k, self.v, self.r = (nn.Linear(D, D) for _ in range(4))
        self.places = torch.randn(N, D) if places else None

    def forward(self, x):
        q = self.q(x)
        logits = q @ self.k(x).mT
        if self.places is not None:
            logits = logits + q @ self.r(self.places).mT
        return (logits * D**-0.5).softmax(-1) @ self.v(x)


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("shape", [(B, N, D), (N, D)])
def test_linear_layers_may_be_products_later(monkeypatch, shape, places):
    """DeepSpeed's ZeRO-3 makes them so."""
    model, x = OneHead(places), torch.randn(shape)
    quest_core.inject(model, "quest", example=x)
    expected = model(x)
    monkeypatch.setattr(F, "linear", lambda x, weight, bias: x.matmul(weight.t()) + bias)
    torch.testing.assert_close(model(x), expected)


def test_left_padding_changes_nothing():
    def padded(m, q, k, v, real=None):
        logits = q @ k.mT / math.sqrt(D)
        if real is not None:
            logits = logits + torch.where(real, 0.0, torch.finfo(q.dtype).min)[:, None, None]
        return logits.softmax(-1) @ v

    model, x = make(padded, "quest")
    padding = torch.cat([torch.randn(B, 3, H * D), x], 1)
    out = model(padding, real=(torch.arange(N + 3) >= 3).expand(B, -1))
    torch.testing.assert_close(out[:, 3:], model(x))


def test_decoding_with_a_cache_equals_all_tokens():
    def cached(m, q, k, v, cache=None):
        if cache is not None:
            k, v = (torch.cat([cache[m, i], x], 2) if (m, i) in cache else x for i, x in enumerate((k, v)))
            cache.update({(m, 0): k, (m, 1): v})
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        return (q @ k.mT * D**-0.5).masked_fill(hidden, -math.inf).softmax(-1) @ v

    model, x = make(cached, "quest")
    cache = {}
    steps = torch.cat([model(x[:, i : i + 1], cache=cache) for i in range(N)], 1)
    torch.testing.assert_close(steps, model(x))


# --- other attentions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attention", ["qnorm", "qknorm", "qknorm-hs", "quest+sigmoid", "quest+sinkhorn", "sigmoid", "quest(scale=2)"]
)
@pytest.mark.parametrize("name", ["scale_after_product", "scale_on_queries", "scale_on_both", "baddbmm_with_alpha"])
def test_equals_the_mechanism(name, attention):
    model, x = make(RIGHT[name][0])
    if name == "baddbmm_with_alpha" and "qk" in attention:
        with pytest.raises(UnsupportedError, match="axis of heads"):
            quest_core.inject(model, attention, example=x)
        return
    model, _ = quest_core.inject(model.eval().double(), attention, example=x.double())
    out = model(x.double())
    for layer in model.layers:
        bias = layer.bias[None] if name.startswith("baddbmm") else None
        layer.untouched = True
        layer.spelling = lambda m, q, k, v, bias=bias: m.mechanism(q, k, v, attn_mask=bias)
    torch.testing.assert_close(out, model(x.double()), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("attention", ["gqa(kv_heads=2)", "linear", "aft-simple", "elliptical", "dgqa(kv_heads=2)"])
def test_what_needs_more_is_refused(attention):
    model, x = make(scale_after_product)
    with pytest.raises(UnsupportedError, match="Possible here: .*quest"):
        quest_core.inject(model, attention, example=x)


def test_learned_scores_need_the_axis_of_heads():
    model, _ = make(einsum_heads_last, "qknorm")
    assert model.layers[0].mechanism.score.query_scale.shape == (H, D)


@pytest.mark.parametrize("turned", [False, True])
def test_heads_are_found_where_matrix_products_project_embeddings(turned):
    """GPT-2's Conv1D: tokens of the first layer are made from a table only, as if they were parameters too."""

    class Projection(nn.Module):
        def __init__(self):
            super().__init__()
            shape = (3 * H * D, H * D) if turned else (H * D, 3 * H * D)
            self.weight, self.bias = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.zeros(3 * H * D))

        def forward(self, x):
            weight = self.weight.t() if turned else self.weight
            return torch.addmm(self.bias, x.flatten(0, 1), weight).unflatten(0, x.shape[:2])

    tokens = torch.arange(B * N).view(B, N) % 9
    model = nn.Sequential(nn.Embedding(9, H * D), Model(scale_after_product))
    for layer in model[1].layers:
        layer.qkv = Projection()
    quest_core.inject(model, "qknorm", example=tokens)
    assert [layer.found_attention.heads for layer in model[1].layers] == [H, H]


def test_learned_scores_are_not_shared_by_the_products_of_one_forward():
    """A module that attends twice may attend in pieces, or have two attentions, each with parameters of its own."""
    model, x = make(lambda m, q, k, v: scale_after_product(m, q, k, v) + scale_after_product(m, k, q, v))
    with pytest.raises(UnsupportedError, match="more than one product, and 'qknorm' keeps something for each"):
        quest_core.inject(model, "qknorm", example=x)


def test_attention_changes_later_without_an_example():
    model, x = injected("scale_after_product")
    stock = make(scale_after_product)[0].eval()
    quest_core.inject(model, "standard")
    assert torch.equal(model(x), stock(x))


def test_sinks_take_no_other_normalizer():
    model, x = make(sink_by_cat)
    with pytest.raises(UnsupportedError, match="sigmoid"):
        quest_core.inject(model, "quest+sigmoid", example=x)


@pytest.mark.parametrize(
    "name", ["keys_first", "einsum_heads_last", "shared_keys", "one_key_head", "relative_positions"]
)
def test_another_normalizer_finds_the_axes_of_queries_and_keys(name):
    def logistic(m, q, k, v):
        if name == "shared_keys":
            k, v = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
        if name == "one_key_head":
            k, v = k[:, :1], v[:, :1]
        bias = (q @ positions(m).mT) * D**-0.5 if name == "relative_positions" else 0.0
        return (q @ (k / k.norm(dim=-1, keepdim=True)).mT + bias - math.log(N)).sigmoid() @ v

    model, x = injected(name, "quest+sigmoid")
    by_hand = make(logistic)[0].eval()
    torch.testing.assert_close(model(x), by_hand(x))


def unbiased(m, q, products):
    return products


WATCHED = {
    "scale_after_product": (True, unbiased),
    "scale_on_queries": (True, unbiased),
    "scale_on_both": (True, unbiased),
    "causal_mask": (True, lambda m, q, x: x + CAUSAL),
    "mask_by_a_number_and_linear_bias": (
        True,
        lambda m, q, x: x + CAUSAL + torch.outer(torch.arange(N), torch.arange(N)),
    ),
    "capped_by_tanh": (True, lambda m, q, x: 2 * ((x + m.bias) / 2).tanh()),
    "bias_and_setitem": (False, lambda m, q, x: x + m.bias),
    "relative_positions": (True, lambda m, q, x: x + (q @ positions(m).mT) * D**-0.5),
    "einsum_heads_last": (True, unbiased),
    "heads_first": (True, unbiased),
    "keys_first": (True, unbiased),
    "baddbmm_with_alpha": (False, lambda m, q, x: x + m.bias),
    "one_loop_per_head": (False, unbiased),
    "blocks_of_keys": (False, unbiased),
}
"""Spellings, each with whether the axis of heads is known, and its logits, from the products of queries and keys."""
KEYLESS = "bias_and_setitem", "blocks_of_keys"
"""Those that do not show which keys their logits are of."""


@pytest.mark.parametrize("attention", ["standard", "quest", "quest+sigmoid"])
@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.drawn(12)
def test_a_monitor_sees_the_logits_of_the_host(name, attention):
    heads, logits_of = WATCHED[name]
    model, x = make(RIGHT[name][0])
    if "sigmoid" in attention and name in KEYLESS:
        return
    wanted = []

    def by_hand(m, q, k, v):
        keys = k * D**-0.5 if attention == "standard" else k / k.norm(dim=-1, keepdim=True)
        logits = logits_of(m, q, q @ keys.mT)
        seen = (logits > -math.inf).sum(-1, keepdim=True)
        w = (logits - seen.log()).sigmoid() if "sigmoid" in attention else logits.softmax(-1)
        share = w / w.sum(-1, keepdim=True)
        sizes = {"query_norm": q.norm(dim=-1), "key_norm": k.norm(dim=-1)}
        rows = {"entropy": -torch.special.xlogy(share, share).sum(-1), **sizes}
        over = (0, 2) if heads else (0, 1, 2)
        each = {f"{n}_mean".replace("entropy_mean", "entropy"): r.mean(over) for n, r in rows.items()}
        columns = share.sum(2)  # [B, H, M]
        if name not in KEYLESS:
            each["top_key_share"] = (columns.amax(-1) / columns.sum(-1)).mean(over[:-1])
        each |= {f"{n}_max": r.amax(over) for n, r in sizes.items()} | {"max_logit": logits.amax((*over, 3))}
        wanted.append({n: pytest.approx(r.reshape(-1).tolist(), rel=2e-5, abs=2e-6) for n, r in each.items()})
        return w @ v

    computing(by_hand, model).eval().double()(x.double())
    plain, _ = quest_core.inject(model.eval(), attention, example=x)
    out = plain(x)
    with quest_core.Monitor(plain) as monitor:
        assert torch.equal(plain(x), out)
        assert [*monitor.collect().values()] == wanted


@pytest.mark.needs_torch("2.6", "torch.compile of function modes")
def test_a_monitor_watches_compiled_models():
    model, x = injected("causal_mask")
    compiled = torch.compile(model, backend="eager")
    wanted = compiled(x)
    with quest_core.Monitor(model) as monitor:
        torch.testing.assert_close(compiled(x), wanted)
        found = monitor.collect(flat=True)
        model(x)
        assert found == pytest.approx(monitor.collect(flat=True))


def test_an_example_of_one_value_does_not_show_positions():
    model, _ = make(RIGHT["relative_positions"][0])
    with pytest.raises(UnsupportedError, match="use an example whose values differ"):
        quest_core.inject(model, "quest", example=torch.zeros(B, N, H * D))


def test_a_step_with_one_key_says_no_less_than_the_others():
    """One token after the other; the first one sees one key."""

    def steps(m, q, k, v):
        return torch.cat([m.core(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]) for i in range(N)], 2)

    model, x = Attention(steps), torch.randn(B, N, H * D)
    model.core = core()
    want = Attention(lambda m, q, k, v: quest(q, k, v, CAUSAL))
    want.load_state_dict(model.state_dict())
    quest_core.inject(model, "quest", example=x)
    torch.testing.assert_close(model(x), want(x))


def test_scripted_modules_beside_an_attention_run():
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(H * D, H * D))), Attention(scale_after_product))
    quest_core.inject(model, "quest", example=torch.randn(B, N, H * D))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_heads_that_share_keys_are_not_balanced_together():
    """sinkhorn's columns are over the queries of one head; here two axes may be those."""

    def grouped(m, q, k, v):
        q, k, v = q.unflatten(1, (2, H // 2)), k[:, ::2], v[:, ::2]  # [B, G, H / G, N, D], [B, G, N, D]
        w = (torch.einsum("bghid,bgjd->bghij", q, k) * D**-0.5).softmax(-1)
        return torch.einsum("bghij,bgjd->bghid", w, v).flatten(1, 2)

    x = torch.randn(B, N, H * D)
    quest_core.inject(Attention(grouped), "quest", example=x)
    with pytest.raises(quest_core.UnsupportedError, match="'sinkhorn' must know which axis is that of heads"):
        quest_core.inject(Attention(grouped), "sinkhorn", example=x)


def test_a_scale_that_a_half_type_rounds_is_the_one_of_the_example():
    def spelling(m, q, k, v):
        return ((q @ k.mT * m.scale).float().softmax(-1)).to(v.dtype) @ v

    model, x = make(spelling)
    for layer in model.layers:
        layer.register_buffer("scale", torch.tensor(D**-0.5))
    quest_core.inject(model, "quest", example=x)
    assert model.bfloat16()(x.bfloat16()).isfinite().all()
