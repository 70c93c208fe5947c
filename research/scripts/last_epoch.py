"""Compare the last epochs of the cells in results.parquet, paired by seed, with Holm's correction."""

from pathlib import Path

import pandas as pd

from quest_bench.stats import compare, correct

cells = pd.read_parquet(Path(__file__).parents[1] / "results" / "handwriting" / "results.parquet")
accuracy = cells.pivot_table(index="seed", columns="attention", values="metric/last_accuracy")  # [seeds, attentions]
print(accuracy.mean().round(2).to_string())
others = list(accuracy.columns.drop("standard"))
for name, found in zip(
    others, correct([compare(accuracy[n], accuracy["standard"], True) for n in others]), strict=True
):
    gap = found.difference
    print(f"{name}: {gap.mean:+.2f} ({gap.low:+.2f} to {gap.high:+.2f}), p after Holm {found.adjusted:.3f}")
