"""Where QUEST starts in the models that people train: the norms of queries and keys before the first step.

    python examples/start/norms.py > norms.jsonl     # the frameworks of this environment; repeat in each one
    python examples/start/norms.py --table *.jsonl   # one Markdown table of all of them

The models are those of the frameworks with their own sizes and initialisation, freshly built. For inputs of independent
features with mean 0 and variance 1, as a LayerNorm makes them, E‖q‖² is the squared Frobenius norm of a head's rows
plus that of its bias, so that no data is needed. First logits are Gaussian to a good approximation, with a standard
deviation of ‖q‖/√D for QUEST, ‖q‖·‖k‖/D for standard attention and 10/√D for qknorm-hs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

import quest_core
from quest_core.hosts.loading import adapter
from quest_core.hosts.torch import TorchAdapter


def pytorch() -> Iterator[tuple[str, nn.Module]]:
    yield "nn.TransformerEncoder(512, 8)", nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8), 6)


def tsai() -> Iterator[tuple[str, nn.Module]]:
    from tsai.models.PatchTST import PatchTST
    from tsai.models.TSTPlus import TSTPlus

    yield "TSTPlus", TSTPlus(12, 9, 29)
    yield "PatchTST", PatchTST(7, 96, seq_len=336)


def torch_geometric() -> Iterator[tuple[str, nn.Module]]:
    from torch_geometric.nn import GPSConv

    yield "GPSConv(64, heads=4)", nn.ModuleList(GPSConv(64, None, heads=4) for _ in range(10))


def mmseg() -> Iterator[tuple[str, nn.Module]]:
    from mmengine.config import Config
    from mmseg.registry import MODELS
    from mmseg.utils import register_all_modules

    import quest_mmseg

    register_all_modules()
    folder = Path(quest_mmseg.__file__).parent / "configs"
    config = Config.fromfile(folder / "segmenter_vit-t_mask_standard_1xb8-160k_ade20k-512x512.py").model
    config.type = "EncoderDecoder"
    config.pop("attention", None)
    config.pretrained = None
    config.backbone.pop("init_cfg", None)
    model = MODELS.build(config)
    model.init_weights()
    yield "Segmenter ViT-T/16", model


def torch_pointcloud() -> Iterator[tuple[str, nn.Module]]:
    from torch_pointcloud.models.point_transformer_v3 import PointTransformerV3Segmentation

    yield "PointTransformerV3", PointTransformerV3Segmentation(in_channels=4, num_classes=16, use_flash_attn=False)


def fairseq() -> Iterator[tuple[str, nn.Module]]:
    from types import SimpleNamespace

    from fairseq.data import Dictionary
    from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

    words = Dictionary()
    words.add_symbol("word")
    sizes = {"decoder_embed_dim": 1024, "decoder_ffn_embed_dim": 4096, "decoder_attention_heads": 8}
    config = TransformerLanguageModelConfig(
        **sizes, decoder_layers=16, max_target_positions=512, share_decoder_input_output_embed=True
    )
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, dictionary=words, output_dictionary=words)
    yield "transformer_lm (1024, 8 heads)", TransformerLanguageModel.build_model(config, task)


def timm() -> Iterator[tuple[str, nn.Module]]:
    import timm as library

    for name in ("vit_tiny_patch16_224", "deit3_small_patch16_224"):
        yield name, library.create_model(name)


def transformers() -> Iterator[tuple[str, nn.Module]]:
    from transformers import AutoModel, BertConfig, GPT2Config, LlamaConfig

    llama = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8)
    for name, config in (("BERT base", BertConfig()), ("GPT-2", GPT2Config()), ("Llama (512, 8 heads)", llama)):
        yield name, AutoModel.from_config(config)


Models: TypeAlias = Callable[[], Iterator[tuple[str, nn.Module]]]

HOSTS: dict[str, tuple[str, Models]] = {  # framework -> plugin that knows its attention, models
    "torch": ("quest_core", pytorch),
    "tsai": ("quest_tsai", tsai),
    "torch_geometric": ("quest_graphgps", torch_geometric),
    "mmseg": ("quest_mmseg", mmseg),
    "torch_pointcloud": ("quest_pointcept", torch_pointcloud),
    "fairseq": ("quest_fairseq", fairseq),
    "timm": ("quest_timm", timm),
    "transformers": ("quest_transformers", transformers),
}


def measure(host: str) -> Iterator[dict[str, Any]]:
    """One row for each model of a host: the norms over all layers and heads."""
    for name, model in HOSTS[host][1]():
        model, report = quest_core.inject(model, "quest", fresh=True, allow_partial=True)
        owners = [TorchAdapter() if r.adapter == "torch" else adapter(r.adapter) for r in report.replacements]
        modules = [model.get_submodule(r.path) for r in report.replacements]
        parts = [part for owner, module in zip(owners, modules, strict=True) for part in owner.projected(module)]
        if not parts:
            print(f"{name}: its projections are not described, as those of Conv1D are not", file=sys.stderr)
            continue
        q, k = (torch.cat([p.projections.norms(p, p.head_sizes, role) for p in parts]) for role in "qk")
        dims = {part.head_sizes.head_dim for part in parts}
        row = {"host": host, "model": name, "layers": len(parts), "head_dim": sorted(dims)}
        yield row | {"q": [q.min().item(), q.mean().item(), q.max().item()], "k": k.mean().item()}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, with the spread of the first logits that follows from the norms."""
    lines = [
        "| host | model | layers | D | ‖q‖ smallest, mean, largest | ‖k‖ | σ of first logits: quest | standard "
        "| qknorm-hs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, mean, high = row["q"]
        dim = max(row["head_dim"])
        spread = [mean / math.sqrt(dim), mean * row["k"] / dim, 10 / math.sqrt(dim)]
        dims = ", ".join(map(str, row["head_dim"]))
        numbers = " | ".join(f"{value:.2g}" for value in spread)
        lines.append(
            f"| {row['host']} | {row['model']} | {row['layers']} | {dims} | {low:.2f}, {mean:.2f}, {high:.2f} "
            f"| {row['k']:.2f} | {numbers} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", nargs="+", type=Path, metavar="JSONL", help="write one table of these files")
    arguments = parser.parse_args()
    if arguments.table:
        found = [json.loads(line) for path in arguments.table for line in path.read_text().splitlines()]
        print(table(list({(row["host"], row["model"]): row for row in found}.values())))
    else:
        torch.manual_seed(0)
        for host in HOSTS:
            if all(importlib.util.find_spec(name) is not None for name in (host, HOSTS[host][0])):
                for row in measure(host):
                    print(json.dumps(row), flush=True)
