"""The tests need what quest-mmengine's `environment/` gives: mmdet without mmcv's compiled operations."""

import copy
import functools
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "quest-mmengine" / "environment"))
import mmdet
import mmengine.config.config
import quest_mmengine_environment  # noqa: F401
import torch
import yapf.yapflib.yapf_api
from mmdet.structures import DetDataSample
from mmdet.utils import register_all_modules
from mmengine.config import Config, ConfigDict
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData

import quest_mmdet

register_all_modules(init_default_scope=False)
init_default_scope("mmdet")
logging.getLogger("mmengine").setLevel(logging.WARNING)
for module in (mmengine.config.config, yapf.yapflib.yapf_api):  # versions of mmengine import it early or late
    module.FormatCode = lambda text, **_: (text, False)  # a Runner formats its config five times, half a second each

MIM = Path(mmdet.__file__).parent / ".mim" / "configs"
LAPTOP = Path(quest_mmdet.__file__).parent / "configs" / "deformable-detr_laptop_objects-64x64.py"
SIDE = 64


DETR = MIM / "detr" / "detr_r50_8xb2-150e_coco.py"
DAB = MIM / "dab_detr" / "dab-detr_r50_8xb2-50e_coco.py"


def read(path: Path) -> ConfigDict:
    """Return the model of a config, which is read once."""
    return copy.deepcopy(_read(path))


_read = functools.cache(lambda path: Config.fromfile(path).model)


def small(base: Path, **options: Any) -> ConfigDict:
    """The model of `DETR` or `DAB` with a small backbone, two layers and no pretrained weights."""
    model = read(base)
    model.backbone = read(LAPTOP).backbone
    model.backbone.out_indices, model.neck.in_channels = (2,), [128]
    for part in (model.encoder, model.decoder):
        part.num_layers, part.layer_cfg.ffn_cfg.feedforward_channels = 2, 64
    model.num_queries = 12
    model.update(options)
    return model


def without_dropout(config: ConfigDict) -> ConfigDict:
    """The same config of a DETR, in which every mechanism is possible."""
    for part in (*config.encoder.layer_cfg.values(), *config.decoder.layer_cfg.values()):
        if "num_heads" in part:
            part.dropout = 0.0
    return config


def samples(count: int = 2, side: int = SIDE) -> list[DetDataSample]:
    """As many images of one size, each with two boxes."""
    made = []
    for index in range(count):
        sizes = dict.fromkeys(("img_shape", "ori_shape", "pad_shape", "batch_input_shape"), (side, side))
        sample = DetDataSample(metainfo={**sizes, "scale_factor": (1.0, 1.0)})
        boxes = torch.tensor([[8.0, 8.0, 40.0, 40.0], [20.0, 4.0, 60.0, 30.0]]) * side / 64
        sample.gt_instances = InstanceData(bboxes=boxes, labels=torch.tensor([index, 1]))
        made.append(sample)
    return made
