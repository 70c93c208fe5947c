"""Models with attention that an adapter knows, and that a run of an example finds; what tests ask of a model."""

import copy
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn


def encoder(width=16, heads=4, layers=2, dropout=0.0):
    """PyTorch's own encoder of batches [B, N, width]."""
    layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Around(nn.Module):
    """A projection to q, k and v [B, H, N, D] around a function of them, whose output [B, H, N, D] it returns."""

    def __init__(self, attend=F.scaled_dot_product_attention, width=16, heads=2):
        super().__init__()
        self.qkv, self.heads, self.attend = nn.Linear(width, 3 * width), heads, attend

    def parts(self, x):  # [B, N, width] -> [3, B, H, N, D]
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        return self.attend(*self.parts(x))


class Host(nn.Module):
    """A module whose forward is a function of the module and of the inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **options):
        return self.function(self, *inputs, **options)


class Call(nn.Module):
    """The call of PyTorch; of `q` only, it is self-attention."""

    def forward(self, q, k=None, v=None, mask=None, **options):
        return F.scaled_dot_product_attention(q, *(q if x is None else x for x in (k, v)), mask, **options)


def gradients(model, *inputs):
    """The output of a model, and the gradients of all parameters that have one."""
    model.zero_grad()
    out = model(*inputs)
    (out * torch.linspace(-1, 1, out.numel()).to(out).view_as(out)).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def held(model):
    """All that a model is made of, by identity."""
    found = []
    for module in model.modules():
        found += [module, type(module)]
        for table in (vars(module), *vars(module).values()):
            if isinstance(table, dict):
                found.append({name: id(x) for name, x in table.items()})
    return found


@contextmanager
def same_state(model):
    """Fail if the block changes the state dict."""
    before = copy.deepcopy(model.state_dict())
    yield
    assert list(model.state_dict()) == list(before)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@contextmanager
def unchanged(model):
    """Fail if the block changes the state dict or anything else that a model is made of."""
    before = held(model)
    with same_state(model):
        yield
    assert held(model) == before
