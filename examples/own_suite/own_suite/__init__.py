"""A suite for quest bench: sequences of your own, in CSV files."""
