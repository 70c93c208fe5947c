"""docs/choosing.md and README.md show the intervals of the reports that they link."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = "https://quest-attention.github.io/quest/"
LINK = re.compile(r"\((results/[^)]*\.md|" + re.escape(SITE) + r"(?:results|start)/[^)]*)\)")
PAIR = re.compile(r"([+−-]?\d+\.?\d*) to ([+−-]?\d+(?:\.\d+)?)")


def pairs(text: str) -> list[tuple[str, str]]:
    return [(low.replace("−", "-"), high.replace("−", "-")) for low, high in PAIR.findall(text)]


def same(shown: tuple[str, str], found: tuple[str, str]) -> bool:
    """Whether an interval is another one, rounded; its ends change places where a smaller metric is better."""

    def near(short: str, long: float) -> bool:
        decimals = len(short.partition(".")[2])
        return abs(float(short) - long) <= 0.5 * 10**-decimals + 1e-9

    low, high = map(float, found)
    return any(near(shown[0], a) and near(shown[1], b) for a, b in ((low, high), (-high, -low)))


def linked(text: str) -> str:
    """Return the text of the pages that a piece of text links, on the site or in docs/."""
    pages = ""
    for link in LINK.findall(text):
        path = DOCS / link.removeprefix(SITE).partition("#")[0]
        found = [path] if path.suffix else [path / "README.md", path.with_name(path.name + ".md")]
        found = [page for page in found if page.is_file()]
        assert found, link
        pages += found[0].read_text()
    return pages


def check(pieces: list[str]) -> int:
    """Check each interval of each piece, against the pages before it if it links none; return how many there are."""
    pages, checked = "", 0
    for piece in pieces:
        pages = linked(piece) or pages
        for shown in pairs(piece):
            assert any(same(shown, found) for found in pairs(pages)), (shown, piece)
            checked += 1
    return checked


def test_choosing_shows_intervals_of_the_linked_reports() -> None:
    rows = [line for line in (DOCS / "choosing.md").read_text().splitlines() if line.startswith("| ")]
    assert check(rows) > 30


def test_readme_shows_intervals_of_the_linked_reports() -> None:
    measured = (ROOT / "README.md").read_text().partition("\nMeasured so far")[2].partition("\n## ")[0]
    bullets = measured.split("\n- ")[1:]
    assert all(pairs(bullet) for bullet in bullets)
    assert check(bullets) > 5
