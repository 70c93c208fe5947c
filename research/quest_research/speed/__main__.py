"""The time of attentions against their peers, which `quest bench` does not run: `python -m quest_research.speed`."""

import sys

from .speed import main

main(sys.argv[1:])
