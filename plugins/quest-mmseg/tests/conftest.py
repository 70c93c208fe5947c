"""The tests need what `environment/` gives: mmseg on mmcv-lite."""

import logging
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "quest-mmengine" / "environment"))
import mmengine.config.config
import pytest
import quest_mmengine_environment  # noqa: F401
import torch
import yapf.yapflib.yapf_api
from mmengine.config import ConfigDict
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

init_default_scope("mmseg")
logging.getLogger("mmengine").setLevel(logging.WARNING)
for module in (mmengine.config.config, yapf.yapflib.yapf_api):  # versions of mmengine import it early or late
    module.FormatCode = lambda text, **_: (text, False)  # a Runner formats its config five times, half a second each

NORM = {"type": "LN", "eps": 1e-6, "requires_grad": True}
CLASSES = 5


def segmenter(**options: Any) -> ConfigDict:
    """A config of Segmenter for images of about 32x48 in patches of 8; with `attention`, of the plugin's."""
    sizes = {"embed_dims": 16, "num_layers": 2, "num_heads": 4}
    image = {"mean": [127.5] * 3, "std": [127.5] * 3, "size": (32, 48)}
    backbone = {"type": "VisionTransformer", "img_size": (32, 48), "patch_size": 8, "final_norm": True, **sizes}
    head = {"type": "SegmenterMaskTransformerHead", "in_channels": 16, "channels": 16, "num_classes": CLASSES, **sizes}
    loss = {"type": "CrossEntropyLoss", "avg_non_ignore": True}
    config = {
        "type": "quest_mmseg.EncoderDecoder" if "attention" in options else "EncoderDecoder",
        "data_preprocessor": {"type": "SegDataPreProcessor", **image},
        "backbone": {**backbone, "norm_cfg": NORM},
        "decode_head": {**head, "dropout_ratio": 0.0, "drop_path_rate": 0.0, "loss_decode": loss},
        "test_cfg": {"mode": "whole"},
    }
    return ConfigDict({**config, **options})


def sample(shape: tuple[int, int] = (32, 48), classes: int = CLASSES) -> SegDataSample:
    """The labels of an image, drawn."""
    info = dict.fromkeys(("img_shape", "ori_shape", "pad_shape", "batch_input_shape"), shape)
    return SegDataSample(gt_sem_seg=PixelData(data=torch.randint(classes, (1, *shape))), metainfo=info)


@pytest.fixture
def log():
    """The lines of quest_core in mmengine's current log."""
    lines = []
    handler = logging.Handler()
    handler.addFilter(lambda record: record.name == "quest_core")
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = MMLogger.get_current_instance()
    logger.handlers.append(handler)
    yield lines
    logger.handlers.remove(handler)
