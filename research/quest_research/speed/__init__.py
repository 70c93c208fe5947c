"""Microbenchmarks of attention: time, scaling with the length, decoding, and a table for GPUs."""
