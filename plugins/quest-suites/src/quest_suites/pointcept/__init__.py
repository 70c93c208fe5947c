"""The point-cloud benchmarks: tasks and generated scenes."""
