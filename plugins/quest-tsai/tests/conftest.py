"""The tests need what quest-suites's `environment/` gives: torchvision with a CPU build of PyTorch."""

import sys
from pathlib import Path

ENVIRONMENT = Path(__file__).parents[2] / "quest-suites" / "environment"
sys.path.append(str(ENVIRONMENT))
import numpy as np  # noqa: E402
import quest_suites_environment  # noqa: F401, E402  # there already where ./dev made the environment
from tsai.basics import TSClassification, TSClassifier  # noqa: E402

SIZES = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_ff": 32}

Y = np.arange(24) % 3
X = np.sin(np.arange(20) * (Y[:, None, None] + 1) * 0.4 + np.random.default_rng(0).uniform(0, 1, (24, 3, 1)))
X = X.astype(np.float32)
"""Series [24, 3, 20] of three classes, which differ in frequency."""
SPLITS = list(range(16)), list(range(16, 24))


def classifier(folder, attention=None, attention_from=None, **options):
    """Return a learner of a small TSTPlus, or of `options["arch"]`, whose epoch has two batches."""
    asked = {} if attention is None else {"attention": attention, "attention_from": attention_from}
    return TSClassifier(
        X.copy(), Y, splits=SPLITS, tfms=[None, TSClassification()], bs=8, path=folder, device="cpu",
        **{"arch": "TSTPlus", **options}, arch_config={**SIZES, **asked},
    )  # fmt: skip
