"""QUEST attention in fairseq: ``--user-dir`` this package, and quest_transformer_lm and quest_transformer exist.

>>> import quest_fairseq  # what --user-dir does
>>> model = quest_fairseq.QuestTransformerLanguageModel.from_pretrained("checkpoints", "checkpoint_best.pt", "data-bin")
"""

from __future__ import annotations

from .adapter import FairseqAdapter as FairseqAdapter
from .models import QuestTransformerLanguageModel as QuestTransformerLanguageModel
from .models import QuestTransformerModel as QuestTransformerModel

FairseqAdapter().install()
