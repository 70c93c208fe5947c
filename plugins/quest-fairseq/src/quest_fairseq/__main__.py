"""``python -m quest_fairseq`` prints the folder that fairseq wants as --user-dir, wherever the package is installed."""

from .averaging import main

main()
