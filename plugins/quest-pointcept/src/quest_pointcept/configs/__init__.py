"""Configurations of Pointcept with another attention: its own file as `_base_`, and three lines.

They name their base as a neighbour, so they belong into a checkout's configs/ folder; `install_configs` copies them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from quest_core.errors import ConfigError

HERE = Path(__file__).parent


def install_configs(root: Path) -> list[Path]:
    """Copy every configuration beside its base in a checkout of Pointcept; returns where they lie.

    Raises:
        ConfigError: `root` is no checkout, or lacks a base.
    """
    made: list[Path] = []
    for path in sorted(HERE.glob("*/*.py")):
        target = root / "configs" / path.parent.name / path.name
        scope: dict[str, object] = {}
        exec(compile(path.read_text(), path, "exec"), scope)
        for base in scope["_base_"]:  # type: ignore[attr-defined]
            if not (target.parent / base).is_file():
                raise ConfigError(
                    f"{root} has no {target.parent.relative_to(root) / base}; is it Pointcept's checkout?"
                )
        made.append(target)
    for target in made:
        shutil.copyfile(HERE / target.parent.name / target.name, target)
    return made
