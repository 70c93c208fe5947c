"""A checkpoint names the attention that it was trained with, in one small tensor per mechanism.

The weights of one mechanism fit another, and every loader that copies a state dict loses its metadata. So every
mechanism other than `standard` has a buffer that holds its configuration as text. A load compares all of them before it
copies a tensor.
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .config import STANDARD, AttentionConfig, AttentionSpec
from .errors import CheckpointError
from .notices import LOGGER, is_heard

ENTRY = "attention_is_not_standard"
"""The buffer's name, which explains itself where PyTorch reports it as an unexpected key."""
BLOCK = 64  # bytes; zeros fill the text to a multiple of it, so that most configurations have tensors of one shape
HOOK = "_quest_compares_checkpoints"

_WRAPPERS = re.compile(r"\b_(fsdp_wrapped_module|checkpoint_wrapped_module|orig_mod)\.")
"""What PyTorch's wrappers add to the paths of modules and only some of them to the keys of a state dict."""
_warned: list[object] = [None]  # the latest load that was warned about


class AttentionMismatchWarning(Warning):
    """A checkpoint of standard attention is loaded into a model with another one.

    UserWarnings would be hidden where fastai is imported, as by tsai.
    """


def encode(config: AttentionConfig) -> Tensor:
    """Return the text of `config` as float32 [512] on the CPU; longer texts take a multiple of that.

    Each bit of the UTF-8 text is 1.0 or 2.0. Every floating type of PyTorch, float8 included, holds both exactly, and
    averages and moving averages of equal tensors stay near them.
    """
    text = str(config).encode()
    bits = "".join(f"{byte:08b}" for byte in text + bytes(-len(text) % BLOCK))
    return torch.tensor([1.0 + int(bit) for bit in bits], device="cpu")


def decode(entry: Tensor) -> str:
    """Return the text that `encode` wrote, also after a cast or an average.

    Raises:
        CheckpointError: the values are not near 1 and 2.
    """
    values = entry.detach().to("cpu", torch.float32).flatten()
    bits = values > 1.5
    if not bits.any() or not ((values - 1 - bits.float()).abs() < 0.25).all():
        raise CheckpointError(
            f"'{ENTRY}' of a checkpoint should hold ones and twos, which name the attention that it was trained with, "
            "and was changed; copy this entry from the state dict of a model with the same attention"
        )
    text = int("".join(str(int(bit)) for bit in bits.tolist()), 2).to_bytes(len(bits) // 8, "big")
    return text.rstrip(b"\0").decode(errors="replace")


def compare(
    entry: Tensor | None, config: AttentionConfig, attention_from: AttentionConfig | None, path: str, load: object
) -> bool:
    """Return whether a checkpoint was trained with the attention of a layer; raise or warn if it was not.

    Args:
        entry: the checkpoint's tensor that names its attention; None means standard attention.
        attention_from: the checkpoint's attention, if the user has named it.
        path: of the layer.
        load: an object that is the same for all layers of one call of load_state_dict, which warns only once.
    """
    trained = str(STANDARD) if entry is None else decode(entry)
    if config.means(trained):
        return True
    if config.initial_norms:
        raise CheckpointError(
            f"'{path}': '{config}' sets the norms of new projections, and the checkpoint has trained ones of attention "
            f"'{trained}'; leave the option out (quest_core.calibrate fits trained queries), or the checkpoint"
        )
    if attention_from is not None and attention_from.means(trained):
        return False
    named = "" if attention_from is None else f" (attention_from is '{attention_from}')"
    if entry is not None or attention_from is not None:
        raise CheckpointError(
            f"'{path}': this checkpoint was trained with attention '{trained}', and the model has '{config}'{named}; "
            f"build the model with attention='{trained}', or say attention_from='{trained}' if you mean to go on from "
            "these weights with another attention"
        )
    if _warned[0] is not load:
        _warned[0] = load
        message = (
            f"these weights were trained with standard attention and are loaded into attention '{config}'; fine-tune "
            "them, and say attention_from='standard' if you mean to"
        )
        warnings.warn(message, AttentionMismatchWarning, stacklevel=2)
        if is_heard(logging.WARNING):
            LOGGER.warning(message)
    return False


def unexpected_entry(key: str, entry: Tensor, host: str) -> CheckpointError:
    """Return the error for an entry of a checkpoint where the model has the attention of `host` itself."""
    trained = decode(entry)
    return CheckpointError(
        f"'{key}': this checkpoint was trained with attention '{trained}', and the model has {host}'s own; build the "
        f"model with attention='{trained}', or with attention='standard' and attention_from='{trained}' if you mean to "
        "go on from these weights with standard attention"
    )


def refuse_entries(model: nn.Module, state_dict: Mapping[str, Any], host: str) -> None:
    """Raise CheckpointError if a state dict names an attention, where `model` has the attention of `host` itself."""
    modules = dict(model.named_modules())
    if any(isinstance(module, CheckpointGuard) for module in modules.values()):
        _refuse_entries_of_hosts(modules, {_unwrap(key): value for key, value in state_dict.items()})
        return
    for key, entry in state_dict.items():
        if key.endswith(ENTRY):
            raise unexpected_entry(key, entry, host)


class CheckpointGuard(nn.Module):
    """A module whose state dict names its attention, and which refuses a checkpoint of another."""

    attention_is_not_standard: Tensor | None  # the configuration, encoded; None for `standard`
    attention_from: AttentionConfig | None  # the attention of a checkpoint to be loaded, if it is meant to differ
    _compared: Any  # the load that `compare_layers` has seen, by its list of missing keys
    _fits: bool  # whether the tensors of that load were trained with this attention

    def __init__(self, config: AttentionConfig, *, keeps: bool) -> None:
        """Register the buffer, unless the module `keeps` nothing in a state dict."""
        super().__init__()
        self.config = config
        self.is_standard = config.is_standard
        self.register_buffer(ENTRY, encode(config) if keeps and not self.is_standard else None)
        self.attention_from = None
        self._compared, self._fits = None, True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CheckpointGuard":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        now = self.attention_is_not_standard
        if now is not None:  # `to_empty` left nothing of the text, and accelerate reads no buffers of modules on disk
            self.attention_is_not_standard = encode(self.config).to("cpu" if now.is_meta else now.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        own, key = self.attention_is_not_standard, prefix + ENTRY
        metadata, _, missing_keys, *_ = arguments
        if self._compared is not missing_keys:  # no module around has compared this load
            compare_layers(self, state_dict, prefix, *arguments)
        self._compared = None
        if not self._fits:
            # Another attention, on purpose: parameters that only this one learns stay as they were initialized.
            mine = self.state_dict(prefix=prefix)
            given = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
            shared = {name: x for name, x in given.items() if name in mine and x.shape == mine[name].shape}
            state_dict.update({name: x for name, x in mine.items() if not x.is_meta} | shared)
        state_dict.pop(key, None)
        if own is not None:
            if metadata.get("assign_to_params_buffers"):  # load_state_dict(assign=True)
                device = next((x.device for x in state_dict.values() if isinstance(x, Tensor)), "cpu")
                own = encode(self.config).to(device)
            state_dict[key] = own
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def compare_layers(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, _: Any, __: Any, missing_keys: Any, *___: Any
) -> None:
    """Compare every layer of `module` with a state dict before tensors are copied: a hook of load_state_dict.

    CheckpointError if a layer has another attention. `missing_keys` is PyTorch's list, one object per load, by which a
    layer knows that it was compared.
    """
    # set_model_state_dict(full_state_dict=True) fills in the model's own tensors.
    own = {id(x) for x in (*module.parameters(), *module.buffers())}
    given = {_unwrap(key): value for key, value in state_dict.items() if id(value) not in own}
    modules = dict(module.named_modules(prefix=prefix[:-1], remove_duplicate=False))
    for path, guard in modules.items():
        if not isinstance(guard, CheckpointGuard) or guard._compared is missing_keys:
            continue
        layer, where = _layer_around(path, modules), _unwrap(path)
        # If the mechanism loads by itself, PyTorch has come to its layer before, and lists what is missing there.
        weights = _weights(modules[layer], layer, path) if layer in modules else missing_keys
        missing = [name for name in map(_unwrap, weights) if name not in given]
        entry = given.get(f"{where}.{ENTRY}" if where else ENTRY)
        fits = entry is None and _lacks_weights(_unwrap(layer), where, given, missing)
        guard._compared = missing_keys
        guard._fits = fits or compare(entry, guard.config, guard.attention_from, where, missing_keys)
    _refuse_entries_of_hosts(modules, given)


def _refuse_entries_of_hosts(modules: Mapping[str, nn.Module], given: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a state dict names the attention of a module that has the host's own."""
    hosts = {_unwrap(path) for path, module in modules.items() if not hasattr(module, "mechanism")}
    meant = {module.attention_from for module in modules.values() if isinstance(module, CheckpointGuard)}
    for key, entry in given.items():
        path, named, _ = key.partition(f".mechanism.{ENTRY}")
        if named and path in hosts and AttentionConfig.parse(decode(entry)) not in meant:
            raise unexpected_entry(key, entry, "the host")


def _unwrap(path: str) -> str:
    """Return a path of a module or tensor without what PyTorch's wrappers add to it."""
    return _WRAPPERS.sub("", f"{path}.")[:-1]


def _layer_around(mechanism: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the nearest module around a mechanism that has weights: "attn" for "attn.mechanism"."""
    layer = mechanism.rpartition(".")[0]
    while layer and (outer := layer.rpartition(".")[0]) in modules and not _weights(modules[layer], layer, mechanism):
        layer = outer
    return layer


def _weights(module: nn.Module, path: str, mechanism: str) -> list[str]:
    """Return the paths of the weights in `module` but not in its mechanism."""
    names = (name for name, _ in module.named_parameters(path) if not name.startswith(f"{mechanism}."))
    return [name for name in names if name.endswith("weight")]


def _lacks_weights(layer: str, mechanism: str, state_dict: Mapping[str, Any], missing: Iterable[str]) -> bool:
    """Return whether a state dict has no weights of `layer`: the layer is new, or the file holds only LoRA adapters."""
    start, weights = f"{layer}." if layer else "", [key for key in missing if key.endswith("weight")]
    held, own, lacking = (  # names of children and parameters of the layer
        {key[len(start) :].partition(".")[0] for key in keys if key.startswith(start)}
        for keys in (state_dict, [mechanism], weights)
    )
    return bool(lacking) and held - own <= lacking


def compare_before_loading(model: nn.Module) -> None:
    """Make `load_state_dict` compare all layers of `model` first, so that a refused checkpoint changes none.

    `inject` calls it. Without it a layer is compared before its own tensors are copied.
    """
    if HOOK not in vars(model):
        vars(model)[HOOK] = model.register_load_state_dict_pre_hook(compare_layers)


def set_attention_from(model: nn.Module, attention_from: AttentionSpec) -> None:
    """Let a model load weights that were trained with another attention ("standard": the host's), without a warning."""
    config = AttentionConfig.parse(attention_from)
    for module in model.modules():
        if isinstance(module, CheckpointGuard):
            module.attention_from = config
