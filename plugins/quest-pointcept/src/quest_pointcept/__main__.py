"""python -m quest_pointcept ROOT: copy this plugin's configurations into a checkout of Pointcept."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quest_core.errors import QuestError

from .configs import install_configs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m quest_pointcept", description=__doc__)
    parser.add_argument("root", type=Path, help="a checkout of Pointcept; files go into its configs/ folder")
    parser.add_argument("--force", action="store_true", help="overwrite files of the same name that were edited")
    given = parser.parse_args()
    try:
        for path in install_configs(given.root, force=given.force):
            print(path)
    except QuestError as error:
        print(f"quest-pointcept: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
