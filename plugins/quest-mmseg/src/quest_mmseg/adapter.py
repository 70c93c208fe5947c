"""MmsegAdapter: where mmseg's attention is, and how `attention=` reaches it.

A config names classes of the scope ``quest_mmseg`` (see quest_mmseg.models), which build mmseg's own class and then
inject: before wrapping, optimizer, EMA, `init_weights` and `load_from`, so all of these see the new parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from mmengine.logging import MMLogger
from mmengine.runner import FlexibleRunner, Runner
from torch import nn

from quest_core.config import AttentionConfig
from quest_core.errors import UnsupportedError
from quest_core.hosts.adapter import Adapter, Capabilities, Site, refusal
from quest_core.hosts.discovery import require_host
from quest_core.mechanisms.aft_conv import AttentionFreeConv

from .info import INFO
from .keys import refuse_unread
from .layers import (
    BEiTAttention,
    EfficientMultiheadAttention,
    MAEAttention,
    MultiheadAttention,
    PackedAttention,
    PretrainAttention,
    WindowMSA,
    Wrapping,
    grids,
)

HOSTS: dict[tuple[str, str], Any] = {
    ("mmcv.cnn.bricks.transformer", "MultiheadAttention"): MultiheadAttention,
    ("mmseg.models.backbones.mit", "EfficientMultiheadAttention"): EfficientMultiheadAttention,
    ("mmseg.models.backbones.twins", "GlobalSubsampledAttention"): EfficientMultiheadAttention,
    ("mmseg.models.backbones.beit", "BEiTAttention"): BEiTAttention,
    ("mmseg.models.backbones.mae", "MAEAttention"): MAEAttention,
    ("mmseg.models.backbones.swin", "WindowMSA"): WindowMSA,
    ("mmpretrain.models.utils.attention", "MultiheadAttention"): PretrainAttention,
}
"""Host class (module, name) -> what replaces it."""

GRID = ("VisionTransformer", "SegmenterMaskTransformerHead")
"""Classes of mmseg that attend over a grid of patches and further tokens; see `connect`."""


class MmsegAdapter(Adapter):
    """Every attention of mmseg's models that attends over tokens with queries, keys and values."""

    name: ClassVar[str] = "mmseg"
    capabilities: ClassVar[Capabilities] = Capabilities(**INFO["capabilities"])
    leaves_alone: ClassVar[frozenset[str]] = frozenset({"MultiScaleDeformableAttention"})

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield every attention module that can be replaced, in the order of registration, that of the forward pass.

        Raises:
            UnsupportedError: the model has a kind of attention that cannot be replaced; the message names it.
        """
        owners: dict[str, nn.Module] = {"": model}
        index = 0
        for path, module in model.named_modules():
            owners[path] = module
            refused = _host_name(module, INFO["refused"])
            if refused is not None:
                raise UnsupportedError(
                    f"attention= cannot be used in a model with {type(module).__name__}"
                    f"{f' (at {path!r})' if path else ''}: {INFO['refused'][refused]}. Name it on the parts that "
                    "can have it, for example backbone=dict(type='quest_mmseg.VisionTransformer', attention='quest')"
                )
            if _replacement(module) is not None:
                yield _site(path, module, index, owners)
                index += 1

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the host's own sub-modules around another mechanism; see quest_mmseg.layers."""
        made = _replacement(site.module)
        assert made is not None
        return made.from_host(site.module, config, fresh=site.fresh)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Refuse position biases without scores, masks without weights, and a grid that the model does not report."""
        if config.family and hasattr(site.module, "relative_position_bias_table"):
            return f"its learned bias by relative position is added to the scores, and '{config}' has none"
        if config.family and site.path.endswith("cross_attn") and not site.capabilities.ordered:
            return f"Mask2Former hides other keys from each query, and '{config}' has no weights that could act on"
        if config.family == "aft-conv":
            given = {key: value for key, value in config.options if key in ("grid", "prefix")}
            if given:
                return f"the model sets the grid and the class tokens; leave out {', '.join(given)}"
            if config.option("dims") != 2:
                return f"dims is {config.option('dims')}, and patches have 2 axes"
            if not site.capabilities.narrows_keys:
                return "'aft-conv' is not possible here: the tokens are not on a grid that the model reports"
        return refusal(config, site.capabilities)

    def connect(self, model: nn.Module) -> None:
        """Set the grid of patches of aft-conv at each call, because crops and images differ in size."""
        for module in model.modules():
            kind = _host_name(module, GRID)
            if kind is not None:
                (_connect_backbone if kind == "VisionTransformer" else _connect_head)(module)

    def install(self) -> None:
        """Have Runners compare their config with the model, and write notices to mmengine's log.

        The import of this plugin calls it, while a Runner builds the first model. So what it wraps is called later.
        `uninstall` leaves the types of the scope ``quest_mmseg`` in mmengine's registry.

        Raises:
            PluginError: mmseg is not installed or of a version that this plugin does not support.
        """
        require_host(self.name)
        self.patches.wrap(Runner, "wrap_model", _compared)
        self.patches.wrap(FlexibleRunner, "load_or_resume", _compared)
        self.forward_notices(MMLogger.get_current_instance)


def _compared(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a runner that first compares the runner's config with its model."""

    @functools.wraps(stock)
    def compared(runner: Any, *arguments: Any, **options: Any) -> Any:
        refuse_unread(runner.cfg, runner.model)
        return stock(runner, *arguments, **options)

    return compared


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
    """Reads the grid from PatchEmbed, which returns tokens and grid; it is copied and pickled with the model."""

    def __init__(self, families: list[AttentionFreeConv]) -> None:
        self.families = families

    def __call__(self, patches: nn.Module, given: Any, made: tuple[Any, tuple[int, int]]) -> None:
        height, width = made[1]
        for family in self.families:
            family.grid = (height, width)


def _host_name(module: nn.Module, names: Iterable[str]) -> str | None:
    """Return the first of mmseg's classes in `names` that `module` derives from, or None."""
    kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("mmseg.")}
    return next((name for name in names if name in kinds), None)


def _replacement(module: nn.Module) -> Any:
    if isinstance(module, Wrapping | PackedAttention | PretrainAttention):
        return type(module)
    return HOSTS.get((type(module).__module__, type(module).__name__))


def _site(path: str, module: Any, index: int, owners: dict[str, nn.Module]) -> Site:
    parents = [owners[path[:i]] for i, letter in enumerate(path) if letter == "."]
    if hasattr(module, "qkv"):
        asked = Capabilities(dropout=getattr(module.attn_drop, "p", module.attn_drop) > 0)
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
