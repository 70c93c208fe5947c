"""The suites of this plugin as data."""

from typing import Any

from quest_suites.declaring import number, timing_suite, whole

SUITES: dict[str, dict[str, Any]] = {
    "transformers/bytes-lm": {
        "summary": "a decoder of four layers predicts the bytes of Python's own documentation",
        "tasks": ["gpt2", "llama"],
        "heads": 4,
        "metric": "perplexity",
        "selection": "last",
        "higher_is_better": False,
        "options": [
            whole("steps", 800, "training steps"),
            number("lr", 0.003, "highest learning rate of AdamW"),
            whole("width", 64, "features of a token", 4),
        ],
    },
    "text/classification": {
        "summary": "a small BERT from scratch classifies sentences, under transformers' Trainer; seed s is fold s of "
        "SUBJ and MR, and a tenth of the training sentences chooses the epoch and the rate",
        "tasks": ["TREC", "SUBJ", "MR"],
        "heads": 4,
        "metric": "best accuracy",
        "unit": "%",
        "selection": "validation",
        "tasks_from_data": "quest_suites.transformers.classification:tasks",
        "data": "the folder packages/corpora of: git clone --depth 1 https://github.com/nltk/nltk_data",
        "data_required": True,
        "options": [
            whole("epochs", 4, "epochs of training"),
            whole("batch_size", 50, "sentences a training step"),
            whole("rates", 3, "learning rates, half a decade apart"),
            number("lowest", 0.0005, "lowest of them, of AdamW"),
            whole("width", 64, "features of a token; 4 heads divide them", 4),
            whole("layers", 2, "layers of the encoder"),
            number("dropout", 0.1, "share of activations and of attention weights that are dropped"),
        ],
    },
    "time/transformers": timing_suite(
        "a training step of small models, and decoding with a full cache, against transformers' own sdpa",
        ["bert", "roberta", "vit", "gpt2", "llama", "qwen3", "mistral", "bart", "t5", "decode-mha", "decode-gqa"],
        12,
        least=True,
    ),
}
