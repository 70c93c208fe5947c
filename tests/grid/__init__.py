"""The grid: every mechanism under every transform, layout and type is right or is refused by name."""
