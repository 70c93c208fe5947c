"""Print the tables of README.md from the results.parquet of a `quest bench` folder.

python research/results/training-step/tables.py runs/training-step
"""

import sys
from pathlib import Path

import pandas as pd

cells = pd.read_parquet(Path(sys.argv[1]) / "results.parquet")
cells = cells[cells["state"] == "done"]
for title, decodes in (("Training step", False), ("Decoding", True)):
    print(f"## {title}\n\n| suite | task | stock, ms | `standard` | `quest` |\n|---|---|---:|---|---|")
    chosen = cells[cells["task"].str.startswith("decode-") == decodes]
    for (suite, task), rows in chosen.groupby(["suite", "task"], sort=False):
        columns = [f"{1e3 * rows['metric/stock seconds'].median():.1f}"]
        for attention in ("standard", "quest"):
            row = rows[rows["attention"] == attention].iloc[0]
            low, middle, high = pd.Series(list(row["series/ratio"])).quantile([0.25, 0.5, 0.75])
            columns.append(f"{row['metric/least time of stock']:.3f} ({middle:.3f}; {low:.3f} to {high:.3f})")
        print(f"| {suite} | {task} | {' | '.join(columns)} |")
    print()
