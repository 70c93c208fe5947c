"""QUEST attention in Hugging Face transformers: import this package, and `attn_implementation="quest"` works.

>>> import quest_transformers
>>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="quest")
"""

from .adapter import TransformersAdapter as TransformersAdapter

TransformersAdapter().install()
