"""``python -m quest_graphgps main.py --cfg FILE`` is ``quest run --host graphgps main.py --cfg FILE``."""

import sys

from quest_core.cli import main

sys.exit(main(["run", "--host", "graphgps", *sys.argv[1:]]))
