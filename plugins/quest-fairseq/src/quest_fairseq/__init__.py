"""QUEST attention in fairseq: ``--user-dir`` this package, and each model of fairseq has a twin named ``quest_...``.

>>> import quest_fairseq  # what --user-dir does
>>> model = TransformerLanguageModel.from_pretrained("checkpoints", "checkpoint_best.pt", "data-bin")
"""

from .adapter import FairseqAdapter as FairseqAdapter

FairseqAdapter().install()
