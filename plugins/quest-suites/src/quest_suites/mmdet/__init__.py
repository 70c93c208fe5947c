"""Evaluation: benchmark tasks and generated images with objects."""
