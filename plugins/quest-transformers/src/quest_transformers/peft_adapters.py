"""Adapters of peft, such as LoRA: their files spell the attention of the model, as those of a whole model do.

peft ignores unknown tensors silently, and warns of unknown keys in adapter_config.json. So that file names the
attention too, for processes without this plugin.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from quest_core.checkpoints import ENTRY, Spelled, compare, read, spell
from quest_core.errors import CheckpointError
from quest_core.hosts.patching import Patches

KEY = "attn_implementation"
"""In adapter_config.json, and an attribute of the config of an adapter that is being saved: the attentions as texts."""
PREFIX = "base_model.model."
"""Of the keys of files that transformers writes. Those of its models have none."""
_WRAPPED = re.compile(r"\.(original_module|modules_to_save\.[^.]+)$|_(fsdp_wrapped_module|orig_mod)\.")
"""What peft's ``modules_to_save``, FSDP and torch.compile add to paths. The keys of files go without."""


def install(patches: Patches) -> None:
    """Wrap what peft saves and loads adapters with, as soon as it is imported."""
    changes = {
        "peft.utils.save_and_load": {"get_peft_model_state_dict": _spell, "set_peft_model_state_dict": _load},
        "peft.utils.hotswap": {"hotswap_adapter_from_state_dict": _swap},
    }
    for module, functions in changes.items():
        patches.when_imported(module, partial(_wrap, patches, module, functions))
    patches.around("peft.config:PeftConfigMixin", "save_pretrained", _write)
    patches.around("peft.config:PeftConfigMixin", "from_peft_type", _read)


def _wrap(patches: Patches, module: str, functions: Mapping[str, Any]) -> None:
    for name, change in functions.items():
        patches.around(sys.modules[module], name, change, everywhere=True)


def _mechanisms(model: nn.Module) -> dict[str, Spelled]:
    """The modules that can spell an attention, by their paths in a state dict."""
    found = {_WRAPPED.sub("", path): part for path, part in model.named_modules() if isinstance(part, Spelled)}
    return {
        path: part for path, part in found.items() if part.is_standard or part.attention_is_not_standard is not None
    }


def compare_adapter(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Compare the attention of a model with that of an adapter, which has not been loaded yet.

    Args:
        model: with the adapter's modules in it.
        stored: the tensors of the adapter.

    Raises:
        CheckpointError: they differ, the adapter's is not `standard`, and `quest_core.checkpoints.accept` has not named
            it.
    """
    mine = {path.removeprefix(PREFIX): part for path, part in _mechanisms(model).items()}
    spelled = {key.removesuffix(f".{ENTRY}").removeprefix(PREFIX): key for key in stored if key.endswith(ENTRY)}
    for path, key in spelled.items():
        if path not in mine:
            trained = read(stored[key])
            raise CheckpointError(
                f"'{path}': this adapter was trained with attention '{trained}', and the model has the host's own; "
                f"build the model with attn_implementation='{trained}'"
            )
    for path, part in mine.items():
        compare(stored[spelled[path]] if path in spelled else None, part.config, part.attention_from, path, stored)


@contextmanager
def keeping_own(model: nn.Module) -> Iterator[None]:
    """Let a model spell its own attention after a loader that writes all tensors of an adapter into it."""
    own = [(part, part.attention_is_not_standard) for part in _mechanisms(model).values()]
    yield
    for part, spelled in own:
        part.attention_is_not_standard = spelled


def _spell(stock: Any, model: Any, *arguments: Any, **options: Any) -> Any:
    """Add the entries that spell the attention to an adapter's tensors, and name it to the adapter's config."""
    found = stock(model, *arguments, **options)
    special = {path: part for path, part in _mechanisms(model).items() if not part.is_standard}
    for config in model.peft_config.values():
        setattr(config, KEY, sorted({str(part.config) for part in special.values()}))
    return {f"{path}.{ENTRY}": spell(part.config) for path, part in special.items()} | found


def _write(save: Any, config: Any, *arguments: Any, **options: Any) -> None:
    """Write adapter_config.json with the key, if the attention is not `standard`."""
    to_dict, named = config.to_dict, vars(config).get(KEY)
    if named:
        config.to_dict = lambda: {**to_dict(), KEY: named}
    try:
        save(config, *arguments, **options)
    finally:
        vars(config).pop("to_dict", None)


def _read(build: Any, cls: Any, **options: Any) -> Any:
    """Make a config of adapter_config.json without the key, because `compare_adapter` reads the adapter's tensors."""
    options.pop(KEY, None)
    return build(cls, **options)


def _load(stock: Any, model: nn.Module, peft_model_state_dict: Any, *arguments: Any, **options: Any) -> Any:
    compare_adapter(model, peft_model_state_dict)
    return stock(model, _unspelled(model, peft_model_state_dict), *arguments, **options)


def _swap(stock: Any, model: nn.Module, state_dict: Any, *arguments: Any, **options: Any) -> Any:
    compare_adapter(model, state_dict)
    return stock(model, _unspelled(model, state_dict), *arguments, **options)


def _unspelled(model: nn.Module, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an adapter without the entries; peft itself loads those of ``modules_to_save``."""
    paths = {path for path, part in model.named_modules() if isinstance(part, Spelled)}
    return {key: x for key, x in stored.items() if key.removesuffix(f".{ENTRY}") not in paths}
