"""The tasks that `quest bench` trains the host frameworks on; each sub-package needs its host."""

__version__ = "0.1.0"
