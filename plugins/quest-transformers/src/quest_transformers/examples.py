"""Inputs for one run of a model, made from its config: they find attention that calls no AttentionInterface."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from quest_core.compat import same_random_state
from quest_core.errors import InjectionError

_SIZES = ("image_size", "input_size", "img_size")


class Example:
    """What `quest_core.inject` takes as an example: it runs parts of a model, each time on other values.

    Args:
        model: a PreTrainedModel.
        paths: of the modules that have to run.

    Raises:
        InjectionError: no inputs can be made that run them.
    """

    def __init__(self, model: Any, paths: Iterable[str]) -> None:
        if any(weight.is_meta for weight in model.parameters()):
            raise InjectionError(
                f"{type(model).__name__} has attention that only a run of it finds, and is on the meta device; build "
                "it on a CPU"
            )
        self.calls = 0
        owners = {path: part for path, part in model.named_modules() if isinstance(part, PreTrainedModel)}
        around = [[owners[p] for p in owners if not p or path == p or path.startswith(f"{p}.")] for path in paths]
        self.parts: list[Any] = []
        for found in around or [[model]]:
            if not any(part in self.parts for part in found):
                self.parts.append(self._runnable(found[::-1]))

    def _runnable(self, parts: list[Any]) -> Any:
        """Return the first of some models that runs."""
        why: list[str] = []
        for part in parts:
            try:
                with same_random_state(part), torch.no_grad():
                    self._run(part)
            except Exception as error:  # whatever a model raises on inputs that do not suit it
                why.append(f"{type(part).__name__}: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}")
            else:
                return part
        raise InjectionError(
            f"{type(parts[-1]).__name__} has attention that only a run of it finds, and does not run on the inputs "
            f"that the plugin makes ({'; '.join(why)}); build it without attn_implementation, and say "
            "quest_core.inject(model, 'quest', example=batch); to load what was saved after that, say "
            "from_pretrained(..., example=batch)"
        )

    def __call__(self, model: nn.Module) -> None:
        """Run the parts, in evaluation mode."""
        for part in self.parts:
            self._run(part)

    def _run(self, part: Any) -> None:
        modes = {module: module.training for module in part.modules()}
        self.calls += 1
        part.eval()
        try:
            part(**inputs(part, torch.Generator().manual_seed(self.calls)))
        finally:
            for module, mode in modes.items():
                module.training = mode


def inputs(model: Any, random: torch.Generator) -> dict[str, Tensor]:
    """Return arguments for the forward of a model: two samples of the modality that it names as its main input."""
    weight = next(model.parameters())
    config, names = model.config, inspect.signature(model.forward).parameters

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=random).to(weight)

    def ids(length: int) -> Tensor:
        most = getattr(config.get_text_config(), "vocab_size", None) or 100
        return torch.randint(min(5, most - 1), min(most, 100), (2, length), generator=random).to(weight.device)

    main = model.main_input_name if model.main_input_name in names else next(iter(names))
    if main == "input_ids":
        made = {main: ids(12)}
    elif main == "pixel_values":
        made = {main: normal(*_image(config))}
    elif main == "input_features":
        bins = _first(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim") or 80
        long = getattr(config, "max_source_positions", None)
        made = {main: normal(bins, 2 * long) if long and hasattr(config, "num_mel_bins") else normal(64, bins)}
    elif main == "input_values":
        bins = getattr(config, "num_mel_bins", None)
        made = {main: normal(config.max_length, bins) if bins and hasattr(config, "max_length") else normal(4000)}
    elif main in ("hidden_states", "inputs_embeds", "input_embeds"):
        made = {main: normal(12, config.hidden_size)}
    else:
        made = dict(model.dummy_inputs)
    if "decoder_input_ids" in names:
        made["decoder_input_ids"] = ids(9)
    return made


def _image(config: Any) -> tuple[int, int, int]:
    """Return channels, height and width of the images of a vision model."""
    size = _first(config, *_SIZES) or 64
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return _first(config, "num_channels", "in_channels", "in_chans") or 3, height, width


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
