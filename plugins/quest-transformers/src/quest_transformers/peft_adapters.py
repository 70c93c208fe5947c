"""Adapters of peft, such as LoRA. They hold nothing of the model below, so adapter_config.json names its attention.

peft builds the config of an adapter from this file, and warns of a key that it does not know. So a process without this
plugin, which loads the adapter into the host's own attention, names the key too.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from quest_core.checkpoints import AttentionMismatchWarning, Spelled
from quest_core.config import AttentionConfig
from quest_core.errors import CheckpointError
from quest_core.hosts.patching import Patches
from quest_core.mechanism import Mechanism

KEY = "attn_implementation"
"""In adapter_config.json, and as an attribute of what was saved or loaded: the attentions of the model, as texts."""


def install(patches: Patches) -> None:
    """Wrap what saves and loads adapters, in peft as soon as it is imported, and in transformers."""
    from transformers.modeling_utils import PreTrainedModel

    for owner in ("peft.peft_model:PeftModel", PreTrainedModel):
        patches.around(owner, "save_pretrained", _name)
        patches.around(owner, "load_adapter", _compare)
    patches.around("peft.config:PeftConfigMixin", "save_pretrained", _write)
    patches.around("peft.config:PeftConfigMixin", "from_peft_type", _read)


def _special(model: Any) -> list[AttentionConfig]:
    """The attentions of a model other than `standard`."""
    found = {module.config for module in model.modules() if isinstance(module, Mechanism)}
    return sorted((config for config in found if not config.is_standard), key=str)


def _name(save: Any, model: Any, *arguments: Any, **options: Any) -> Any:
    for config in (getattr(model, "peft_config", None) or {}).values():
        setattr(config, KEY, [str(attention) for attention in _special(model)])
    return save(model, *arguments, **options)


def _write(save: Any, config: Any, save_directory: Any, **options: Any) -> None:
    save(config, save_directory, **options)
    if attentions := vars(config).get(KEY):
        file = Path(save_directory, "adapter_config.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), KEY: attentions}, indent=2, sort_keys=True))


def _read(build: Any, cls: Any, **options: Any) -> Any:
    attentions = options.pop(KEY, [])
    config = build(cls, **options)
    setattr(config, KEY, attentions)
    return config


def _compare(load: Any, model: Any, *arguments: Any, **options: Any) -> Any:
    """Load an adapter, and compare its attention with that of the model.

    Raises:
        CheckpointError: the model has another attention, and `quest_core.checkpoints.accept` does not name that of the
            adapter, which is not `standard`.
    """
    loaded = load(model, *arguments, **options)
    own = _special(model)
    has = ", ".join(map(str, own)) or "the host's own"
    known = [module for module in model.modules() if isinstance(module, Spelled)]
    accepted = {module.attention_from for module in known} - {None}
    for name, config in model.peft_config.items():
        trained = vars(config).get(KEY)
        if trained is None or _mean(own, trained) or _mean(accepted, trained or ["standard"]):
            continue  # the first is a config that was not loaded
        if trained:
            fix = f"load it into a model with attn_implementation='{trained[0]}'"
            if known:
                fix += f", or call quest_core.checkpoints.accept(model, '{trained[0]}') before if you mean it"
            raise CheckpointError(
                f"adapter '{name}' was trained with attention '{', '.join(trained)}', and the model has {has}; {fix}"
            )
        message = (
            f"adapter '{name}' was trained with standard attention, and the model has '{has}'; fine-tune it, and call "
            "quest_core.checkpoints.accept(model, 'standard') before if you mean to"
        )
        warnings.warn(message, AttentionMismatchWarning, stacklevel=3)
    return loaded


def _mean(attentions: Collection[Any], texts: Collection[str]) -> bool:
    """Return whether these are the attentions that the texts say."""
    return len(attentions) == len(texts) and all(any(one.means(text) for one in attentions) for text in texts)
