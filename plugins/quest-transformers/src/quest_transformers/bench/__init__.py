"""Benchmark tasks; `import quest_transformers` loads none of this."""
