"""Suite text/classification: a small BERT from scratch classifies sentences, under transformers' own Trainer.

TREC: which of six kinds of answer a question asks for. SUBJ: whether a sentence is of a review or of a plot. MR:
whether a sentence of a review is positive. TREC has a split of its own, in which 11 of 500 test questions are training
questions too. SUBJ and MR have none: seed s tests fold s of ten, in which sentences with the same words are together. A
tenth of the training sentences, drawn by the seed, chooses the epoch and the learning rate.

CNN-rand of Kim (2014, arXiv 1408.5882, table 2), a convolution whose words are not pretrained either, has 91.2 on TREC,
89.6 on SUBJ and 76.1 on MR. The last two are means over ten folds, which are not ours.
"""

import math
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
import transformers as hf
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import quest_transformers  # noqa: F401  # makes transformers accept the attention
from quest_core.errors import ConfigError, PluginError
from quest_suites.contract import Cell, Progress, Result, Trained, about, over_rates, sweep

Sentences = list[tuple[list[str], str]]
"""Words in lower case, and the class."""

FILES = {
    "TREC": ("qc", "latin-1", ("train.txt", "test.txt")),
    "SUBJ": ("subjectivity", "utf-8", ("plot.tok.gt9.5000", "quote.tok.gt9.5000")),
    "MR": ("sentence_polarity", "utf-8", ("rt-polarity.neg", "rt-polarity.pos")),
}
"""Task -> its archive, the encoding, and the files in it: training and test of TREC, the classes of the others."""
FOLDS = 10
PADDING, UNKNOWN, START = range(3)
HEADS = 4
SMOKE_SENTENCES = 16


def tasks(data: Path) -> dict[str, dict[str, Any]]:
    """Return every task with its archive and, if that cannot be read, the problem in words."""
    if find_spec("accelerate") is None:
        raise PluginError("transformers' Trainer needs accelerate; fix: pip install 'quest-suites[trainer]'")
    found = {}
    for task, (archive, _, _) in FILES.items():
        problem = None
        try:
            read(data, task)
        except (OSError, KeyError, BadZipFile, UnicodeDecodeError) as error:
            problem = (
                f"expected {archive}.zip of nltk_data; found: {error}; fix: git clone --depth 1 "
                "https://github.com/nltk/nltk_data and --data nltk_data/packages/corpora"
            )
        found[task] = {"files": [str(data / f"{archive}.zip")], "problem": problem}
    return found


def read(data: Path, task: str) -> list[Sentences]:
    """Return the sentences of each file of a task."""
    archive, encoding, names = FILES[task]
    with ZipFile(data / f"{archive}.zip") as file:
        texts = [file.read(f"{archive}/{name}").decode(encoding).strip().split("\n") for name in names]
    if task == "TREC":  # a line is "KIND:finer words"
        parts = [[line.partition(" ") for line in lines] for lines in texts]
        return [[(words.lower().split(), label.partition(":")[0]) for label, _, words in part] for part in parts]
    return [[(line.lower().split(), name) for line in lines] for name, lines in zip(names, texts, strict=True)]


def divide(sentences: Sentences, seed: int, fold: int) -> tuple[Sentences, Sentences]:
    """Return the sentences outside and inside one of ten random folds; those that differ only in marks share a fold."""
    keys = [" ".join(re.findall(r"\w+", " ".join(words))) for words, _ in sentences]
    different = sorted(set(keys))
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(seed)).tolist()
    fold_of = {different[i]: place % FOLDS for place, i in enumerate(order)}
    outside = [one for one, key in zip(sentences, keys, strict=True) if fold_of[key] != fold]
    return outside, [one for one, key in zip(sentences, keys, strict=True) if fold_of[key] == fold]


def splits(data: Path, task: str, seed: int) -> list[Sentences]:
    """Return the sentences of training, validation and test."""
    if task == "TREC":
        train, test = read(data, task)
    else:
        if not 0 <= seed < FOLDS:
            raise ConfigError(f"seed is {seed}; a seed of {task} is one of its folds, 0 to {FOLDS - 1}")
        first, second = read(data, task)  # the two classes
        train, test = divide(first + second, seed=0, fold=seed)
    return [*divide(train, seed, fold=0), test]


def encode(parts: Sequence[Sentences]) -> tuple[list[list[dict[str, Any]]], int, int]:
    """Return the inputs of each part, the size of the vocabulary, and the number of classes.

    The vocabulary is the words that the first part has twice or more.
    """
    counts = Counter(word for words, _ in parts[0] for word in words)
    known = sorted(word for word, count in counts.items() if count > 1)
    ids = {word: i for i, word in enumerate(known, START + 1)}
    classes = sorted({label for part in parts for _, label in part})

    def row(words: list[str], label: str) -> dict[str, Any]:
        return {"input_ids": [START, *(ids.get(word, UNKNOWN) for word in words)], "labels": classes.index(label)}

    return [[row(*sentence) for sentence in part] for part in parts], len(ids) + START + 1, len(classes)


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch, padded to its longest sentence."""
    ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True, padding_value=PADDING)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": labels}


def bert(options: dict[str, Any], words: int, longest: int, classes: int) -> "hf.BertConfig":
    """Return the config of a model for `words` words, and sentences of at most `longest`."""
    return hf.BertConfig(
        vocab_size=words,
        hidden_size=options["width"],
        intermediate_size=2 * options["width"],
        num_hidden_layers=options["layers"],
        num_attention_heads=HEADS,
        max_position_embeddings=longest,
        hidden_dropout_prob=options["dropout"],
        attention_probs_dropout_prob=options["dropout"],
        num_labels=classes,
        pad_token_id=PADDING,
    )


def arguments(folder: Path, options: dict[str, Any], rate: float, seed: int, sentences: int) -> "hf.TrainingArguments":
    """Return the arguments of Trainer: it validates after each epoch, and ends with the weights of the best one."""
    return hf.TrainingArguments(
        str(folder),
        num_train_epochs=options["epochs"],
        per_device_train_batch_size=options["batch_size"],
        per_device_eval_batch_size=250,
        learning_rate=rate,
        warmup_steps=math.ceil(sentences / options["batch_size"]) * options["epochs"] // 10,
        weight_decay=0.01,
        eval_strategy="epoch",
        logging_strategy="epoch",
        logging_nan_inf_filter=False,
        save_strategy="epoch",
        save_only_model=True,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        seed=seed,
        data_seed=seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )


def run(cell: Cell, progress: Progress) -> Result:
    """Train one attention with one seed at every learning rate, from the same weights, in the same batches.

    Returns:
        What `over_rates` returns, with series ``train_loss/lr=R`` and ``validation/lr=R`` by epoch. A rate that
        diverges has the accuracy of guessing.
    """
    assert cell.data is not None  # the harness has checked it
    options = dict(cell.options)
    rows, words, classes = encode(splits(cell.data, cell.task, cell.seed))
    if cell.smoke:
        options |= {"epochs": 1, "rates": 2, "width": 16, "layers": 1}
        rows = [part[:SMOKE_SENTENCES] for part in rows]
    train, validation, test = rows
    config = bert(options, words, max(len(row["input_ids"]) for part in rows for row in part), classes)

    def make() -> Any:
        torch.manual_seed(cell.seed)
        return hf.AutoModelForSequenceClassification.from_config(config, attn_implementation=cell.attention)

    def once(rate: float, name: str, progress: Progress) -> Trained:
        folder = cell.workdir / name
        shutil.rmtree(folder, ignore_errors=True)

        class Report(hf.TrainerCallback):
            def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
                text = f"{name} epoch {state.epoch:.0f} validation {metrics['eval_accuracy']:.2f}"
                progress(state.epoch / args.num_train_epochs, text)

        trainer = hf.Trainer(
            make(),
            arguments(folder, options, rate, cell.seed, len(train)),
            data_collator=collate,
            train_dataset=train,
            eval_dataset=validation,
            compute_metrics=lambda found: {"accuracy": 100 * (found[0].argmax(-1) == found[1]).mean()},
            callbacks=[Report()],
        )
        trainer.train()
        log = trainer.state.log_history
        keys = {"train_loss": "loss", "validation": "eval_accuracy"}
        series = {name: [one[key] for one in log if key in one] for name, key in keys.items()}
        if all(map(math.isfinite, series["train_loss"])):
            accuracy = trainer.predict(test).metrics["test_accuracy"]
            found = Trained(accuracy, max(series["validation"]), series)
        else:
            found = Trained(100 / classes, 100 / classes, series, diverged=True)
        shutil.rmtree(folder)
        return found

    result = over_rates(sweep(options["lowest"], options["rates"], once, progress, keep=cell))
    result.details |= {"vocabulary": words, "sentences": [len(train), len(validation), len(test)]}
    result.details |= about(make())
    return result
