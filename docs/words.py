"""Finds the phrases that our comments, messages and pages avoid, and fails if there is one: python docs/words.py.

Readers are engineers in a hurry, most of them not native speakers. The subject of a sentence is the code object, the
verb says what it does.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AVOIDED = (
    r"\b(?:nobody|somebody|whoever|anybody)\b",
    r"\b(?:tells?|told)\b",
    r"\banew\b",
    r"\b(?:upon which|whereupon)\b",
    r"\w alone\b",
    r"\b(?:is|are) no (?!longer|more|less)\w+",
    r"(?:^|[.:;,\"#(] ?)[Ww]hat (?:the |a |an )?\w+ \w+s\b",
    r", for (?:it|they|its|their|there|which|no|what|his|an?y?|the) ",
    r"\bbeside\b",
)


def main() -> int:
    """Print every place of an avoided phrase; the exit status is 1 if there is one."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ours = (name for name in listed if not name.startswith("research/results/"))
    files = [ROOT / name for name in ours if name.endswith((".py", ".md", ".tmpl"))]
    found = 0
    for path in files:
        if path == Path(__file__).resolve() or not path.exists():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for phrase in (match.group() for pattern in AVOIDED for match in re.finditer(pattern, line)):
                found += 1
                print(f"{path.relative_to(ROOT)}:{number}: '{phrase.strip()}' in: {line.strip()}")
    print(f"{found} avoided phrases (docs/development.md)")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
