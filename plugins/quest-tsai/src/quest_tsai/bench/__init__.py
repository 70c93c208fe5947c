"""The ts/uea benchmark. `import quest_tsai` does not load this package."""
