"""The plugin as data. INFO is a literal, because core reads this file without running it."""

from __future__ import annotations

from typing import Any

INFO: dict[str, Any] = {
    "name": "tsai",
    "host": "tsai",
    "module": "tsai",
    "api": (1, 0),
    "summary": "time-series Transformers of tsai (fastai)",
    "capabilities": {"ordered": True},
    "architectures": [
        "TSTPlus",
        "MultiTSTPlus",
        "TSiTPlus",
        "TST",
        "PatchTST",
        "TSPerceiver",
        "TransformerModel",
        "TransformerRNNPlus",
        "TransformerLSTMPlus",
        "TransformerGRUPlus",
        "RNNAttention",
        "LSTMAttention",
        "GRUAttention",
        "RNNAttentionPlus",
        "LSTMAttentionPlus",
        "GRUAttentionPlus",
        "ConvTranPlus",
        "TabTransformer",
        "TabFusionTransformer",
        "TSTabFusionTransformer",
        "GatedTabTransformer",
    ],
    "suites": "quest_tsai.bench.suites:SUITES",
}
