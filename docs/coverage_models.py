"""Tiny models of packages without configurations of their own, each with inputs: what docs/coverage.py injects into.

Each function returns, by the name of a model, what builds the model and its inputs, as `quest_core.inject` takes them.
"""

import argparse
import ast
import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, Any]
Models = dict[str, Callable[[], Built]]


def images(side: int = 64, *more: int) -> Tensor:
    return torch.randn(2, 3, *more, side, side)


def _known(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return those of the options that a constructor takes."""
    return {name: options[name] for name in inspect.signature(kind).parameters if name in options}


def torchvision() -> Models:
    """The classifiers, of images and of videos: the first model of each module."""
    from torchvision import models

    def build(name: str, *frames: int) -> Built:
        return models.get_model(name, weights=None), images(224, *frames)

    made: Models = {}
    for owner, frames in ((models, ()), (models.video, (16,))):
        for name in models.list_models(module=owner):
            module = models.get_model_builder(name).__module__.rpartition(".")[2]
            if not any(getattr(one, "module", None) == module for one in made.values()):
                made[name] = functools.partial(build, name, *frames)
                vars(made[name])["module"] = module
    return made


def segmentation_models_pytorch() -> Models:
    """Every architecture with its default encoder, and U-Net with a transformer's."""
    import segmentation_models_pytorch as smp

    def build(name: str, **options: Any) -> Built:
        return smp.create_model(name, encoder_weights=None, **options).eval(), images(224 if name == "dpt" else 128)

    made = {name: functools.partial(build, name) for name in smp.MODEL_ARCHITECTURES_MAPPING}
    made["dpt"] = functools.partial(build, "dpt", encoder_name="tu-vit_tiny_patch16_224")
    return {**made, "unet mit_b0": functools.partial(build, "unet", encoder_name="mit_b0")}


VIT_OPTIONS = {
    **{"dim": 64, "heads": 4, "num_heads": 4, "dim_head": 16, "window_size": 4, "attn_type": "short", "proj_kernel": 3},
    **{"kv_proj_stride": 2, "fmap_size": 8, "h_s": 4, "w_s": 4, "num_slots": 4, "mlp_dim": 64, "fn": nn.Identity()},
    **{"k": 4, "patch_size": 4, "use_rotary": False, "use_ds_conv": False},
}
"""Arguments of the constructors, by name; sizes that have a default are made small too."""
VIT_SHAPES = ((2, 16, 64), (2, 64, 8, 8), (2, 8, 8, 64), (2, 2, 2, 4, 4, 64), (2, 17, 64), (2, 65, 64))
"""Of the first argument of a forward; the first that the module takes is used."""


def vit_pytorch() -> Models:
    """The classes of attention."""
    import vit_pytorch

    made: Models = {}
    for one in pkgutil.iter_modules(vit_pytorch.__path__):
        try:
            module = importlib.import_module(f"vit_pytorch.{one.name}")
        except ImportError:  # of a package that is not installed
            continue
        for name, kind in vars(module).items():
            if inspect.isclass(kind) and kind.__module__ == module.__name__ and "atten" in name.lower():
                made[f"{one.name} {name}"] = functools.partial(_vit, kind)
    return made


def _vit(kind: type[nn.Module]) -> Built:
    model = kind(**_known(kind, VIT_OPTIONS)).eval()
    parameters = inspect.signature(kind.forward).parameters
    required = [name for name, one in parameters.items() if one.default is one.empty and name != "self"]
    failed: Exception | None = None
    for shape in VIT_SHAPES:
        x = torch.randn(shape)
        given = {name: torch.randn(shape) for name in required}
        given |= {name: [x, torch.randn(shape)] for name in required if name == "history"}
        given |= {
            name: None for name in required if name in ("rotary_emb", "coords", "pos", "block_mask", "dense_mask")
        }
        given |= {name: torch.ones(shape[:2], dtype=torch.bool) for name in required if name == "mask"}
        given |= {name: (1, shape[1] - 1) for name in parameters if name == "token_lens"}
        if "context" in parameters and "cross_attend" in parameters:
            given["context"] = torch.randn(shape)
        try:
            with torch.no_grad():
                model(**given)
            return model, given
        except Exception as error:
            failed = failed or error
    raise failed or ValueError(f"{kind.__name__} takes no input")


X_FLAGS: tuple[dict[str, Any], ...] = (
    {},
    *({name: True} for name in ("rotary_pos_emb", "rel_pos_bias", "alibi_pos_bias", "dynamic_pos_bias", "attn_flash")),
    *({name: True} for name in ("attn_gate_values", "attn_value_rmsnorm", "attn_qk_norm", "attn_pre_talking_heads")),
    *({name: True} for name in ("sandwich_norm", "macaron", "gate_residual", "shift_tokens", "ff_glu", "use_rmsnorm")),
    *({name: True} for name in ("residual_attn", "attn_on_attn", "attn_head_scale")),
    *({name: True} for name in ("attn_add_zero_kv", "add_value_residual", "attn_softclamp_logits", "attn_l2_distance")),
    {"attn_kv_heads": 2},
    {"attn_one_kv_head": True},
    {"attn_num_mem_kv": 4},
    {"attn_sparse_topk": 4},
    {"attn_flash": True, "rotary_pos_emb": True},
)
"""Options of a decoder, tried one after the other."""


def x_transformers() -> Models:
    """A decoder by default and with each usual flag, an encoder-decoder model and an encoder of images."""
    import x_transformers as x

    size = {"dim": 64, "depth": 2, "heads": 4, "attn_dim_head": 16}

    def decoder(flags: dict[str, Any]) -> Built:
        layers = x.Decoder(**size, **flags)
        model = x.TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers)
        return model.eval(), torch.randint(0, 100, (2, 16))

    def both() -> Built:
        options = {f"{side}_{key}": n for side in ("enc", "dec") for key, n in (*size.items(), ("num_tokens", 100))}
        model = x.XTransformer(
            **{key: n for key, n in options.items() if not key.endswith("_dim")},
            **{"dim": 64, "enc_max_seq_len": 32, "dec_max_seq_len": 32},
        )
        return model.eval(), (torch.randint(0, 100, (2, 16)), torch.randint(0, 100, (2, 12)))

    def vision() -> Built:
        layers = x.Encoder(**size)
        return x.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=layers), images(32)

    made: Models = {" ".join(flags) or "Decoder": functools.partial(decoder, flags) for flags in X_FLAGS}
    return {**made, "XTransformer": both, "ViTransformerWrapper": vision}


DIFFUSERS_SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_layers", "num_attention_heads"), 2),
    **dict.fromkeys(("num_single_layers", "num_mmdit_layers", "num_single_dit_layers", "num_refiner_layers"), 1),
    **dict.fromkeys(("in_channels", "out_channels"), 4),
    **dict.fromkeys(("cross_attention_dim", "joint_attention_dim", "pooled_projection_dim", "caption_channels"), 32),
    **dict.fromkeys(
        ("caption_projection_dim", "text_dim", "text_embed_dim", "cap_feat_dim", "freq_dim", "ffn_dim"), 32
    ),
    **{"attention_head_dim": 16, "sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1},
    **{"norm_num_groups": 8, "axes_dims_rope": (4, 6, 6)},
}
"""Arguments of the constructors, by name."""


def diffusers() -> Models:
    """The models that users train most."""
    image, video, tokens = torch.randn(2, 4, 16, 16), torch.randn(2, 4, 4, 16, 16), torch.randn(2, 16, 4)
    known = {
        **{"timestep": torch.tensor([1.0, 2.0]), "class_labels": torch.tensor([1, 2]), "added_cond_kwargs": {}},
        **{"encoder_hidden_states": torch.randn(2, 7, 32), "pooled_projections": torch.randn(2, 32)},
        **dict.fromkeys(("encoder_attention_mask", "encoder_hidden_states_mask"), torch.ones(2, 7, dtype=torch.bool)),
        **{"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3), "img_shapes": [(1, 4, 4)] * 2},
        **{"num_frames": 2, "height": 4, "width": 4},
    }
    text = ("timestep", "encoder_hidden_states")

    def unet(kind: str, size: str) -> dict[str, Any]:
        down, up = (f"{kind}DownBlock{size}", f"DownBlock{size}"), (f"UpBlock{size}", f"{kind}UpBlock{size}")
        return {"down_block_types": down, "up_block_types": up, "num_attention_heads": None, "attention_head_dim": 4}

    lumina = {"hidden_size": 24, "num_attention_heads": 3, "num_kv_heads": 1, "axes_dim_rope": (4, 2, 2)}
    frames = {"sample_width": 16, "sample_height": 16, "sample_frames": 5, "max_text_seq_length": 7}
    # Model -> arguments that differ, the first input, and the names of the others.
    table: dict[str, tuple[dict[str, Any], Tensor, tuple[str, ...]]] = {
        "UNet2DModel": ({**unet("Attn", "2D"), "attention_head_dim": 8}, image, ("timestep",)),
        "UNet2DConditionModel": (unet("CrossAttn", "2D"), image, text),
        "UNet3DConditionModel": (unet("CrossAttn", "3D"), video, text),
        "AutoencoderKL": ({"block_out_channels": (32,)}, image, ()),
        "DiTTransformer2DModel": ({}, image, ("timestep", "class_labels")),
        "PixArtTransformer2DModel": ({}, image, (*text, "added_cond_kwargs")),
        "Transformer2DModel": (
            {"num_layers": 1, "in_channels": 32, "out_channels": 32, "caption_channels": None},
            torch.randn(2, 32, 8, 8),
            ("encoder_hidden_states",),
        ),
        "SD3Transformer2DModel": ({}, image, (*text, "pooled_projections")),
        "FluxTransformer2DModel": ({"num_layers": 1}, tokens, (*text, "pooled_projections", "img_ids", "txt_ids")),
        "AuraFlowTransformer2DModel": ({}, image, text),
        "Lumina2Transformer2DModel": ({**lumina, "num_layers": 1}, image, (*text, "encoder_attention_mask")),
        "WanTransformer3DModel": ({}, video, text),
        "CogVideoXTransformer3DModel": ({**frames, "num_layers": 1}, video.transpose(1, 2)[:, :2], text),
        "LTXVideoTransformer3DModel": (
            {"num_layers": 1, "cross_attention_dim": 32},
            torch.randn(2, 32, 4),
            (*text, "encoder_attention_mask", "num_frames", "height", "width"),
        ),
        "QwenImageTransformer2DModel": (
            {"in_channels": 16},
            torch.randn(2, 16, 16),
            (*text, "encoder_hidden_states_mask", "img_shapes"),
        ),
    }

    def build(name: str) -> Built:
        import diffusers

        kind, (changes, first, others) = getattr(diffusers, name), table[name]
        model = kind(**_known(kind, {**DIFFUSERS_SIZES, **changes})).eval()
        argument = "sample" if "sample" in inspect.signature(kind.forward).parameters else "hidden_states"
        return model, {argument: first, **{other: known[other] for other in others}}

    return {name: functools.partial(build, name) for name in table}


def torchaudio() -> Models:
    """The models with attention."""
    from torchaudio import models

    sound, features = torch.randn(2, 4000), (torch.randn(2, 40, 64), torch.tensor([40, 32]))
    blocks = [(32, 10, 5), *[(32, 3, 2)] * 4, *[(32, 2, 2)] * 2]
    size = (64, 0.1, 8, 4, 2, 4, 0.1, 64, 0.1, 0.1, False, 0.1, None)  # of wav2vec2_model, after its convolutions

    return {
        "Wav2Vec2Model": lambda: (models.wav2vec2_model("group_norm", blocks, False, *size).eval(), sound),
        "HuBERTPretrainModel": lambda: (models.hubert_base().eval(), torch.randn(1, 4000)),
        "WavLM": lambda: (models.wavlm_base().eval(), torch.randn(1, 4000)),
        "Conformer": lambda: (models.Conformer(64, 4, 64, 2, 15).eval(), features),
        "Emformer": lambda: (models.Emformer(64, 4, 64, 2, 4, right_context_length=1).eval(), features),
    }


def speechbrain() -> Models:
    """The transformers and layers of speechbrain.lobes."""
    import speechbrain.lobes.models.transformer as lobes  # type: ignore[import-not-found]

    speech, tokens = torch.randn(2, 20, 64), torch.randint(1, 100, (2, 12))

    def build(module: str, kind: str, options: dict[str, Any], example: Any) -> Built:
        found = importlib.import_module(f"{lobes.__name__}.{module}")
        return getattr(found, kind)(**options).eval(), example

    whole = {"tgt_vocab": 100, "input_size": 64, "d_model": 64, "nhead": 4, "d_ffn": 64}
    few = {**whole, "num_encoder_layers": 2, "num_decoder_layers": 2}
    layers = {"num_layers": 2, "nhead": 4, "d_ffn": 64, "d_model": 64}
    table: dict[str, tuple[str, str, dict[str, Any], Any]] = {}
    for kind in ("regularMHA", "RelPosMHAXL", "RoPEMHA"):
        for encoder in ("transformer", "conformer", "branchformer"):
            options = {**few, "attention_type": kind, "encoder_module": encoder, "causal": False, "max_length": 50}
            options["normalize_before"] = encoder == "conformer"
            if encoder == "branchformer":
                options["csgu_linear_units"] = 64
            table[f"TransformerASR {encoder} {kind}"] = "TransformerASR", "TransformerASR", options, (speech, tokens)
    for kind in ("regularMHA", "hypermixing"):
        options = {**layers, "attention_type": kind}
        table[f"TransformerEncoder {kind}"] = "Transformer", "TransformerEncoder", options, speech
    language = {"vocab": 100, "d_model": 64, "nhead": 4, "num_encoder_layers": 2, "num_decoder_layers": 0, "d_ffn": 64}
    table["TransformerLM"] = "TransformerLM", "TransformerLM", language, tokens
    table["TransformerDecoder"] = "Transformer", "TransformerDecoder", layers, (speech, speech)
    enhancement = {"d_model": 64, "output_size": 65, "nhead": 4, "num_layers": 2, "d_ffn": 64}
    table["CNNTransformerSE"] = "TransformerSE", "CNNTransformerSE", enhancement, speech
    return {name: functools.partial(build, *one) for name, one in table.items()}


def neuralforecast() -> Models:
    """Every model that it builds from sizes."""
    from neuralforecast import models

    def build(kind: Any) -> Built:
        options = {
            "h": 12,
            "input_size": 24,
            "n_series": 3,
            "hidden_size": 32,
            "n_head": 8,
            "n_heads": 4,
            "e_layers": 2,
        }
        options |= {"patch_len": 8, "d_model": 32, "conv_hidden_size": 32, "encoder_layers": 2}
        model = kind(**_known(kind, options)).eval()
        many = getattr(model, "MULTIVARIATE", False)
        series = 3 if many else 1
        batch = {name: None for name in ("hist_exog", "futr_exog", "stat_exog", "insample_mask")}
        batch |= {"insample_y": torch.randn(2, 24, series), "insample_mask": torch.ones(2, 24, series)}
        return model, ({**batch},)

    kinds = {name: kind for name, kind in vars(models).items() if inspect.isclass(kind)}
    return {name: functools.partial(build, kind) for name, kind in kinds.items() if name not in ("HINT", "TimeLLM")}


def time_series_library() -> Models:
    """The models of the clone that `sys.path` begins with, by most defaults of its run.py; none that is pretrained."""
    clone = Path(sys.path[0])
    given = r"'--(\w+)'(?:(?!'--).)*?default=('[^']*'|\[.*?\]|[\w.]+)"
    found = re.findall(given, (clone / "run.py").read_text(), re.DOTALL)
    options = {name: ast.literal_eval(value) for name, value in found}
    options |= {"d_model": 64, "d_ff": 64, "n_heads": 4, "d_layers": 2, "label_len": 96, "device": torch.device("cpu")}
    options |= {"down_sampling_layers": 1, "down_sampling_window": 2, "down_sampling_method": "avg"}

    def build(name: str) -> Built:
        model = importlib.import_module(f"models.{name}").Model(argparse.Namespace(**options)).eval()
        steps = options["label_len"] + options["pred_len"]
        parts = [(torch.randn(2, n, 7), torch.rand(2, n, 4)) for n in (options["seq_len"], steps)]  # values, times
        return model, (*parts[0], *parts[1])

    texts = {path.stem: path.read_text() for path in sorted((clone / "models").glob("[!_]*.py"))}
    weights = re.compile("from_pretrained|load_model")
    return {name: functools.partial(build, name) for name, text in texts.items() if not weights.search(text)}
