"""python -m quest_pointcept ROOT: copy this plugin's configurations into a checkout of Pointcept."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quest_core.errors import QuestError

from .configs import install_configs

parser = argparse.ArgumentParser(prog="python -m quest_pointcept", description=__doc__)
parser.add_argument("root", type=Path, help="a checkout of Pointcept; files go into its configs/ folder")
parser.add_argument("--force", action="store_true", help="overwrite files of the same name that were edited")
try:
    print(*install_configs(**vars(parser.parse_args())), sep="\n")
except QuestError as error:
    sys.exit(f"quest-pointcept: {error}")
