"""Compare QUEST with a start to other attentions in every domain, paired by seed.

    python research/scripts/start_domains.py    # in a clone, with quest-bench installed

It reads the committed results.parquet of each report and prints three Markdown tables. Positive is better. Holm's
method corrects all comparisons of a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from scipy import stats

SITE = "https://quest-attention.github.io/quest/results/"
RESULTS = Path(__file__).resolve().parents[1] / "results"
START, PRINTED = "quest(init=12.0)", "quest"
DOMAINS = {  # folder -> its title, metric, and 1 where higher is better
    "start-images": ("Fashion-MNIST, ViT of width 64, %", "metric/accuracy", 1),
    "start-cifar": ("CIFAR-10, the same ViT, %", "metric/accuracy", 1),
    "handwriting": ("Handwriting, epoch of the validation split, %", "metric/accuracy", 1),
    "start-vowels": ("JapaneseVowels, epoch of the validation split, %", "metric/accuracy", 1),
    "start-pattern": ("PATTERN, GPS, %", "metric/accuracy", 1),
    "start-shapes": ("generated scenes, Segmenter, mIoU in %", "metric/mIoU", 1),
    "start-points": ("generated scenes, Point Transformer V3, mIoU in %", "metric/miou", 1),
    "start-toy": ("toy with a shortcut, % of models", "metric/success_rate", 1),
    "start-bytes": ("bytes of Python's documentation, small Llama, perplexity", "metric/perplexity", -1),
    "start-text": ("words of Python's documentation, fairseq, perplexity", "metric/perplexity", -1),
}
RATES = {  # a metric of stability -> its title
    "accuracy": "mean accuracy over five rates from 0.001 to 0.1, %",
    "best accuracy": "accuracy at the rate that validation chooses, %",
    "range": "decades of rates within 1 point of the best",
}


class Pair(NamedTuple):
    """One comparison with another attention."""

    seeds: int
    other: float
    start: float
    test: Any
    """scipy's, of start − other by seed, positive where the start is better."""


def compare(by_seed: pd.DataFrame, other: str, sign: int = 1) -> Pair | None:
    """Compare the columns START and `other` of a table [seeds, attentions]; None where either is missing."""
    if not {other, START} <= set(by_seed):
        return None
    pairs = by_seed[[other, START]].dropna()
    test = stats.ttest_1samp(sign * (pairs[START] - pairs[other]), 0)
    return Pair(len(pairs), pairs[other].mean(), pairs[START].mean(), test)


def domains() -> Iterator[tuple[str, int, pd.DataFrame]]:
    """Yield each task's title, sign and table [seeds, attentions] of its metric."""
    for folder, (title, metric, sign) in DOMAINS.items():
        cells = pd.read_parquet(RESULTS / folder / "results.parquet")
        for task, own in cells.groupby("task"):
            name = f"[{title}]({SITE}{folder}/report/)" + (f", {task}" if "lr=" in task else "")
            yield name, sign, own.pivot_table(index="seed", columns="attention", values=metric)


def corrected(pairs: list[Pair | None]) -> list[float]:
    """Return each p-value after Holm's method over all of them, 1 where a comparison is missing."""
    known = sorted((pair.test.pvalue, place) for place, pair in enumerate(pairs) if pair)
    found, largest = [1.0] * len(pairs), 0.0
    for rank, (value, place) in enumerate(known):
        found[place] = largest = max(largest, min(1.0, value * (len(known) - rank)))
    return found


def interval(pair: Pair) -> tuple[str, str, str]:
    """Return the gain and its two ends as text."""
    low, high = pair.test.confidence_interval(0.95)
    digits = 2 if abs(low) > 0.3 else 3
    gain, low, high = (f"{value:+.{digits}f}".replace("-", "−") for value in ((low + high) / 2, low, high))
    return gain, low, high


def versus(others: list[str], rows: list[tuple[str, int, pd.DataFrame]]) -> None:
    """Print one row for each title, sign and table [seeds, attentions], and one column for each of `others`."""
    pairs = {(title, other): compare(table, other, sign) for title, sign, table in rows for other in others}
    values = dict(zip(pairs, corrected(list(pairs.values())), strict=True))
    print("| task | " + " | ".join(f"against `{other}`" for other in others) + " |")
    print("|---|" + "---:|" * len(others))
    for title, *_ in rows:
        shown = []
        for other in others:
            marked = "**" if values[title, other] < 0.05 else ""
            pair = pairs[title, other]
            gain, low, high = interval(pair) if pair else ("–", "", "")
            shown.append(f"{marked}{gain} ({low} to {high}){marked}" if pair else gain)
        print(f"| {title} | " + " | ".join(shown) + " |")
    print(f"\n{sum(pair is not None for pair in pairs.values())} comparisons.")


def main() -> None:
    tasks = list(domains())
    printed = [(name, pair) for name, sign, table in tasks if (pair := compare(table, PRINTED, sign))]
    values = corrected([pair for _, pair in printed])
    print(f"| task | seeds | `quest` | `quest(init=12)` | gain, paired | 95 % | p, Holm over these {len(printed)} |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for (name, pair), value in zip(printed, values, strict=True):
        gain, low, high = interval(pair)
        digits = len(gain.partition(".")[2])
        print(
            f"| {name} | {pair.seeds} | {pair.other:.{digits}f} | {pair.start:.{digits}f} | {gain} | {low} to {high} "
            f"| {'<0.001' if value < 0.001 else f'{value:.3f}'} |"
        )
    print("\n## Against standard attention and QK norms\n")
    versus(["standard", "qknorm-hs", "qknorm-ds"], tasks)
    print("\n## Over learning rates\n")
    cells = pd.read_parquet(RESULTS / "stability" / "results.parquet")
    tables = [(name, 1, cells.pivot_table("metric/" + metric, "seed", "attention")) for metric, name in RATES.items()]
    versus(["standard", PRINTED, "qknorm-hs"], tables)


if __name__ == "__main__":
    main()
