"""MmsegAdapter: where mmseg's attention is."""

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from quest_core.config import AttentionConfig
from quest_core.drafts import draft
from quest_core.errors import InjectionError, UnsupportedError
from quest_core.hosts.adapter import Capabilities, HostAttention, Site
from quest_core.hosts.plugins import running_adapters
from quest_core.hosts.request import Request
from quest_mmengine.adapter import MmengineAdapter
from quest_mmengine.layers import Attention, MultiheadAttention

from .layers import (
    BEiTAttention,
    EfficientMultiheadAttention,
    MAEAttention,
    PretrainAttention,
    WindowMSA,
    lay_out,
    mechanisms_with_places,
)
from .registry import MODELS

REPLACEMENTS: dict[str, Any] = {
    "mmcv.cnn.bricks.transformer.MultiheadAttention": MultiheadAttention,
    "mmseg.models.backbones.mit.EfficientMultiheadAttention": EfficientMultiheadAttention,
    "mmseg.models.backbones.twins.GlobalSubsampledAttention": EfficientMultiheadAttention,
    "mmseg.models.backbones.beit.BEiTAttention": BEiTAttention,
    "mmseg.models.backbones.mae.MAEAttention": MAEAttention,
    "mmseg.models.backbones.swin.WindowMSA": WindowMSA,
    "mmpretrain.models.utils.attention.MultiheadAttention": PretrainAttention,
}
"""Host class -> what replaces it."""

CONVOLUTIONS = "its queries and keys are feature maps from convolutions"
REFUSED = {
    "RecWithAttnbias": "with cross_attn=True SAN reads the raw weights of torch.nn.MultiheadAttention and adds a term "
    "for each query to the softmax",
    "LocallyGroupedSelfAttention": "Twins-SVT attends inside windows with a mask of its own",
    "MSCAAttention": "SegNeXt's attention is a convolution",
    **dict.fromkeys(("ObjectAttentionBlock", "PAM", "SelfAttentionBlock", "NLHead", "DNLHead"), CONVOLUTIONS),
    **dict.fromkeys(("CCHead", "PSAHead"), "its attention is a compiled op"),
    "EMAHead": "its attention is expectation maximization over bases",
    "VPD": "its attention is inside a diffusion model of another library",
}
"""Modules of mmseg whose attention has no exchangeable queries, keys and values, or hides them."""

MASKED = re.compile(r"(^|\.)(text_encoder|rec_with_attnbias)\.")
"""Paths of SAN's attention, with a mask for each query."""
SAN_HIDES = -100.0
"""The number in the masks of SAN at pairs that may not see each other."""

TYPES = frozenset(
    (
        *("EncoderDecoder", "CascadeEncoderDecoder", "DepthEstimator", "MultimodalEncoderDecoder"),
        *("VisionTransformer", "BEiT", "MAE", "MixVisionTransformer", "SwinTransformer", "PCPVT"),
        *("SegmenterMaskTransformerHead", "KernelUpdateHead", "Mask2FormerHead", "MaskFormerHead"),
        "SideAdapterCLIPHead",
    )
)
"""Segmentors, backbones and heads of mmseg whose attention is replaced, each registered as quest_mmseg.<name>."""

GRID = ("VisionTransformer", "SegmenterMaskTransformerHead")
"""Classes of mmseg that attend over a grid of patches and further tokens; see `connect`."""


class MmsegAdapter(MmengineAdapter):
    """Every attention of mmseg's models that attends over tokens with queries, keys and values."""

    name: ClassVar[str] = "mmseg"
    package, types, models = "quest_mmseg", TYPES, MODELS
    leaves_alone: ClassVar = {"MultiScaleDeformableAttention": "deformable attention, no q·k"}
    replacements = REPLACEMENTS

    def apply(self, request: Request, model: Any) -> None:
        """Inject; a backbone of timm is replaced by quest-timm, if that is installed."""
        timm = [adapter for adapter in running_adapters() if adapter.name == "timm"]
        kinds = {type(part).__module__.partition(".")[0] for part in model.modules()}
        trained = any(type(part).__name__ == "TIMMBackbone" and part._is_init for part in model.modules())
        try:
            request.apply(model, [self, *timm], fresh=not trained)
        except InjectionError as error:
            if timm or "timm" not in kinds:
                raise
            raise InjectionError(
                f"{error}. The backbone is one of timm, whose attention quest-timm replaces: "
                "pip install 'quest-timm[host]'"
            ) from None

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield every attention module that can be replaced, in the order of registration, that of the forward pass.

        Raises:
            UnsupportedError: the model has a kind of attention that cannot be replaced; the message names it.
        """
        for path, module in model.named_modules():
            refused = _host_name(module, *REFUSED)
            if refused is not None and getattr(module, "cross_attn", True):  # only SAN has two ways
                raise UnsupportedError(
                    f"attention= cannot be used in a model with {type(module).__name__}"
                    f"{f' (at {path!r})' if path else ''}: {REFUSED[refused]}. Name it on the parts that "
                    "can have it, for example backbone=dict(type='quest_mmseg.VisionTransformer', attention='quest')"
                )
        yield from super().sites(model)

    def site(self, path: str, module: Any, kind: Any, model: nn.Module) -> Site:
        """Return a site; what `attn` is asked for depends on the modules around it."""
        if issubclass(kind, HostAttention):
            return super().site(path, module, kind, model)
        hides = path.endswith("cross_attn") or MASKED.search(path) is not None
        asked = Capabilities(dropout=module.attn.dropout > 0, narrows_keys=True, pairs=hides)
        if hasattr(module, "sr_ratio"):
            asked = replace(asked, cross=module.sr_ratio > 1)
        else:
            parents = [model, *(model.get_submodule(path[:i]) for i, letter in enumerate(path) if letter == ".")]
            sets = any(_host_name(parent, "KernelUpdateHead") for parent in parents)  # K-Net attends over kernels
            decoder = any(k.__name__.startswith("DetrTransformerDecoder") for p in parents for k in type(p).__mro__)
            asked = replace(
                asked,
                ordered=not (sets or decoder),  # object queries are a set
                causal=any(_host_name(parent, "CLIPTextEncoder") for parent in parents),
                cross=decoder and path.endswith("cross_attn"),
                narrows_keys=any(_host_name(parent, *GRID) for parent in parents),
            )
        return Site(path, module, capabilities=asked, **kind.sizes(module))

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Refuse a grid that the model does not report, or that is not the model's."""
        if any(part.on_grid for part in config.components):
            given = {key: value for key, value in config.options if key in ("grid", "prefix")}
            if given:
                return f"the model sets the grid and the class tokens; leave out {', '.join(given)}"
            if config.option("dims") != 2:
                return f"dims is {config.option('dims')}, and patches have 2 axes"
            if not site.capabilities.narrows_keys:
                return f"'{config.family}' is not possible here: the tokens are not on a grid that the model reports"
        return super().refusal(site, config)

    def connect(self, model: nn.Module, drafts: dict[nn.Module, Any]) -> None:
        """Set the grid of families that have one at each call, because crops and images differ in size."""
        hosts: list[Any] = list(model.modules())
        backbones = [host for host in hosts if _host_name(host, "VisionTransformer")]
        trained = next(((b.img_size[0] // b.patch_size, b.img_size[1] // b.patch_size) for b in backbones), None)
        for host in backbones:
            _connect(drafts, host, host.patch_embed, _patches, trained, prefix=int(host.with_cls_token))
        for host in (host for host in hosts if _host_name(host, "RecWithAttnbias")):
            for module in (module for module in host.modules() if module in drafts):
                drafts[module].attn.hidden = SAN_HIDES
        for host in (host for host in hosts if _host_name(host, "SegmenterMaskTransformerHead")):
            _connect(drafts, host, host, _head, trained, prefix=int(host.num_classes), last=int(host.num_classes))
        super().connect(model, drafts)


def _connect(
    drafts: dict[nn.Module, Any],
    owner: nn.Module,
    called: nn.Module,
    forward: Any,
    trained: tuple[int, int] | None,
    *,
    prefix: int,
    last: int = 0,
) -> None:
    """Have `forward` run in place of that of `called`, if a mechanism of `owner` knows the places of tokens.

    `prefix` tokens are off the grid, `last` of them at the end of the sequence; `trained` is as in `lay_out`.
    """
    made = [drafts[module] for module in owner.modules() if module in drafts]
    found = [mechanism for one in made for mechanism in mechanisms_with_places(one)]
    if found or "forward" in vars(called):  # of a former injection
        drafts[called] = draft(called)
    if found:
        # mmseg calls head.forward by its name, which passes by hooks.
        drafts[called].forward = functools.partial(forward, owner, trained)
    on_grid: list[Any] = [mechanism.family for mechanism in found if mechanism.on_grid]
    for mechanism in found:
        if mechanism.on_grid:
            continue
        if trained is None:
            raise UnsupportedError(
                f"'{mechanism.config}' has biases for the places of patches, and {type(owner).__name__} does not know "
                "the size of the images; name the attention on the whole model"
            )
        by_index: Any = mechanism.family
        tokens = math.prod(trained) + prefix
        by_index.check_lengths(tokens, tokens, is_causal=False)
    for family in on_grid:
        family.prefix = prefix
    for module in (module for one in made for module in one.modules()):
        if isinstance(module, Attention):
            module.class_tokens = last if on_grid else 0


def _patches(backbone: Any, trained: Any, images: Any) -> Any:
    """VisionTransformer's patch_embed on images [B, 3, height, width]; returns tokens and grid."""
    made = type(backbone.patch_embed).forward(backbone.patch_embed, images)
    lay_out(backbone, tuple(made[1]), trained)
    return made


def _head(head: Any, trained: Any, inputs: Any) -> Any:
    """Segmenter's head on features [B, C, height, width]."""
    lay_out(head, tuple(head._transform_inputs(inputs).shape[-2:]), trained)
    return type(head).forward(head, inputs)


def _host_name(module: nn.Module, *names: str) -> str | None:
    """Return the first of mmseg's classes in `names` that `module` derives from, or None."""
    kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("mmseg.")}
    return next((name for name in names if name in kinds), None)
