"""The plugin's description, as data. Standard library only: listing plugins executes only this file."""

from __future__ import annotations

from typing import Any

CORRUPTIONS = (
    "motion_blur", "defocus_blur", "glass_blur", "gaussian_blur", "gaussian_noise", "impulse_noise", "shot_noise",
    "speckle_noise", "brightness", "contrast", "saturate", "jpeg_compression", "snow", "spatter", "fog", "frost",
)  # fmt: skip
"""The 16 corruptions of the segmentation protocol; see quest_mmseg.bench.corruptions."""


def _option(name: str, kind: str, default: Any, doc: str, **limits: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "default": default, "doc": doc, **limits}


# mIoU in % (arXiv 2604.00199, table 5): (clean, corrupted).
_PAPER = {
    "vit-t": {"standard": (37.34, 32.19), "quest": (38.87, 33.55)},
    "vit-s": {"standard": (43.43, 38.45), "quest": (44.13, 39.19)},
}
_SOURCE = "QUEST (arXiv 2604.00199), table 5; the paper starts from DeiT weights of the same attention"

_ADE20K: dict[str, Any] = {
    "tasks": ["vit-t", "vit-s"],
    "unit": "%",
    "higher_is_better": True,
    "paper_source": _SOURCE,
    "data": "the folder ADEChallengeData2016 of ADE20K, with images/ and annotations/",
    "data_required": True,
    "options": [
        _option("iterations", "int", 160000, "training iterations", minimum=1),
        _option("batch_size", "int", 8, "images an iteration", minimum=1),
        _option("workers", "int", 4, "processes that load images", minimum=0),
        _option("pretrained", "str", None, "ViT weights under mmseg's names (vit2mmseg.py); null: none", nullable=True),
        _option("checkpoint", "str", None, "a trained Segmenter to evaluate; null: train one", nullable=True),
    ],
}

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
        "EMAHead": "its attention is expectation maximisation over bases",
        "VPD": "its attention is inside a diffusion model of another library",
    },
    "suites": [
        {
            "suite": "seg/shapes",
            "summary": "a small Segmenter on generated scenes in the layout of ADE20K, clean and under 16 corruptions",
            "tasks": ["scenes"],
            "metric": "mIoU",
            "also": [{"metric": "mIoU corrupted"}],
            "unit": "%",
            "higher_is_better": True,
            "options": [
                _option("iterations", "int", 1000, "training iterations", minimum=1),
                _option("batch_size", "int", 16, "images an iteration", minimum=1),
                _option("lr", "float", 0.001, "largest learning rate of AdamW", minimum=0),
                _option("train_images", "int", 512, "scenes to train on", minimum=1),
                _option("validation_images", "int", 64, "scenes to test on", minimum=1),
            ],
        },
        {
            **_ADE20K,
            "suite": "seg/ade20k",
            "summary": "Segmenter on ADE20K with the paper's schedule",
            "metric": "mIoU",
            "paper": {task: {name: pair[0] for name, pair in rows.items()} for task, rows in _PAPER.items()},
        },
        {
            **_ADE20K,
            "suite": "seg/ade20k-c",
            "summary": "Segmenter on ADE20K with the paper's schedule, under 16 corruptions",
            "metric": "mIoU corrupted",
            "paper": {task: {name: pair[1] for name, pair in rows.items()} for task, rows in _PAPER.items()},
        },
    ],
}
