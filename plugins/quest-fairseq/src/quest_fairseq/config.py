"""The options of quest_transformer_lm.

fairseq reads the types of a dataclass's fields as objects, so this file is without ``from __future__ import
annotations`` and writes Optional as fairseq knows it.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.models.transformer_lm import TransformerLanguageModelConfig

ATTENTION = "attention: a name (quest), a text with options ('quest+gqa(kv_heads=4)') or a mapping"
ATTENTION_FROM = "load a checkpoint that was trained with this attention, although the model has another"


@dataclass
class QuestTransformerLanguageModelConfig(TransformerLanguageModelConfig):
    """fairseq's options of transformer_lm, and the attention."""

    attention: Any = field(default="quest", metadata={"help": ATTENTION})
    attention_from: Optional[str] = field(default=None, metadata={"help": ATTENTION_FROM})  # noqa: UP045
