"""Distributions as pip would install them, written into a folder on sys.path."""

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

ADAPTER = """
from quest_core import Adapter

class HostAdapter(Adapter):
    name = "{name}"
    def sites(self, model): return []
    def replace(self, site, config): raise AssertionError
    def install(self): pass
"""

COSINE = """
from quest_core import Score, register
from quest_core.ops import unit

@register("{name}", source="a test")
class Cosine10(Score):
    "10 cos(q, k)."

    factor = 10.0
    def query(self, q): return unit(q)
    def key(self, k): return unit(k)
"""


def write_distribution(
    folder: Path,
    distribution: str,
    files: Mapping[str, str],
    entry_points: Mapping[str, Mapping[str, str]],
    requires: tuple[str, ...] = (),
) -> None:
    """Write modules and the metadata that declares them.

    Args:
        folder: on sys.path.
        distribution: its name; the version is 1.2.
        files: path below `folder` -> source.
        entry_points: group -> name -> value.
        requires: requirements; the extras that they name are declared.
    """
    for path, source in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(source))
    extras = sorted(set(re.findall(r"extra == ['\"]([\w-]+)['\"]", " ".join(requires))))
    lines = [
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\nSummary: of a test",
        *(f"Requires-Dist: {text}" for text in requires),
        *(f"Provides-Extra: {extra}" for extra in extras),
    ]
    meta = folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text("\n".join(lines) + "\n")
    sections = (
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in entry_points.items()
    )
    (meta / "entry_points.txt").write_text("".join(sections))
