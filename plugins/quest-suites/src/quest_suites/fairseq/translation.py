"""Translation of Multi30k, English to German, by fairseq's own preprocessing, training and generation."""

import gzip
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quest_suites.contract import Cell, Progress, Result, observe

from .corpus import JOINT, BytePairs, Lines
from .tasks import SMOKE_LINES, SMOKE_UPDATES, parse, preprocess, train, watching

SOURCE, TARGET = "en", "de"
SPLITS = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
"""fairseq's name of a split -> the data set's."""
OBSERVED = 50
"""Sentences of the validation split whose attention is looked at, one at a time, so that none is padded."""


def run_multi30k(cell: Cell, progress: Progress) -> Result:
    """Train on the 29,000 sentences of Multi30k, translate test_2016_flickr with the best checkpoint in validation.

    Text is in lower case, in the words of sacrebleu's 13a, in byte pairs that both languages share. sacrebleu compares
    the translations with the raw sentences, in lower case too.

    Returns:
        Metrics ``BLEU``, ``validation loss`` (of the checkpoint, with label smoothing, bits a piece), and
        ``largest logit`` and ``entropy`` over all attention; series ``train_loss`` and ``valid_loss``.
    """
    from fairseq import checkpoint_utils
    from sacrebleu.metrics import BLEU
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    assert cell.data is not None  # the harness has checked it
    options, data_bin = cell.options, cell.workdir / "data-bin"
    raw = {
        f"{split}.{language}": read(cell.data / f"{name}.{language}.gz", SMOKE_LINES[split] if cell.smoke else None)
        for split, name in SPLITS.items()
        for language in (SOURCE, TARGET)
    }
    words = Tokenizer13a()
    texts = {name: [words(line.lower()) for line in lines] for name, lines in raw.items()}
    pairs = BytePairs([*texts[f"train.{SOURCE}"], *texts[f"train.{TARGET}"]], options["merges"])
    splits = {name: list(map(pairs.encode, lines)) for name, lines in texts.items()}
    preprocess(data_bin, splits, pair=(SOURCE, TARGET))

    updates = SMOKE_UPDATES if cell.smoke else options["updates"]
    device = [] if torch.cuda.is_available() else ["--cpu"]
    with watching(updates, progress) as series:
        train(parse("training", training(cell, data_bin, updates) + device))

    progress(0.9, "translating")
    checkpoint = cell.workdir / "checkpoints" / "checkpoint_best.pt"
    found, wanted = translate(checkpoint, data_bin, device), raw[f"test.{TARGET}"]
    assert len(found) == len(wanted), f"fairseq translated {len(found)} of {len(wanted)} sentences"
    bleu = BLEU(lowercase=True, force=True)  # 13a leaves its own words as they are, so it need not warn of them
    score = bleu.corpus_score(found, [wanted])
    state = torch.load(checkpoint, map_location="cpu", weights_only=False)
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    return Result(
        metrics={
            "BLEU": score.score,
            "validation loss": float(state["extra_state"]["best"]),
            **look(model, task),
        },
        series=series,
        details={
            "parameters": sum(x.numel() for x in model.parameters()),
            "updates": state["optimizer_history"][-1]["num_updates"],
            "signature": str(bleu.get_signature()),
            "length ratio": score.sys_len / score.ref_len,
            "translations": found[:10],
        },
    )


def read(path: Path, lines: int | None) -> Lines:
    """Return the first `lines` of a text, or all."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.strip() for line in file][:lines]


def training(cell: Cell, data_bin: Path, updates: int) -> list[str]:
    """Return the command line of fairseq-train: a pre-norm Transformer of width 128 with heads of 32 features."""
    options, parts = cell.options, cell.options["parts"]
    layers = 1 if cell.smoke else options["layers"]
    size = " ".join(
        f"--{side}-embed-dim 128 --{side}-ffn-embed-dim 256 --{side}-layers {layers} --{side}-attention-heads 4"
        f" --{side}-normalize-before"
        for side in ("encoder", "decoder")
    )
    given = f"""--task translation --source-lang {SOURCE} --target-lang {TARGET} --seed {cell.seed}
        --arch quest_transformer {size} --share-all-embeddings --dropout {options["dropout"]}
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1
        --optimizer adam --adam-betas (0.9,0.98) --clip-norm 1
        --lr {options["lr"]} --lr-scheduler cosine --warmup-updates {updates // 10} --max-update {updates}
        --max-tokens {options["max_tokens"]} --required-batch-size-multiple 1 --num-workers 0
        --no-epoch-checkpoints --no-last-checkpoints
        --no-progress-bar --log-format json --log-interval {1 if cell.smoke else 50}"""
    within = "standard" if parts == "cross" else cell.attention
    between = "standard" if parts == "self" else cell.attention
    attention = ["--attention", within, "--attention-cross", between]
    return [str(data_bin), "--save-dir", str(cell.workdir / "checkpoints"), *given.split(), *attention]


def translate(checkpoint: Path, data_bin: Path, device: list[str]) -> Lines:
    """fairseq-generate: return the translations of the test split, in its order, without the marks of byte pairs."""
    from fairseq_cli.generate import main

    # With the default multiple of 8, fairseq drops the last batch if it is not full.
    fixed = "--gen-subset test --beam 5 --max-len-a 1.2 --max-len-b 10 --batch-size 64 --required-batch-size-multiple 1"
    places = [str(data_bin), "--path", str(checkpoint), "--results-path", str(checkpoint.parent)]
    given = [*places, *fixed.split(), "--post-process", f"{JOINT} ", "--num-workers", "0", "--no-progress-bar", *device]
    main(parse("generation", given))
    written = (checkpoint.parent / "generate-test.txt").read_text(encoding="utf-8")
    fields = [line[2:].split("\t") for line in written.splitlines() if line.startswith("H-")]
    return [text for _, text in sorted((int(number), text) for number, _, text in fields)]


def look(model: nn.Module, task: Any) -> dict[str, float]:
    """Return the largest logit and the mean entropy of a model's attention on validation sentences."""
    task.load_dataset("valid")
    split = task.dataset("valid")
    seen = []
    for index in range(min(OBSERVED, len(split))):
        inputs = split.collater([split[index]])["net_input"]
        seen.append(observe(model, inputs["src_tokens"], inputs["src_lengths"], inputs["prev_output_tokens"]))
    return {
        "largest logit": max(one["max_logit"] for one in seen),
        "entropy": statistics.fmean(one["entropy"] for one in seen),
    }
