"""Experiments of the papers and microbenchmarks. Not published; results are in research/results."""
