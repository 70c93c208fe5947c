"""python -m quest_graphgps main.py --cfg pattern.yaml: GraphGPS's own main.py, in which `attention` works.

The same as ``quest run --host graphgps -- python main.py --cfg pattern.yaml``.
"""

from __future__ import annotations

import sys

from quest_core.errors import QuestError
from quest_core.hosts.launching import run

USAGE = """usage: python -m quest_graphgps main.py --cfg FILE [KEY VALUE ...]

Runs main.py of GraphGPS (or your own GraphGym main) with QUEST's plugin installed, in this process and in every
Python process that it starts. All arguments are those of main.py. For example, in a checkout of GraphGPS:

  python -m quest_graphgps main.py --cfg configs/GPS/zinc-GPS+RWSE.yaml gt.attention quest
  python -m quest_graphgps main.py --cfg configs/GPS/zinc-GPS+RWSE.yaml gt.layer_type GINE+Quest wandb.use False
  python -m quest_graphgps main.py --cfg configs/GPS/zinc-GPS+RWSE.yaml gt.attention quest gt.quest.kv_heads 2

quest list shows every attention."""


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(USAGE)
        return 0 if len(sys.argv) > 1 else 2
    try:
        run(sys.argv[1:], hosts=["graphgps"])
    except QuestError as error:
        print(f"quest_graphgps: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
