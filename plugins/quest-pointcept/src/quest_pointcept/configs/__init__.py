"""Configurations of Pointcept with another attention: its own file as `_base_`, and three lines.

Their base is a file in the same folder, so `install_configs` copies them into a checkout's configs/ folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from quest_core.errors import ConfigError

HERE = Path(__file__).parent


def install_configs(root: Path) -> list[Path]:
    """Copy every configuration into the folder of its base in a checkout of Pointcept; return the new paths.

    Raises:
        ConfigError: `root` is not a checkout, or lacks a base.
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
