"""The point-cloud benchmarks: tasks and generated scenes. `import quest_pointcept` does not load this package."""
