"""The language-model benchmarks: tasks and texts."""
