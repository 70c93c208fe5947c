"""The registries that mmengine looks into for ``type='quest_mmdet.X'``."""

from mmdet.registry import MODELS as MMDET_MODELS
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import Registry

from quest_mmengine.watching import WatchAttention

MODELS = Registry("model", scope="quest_mmdet", parent=MMDET_MODELS, locations=["quest_mmdet.models"])
HOOKS = Registry("hook", scope="quest_mmdet", parent=MMENGINE_HOOKS, locations=["quest_mmdet.registry"])
HOOKS.register_module(module=WatchAttention)
