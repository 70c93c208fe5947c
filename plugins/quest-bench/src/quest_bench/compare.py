"""Two runs of one grid, compared row by row: what a change did."""

import json
import math
from pathlib import Path

from rich.table import Table
from rich.text import Text

from quest_core.errors import ConfigError

from .groups import Group, Row, interval, number, read_groups, with_sign
from .stats import compare, correct, estimate, verdict
from .worker import encode


def compare_runs(first: Path, second: Path) -> Table:
    """Compare each row of `second` with the same row of `first`.

    Returns:
        A table, whose means cover the seeds that are finite in both.
    """
    sides = []
    for folder in (first, second):
        groups = read_groups(folder, "standard")
        sides.append({_key(group, row): (group, row) for group in groups for row in group.rows})
    before, after = sides
    shared = [key for key in before if key in after]
    if not shared:
        raise ConfigError(f"{first} and {second} have no task, option values and attention in common")
    found = correct(
        [compare(after[key][1].values, before[key][1].values, after[key][0].suite.higher_is_better) for key in shared]
    )
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("task", "attention", "seeds", str(first), str(second), "difference, paired", "in words"):
        table.add_column(Text(heading), overflow="fold")  # a folder may be called a[b]
    for key, one in zip(shared, found, strict=True):
        (group, old), (_, new) = before[key], after[key]
        gap = f"{with_sign(one.difference.mean)} [{interval(one.difference, signs=True)}]"
        both = [seed for seed in old.values if math.isfinite(old.values[seed] - new.values.get(seed, math.nan))]
        means = [number(estimate([row.values[seed] for seed in both]).mean) for row in (old, new)]
        cells = (group.title, new.attention, str(one.seeds), *means, gap)
        table.add_row(*map(Text, (*cells, verdict(one, str(first)))))
    return table


def _key(group: Group, row: Row) -> str:
    spec = group.cells[0].spec
    same = [spec["suite"], spec["task"], spec["smoke"], spec["data"], spec["options"], group.suite.metric]
    return json.dumps(encode([*same, row.attention]), sort_keys=True)
