"""Arguments for the forward of a model or of a module in it, made from the names of its parameters and its config."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

TRIES = 6
"""Sets of inputs for one module: its main and required ones, or all that are known, each in three forms."""

SAMPLES, TOKENS, SIDE, OTHER_TOKENS = 2, 16, 4, 9
_SIZES = ("image_size", "input_size", "img_size")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def inputs(part: Any, config: Any, number: int, random: torch.Generator) -> dict[str, Any]:
    """Return arguments for the forward of a module of a model; ValueError if a required one is unknown.

    Args:
        number: which set, below `TRIES`.
        random: draws the values.
    """
    make = Maker(part, config, number // 2, random)
    parameters = inspect.signature(part.forward).parameters
    main: str = getattr(part, "main_input_name", "")
    wanted = {main, "decoder_input_ids", "use_cache"} & parameters.keys()
    wanted |= {name for name, one in parameters.items() if one.default is one.empty and one.kind in _BY_NAME}
    if number % 2:
        wanted |= {name for name in parameters if name in OPTIONAL}
    unknown = sorted(name for name in wanted if not hasattr(make, name))
    if unknown:
        raise ValueError(f"its forward requires {', '.join(unknown)}")
    return {name: getattr(make, name)() for name in parameters if name in wanted}


OPTIONAL = frozenset(
    {
        *("input_ids", "pixel_values", "input_features", "input_values", "bbox", "input_points"),
        *("encoder_hidden_states", "key_value_states", "past_values", "visual_feats", "visual_pos"),
    }
)
"""Arguments that a forward may leave out, and that other attention needs."""


class Maker:
    """Makes an argument by its name, two samples each; `form` is one of the shapes that it may have: 0, 1 or 2."""

    def __init__(self, part: nn.Module, config: Any, form: int, random: torch.Generator) -> None:
        self.part, self.config, self.form, self.random = part, config, form, random
        self.weight = next(part.parameters())

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(SAMPLES, *shape, generator=self.random).to(self.weight)

    def integers(self, least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, most, (SAMPLES, *shape), generator=self.random).to(self.weight.device)

    def of_config(self, *names: str) -> Any:
        return next((value for name in names if (value := getattr(self.config, name, None)) is not None), None)

    def in_features(self, *names: str) -> int:
        """Return the width of what a module reads: of its child with one of some names, or of its first layer."""
        children = [child for name in names if isinstance(child := getattr(self.part, name, None), nn.Module)]
        widths = [getattr(one, "in_features", None) for inner in (*children, self.part) for one in inner.modules()]
        width: int = next((width for width in widths if width), None) or self.of_config("hidden_size", "d_model")
        return width

    # Texts

    def input_ids(self, tokens: int = TOKENS) -> Tensor:
        if tokens == TOKENS and self.of_config("attention_type") == "block_sparse":  # BigBird's shortest sequence
            tokens = (6 + 2 * self.config.num_random_blocks) * self.config.block_size
        most = getattr(self.config.get_text_config(), "vocab_size", None) or 100
        codebooks = self.of_config("num_codebooks", "n_codes_total") if self.form else None
        return self.integers(min(5, most - 1), min(most, 100), tokens, *([codebooks] if codebooks else []))

    def decoder_input_ids(self) -> Tensor:
        return self.input_ids(OTHER_TOKENS)

    def use_cache(self) -> bool:
        return False

    def bbox(self) -> Tensor:
        return self.integers(0, 100, TOKENS, 4).sort(-1).values

    def codebook_idx(self) -> int:
        return 2

    # Images

    def pixel_values(self) -> Tensor:
        large = 448 if self.of_config("num_queries") else 256  # a detector has a query for some of the places
        size = self._of_image(*_SIZES) or (64, large, 64)[self.form]
        if isinstance(size, dict):
            size = (size["height"], size["width"])
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        frames = self.of_config("num_frames") or SIDE
        return self.normal(*([frames] if self.form == 2 else []), self._channels(), height, width)

    pixel_values_videos = pixel_values

    def _channels(self) -> int:
        return self._of_image("num_channels", "in_channels", "in_chans") or 3

    def _of_image(self, *names: str) -> Any:
        """Return what the config, or that of its vision model, says."""
        configs = (self.config, getattr(self.config, "vision_config", None))
        found = (getattr(config, name, None) for config in configs for name in names)
        return next((value for value in found if value is not None), None)

    def visual_feats(self) -> Tensor:
        return self.normal(TOKENS, self.of_config("visual_feat_dim"))

    def visual_pos(self) -> Tensor:
        return self.normal(TOKENS, self.of_config("visual_pos_dim"))

    def input_points(self) -> Tensor:
        return self.normal(1, 2, 2)

    # Sounds and other series

    def input_features(self) -> Tensor:
        bins = self.of_config("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim") or 80
        half = self.of_config("max_source_positions")  # Whisper's convolutions halve the frames
        if self.form:
            return self.normal(*([1] if self.form == 1 else []), self.of_config("spec_size") or 64, bins)
        return self.normal(bins, 2 * half) if half and hasattr(self.config, "num_mel_bins") else self.normal(64, bins)

    def input_values(self) -> Tensor:
        bins, length = self.of_config("num_mel_bins"), self.of_config("max_length")
        if self.form:
            return self.normal(self.of_config("audio_channels") or 1, 4000 * self.form)
        return self.normal(length, bins) if bins and length else self.normal(4000)

    def past_values(self) -> Tensor:
        length = self.of_config("context_length") or TOKENS
        return self.normal(length, *([] if self.form else [self.of_config("num_input_channels", "input_size") or 1]))

    # Features between modules

    def hidden_states(self) -> Tensor:
        tokens = (SIDE, SIDE) if self.form == 1 else (TOKENS,)
        return self.normal(*tokens, self.in_features("query", "q_proj", "q"))

    inputs_embeds = input_embeds = query = query_states = x = hidden_states

    def key(self) -> Tensor:
        return self.normal(TOKENS, self.in_features("key", "k_proj", "k"))

    encoder_hidden_states = key_value_states = key

    def inputs(self) -> Tensor:
        return self.normal(TOKENS, self.of_config("d_model"))

    def value(self) -> Tensor:
        return self.normal(TOKENS, self.in_features("value", "v_proj", "v"))

    def attention_mask(self) -> Tensor | None:
        return self.integers(1, 2, TOKENS) if hasattr(self.part, "main_input_name") else None

    def position_embeddings(self) -> tuple[Tensor, Tensor]:
        angles = self.normal(TOKENS, self.of_config("head_dim") or getattr(self.part, "head_dim", 16))
        return angles.cos(), angles.sin()

    def height(self) -> int:
        return SIDE

    width = height

    def input_dimensions(self) -> tuple[int, int]:
        return SIDE, SIDE
