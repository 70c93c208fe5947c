"""Evaluation: benchmark tasks, generated scenes, image corruptions, and attention maps of a trained model."""
