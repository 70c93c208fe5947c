"""MmsegAdapter: where mmseg's attention is, and how `attention=` reaches it.

A config names classes of the scope ``quest_mmseg`` (see quest_mmseg.models), which build the host's own class and then
inject. That is before wrapping, optimizer, EMA, `init_weights` and `load_from`, so new parameters are seen by all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from quest_core.config import AttentionConfig
from quest_core.errors import UnsupportedError
from quest_core.hosts.adapter import Adapter, Capabilities, Site, refusal
from quest_core.hosts.discovery import require_host
from quest_core.mechanisms.aft_conv import AttentionFreeConv

from . import checkpoints
from .info import INFO
from .layers import (
    BEiTAttention,
    EfficientMultiheadAttention,
    MAEAttention,
    MultiheadAttention,
    PackedAttention,
    Replacement,
    WindowMSA,
    grids,
)

HOSTS: dict[tuple[str, str], type[Replacement]] = {
    ("mmcv.cnn.bricks.transformer", "MultiheadAttention"): MultiheadAttention,
    ("mmseg.models.backbones.mit", "EfficientMultiheadAttention"): EfficientMultiheadAttention,
    ("mmseg.models.backbones.twins", "GlobalSubsampledAttention"): EfficientMultiheadAttention,
    ("mmseg.models.backbones.beit", "BEiTAttention"): BEiTAttention,
    ("mmseg.models.backbones.mae", "MAEAttention"): MAEAttention,
    ("mmseg.models.backbones.swin", "WindowMSA"): WindowMSA,
}
"""Host class (module, name) -> what replaces it."""

GRID = ("VisionTransformer", "SegmenterMaskTransformerHead")
"""The hosts whose attention is over a grid of patches with tokens beside it; see `connect`."""


class MmsegAdapter(Adapter):
    """Every attention of mmseg's models that attends over tokens with queries, keys and values."""

    name: ClassVar[str] = "mmseg"
    capabilities: ClassVar[Capabilities] = Capabilities(**INFO["capabilities"])

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Every attention module that can be replaced, in the order of registration, that of the forward pass.

        Raises:
            UnsupportedError: the model has attention of a kind that cannot be replaced; the message says which.
        """
        owners: dict[str, nn.Module] = {"": model}
        index = 0
        for path, module in model.named_modules():
            owners[path] = module
            reason = _reason(module)
            if reason is not None:
                raise UnsupportedError(
                    f"attention= cannot be used in a model with {type(module).__name__}"
                    f"{f' (at {path!r})' if path else ''}: {reason}. Name it on the parts that can have it instead, "
                    "for example backbone=dict(type='quest_mmseg.VisionTransformer', attention='quest')"
                )
            if _replacement(module) is not None:
                yield _site(path, module, index, owners)
                index += 1

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """The host's own sub-modules around another mechanism; see quest_mmseg.layers."""
        made = _replacement(site.module)
        assert made is not None
        module = made.from_host(site.module, config, fresh=site.fresh)
        assert isinstance(module, nn.Module)
        return module

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Beside what capabilities say: position biases belong to scores, and the grid of aft-conv to the model."""
        if config.family and hasattr(site.module, "relative_position_bias_table"):
            return f"its learned bias by relative position is added to the scores, and '{config}' has none"
        if config.family and site.path.endswith("cross_attn") and not site.capabilities.ordered:
            return f"Mask2Former hides other keys from each query, and '{config}' has no weights that could act on"
        if config.family == "aft-conv":
            given = {key: value for key, value in config.options if key in ("grid", "prefix")}
            if given:
                return f"the model itself says what the grid and the class tokens are; leave out {', '.join(given)}"
            if config.option("dims") != 2:
                return f"dims is {config.option('dims')}, and patches have 2 axes"
            if not site.capabilities.narrows_keys:
                return "'aft-conv' is not possible here: the tokens do not lie on a grid that the model tells of"
        return refusal(config, site.capabilities)

    def connect(self, model: nn.Module) -> None:
        """Tell aft-conv, at each call, the grid of patches: crops and images differ in size."""
        for module in model.modules():
            kind = _host_name(module, GRID)
            if kind is not None:
                (_connect_backbone if kind == "VisionTransformer" else _connect_head)(module)

    def install(self) -> None:
        """Check the host's version, and let no run resume or be tested with another attention than it was trained with.

        Raises:
            PluginError: mmseg is not installed or of a version that this plugin does not support.
        """
        require_host(self.name)
        checkpoints.guard()


def _connect_backbone(backbone: Any) -> None:
    hooks = backbone.patch_embed._forward_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _GridHook)]:  # of a former injection
        del hooks[key]
    families = list(grids(backbone))
    if families:
        backbone.patch_embed.register_forward_hook(_GridHook(families))
    for family in families:
        family.prefix = int(backbone.with_cls_token)


def _connect_head(head: Any) -> None:
    vars(head).pop("forward", None)
    families = list(grids(head))
    if families:
        # mmseg calls head.forward by its name, which passes by hooks.
        head.forward = functools.partial(_head_forward, head)
    for family in families:
        family.prefix = int(head.num_classes)
    for layer in head.modules():
        if isinstance(layer, MultiheadAttention):
            layer.class_tokens = int(head.num_classes) if families else 0


def _head_forward(head: Any, inputs: Any) -> Any:
    """Segmenter's head on features [B, C, height, width]."""
    height, width = head._transform_inputs(inputs).shape[-2:]
    for family in grids(head):
        family.grid = (height, width)
    return type(head).forward(head, inputs)


class _GridHook:
    """Reads the grid off PatchEmbed, which returns the tokens and their grid; copies and pickles with the model."""

    def __init__(self, families: list[AttentionFreeConv]) -> None:
        self.families = families

    def __call__(self, patches: nn.Module, given: Any, made: tuple[Any, tuple[int, int]]) -> None:
        height, width = made[1]
        for family in self.families:
            family.grid = (height, width)


def _host_name(module: nn.Module, names: Iterable[str]) -> str | None:
    """The first of mmseg's classes in `names` that `module` is made of, or None."""
    kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("mmseg.")}
    return next((name for name in names if name in kinds), None)


def _reason(module: nn.Module) -> str | None:
    """Why a module of mmseg with attention cannot be honoured, or None."""
    name = _host_name(module, INFO["refused"])
    return None if name is None else INFO["refused"][name]


def _replacement(module: nn.Module) -> type[Replacement] | None:
    if isinstance(module, Replacement):
        return type(module)
    return HOSTS.get((type(module).__module__, type(module).__name__))


def _site(path: str, module: Any, index: int, owners: dict[str, nn.Module]) -> Site:
    parents = [owners[path[:i]] for i, letter in enumerate(path) if letter == "."]
    if isinstance(module, PackedAttention) or hasattr(module, "qkv"):
        asked = Capabilities(dropout=module.attn_drop.p > 0)
    elif hasattr(module, "sr_ratio"):
        asked = Capabilities(cross=module.sr_ratio > 1, dropout=module.attn.dropout > 0, narrows_keys=True)
    else:
        sets = any(_host_name(parent, ("KernelUpdateHead",)) for parent in parents)  # K-Net attends over kernels
        decoder = any(kind.__name__.startswith("DetrTransformerDecoder") for p in parents for kind in type(p).__mro__)
        asked = Capabilities(
            ordered=not (sets or decoder),  # object queries are a set
            cross=decoder and path.endswith("cross_attn"),
            dropout=module.attn.dropout > 0,
            narrows_keys=any(_host_name(parent, GRID) for parent in parents),
        )
    return Site(path, module, index, module.num_heads, module.embed_dims // module.num_heads, asked)
