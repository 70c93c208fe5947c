"""The suites of this plugin as data. Standard library only, because `quest bench ls` executes only this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PAPER: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
OPTIONS: list[dict[str, Any]] = [
    {
        "name": "samples",
        "kind": "int",
        "default": 2048,
        "minimum": 1,
        "doc": "training sequences; the paper does not say how many, and which attentions succeed depends on it",
    },
    {
        "name": "test_samples",
        "kind": "int",
        "default": 2048,
        "minimum": 1,
        "doc": "test sequences, none of them biased",
    },
    {
        "name": "seq_len",
        "kind": "int",
        "default": 20,
        "minimum": 11,
        "doc": "vectors in a sequence; answers lie around position 10 with standard deviation 2",
    },
    {"name": "epochs", "kind": "int", "default": 50, "minimum": 1, "doc": "passes over the training sequences"},
    {"name": "batch", "kind": "int", "default": 32, "minimum": 1, "doc": "sequences in a mini-batch"},
    {
        "name": "weight_seeds",
        "kind": "int",
        "default": 3,
        "minimum": 1,
        "doc": "weight initialisations for each learning rate and weight decay (the paper: 5)",
    },
    {
        "name": "block",
        "kind": "str",
        "default": "prenorm",
        "choices": ("prenorm", "printed"),
        "doc": "where the Transformer block normalises",
    },
    {
        "name": "embed_std",
        "kind": "float",
        "default": 0.02,
        "minimum": 0.0,
        "doc": "standard deviation of the initial [CLS] token and positional embeddings",
    },
]


def _whole(name: str, default: int, doc: str, minimum: int = 1) -> dict[str, Any]:
    return {"name": name, "kind": "int", "default": default, "minimum": minimum, "doc": doc}


IMAGE_OPTIONS = [
    _whole("train", 8000, "training images, drawn for each seed"),
    _whole("validation", 2000, "further training images, which choose the epoch that is reported"),
    _whole("epochs", 5, "passes over the training images"),
    _whole("batch", 128, "images in a mini-batch"),
    _whole("patch", 7, "pixels a side of a patch; it divides 28"),
    _whole("width", 64, "features of a token"),
    _whole("layers", 4, "Transformer blocks"),
    _whole("heads", 4, "attention heads of a block"),
    _whole("warmup", 0, "steps in which the learning rate rises to its value", 0),
    {"name": "weight_decay", "kind": "float", "default": 0.05, "minimum": 0.0, "doc": "of AdamW, on every parameter"},
]


def _rate(name: str, default: float, doc: str) -> dict[str, Any]:
    return {"name": name, "kind": "float", "default": default, "minimum": 0.0, "doc": doc}


GQA_OPTIONS = [
    _whole("train", 2400, "images of classes 0 to 4 for pretraining, drawn for each seed"),
    _whole("uptrain_images", 800, "those of them that up-training sees"),
    _whole("downstream", 800, "images of classes 5 to 9 for fine-tuning"),
    _whole("validation", 500, "further images of each half, which draw the curves"),
    _whole("test", 2000, "test images of each half, the first ones"),
    _whole("pretrain", 4, "epochs of pretraining with multi-head attention"),
    _whole("uptrain", 3, "epochs of up-training"),
    _whole("finetune", 3, "epochs of fine-tuning"),
    _rate("pretrain_rate", 0.001, "learning rate of pretraining"),
    _rate("uptrain_rate", 0.0003, "learning rate of up-training"),
    _rate("finetune_rate", 0.001, "learning rate of fine-tuning"),
    _rate("weight_decay", 0.01, "of AdamW, on every parameter"),
    _whole("batch", 32, "images in a mini-batch"),
    _whole("patch", 7, "pixels a side of a patch; it divides 28"),
    _whole("width", 64, "features of a token"),
    _whole("layers", 3, "Transformer blocks"),
    _whole("heads", 8, "query heads of a block", 2),
    _whole("rounds", 15, "how often inference is timed"),
]

EXPLAIN_OPTIONS = [
    _whole("train", 3000, "training images, drawn for each seed"),
    _whole("validation", 500, "further training images, which choose the epoch"),
    _whole("test", 1000, "test images, the first ones"),
    _whole("epochs", 4, "passes over the training images"),
    _whole("batch", 32, "images in a mini-batch"),
    _rate("rate", 0.002, "learning rate of AdamW"),
    _rate("weight_decay", 0.01, "of AdamW, on every parameter"),
    _rate("noise", 0.1, "the background is uniform between 0 and this; the object reaches 1"),
    _whole("size", 42, "pixels a side of the canvas", 28),
    _whole("patch", 7, "pixels a side of a patch; it divides the size"),
    _whole("width", 64, "features of a token"),
    _whole("layers", 3, "Transformer blocks"),
    _whole("heads", 4, "attention heads of a block"),
]

AFT_OPTIONS = [
    _whole("epochs", 1, "passes over the training data"),
    _whole("images", 2000, "training images; a quarter as many more for validation, half as many for the test"),
    _whole("tokens", 1024, "bytes or pixels in a mini-batch"),
    _rate("rate", 0.004, "learning rate of AdamW"),
    _rate("weight_decay", 0.01, "of AdamW, on every parameter"),
    _whole("width", 64, "features of a token"),
    _whole("layers", 2, "Transformer blocks"),
    _whole("heads", 4, "attention heads of a block"),
    _whole("rounds", 10, "how often a training step is timed"),
]

SUITES: dict[str, dict[str, Any]] = {
    "toy/spurious": {
        "summary": "key-value retrieval with a spurious shortcut: how often training finds the true rule",
        "tasks": ["retrieval"],
        "metric": "success_rate",
        "selection": "last",
        "unit": "%",
        "higher_is_better": True,
        "paper": _PAPER["toy/spurious"],
        "options": OPTIONS,
        "plots": "quest_bench.toy_plots:plots",
        "needs": None,
    },
    "images/fashion-mnist": {
        "summary": "a small Vision Transformer on Fashion-MNIST, one task for each learning rate",
        "tasks": ["lr=0.001", "lr=0.003", "lr=0.01", "lr=0.03"],
        "metric": "accuracy",
        "unit": "%",
        "higher_is_better": True,
        "selection": "validation",
        "options": IMAGE_OPTIONS,
        "needs": None,
    },
    "gqa/fashion-mnist": {
        "summary": "grouped attentions up-trained from a multi-head checkpoint, on halves of Fashion-MNIST",
        "tasks": ["half"],
        "metric": "accuracy",
        "unit": "%",
        "higher_is_better": True,
        "selection": "last",
        "also": [
            {"metric": "fine-tuned"},
            {"metric": "fine-tuned from gqa"},
            {"metric": "time of gqa", "unit": "×", "higher_is_better": False},
        ],
        "jobs": 1,
        "options": GQA_OPTIONS,
        "needs": None,
    },
    "explain/fashion-mnist": {
        "summary": "maps of a classifier's attention against the exact masks of the objects",
        "tasks": ["canvas"],
        "metric": "AG-CAM IoU",
        "unit": "%",
        "higher_is_better": True,
        "selection": "validation",
        "also": [
            {"metric": name}
            for name in (
                "AG-CAM Dice",
                "AG-CAM pixel accuracy",
                "AG-CAM pointing",
                "rollout IoU",
                "rollout pointing",
                "accuracy",
            )
        ],
        "paper": _PAPER["explain/fashion-mnist"],
        "plots": "quest_bench.explain:pictures",
        "options": EXPLAIN_OPTIONS,
        "needs": None,
    },
    "aft/causal": {
        "summary": "attention-free layers as byte and pixel models, in bits, with time and memory of standard's",
        "tasks": ["text=64", "text=256", "text=1024", "image=14"],
        "metric": "bits",
        "unit": "bits",
        "higher_is_better": False,
        "selection": "validation",
        "also": [
            {"metric": "time of standard", "unit": "×"},
            {"metric": "memory of standard", "unit": "×"},
        ],
        "jobs": 1,
        "options": AFT_OPTIONS,
        "needs": None,
    },
    "calibration/pydocs": {
        "summary": "the gain of calibration when a pretrained character model is fine-tuned with QUEST",
        "tasks": ["finetune"],
        "metric": "gain",
        "unit": "nats",
        "higher_is_better": True,
        "selection": "last",
        "also": [{"metric": "first gain"}, {"metric": "loss", "higher_is_better": False}],
        "options": [
            _whole("pretrain", 1500, "steps of pretraining with standard attention"),
            _whole("finetune", 300, "steps of fine-tuning"),
            {"name": "rate", "kind": "float", "default": 0.001, "minimum": 0.0, "doc": "learning rate of fine-tuning"},
        ],
        "needs": None,
    },
}
