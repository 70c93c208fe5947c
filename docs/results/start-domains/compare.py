"""Compare QUEST with a start to QUEST as printed in every domain, paired by seed; Holm's method over all rows.

    python docs/results/start-domains/compare.py    # in a clone, with quest-bench installed

It reads the committed results.parquet of each report and prints a Markdown table. Positive is better.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from scipy import stats

RESULTS = Path(__file__).resolve().parent.parent
START, PRINTED = "quest(init=12.0)", "quest"
DOMAINS = {  # folder -> its title, metric, and 1 where higher is better
    "start-images": ("Fashion-MNIST, ViT of width 64, %", "metric/accuracy", 1),
    "handwriting": ("Handwriting, epoch of the validation split, %", "metric/accuracy", 1),
    "start-points": ("generated scenes, Point Transformer V3, mIoU in %", "metric/miou", 1),
    "start-toy": ("toy with a shortcut, % of models", "metric/success_rate", 1),
    "start-bytes": ("bytes of Python's documentation, small Llama, perplexity", "metric/perplexity", -1),
    "start-text": ("words of Python's documentation, fairseq, perplexity", "metric/perplexity", -1),
}


def main() -> None:
    rows = []
    for folder, (title, metric, sign) in DOMAINS.items():
        cells = pd.read_parquet(RESULTS / folder / "results.parquet")
        for task, own in cells.groupby("task"):
            by_seed = own.pivot_table(index="seed", columns="attention", values=metric)  # [seeds, attentions]
            pairs = by_seed[[PRINTED, START]].dropna()
            test = stats.ttest_1samp(sign * (pairs[START] - pairs[PRINTED]), 0)
            name = f"[{title}](../{folder}/report.md)" + (f", {task}" if "lr=" in task else "")
            rows.append((name, len(pairs), pairs[PRINTED].mean(), pairs[START].mean(), test))
    ranks = sorted(range(len(rows)), key=lambda i: rows[i][4].pvalue)
    corrected, largest = {}, 0.0
    for rank, i in enumerate(ranks):
        corrected[i] = largest = max(largest, min(1.0, rows[i][4].pvalue * (len(rows) - rank)))
    print(f"| task | seeds | `quest` | `quest(init=12)` | gain, paired | 95 % | p, Holm over these {len(rows)} |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for i, (name, seeds, printed, start, test) in enumerate(rows):
        low, high = test.confidence_interval(0.95)
        digits = 2 if abs(low) > 0.3 else 3
        gain, low, high = (f"{value:+.{digits}f}".replace("-", "−") for value in ((low + high) / 2, low, high))
        print(
            f"| {name} | {seeds} | {printed:.{digits}f} | {start:.{digits}f} | {gain} | {low} to {high} "
            f"| {'<0.001' if corrected[i] < 0.001 else f'{corrected[i]:.3f}'} |"
        )


if __name__ == "__main__":
    main()
