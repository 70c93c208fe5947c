"""The segmentation benchmarks: tasks, generated scenes and image corruptions.

`import quest_mmseg` does not load this package. mmengine loads it when a config names ``quest_mmseg.Corrupt``.
"""
