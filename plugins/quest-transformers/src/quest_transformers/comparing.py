"""Compare the attention of a checkpoint with that of the model that loads it.

`from_pretrained` does not call `load_state_dict`, so no load hook of quest_core runs.
"""

from collections.abc import Mapping, Set
from itertools import takewhile
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor, nn

from quest_core.checkpoints import ENTRY, compare, decode, refuse_entries, unexpected_entry
from quest_core.config import AttentionConfig
from quest_core.errors import CheckpointError
from quest_core.mechanism import Mechanism, has_mechanism

from .anatomy import is_attention, role
from .configs import choice_for, choice_of


def fits(model: Any, stored: Mapping[str, Tensor], attention_from: AttentionConfig | None, load: object) -> bool:
    """Return whether a checkpoint was trained with the attention that the model shall have; as `compare`.

    Args:
        model: with the host's own modules.
        stored: tensors of mechanisms in the checkpoint.
        load: as of `compare`.
    """
    choices = [(part, choice_for(model, part)) for part in model.modules() if is_attention(part)]
    wanted = {choice.of(role(part)) for part, choice in choices if choice is not None}
    if not choices and (choice := choice_of(model.config)) is not None:
        wanted = {choice.decoder}
    special = sorted((config for config in wanted if not config.is_standard), key=str)
    named = attention_entries(stored)
    for key, entry in named.items():
        trained = decode(entry)
        if not any(config.means(trained) for config in special):
            if not wanted:
                return True  # `verify` refuses it, if it is not of a part that the model lacks
            config = special[0] if special else next(iter(wanted))
            compare(entry, config, attention_from, key.removesuffix(f".{ENTRY}"), load)
            return False
    if special and not named:
        compare(None, special[0], attention_from, type(model).__name__, load)
        return False
    return True


def take_unexpected(model: nn.Module, info: Any, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove from the unexpected keys, and return, those of mechanisms that modules of the model do not have yet."""
    found = {}
    for key in [*info.unexpected_keys]:
        path, mechanism, _ = key.rpartition(".mechanism.")
        owner = next((part for name, part in model.named_modules() if name == path), None)
        name = _name_in_file(key, stored)
        if mechanism and name and owner is not None and not hasattr(owner, "mechanism"):
            found[key] = stored[name]
            info.unexpected_keys.remove(key)
    return found


def _name_in_file(key: str, stored: Mapping[str, Tensor]) -> str | None:
    """Return the name in the checkpoint of a key, of which a host may rename the first parts; None if it is unclear."""

    def shared(name: str) -> int:
        pairs = zip(reversed(key.split(".")), reversed(name.split(".")), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    most = max(map(shared, stored), default=0)
    of_mechanism = key.rpartition(".mechanism.")[2].count(".") + 2
    names = [name for name in stored if shared(name) == most > of_mechanism]
    return names[0] if len(names) == 1 else None


def load_mechanisms(model: nn.Module, stored: Mapping[str, Tensor], missing: Set[str], known: Set[str]) -> None:
    """Load the tensors that `take_unexpected` returned into the mechanisms that modules have now.

    Args:
        missing: keys that the checkpoint lacks, of the model as it was compared.
        known: paths of the mechanisms that it had then.

    Raises:
        CheckpointError: a module has another attention, or none, or the checkpoint lacks that of a module.
    """
    for path in {key.rpartition(".mechanism.")[0] for key in stored}:
        prefix = f"{path}.mechanism."
        part = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
        mechanism = getattr(model.get_submodule(path), "mechanism", None)
        if mechanism is None:
            raise CheckpointError(
                f"the checkpoint has an attention of quest in '{path}', which only a run of the model finds; say "
                "from_pretrained(..., example=batch) with the inputs that quest_core.inject was given"
            )
        mechanism.load_state_dict(part)
    new = [path for path, part in model.named_modules() if isinstance(part, Mechanism) and path not in known]
    if stored:
        keys = {f"{path}.{key}" for path in new for key in model.get_submodule(path).state_dict()}
        verify(model, {*missing, *(keys - {*stored})}, set(), {})


def mechanism_tensors(state_dict: Any, files: Any) -> dict[str, Tensor]:
    """Return the tensors of mechanisms in a checkpoint: the entries that name their attention, and parameters."""
    if state_dict is not None:
        return {key: value for key, value in state_dict.items() if ".mechanism." in key}
    found: dict[str, Tensor] = {}
    for file in files or ():
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                found |= {key: opened.get_tensor(key) for key in opened.keys() if ".mechanism." in key}  # noqa: SIM118
        else:
            stored = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
            found |= {key: value for key, value in stored.items() if ".mechanism." in key}
    return found


def attention_entries(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of mechanisms that name an attention."""
    return {key: value for key, value in stored.items() if key.endswith(ENTRY)}


def verify(model: Any, missing: Set[str], unexpected: Set[str], stored: Mapping[str, Tensor]) -> None:
    """Compare what was loaded with what the model has, except for layers that the checkpoint lacks whole.

    Args:
        missing, unexpected: the keys that the checkpoint lacks, and those that the model lacks.
        stored: tensors of mechanisms in the checkpoint.

    Raises:
        CheckpointError: some module has another attention than the checkpoint, or lacks parameters of it.
    """
    stored = attention_entries(stored)
    paths = {path for path, _ in model.named_modules()}
    entries = sorted(key for key in unexpected if key.endswith(ENTRY))
    for key in entries:
        if key.removesuffix(f".mechanism.{ENTRY}") not in paths:
            continue  # of a part that the model lacks, such as the text model of CLIP
        if has_mechanism(model):
            raise CheckpointError(
                f"'{key}': this checkpoint has an attention of quest in a module that shall have another; say the "
                "attention that the checkpoint was trained with"
            )
        raise unexpected_entry(key, stored.get(key, next(iter(stored.values()))), "the host")
    if len(entries) < len(stored) and not has_mechanism(model):  # a loader that does not name what it leaves out
        refuse_entries(model, stored, "the host")
    for path, module in model.named_modules():
        if not isinstance(module, Mechanism):
            continue
        layer = path.rpartition(".")[0]
        weights = [name for name, _ in model.get_submodule(layer).named_parameters(layer) if name.endswith("weight")]
        lacks = sorted(key for key in missing if key.startswith(f"{path}."))
        if weights and missing >= {*weights}:
            continue
        if lacks:
            raise CheckpointError(
                f"the checkpoint lacks {', '.join(lacks)}, so '{path}' was not trained with attention "
                f"'{module.config}'; build the model with the attention of the checkpoint"
            )
        entry = module.attention_is_not_standard
        # A tensor without values was left on disk, or the whole model was; `fits` has read the file.
        if entry is not None and not entry.is_meta and not module.config.means(decode(entry)):
            compare(entry, module.config, None, path, missing)
