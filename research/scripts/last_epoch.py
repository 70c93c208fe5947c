"""Compare the last epochs of the cells in results.parquet, paired by seed, with Holm's correction."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from scipy import stats

cells = pd.read_parquet(Path(__file__).parents[1] / "results" / "handwriting" / "results.parquet")
accuracy = cells.pivot_table(index="seed", columns="attention", values="metric/last_accuracy")  # [seeds, attentions]
print(accuracy.mean().round(2).to_string())
differences = accuracy.drop(columns="standard").sub(accuracy["standard"], axis=0)
tests = {name: stats.ttest_1samp(differences[name], 0) for name in differences}
corrected = 0.0
for rank, name in enumerate(sorted(tests, key=lambda name: tests[name].pvalue)):
    corrected = max(corrected, min(1.0, tests[name].pvalue * (len(tests) - rank)))
    low, high = tests[name].confidence_interval(0.95)
    print(f"{name}: {differences[name].mean():+.2f} ({low:+.2f} to {high:+.2f}), p after Holm {corrected:.3f}")
