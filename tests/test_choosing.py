"""docs/choosing.md shows the intervals of the reports that it links."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAIR = re.compile(r"([+−-]?[\d.]+) to ([+−-]?[\d.]+)")


def pairs(text: str) -> list[tuple[str, str]]:
    return [(low.replace("−", "-"), high.replace("−", "-")) for low, high in PAIR.findall(text)]


def same(shown: tuple[str, str], found: tuple[str, str]) -> bool:
    """Whether an interval is another one, rounded; its ends change places where a smaller metric is better."""

    def near(short: str, long: float) -> bool:
        decimals = len(short.partition(".")[2])
        return abs(float(short) - long) <= 0.5 * 10**-decimals + 1e-9

    low, high = map(float, found)
    return any(near(shown[0], a) and near(shown[1], b) for a, b in ((low, high), (-high, -low)))


def test_intervals_are_those_of_the_linked_reports() -> None:
    page = (DOCS / "choosing.md").read_text()
    rows = [line for line in page.partition("| task, each")[2].split("\n\n")[0].splitlines() if line.startswith("| ")]
    report, checked = "", 0
    for row in rows:
        link = re.search(r"\((results/[^)]*\.md)\)", row)
        report = (DOCS / link[1]).read_text() if link else report
        for shown in pairs(row):
            assert any(same(shown, found) for found in pairs(report)), (shown, row)
            checked += 1
    assert checked > 20
