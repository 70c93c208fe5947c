"""Microbenchmarks of attention: the time of a call on a CPU and on a GPU."""
