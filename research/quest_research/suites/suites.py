"""The suites of this plugin as data."""

from typing import Any

from quest_suites.declaring import RATES, choice, number, papers, whole

_PAPER = papers(__file__)

SHARED = {
    option["name"]: option
    for option in [
        whole("train", 8000, "training samples, drawn for each seed"),
        whole("validation", 2000, "further training samples, which choose the epoch that is reported"),
        whole("test", 1000, "test samples"),
        whole("epochs", 5, "passes over the training samples"),
        whole("steps", 1500, "training steps"),
        whole("batch", 128, "samples in a mini-batch"),
        whole("patch", 7, "pixels a side of a patch; it divides those of the images"),
        whole("width", 64, "features of a token; every width of a head divides it"),
        whole("layers", 4, "Transformer blocks"),
        whole("heads", 4, "attention heads of a block"),
        whole("warmup", 0, "steps in which the learning rate rises to its value", 0),
        number("weight_decay", 0.05, "of AdamW, on every parameter"),
        number("rate", 0.001, "highest learning rate of AdamW"),
        whole("rates", 1, "learning rates, half a decade apart"),
        number("lowest", 0.001, "lowest of them"),
        whole("rounds", 10, "how often a step is timed"),
    ]
}
"""Options that several suites have, by name."""


def _options(**defaults: Any) -> list[dict[str, Any]]:
    """Return shared options with these defaults."""
    return [{**SHARED[name], "default": default} for name, default in defaults.items()]


def _images(**defaults: Any) -> list[dict[str, Any]]:
    """Return the options of a Vision Transformer and its training, with other defaults than those of `SHARED`."""
    names = ("train", "validation", "epochs", "batch", "patch", "width", "layers", "heads", "warmup", "weight_decay")
    return _options(**{name: SHARED[name]["default"] for name in names} | defaults)


TOY_OPTIONS = [
    whole("samples", 2048, "training sequences; the paper does not say how many, on which the ranking depends"),
    whole("test_samples", 2048, "test sequences, none of them biased"),
    whole("seq_len", 20, "vectors in a sequence; answers lie around position 10 with standard deviation 2", 11),
    *_options(epochs=50, batch=32),
    whole("weight_seeds", 3, "weight initializations for each learning rate and weight decay (the paper: 5)"),
    choice("block", ("prenorm", "printed"), "where the Transformer block normalizes"),
    number("embed_std", 0.02, "standard deviation of the initial [CLS] token and positional embeddings"),
]
IMAGE_DATA = (
    "Fashion-MNIST's or MNIST's four IDX files, or CIFAR-10 in the binary version; Debian's "
    "dataset-fashion-mnist by default"
)
IMAGE_FILES = ["train-images-idx3-ubyte*", "*.bin"]
IDX_DATA = "Fashion-MNIST's or MNIST's four IDX files; Debian's dataset-fashion-mnist by default"
_TEST = whole("test", 0, "test images, the same for all seeds; 0 for all", 0)
_PRECISION = choice("precision", ("float32", "bfloat16", "float16"), "of autocast in training; float16 scales the loss")

RECIPE_OPTIONS = [
    *_images(train=50000, validation=10000, epochs=30, warmup=500),
    *_options(rate=0.001, rates=1),
    _TEST,
    _PRECISION,
]
STABILITY_OPTIONS = [
    *_images(train=3000, validation=500, batch=64, width=48),
    *_options(test=3000, rates=5, lowest=0.001),
    _PRECISION,
    number("qk_clip", 0, "threshold of QK-clip after each step; 0 for none"),
]
ROBUSTNESS_OPTIONS = [
    *_images(train=3000, validation=500, batch=64, width=48),
    *_options(rate=0.003),
    {**_TEST, "default": 3000},
    whole("shifted", 100, "test images that are corrupted or attacked"),
    {**whole("severity", 3, "of the fog in the task fog, 1 to 5"), "choices": (1, 2, 3, 4, 5)},
    number("epsilon", 1.0, "budget of attacks, in 255ths"),
    number("share", 0.9, "training images whose square is at the place of their class"),
]
GQA_OPTIONS = [
    whole("train", 2400, "images of classes 0 to 4 for pretraining, drawn for each seed"),
    whole("uptrain_images", 800, "those of them that up-training sees"),
    whole("downstream", 800, "images of classes 5 to 9 for fine-tuning"),
    whole("validation", 500, "further images of each half, which draw the curves"),
    whole("test", 2000, "test images of each half, the first ones"),
    whole("pretrain", 4, "epochs of pretraining with multi-head attention"),
    whole("uptrain", 3, "epochs of up-training"),
    whole("finetune", 3, "epochs of fine-tuning"),
    number("pretrain_rate", 0.001, "learning rate of pretraining"),
    number("uptrain_rate", 0.0003, "learning rate of up-training"),
    number("finetune_rate", 0.001, "learning rate of fine-tuning"),
    *_options(weight_decay=0.01, batch=32, patch=7, width=64, layers=3, heads=8, rounds=15),
]
EXPLAIN_OPTIONS = [
    *_options(train=3000, validation=500, test=1000, epochs=4, batch=32, rate=0.002, weight_decay=0.01),
    number("noise", 0.1, "the background is uniform between 0 and this; the object reaches 1"),
    whole("size", 42, "pixels a side of the canvas, a multiple of those of a patch", 28),
    *_options(patch=7, width=64, layers=3, heads=4),
]
AFT_OPTIONS = [
    *_options(epochs=1),
    whole("images", 2000, "training images; a quarter as many more for validation, half as many for the test"),
    whole("tokens", 1024, "bytes or pixels in a mini-batch"),
    *_options(rate=0.004, weight_decay=0.01, width=64, layers=2, heads=4, rounds=10),
]
WIDTHS_OPTIONS = _options(steps=1500, batch=8, width=64, layers=2, rates=2, lowest=0.003, weight_decay=0.01)
RECALL_OPTIONS = [
    *_options(train=10000, test=1000, epochs=1, batch=32),
    whole("pairs", 16, "keys with their values in a sequence"),
    whole("vocabulary", 256, "tokens: keys in the first half, values in the second"),
    *_options(width=64, layers=1, rates=4, lowest=0.001, weight_decay=0.01),
]
MAD_OPTIONS = _options(
    train=25600, test=1000, epochs=1, batch=32, width=32, heads=2, layers=2, rates=3, lowest=0.001, weight_decay=0.01
)

_VALIDATION = {"unit": "%", "selection": "validation"}
_IMAGES = {"metric": "accuracy", **_VALIDATION, "data": IMAGE_DATA, "data_files": IMAGE_FILES}
_WIDTHS: dict[str, Any] = {
    "tasks": [f"D={width}" for width in (4, 8, 16, 32, 64)],
    "metric": "bits",
    "unit": "bits",
    "higher_is_better": False,
    "selection": "validation",
    "options": WIDTHS_OPTIONS,
}
_IDX = {"data": IDX_DATA, "data_files": IMAGE_FILES[:1]}


def _also(*metrics: str, **facts: Any) -> list[dict[str, Any]]:
    """Return further metrics, which have these facts in common."""
    return [{"metric": metric, **facts} for metric in metrics]


SUITES: dict[str, dict[str, Any]] = {
    "toy/spurious": {
        "summary": "key-value retrieval with a spurious shortcut: how often training finds the true rule",
        "tasks": ["retrieval"],
        "metric": "success_rate",
        "selection": "last",
        "unit": "%",
        "paper": _PAPER["toy/spurious"],
        "options": TOY_OPTIONS,
        "plots": "quest_research.suites.toy_plots:plots",
    },
    "images/fashion-mnist": {
        **_IMAGES,
        "summary": "a small Vision Transformer on Fashion-MNIST, one task for each learning rate",
        "tasks": ["lr=0.001", "lr=0.003", "lr=0.01", "lr=0.03"],
        "options": _images(),
    },
    "images/digits": {
        **_VALIDATION,
        "summary": "a small Vision Transformer on scikit-learn's handwritten digits, one task for each learning rate",
        "tasks": ["lr=0.003", "lr=0.03"],
        "metric": "accuracy",
        "options": _images(train=1000, validation=200, epochs=12, batch=32, patch=2, width=48, layers=2, warmup=50),
    },
    "images/recipes": {
        **_IMAGES,
        "summary": "a small Vision Transformer with the recipes of ViT and DeiT",
        "tasks": ["vit", "deit"],
        "options": RECIPE_OPTIONS,
    },
    "images/cifar10": {
        **_IMAGES,
        "summary": "a small Vision Transformer on CIFAR-10, one task for each learning rate",
        "tasks": ["lr=0.001", "lr=0.003", "lr=0.01"],
        "options": _images(patch=4),
        "data": "cifar-10-batches-bin of: curl https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz | tar xz",
        "data_files": ["test_batch.bin"],
        "data_required": True,
    },
    "images/mnist-1d": {
        **_IMAGES,
        "summary": "the same Transformer on the 40 samples of MNIST-1D's signals",
        "tasks": ["lr=0.001", "lr=0.003", "lr=0.01"],
        "options": _images(train=3200, validation=800, epochs=30, batch=32, patch=1, layers=2),
        "data": 'mnist1d.npz, by the package mnist1d: python -c "import numpy, mnist1d.data as m; '
        "d = m.make_dataset(); del d['templates']; numpy.savez('mnist1d.npz', **d)\"",
        "data_files": ["mnist1d.npz"],
        "data_required": True,
    },
    "stability/rates": {
        **_IMAGES,
        "summary": "accuracy over learning rates up to divergence, of a Vision Transformer and of a language model",
        "tasks": ["vit", "pydocs"],
        "also": RATES,
        "options": STABILITY_OPTIONS,
    },
    "widths/text": {
        **_WIDTHS,
        "summary": "bits per character of a small language model, by the width of its heads",
        "data": "a folder with input.txt, such as tiny Shakespeare; Python's documentation topics by default",
        "data_files": ["input.txt"],
    },
    "widths/brown": {
        **_WIDTHS,
        "summary": "the same on the Brown corpus",
        "data": "the folder packages/corpora of: git clone --depth 1 https://github.com/nltk/nltk_data",
        "data_files": ["brown.zip"],
        "data_required": True,
    },
    "recall/mqar": {
        **_VALIDATION,
        "summary": "values recalled by their keys within a sequence (multi-query associative recall)",
        "tasks": [f"D={width}" for width in (4, 16, 64)],
        "metric": "accuracy",
        "also": RATES,
        "options": RECALL_OPTIONS,
    },
    "recall/mad": {
        **_VALIDATION,
        "summary": "MAD's synthetic tasks: recall in three variants, copying, compression and memorization",
        "tasks": ["in-context", "fuzzy", "noisy", "copying", "compression", "memorization"],
        "metric": "accuracy",
        "also": RATES,
        "options": MAD_OPTIONS,
    },
    "robustness/images": {
        **_IMAGES,
        "summary": "a small Vision Transformer in fog, under corruptions and attacks, and with a spurious patch",
        "tasks": ["fog", "corruptions", "attacks", "autoattack", "patch"],
        "also": _also("relative accuracy", "clean"),
        "options": ROBUSTNESS_OPTIONS,
    },
    "gqa/fashion-mnist": {
        **_IDX,
        "summary": "grouped attentions up-trained from a multi-head checkpoint, on halves of Fashion-MNIST",
        "tasks": ["half"],
        "metric": "accuracy",
        "unit": "%",
        "selection": "last",
        "also": [
            *_also("fine-tuned", "fine-tuned from gqa"),
            *_also("time of gqa", unit="×", higher_is_better=False),
        ],
        "jobs": 1,
        "options": GQA_OPTIONS,
    },
    "explain/fashion-mnist": {
        **_VALIDATION,
        **_IDX,
        "summary": "maps of a classifier's attention against the exact masks of the objects",
        "tasks": ["canvas"],
        "metric": "AG-CAM IoU",
        "also": [
            *_also("AG-CAM Dice", "AG-CAM pixel accuracy", "AG-CAM pointing"),
            *_also("rollout IoU", "rollout pointing", "accuracy"),
        ],
        "paper": _PAPER["explain/fashion-mnist"],
        "plots": "quest_research.suites.explain:pictures",
        "options": EXPLAIN_OPTIONS,
    },
    "aft/causal": {
        **_IDX,
        "summary": "attention-free layers as byte and pixel models, in bits, with time and memory of standard's",
        "tasks": ["text=64", "text=256", "text=1024", "image=14"],
        "metric": "bits",
        "unit": "bits",
        "higher_is_better": False,
        "selection": "validation",
        "also": _also("time of standard", "memory of standard", unit="×"),
        "jobs": 1,
        "options": AFT_OPTIONS,
        "data": f"for images: {IDX_DATA}",
    },
    "calibration/pydocs": {
        "summary": "a pretrained character model fine-tuned with calibrated QUEST, and the gain of calibrating it; "
        "standard attention needs none, so its gain is 0",
        "tasks": ["finetune"],
        "metric": "loss",
        "unit": "nats",
        "higher_is_better": False,
        "selection": "last",
        "also": _also("gain", "first gain", higher_is_better=True),
        "options": [
            whole("pretrain", 1500, "steps of pretraining with standard attention"),
            whole("finetune", 300, "steps of fine-tuning"),
            number("rate", 0.001, "learning rate of fine-tuning"),
        ],
    },
    "gpu/attention": {
        "summary": "attention on a GPU against the fastest back-end of scaled_dot_product_attention, in turns",
        "tasks": [f"N={n}" for n in (25, 64, 197, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)],
        "metric": "time of sdpa",
        "higher_is_better": False,
        "selection": "none",
        "also": _also("forward time of sdpa"),
        "jobs": 1,
        "options": [
            choice("dtype", ("bfloat16", "float16", "float32"), "type of the tensors"),
            whole("tokens", 2**16, "tokens a call: as many sequences as that takes"),
            whole("heads", 16, "query heads"),
            whole("dim", 64, "features of a head"),
            whole("rounds", 21, "how often each contender takes its turn", 2),
            whole("slice_ms", 20, "milliseconds that a turn lasts", 0),
        ],
    },
}
