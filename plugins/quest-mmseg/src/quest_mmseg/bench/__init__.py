"""Evaluation: benchmark tasks, generated scenes, image corruptions, and attention maps of a trained model.

`import quest_mmseg` does not load this package. mmengine loads it when a config names ``quest_mmseg.Corrupt``.
"""
