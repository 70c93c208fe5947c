"""QUEST attention in Hugging Face transformers: import this package, and `attn_implementation="quest"` works.

>>> import quest_transformers
>>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="quest")
"""

from __future__ import annotations

from quest_core.hosts.discovery import require_host

require_host("transformers")  # before an import of it fails

from .adapter import TransformersAdapter as TransformersAdapter  # noqa: E402
from .conversion import convert as convert  # noqa: E402

TransformersAdapter().install()
