"""Counts the phrases that our comments, messages and pages avoid, and fails above a bound: python docs/words.py.

Readers are engineers in a hurry, most of them not native speakers. The subject of a sentence is the code object, the
verb says what it does. Lower a bound whenever a count has fallen below it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = {
    # pattern: how often it may occur
    r"\b(?:nobody|somebody|whoever|anybody)\b": 9,
    r"\b(?:tells?|told)\b": 62,
    r"\banew\b": 12,
    r"\b(?:upon which|whereupon)\b": 0,
    r"\w alone\b": 69,
    r"\b(?:is|are) no (?!longer|more|less)\w+": 33,
    r"(?:^|[.:;,\"#(] ?)[Ww]hat (?:the |a |an )?\w+ \w+s\b": 70,
    r", for (?:it|they|its|their|there|which|no|what|his|an?y?|the) ": 18,
    r"\bbeside\b": 48,
}


def main() -> int:
    """Print every pattern that occurs too often, with the places; the exit status is 1 if there is one."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [ROOT / name for name in listed if name.endswith((".py", ".md", ".tmpl")) and "docs/results/" not in name]
    found: Counter[str] = Counter()
    places: dict[str, list[str]] = {}
    for path in files:
        if path == Path(__file__).resolve() or not path.exists():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for pattern in BOUNDS:
                if count := len(re.findall(pattern, line)):
                    found[pattern] += count
                    places.setdefault(pattern, []).append(f"    {path.relative_to(ROOT)}:{number}: {line.strip()}")
    status = 0
    for pattern, bound in BOUNDS.items():
        if found[pattern] > bound:
            status = 1
            print(f"{pattern} occurs {found[pattern]} times, {bound} are allowed (docs/development.md):")
            print("\n".join(places[pattern]))
    print(f"{sum(found.values())} avoided phrases, {sum(BOUNDS.values())} allowed")
    return status


if __name__ == "__main__":
    sys.exit(main())
