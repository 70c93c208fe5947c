"""Models with attention that an adapter knows, and that a run of an example finds."""

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


class Call(nn.Module):
    """The call of PyTorch; of `q` only, it is self-attention."""

    def forward(self, q, k=None, v=None, mask=None, **options):
        return F.scaled_dot_product_attention(q, *(q if x is None else x for x in (k, v)), mask, **options)
