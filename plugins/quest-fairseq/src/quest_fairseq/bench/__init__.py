"""The language-model benchmarks: tasks and texts. `import quest_fairseq` does not load this package."""
