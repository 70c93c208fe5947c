"""Functions that child processes of the tests run. Nothing here imports the plugin."""

import sys
from typing import Any


class Config:
    """Pickled as Pointcept's Config is."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __getstate__(self) -> Any:
        return (self.options,)

    def __setstate__(self, state: Any) -> None:
        (self.options,) = state


def torch_pointcloud_model(config: Config, answers: Any) -> None:
    """Build a model of torch-pointcloud from a Config and say what its attention is."""
    known = "quest_pointcept" in sys.modules
    from torch_pointcloud.models.point_transformer_v3 import PointTransformerV3Encoder

    answers.put((known, str(PointTransformerV3Encoder(**config.options).attention_report)))
