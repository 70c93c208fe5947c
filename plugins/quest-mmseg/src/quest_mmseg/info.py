"""The plugin as data. INFO is a literal, because core reads this file without running it."""

from __future__ import annotations

from typing import Any

INFO: dict[str, Any] = {
    "name": "mmseg",
    "host": "mmsegmentation",
    "module": "mmseg",
    "api": (1, 0),
    "summary": "Segmenter and other Transformers of mmsegmentation",
    "capabilities": {"ordered": True, "narrows_keys": True},
    # Classes of mmseg whose attention is replaced, each registered as quest_mmseg.<name>.
    "models": {
        "segmentors": ["EncoderDecoder", "CascadeEncoderDecoder", "DepthEstimator"],
        "backbones": ["VisionTransformer", "BEiT", "MAE", "MixVisionTransformer", "SwinTransformer", "PCPVT"],
        "heads": ["SegmenterMaskTransformerHead", "KernelUpdateHead", "Mask2FormerHead", "MaskFormerHead"],
    },
    # Modules of mmseg whose attention has no exchangeable queries, keys and values, or hides them.
    "refused": {
        "SideAdapterCLIPHead": "SAN reads the raw weights of torch.nn.MultiheadAttention and adds a term for "
        "each query to the softmax",
        "LocallyGroupedSelfAttention": "Twins-SVT attends inside windows with a mask of its own",
        "MSCAAttention": "SegNeXt's attention is a convolution",
        "SelfAttentionBlock": "its queries, keys and values are feature maps from convolutions (ANN, ISA)",
        "ObjectAttentionBlock": "its keys are object regions from convolutions (OCRNet)",
        "PAM": "its queries and keys are feature maps from convolutions (DANet)",
        "NLHead": "a non-local block has queries and keys from convolutions",
        "DNLHead": "a disentangled non-local block has queries and keys from convolutions",
        "CCHead": "criss-cross attention is a compiled op over rows and columns",
        "PSAHead": "point-wise spatial attention is a compiled op",
        "EMAHead": "its attention is expectation maximization over bases",
        "VPD": "its attention is inside a diffusion model of another library",
    },
    "remedies": {  # of errors that a reinstall of the host does not end, for `quest doctor`
        "No module named 'mmcv": "a full build of mmcv: CFLAGS='-O0 -g0' pip install --no-build-isolation mmcv==2.1.0; "
        "or without a compiler, in another environment: pip install torch onedl-mmcv==2.3.6 'quest-mmseg[host-onedl]'",
    },
    "suites": "quest_mmseg.bench.suites:SUITES",
}
