"""Configurations of Pointcept with another attention: its own file as `_base_`, three lines, and a start in a comment.

Their base is a file in the same folder, so `install_configs` copies them into a checkout's configs/ folder.
"""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

from quest_core.errors import ConfigError

HERE = Path(__file__).parent


def install_configs(root: Path, *, force: bool = False) -> list[Path]:
    """Copy every configuration into the folder of its base in a checkout of Pointcept; return their paths there.

    If one file cannot be copied, for example because the disk is full, none changes. A file is never torn.

    Args:
        root: the checkout.
        force: overwrite files that differ.

    Raises:
        ConfigError: `root` is not a checkout, lacks a base, or has an edited file and `force` is false.
    """
    pairs = {path: root / "configs" / path.parent.name / path.name for path in sorted(HERE.glob("*/*.py"))}
    for source, target in pairs.items():
        for base in _bases(source):
            if not (target.parent / base).is_file():
                raise ConfigError(
                    f"{root} has no {target.parent.relative_to(root) / base}; is it Pointcept's checkout?"
                )
    edited = [to for source, to in pairs.items() if to.exists() and to.read_bytes() != source.read_bytes()]
    if edited and not force:
        listed = ", ".join(str(path.relative_to(root)) for path in edited)
        raise ConfigError(f"{listed} differ from this plugin's files; rename them, or overwrite them with --force")
    copies = {target: target.with_name(f".{target.name}.new") for target in pairs.values()}
    try:
        for source, target in pairs.items():
            shutil.copyfile(source, copies[target])
        for target, copy in copies.items():
            copy.replace(target)
    finally:
        for copy in copies.values():
            copy.unlink(missing_ok=True)
    return list(copies)


def _bases(path: Path) -> list[str]:
    """Return the `_base_` of a configuration without running it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_base_":
            bases: list[str] = ast.literal_eval(node.value)
            return bases
    raise ConfigError(f"{path} has no _base_")
