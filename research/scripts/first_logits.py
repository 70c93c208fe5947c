"""Where QUEST starts in the models that people train: the first logits.

    python research/scripts/first_logits.py rows.jsonl --measure    # in the environment of each framework
    python research/scripts/first_logits.py rows.jsonl --figure first-logits.png

The models are those of the frameworks with their own sizes and initialization, freshly built. Logits are measured in
the first forward pass of each model with each attention, in training mode, on the data that each function below names:
the standard deviation of a query's logits over the keys that it sees, and how far the entropy of its weights lies below
log N, which is that of N equal weights. Both are averaged over queries and heads of a layer.
"""

import argparse
import copy
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import quest_core
from quest_core.errors import UnsupportedError
from quest_core.mechanism import Mechanism
from quest_core.ops import logits

SPECS = {  # attention -> its marker and color in the figure
    "standard": ("o", "#b03a2e"),
    "quest": ("s", "#1f618d"),
    "quest(init=12)": ("D", "#5dade2"),
    "qknorm-hs": ("^", "#7d8b2f"),
    "qknorm-ds": ("v", "#b9770e"),
}


class Host(NamedTuple):
    """A fresh model of a framework, without any attention of ours."""

    name: str
    model: nn.Module
    call: Callable[[nn.Module], object]  # runs the model once on data


def pytorch() -> Iterator[Host]:
    """Gaussian tokens."""
    x = torch.randn(64, 8, 512)  # [N, B, E]
    layer = nn.TransformerEncoderLayer(512, 8)
    yield Host("nn.TransformerEncoder(512, 8)", nn.TransformerEncoder(layer, 6), lambda model: model(x))


def tsai() -> Iterator[Host]:
    """JapaneseVowels, and sums of three sine waves for PatchTST."""
    import numpy as np
    from tsai.models.PatchTST import PatchTST
    from tsai.models.TSTPlus import TSTPlus

    from quest_suites.tsai.data import find, read

    series = read(find("JapaneseVowels", None)[0])[0][:64]
    every = np.concatenate(series, axis=1)
    spoken = torch.full((len(series), 12, 29), math.nan)  # NaN is padding
    for row, one in zip(spoken, series, strict=True):
        row[:, : one.shape[1]] = torch.from_numpy((one - every.mean(1, keepdims=True)) / every.std(1, keepdims=True))
    yield Host("TSTPlus", TSTPlus(12, 9, 29), lambda model: model(spoken))
    length, phase = 8 + 100 * torch.rand(2, 16, 7, 3, 1)  # [B, C, waves, 1] each
    waves = torch.sin(2 * math.pi * (torch.arange(336) + phase) / length).sum(2)  # [B, C, L]
    yield Host("PatchTST", PatchTST(7, 96, seq_len=336), lambda model: model(waves))


def torch_geometric() -> Iterator[Host]:
    """PATTERN's generator."""
    from torch_geometric.graphgym.config import cfg, set_cfg
    from torch_geometric.graphgym.model_builder import create_model
    from torch_geometric.graphgym.train import GraphGymDataModule

    import quest_graphgps
    from quest_suites.graphgps import gps
    from quest_suites.graphgps.data import pattern_graphs

    set_cfg(cfg)
    config = Path(quest_graphgps.__file__).parent / "configs" / "pattern.yaml"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as stock:
        stock.writelines(line for line in config.open() if not line.lstrip().startswith("attention:"))
        stock.flush()
        cfg.merge_from_file(stock.name)
    cfg.accelerator, cfg.num_workers = "cpu", 0
    cfg.dataset.format, cfg.dataset.name = "memory", "PATTERN"
    gps.MEMORY["PATTERN"] = pattern_graphs([32, 8, 8], seed=0)
    graphs = next(iter(GraphGymDataModule().train_dataloader()))
    yield Host("GPS of PATTERN (64, 4 heads)", create_model(), lambda model: model(graphs.clone()))


def mmseg() -> Iterator[Host]:
    """Generated scenes."""
    import numpy as np
    from mmengine.config import Config
    from mmseg.registry import MODELS
    from mmseg.utils import register_all_modules

    import quest_mmseg
    from quest_suites.mmseg.scenes import scene

    register_all_modules()
    folder = Path(quest_mmseg.__file__).parent / "configs"
    config = Config.fromfile(folder / "segmenter_vit-t_mask_1xb8-160k_ade20k-512x512.py").model
    config.type = "EncoderDecoder"
    config.pop("attention", None)
    config.pretrained = None
    config.backbone.pop("init_cfg", None)
    model = MODELS.build(config)
    model.init_weights()
    image = torch.from_numpy(scene(512, np.random.default_rng(0))[0]).permute(2, 0, 1)[None]  # [1, 3, 512, 512]
    image = (image - 127.5) / 127.5
    yield Host("Segmenter ViT-T/16", model, lambda model: model(image, mode="tensor"))


def torch_pointcloud() -> Iterator[Host]:
    """Generated lidar-like scenes."""
    import numpy as np
    from torch_pointcloud.models.point_transformer_v3 import PointTransformerV3Segmentation

    from quest_suites.pointcept import scenes
    from quest_suites.pointcept.tasks import batches

    torch.set_num_threads(1)  # sparse convolutions on a CPU are wrong with more
    scans = [scenes.scan(seed, rings=24, rays=180) for seed in scenes.seeds("train", 2)]
    options = {"batch_size": 2, "grid_size": 0.4}
    batch = next(batches(scans, options, np.random.default_rng(0), torch.device("cpu")))
    model = PointTransformerV3Segmentation(in_channels=4, num_classes=16, use_flash_attn=False)
    yield Host("PointTransformerV3", model, lambda model: model(batch.x, batch.grid, batch.scene))


def fairseq() -> Iterator[Host]:
    """Words of Python's documentation topics."""
    from types import SimpleNamespace

    from fairseq.data import Dictionary
    from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

    from quest_suites.fairseq.corpus import pydocs

    words = Dictionary()
    lines = [words.encode_line(line, add_if_not_exist=True) for line in pydocs()[0]]
    tokens = torch.cat(lines)[: 4 * 512].long().view(4, 512)  # [B, N]
    sizes = {"decoder_embed_dim": 1024, "decoder_ffn_embed_dim": 4096, "decoder_attention_heads": 8}
    config = TransformerLanguageModelConfig(
        **sizes, decoder_layers=16, max_target_positions=512, share_decoder_input_output_embed=True
    )
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, dictionary=words, output_dictionary=words)
    model = TransformerLanguageModel.build_model(config, task)
    yield Host("transformer_lm (1024, 8 heads)", model, lambda model: model(tokens))


def timm() -> Iterator[Host]:
    """Generated images of strokes."""
    import timm as library

    from quest_suites.timm.tasks import make_batch

    small = make_batch(4, torch.Generator().manual_seed(0))[0]  # [4, 3, 32, 32]
    large = nn.functional.interpolate(small, size=224, mode="bilinear")
    for name in ("vit_tiny_patch16_224", "deit3_small_patch16_224"):
        yield Host(name, library.create_model(name), lambda model: model(large))
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4}
    yield Host("ViT (64, 4 heads)", library.create_model("vit_tiny_patch16_224", **sizes), lambda model: model(small))


def transformers() -> Iterator[Host]:
    """Bytes of Python's documentation topics."""
    from transformers import AutoModel, BertConfig, GPT2Config, LlamaConfig

    from quest_suites.transformers.tasks import text

    tokens = text()[0][: 4 * 256].view(4, 256)  # [B, N]
    llama = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8)
    for name, config in (("BERT base", BertConfig()), ("GPT-2", GPT2Config()), ("Llama (512, 8 heads)", llama)):
        yield Host(name, AutoModel.from_config(config), lambda model: model(tokens))


MODELS: dict[str, tuple[str, Callable[[], Iterator[Host]]]] = {  # framework -> plugin that knows its attention, models
    "torch": ("quest_core", pytorch),
    "tsai": ("quest_tsai", tsai),
    "torch_geometric": ("quest_graphgps", torch_geometric),
    "mmseg": ("quest_mmseg", mmseg),
    "torch_pointcloud": ("quest_pointcept", torch_pointcloud),
    "fairseq": ("quest_fairseq", fairseq),
    "timm": ("quest_timm", timm),
    "transformers": ("quest_transformers", transformers),
}


def measure(framework: str) -> Iterator[dict[str, Any]]:
    """One row for each model of a framework, with the first logits of every layer."""
    for host in MODELS[framework][1]():
        row: dict[str, Any] = {"host": framework, "model": host.name, "logits": {}}
        for spec in SPECS:
            try:
                model, _ = quest_core.inject(copy.deepcopy(host.model), spec, fresh=True, allow_partial=True)
            except UnsupportedError as error:
                print(f"{host.name}, {spec}: {error}", file=sys.stderr)
                continue
            row["logits"][spec] = first_logits(model, host.call)
        yield row


@torch.no_grad()
def first_logits(model: nn.Module, call: Callable[[nn.Module], object]) -> list[tuple[float, float]]:
    """Run a model once; return for every layer the spread of its logits and how many nats its entropy lacks."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Mechanism):

            def observe(_: nn.Module, args: Any, given: dict[str, Any], prepared: Any, name: str = name) -> None:
                q, k, scale = prepared
                z, mask = logits(q, k, scale, grouped=q.shape[1] != k.shape[1]), given["mask"]  # z: [B, H, N, M]
                visible = torch.ones(z.shape[-2:], dtype=torch.bool)
                visible = visible.tril(z.shape[-1] - z.shape[-2]) if given["is_causal"] else visible
                if mask is not None:
                    visible = visible & (mask if mask.dtype == torch.bool else mask > -1e4)
                seen.setdefault(name, []).append(spread_and_gap(z.double(), visible.expand(z.shape)))

            module.score.register_forward_hook(observe, with_kwargs=True)
    call(model.train())
    assert seen, "no attention was called"
    return [tuple(round(x, 4) for x in torch.tensor(calls).mean(0).tolist()) for calls in seen.values()]  # type: ignore[misc]


def spread_and_gap(z: Tensor, visible: Tensor) -> tuple[float, float]:
    """Standard deviation of a query's logits, and log N minus the entropy of its weights, over keys that it sees.

    Of z and visible [B, H, N, M]: the root mean square of the first and the mean of the second over queries that see
    two keys or more.
    """
    count = visible.sum(-1)
    mean = z.mul(visible).sum(-1) / count
    variance = (z - mean[..., None]).square().mul(visible).sum(-1) / count
    p = z.masked_fill(~visible, -math.inf).softmax(-1)
    gap = count.log() + torch.special.xlogy(p, p).sum(-1)
    counted = count > 1
    return variance[counted].mean().sqrt().item(), gap[counted].mean().item()


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw spread and missing entropy of every model: a dot is the mean of its layers, a line their range."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10})
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(10, 0.42 * len(rows) + 1.2), layout="constrained")
    titles = ("standard deviation of a query's first logits", "log N − entropy of its weights, nats")
    limits = ((0.01, 5), (1e-4, 5))
    for number, (axes, title, limit) in enumerate(zip(panels, titles, limits, strict=True)):
        for place, row in enumerate(rows):
            for offset, (spec, (marker, color)) in enumerate(SPECS.items()):
                values = [pair[number] for pair in row["logits"].get(spec, ())]
                if values:
                    y = place + (offset - (len(SPECS) - 1) / 2) * 0.14
                    axes.plot([min(values), max(values)], [y, y], color=color, linewidth=1.5)
                    label = spec if place == 0 else None
                    axes.plot(sum(values) / len(values), y, marker, color=color, markersize=4, label=label)
        axes.set(xscale="log", xlabel=title, xlim=limit)
        axes.grid(axis="x", color="#dddddd")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), [f"{row['host']}: {row['model']}" for row in rows])
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(SPECS), frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="JSONL", help="one row for each model; the last one counts")
    parser.add_argument("--measure", action="store_true", help="append the models of this environment")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw the first logits")
    arguments = parser.parse_args()
    if arguments.measure:
        for framework, (plugin, _) in MODELS.items():
            if all(importlib.util.find_spec(name) is not None for name in (framework, plugin)):
                torch.manual_seed(0)
                for row in measure(framework):
                    with arguments.file.open("a") as file:
                        print(json.dumps(row), file=file)
    found = [json.loads(line) for line in arguments.file.read_text().splitlines()]
    rows = list({(row["host"], row["model"]): row for row in found}.values())
    if arguments.figure:
        draw(rows, arguments.figure)
