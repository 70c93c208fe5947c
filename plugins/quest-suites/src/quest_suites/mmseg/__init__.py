"""Evaluation: benchmark tasks, generated scenes and image corruptions."""
