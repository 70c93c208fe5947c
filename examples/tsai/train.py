"""QUEST attention in tsai's own trainer, on JapaneseVowels: nine speakers, 12 features, 7 to 29 time steps.

python examples/tsai/train.py --attention quest --epochs 10
python examples/tsai/train.py --attention "quest(init=12)"  # queries start at norm 12; null is the paper's
"""

from __future__ import annotations

import argparse
from pathlib import Path

import aeon
import numpy as np
from aeon.datasets import load_from_ts_file
from tsai.basics import TSClassification, TSClassifier

import quest_tsai  # noqa: F401  # from here on tsai's architectures accept attention=


def japanese_vowels() -> tuple[np.ndarray, np.ndarray, tuple[list[int], list[int]]]:
    """Series [640, 12, 29] padded with NaN, which TSTPlus masks; labels; indices of training and test series."""
    folder = Path(aeon.__file__).parent / "datasets" / "data" / "JapaneseVowels"
    parts = [load_from_ts_file(str(folder / f"JapaneseVowels_{split}.ts")) for split in ("TRAIN", "TEST")]
    series = [np.asarray(one) for read, _ in parts for one in read]
    x = np.full((len(series), 12, max(one.shape[1] for one in series)), np.nan, dtype=np.float32)
    for row, one in zip(x, series, strict=True):
        row[:, : one.shape[1]] = one
    n = len(parts[0][0])
    of_training = x[:n]
    mean, deviation = np.nanmean(of_training, (0, 2), keepdims=True), np.nanstd(of_training, (0, 2), keepdims=True)
    labels = np.concatenate([y for _, y in parts])
    return (x - mean) / deviation, labels, (list(range(n)), list(range(n, len(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="quest", help="a name: standard, quest, 'quest+gqa(kv_heads=4)'")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    x, y, splits = japanese_vowels()
    learn = TSClassifier(
        x,
        y,
        splits=splits,
        tfms=[None, TSClassification()],
        bs=16,
        arch="TSTPlus",
        arch_config={"attention": options.attention, "n_heads": 8, "dropout": 0.1},
        seed=options.seed,
    )
    with learn.no_bar():
        learn.fit_one_cycle(options.epochs, 1e-3)
    print(f"{options.attention}: accuracy {100 * learn.recorder.values[-1][-1]:.2f} % on the test series")


if __name__ == "__main__":
    main()
