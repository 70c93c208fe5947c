"""usage: python -m quest_graphgps main.py --cfg FILE [KEY VALUE ...]

Runs main.py of GraphGPS (or your own GraphGym main) with QUEST's plugin installed, in this process and in every Python
process that it starts, as ``quest run --host graphgps -- python main.py`` does. All arguments are those of main.py. For
example, in a checkout of GraphGPS:

  python -m quest_graphgps main.py --cfg configs/GPS/zinc-GPS+RWSE.yaml gt.attention quest
  python -m quest_graphgps main.py --cfg configs/GPS/zinc-GPS+RWSE.yaml gt.layer_type GINE+Quest wandb.use False
  python -m quest_graphgps main.py --cfg configs/GPS/zinc-GPS+RWSE.yaml gt.attention quest gt.quest.kv_heads 2

quest list shows every attention.
"""

from __future__ import annotations

import sys

from quest_core.errors import QuestError
from quest_core.hosts.launching import run

if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
    print(__doc__)
    sys.exit(0 if len(sys.argv) > 1 else 2)
try:
    run(sys.argv[1:], hosts=["graphgps"])
except QuestError as error:
    print(f"quest_graphgps: {error}", file=sys.stderr)
sys.exit(2)
