"""Put the combinations of precision, depth and warm-up side by side, and average over them.

    python research/scripts/stability.py    # in a clone, with quest-bench installed

It reads the committed results.parquet of each report and prints Markdown tables of paired differences from standard
attention: one for each metric, and one of ten other seeds; then the largest logits. The mean of a seed over
combinations is one value. Holm's method corrects all means of the tables by metric, those of the other seeds, and those
of QK-clip's table. Single combinations are tested in their own reports.
"""

from pathlib import Path

import pandas as pd

from quest_bench.stats import Comparison, compare, correct, write_p

SITE = "https://quest-attention.github.io/quest/results/"
HERE = Path(__file__).resolve().parents[1] / "results" / "stability"
OTHERS = {"quest": "quest", "quest(init=12)": "quest(init=12.0)", "qknorm-hs": "qknorm-hs"}  # as written -> as stored
METRICS = {
    "best accuracy": "accuracy at the rate that validation chooses, %",
    "accuracy": "mean accuracy over the five rates, %",
    "range": "decades of rates within 1 point of the best",
}
COMBINATIONS = {
    f"{precision}, {blocks} blocks{', warm-up' * warm}": "-".join(
        ["warmup"] * warm + ["depth"] * (blocks == 12) + [precision] * (precision != "float32")
    )
    for precision in ("float32", "bfloat16", "float16")
    for blocks in (4, 12)
    for warm in (False, True)
}

NEW = {"float32, 4 blocks": "confirm", "float32, 4 blocks, warm-up": "warmup/confirm"}  # reports on other seeds


def differences(folder: str, metric: str) -> pd.DataFrame:
    """Return a table [seeds, attentions]: standard itself, and the others minus standard."""
    cells = pd.read_parquet(HERE / folder / "results.parquet")
    table = cells.pivot_table(f"metric/{metric}", "seed", "attention")
    others = [name for name in OTHERS.values() if name in table]
    return table[others].sub(table["standard"], axis=0).assign(standard=table["standard"])


def compared(values: pd.Series) -> Comparison:
    """Compare one attention's differences from standard, by seed, with nothing."""
    given = values.to_dict()
    return compare(given, dict.fromkeys(given, 0.0), higher_is_better=True)


def shown(found: Comparison) -> str:
    """Return a difference and its 95 % interval as text."""
    three = (found.difference.mean, found.difference.low, found.difference.high)
    mean, low, high = (f"{round(x, 1) + 0.0:.1f}".replace("-", "−") for x in three)  # + 0.0: no "−0.0"
    return f"{'' if mean.startswith('−') else '+'}{mean} ({low} to {high})"


def averaged(folders: list[str], keys: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return for each metric and attention its mean over folders, with p, in bold where it is significant."""
    tables = {metric: sum(differences(folder, metric) for folder in folders) / len(folders) for metric, _ in keys}
    tested = correct([compared(tables[metric][name]) for metric, name in keys])
    texts = [f"{shown(found)}, p = {write_p(found.adjusted)}" for found in tested]
    bold = [f"**{text}**" if found.adjusted < 0.05 else text for text, found in zip(texts, tested, strict=True)]
    base = {(metric, "standard"): f"{table['standard'].mean():.1f}" for metric, table in tables.items()}
    return dict(zip(keys, bold, strict=True)) | base


def link(name: str, folder: str) -> str:
    return f"[{name}]({SITE}{'/'.join(filter(None, ['stability', folder]))}/report/)"


def clipping() -> None:
    """Print QK-clip, quest and QK norms at the two largest rates: accuracy minus standard, and logits in training."""
    read = {name: pd.read_parquet(HERE / name / "results.parquet").set_index("seed") for name in ("logits", "qk-clip")}
    cells = dict(iter(read["logits"].groupby("attention")))
    cells = {"standard": cells["standard"], "standard, QK-clip": read["qk-clip"]} | {
        name: cells[name] for name in ("quest", "qknorm-hs")
    }
    rates = ["0.032", "0.1"]
    accuracy = {name: own[[f"metric/accuracy/lr={rate}" for rate in rates]] for name, own in cells.items()}
    base = accuracy.pop("standard")
    print(
        "| | `standard` | "
        + " | ".join(f"`{name}`".replace(", QK-clip`", "` with QK-clip") for name in accuracy)
        + " |"
    )
    print("|---|---:|" + "---:|" * len(accuracy))
    for rate, column in zip(rates, base, strict=True):
        row = [shown(compared(own[column] - base[column])) for own in accuracy.values()]
        print(f"| accuracy at {rate}, % | {base[column].mean():.1f} | " + " | ".join(row) + " |")
    tested = correct([compared((own - base).mean(axis=1)) for own in accuracy.values()])
    row = [f"{shown(found)}, p = {write_p(found.adjusted)}" for found in tested]
    print(f"| mean of both | {base.to_numpy().mean():.1f} | " + " | ".join(row) + " |")
    for rate in rates:
        tops = [own[f"series/training_logit/lr={rate}"].map(max) for own in cells.values()]
        print(
            f"| largest logit at {rate} | " + " | ".join(f"{top.min():,.0f} to {top.max():,.0f}" for top in tops) + " |"
        )


def main() -> None:
    names = {name: folder for name, folder in COMBINATIONS.items() if (HERE / folder / "results.parquet").exists()}
    full = [folder for name, folder in names.items() if "float16" not in name.split(", ")]
    means = averaged(full, [(metric, name) for metric in METRICS for name in OTHERS.values()])
    for metric, title in METRICS.items():
        print(f"| {title} | `standard` | " + " | ".join(f"`{name}`" for name in OTHERS) + " |")
        print("|---|---:|" + "---:|" * len(OTHERS))
        for name, folder in names.items():
            table = differences(folder, metric)
            row = [shown(compared(table[key])) if key in table else "–" for key in OTHERS.values()]
            print(f"| {link(name, folder)} | {table['standard'].mean():.1f} | " + " | ".join(row) + " |")
        row = [means[metric, key] for key in ("standard", *OTHERS.values())]
        print(f"| mean of the {len(full)} in float32 and bfloat16 | " + " | ".join(row) + " |\n")

    tested = list(METRICS)[:2]
    print("| ten other seeds, `quest` | " + " | ".join(METRICS[metric] for metric in tested) + " |")
    print("|---|---:|---:|")
    for name, folder in NEW.items():
        row = [shown(compared(differences(folder, metric)["quest"])) for metric in tested]
        print(f"| {link(name, folder)} | " + " | ".join(row) + " |")
    again = averaged(list(NEW.values()), [(metric, "quest") for metric in tested])
    print("| mean of both | " + " | ".join(again[metric, "quest"] for metric in tested) + " |\n")

    print("| largest logit at 0.1, after training | `standard` | " + " | ".join(f"`{name}`" for name in OTHERS) + " |")
    print("|---|---:|" + "---:|" * len(OTHERS))
    for name, folder in names.items():
        cells = pd.read_parquet(HERE / folder / "results.parquet")
        found = cells["series/max_logit/lr=0.1"].str[-1].groupby(cells["attention"]).mean()
        row = [f"{found[key]:.0f}" if key in found else "–" for key in ("standard", *OTHERS.values())]
        print(f"| {link(name, folder)} | " + " | ".join(row) + " |")
    print()
    clipping()


if __name__ == "__main__":
    main()
