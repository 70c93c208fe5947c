"""The registries that mmengine looks into for ``type='quest_mmseg.X'``."""

from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import Registry
from mmseg.registry import MODELS as MMSEG_MODELS

from quest_mmengine.watching import WatchAttention

MODELS = Registry("model", scope="quest_mmseg", parent=MMSEG_MODELS, locations=["quest_mmseg.models"])
HOOKS = Registry("hook", scope="quest_mmseg", parent=MMENGINE_HOOKS, locations=["quest_mmseg.registry"])
HOOKS.register_module(module=WatchAttention)
