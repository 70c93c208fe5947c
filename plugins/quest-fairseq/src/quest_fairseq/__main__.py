"""``python -m quest_fairseq`` prints the folder that fairseq wants as --user-dir, wherever the package is installed."""

from __future__ import annotations

from .averaging import main

main()
