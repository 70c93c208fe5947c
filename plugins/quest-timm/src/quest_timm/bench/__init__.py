"""Benchmark tasks; loaded by `quest bench` only."""
