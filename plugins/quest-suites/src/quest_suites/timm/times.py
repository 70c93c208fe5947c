"""time/timm: a training step of models of timm, torchvision and plain PyTorch, against their own attention.

timm's models have 2 or 4 layers. timm's fused attention is on for all of them, which Swin has only as an experiment;
CrossViT has none.
"""

import re
from typing import Any

import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import quest_core
import quest_timm  # noqa: F401  # timm accepts attention= from here on
from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import DEVICE, Step, against_stock, training_step

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {"depth": 4}),
    "deit3": ("deit3_small_patch16_224", {"depth": 4}),
    "eva02": ("eva02_tiny_patch14_224", {"depth": 4}),
    "beit": ("beit_base_patch16_224", {"depth": 2}),
    "swin": ("swin_tiny_patch4_window7_224", {"depths": (2, 2)}),
    "crossvit": ("crossvit_tiny_240", {}),
}


class Block(nn.Module):
    """Attention as in nanoGPT, with its norm and its residual connection."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm, self.c_attn, self.c_proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, E] -> [B, N, E]."""
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.c_attn(self.norm(x)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.c_proj(out.transpose(1, 2).flatten(2))


class Plain(nn.Module):
    """A transformer that no adapter knows."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(256, 4, causal) for _ in range(4))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, 256] -> [B, N, 256]."""
        for block, mlp in zip(self.blocks, self.mlps, strict=True):
            x = block(x)
            x = x + mlp(x)
        return x


class ByHand(timm.models.vision_transformer.Attention):
    """timm's attention with the lines of QUEST written into it."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """[B, N, E] -> [B, N, E]."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # [B, H, N, D]
        out = F.scaled_dot_product_attention(q, F.normalize(k, dim=-1), v, scale=1)
        return self.proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def make_model(task: str) -> nn.Module:
    if task == "torchvision":
        return torchvision.models.VisionTransformer(224, 16, 4, 4, 256, 1024)
    if task in ("decoder-universal", "encoder-universal"):
        return Plain(causal=task == "decoder-universal")
    name, options = MODELS[re.sub("-(universal|by-hand)", "", task)]
    model = timm.create_model(name, **options)
    if task.endswith("-by-hand"):
        for block in model.blocks:
            block.attn.__class__ = ByHand
    return model


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_suites.timing.against_stock`.

    Args:
        cell: tasks with the suffix -universal replace the calls of scaled_dot_product_attention, without an adapter. In
            those with -by-hand, the model that `quest` is compared with has QUEST's lines in its own code.
    """
    timm.layers.set_fused_attn(True, experimental=True)
    side = 240 if cell.task == "crossvit" else 224
    plain = cell.task in ("decoder-universal", "encoder-universal")
    batch = 1 if cell.smoke else 2
    torch.manual_seed(cell.seed)
    x = torch.randn(batch, *((256, 256) if plain else (3, side, side)), device=DEVICE)

    def make(attention: str | None) -> Step:
        model = make_model(cell.task.removesuffix("-by-hand") if attention else cell.task).to(DEVICE)
        if attention:
            found: dict[str, Any] = {"adapter": (), "example": x} if cell.task.endswith("-universal") else {}
            model, _ = quest_core.inject(model, attention, fresh=True, **found)
        model.train()
        return training_step(model, lambda: model(x).square().mean())

    return against_stock(cell, progress, make)
