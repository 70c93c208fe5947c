"""What stands below the formulas: unit vectors, and the one file that knows PyTorch's private names."""

from .unit import unit as unit
