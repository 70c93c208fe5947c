"""Experiments that need no host framework, as suites of `quest bench`."""
