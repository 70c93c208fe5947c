"""The time of a training step against stock, over architectures of transformers, timm, torchvision and plain PyTorch.

    python examples/training_step/run.py .nox/quest-transformers/bin/python .nox/quest-timm/bin/python

Runs in each Python that is named, with one thread, and writes docs/results/training-step.md. Every model is built three
times with equal weights: stock, with `standard` and with `quest`. The three take turns in a random order, so that a
change of the machine's load meets all alike; the time is that of the processor. One round gives one ratio to stock for
each. Then the same for a step of decoding with a full cache.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quest_core

VARIANTS = ("stock", "standard", "quest")
PAGE = Path(__file__).parents[2] / "docs" / "results" / "training-step.md"
Made: TypeAlias = "tuple[str, str, Callable[[str], nn.Module], Callable[[nn.Module], Tensor]]"
"""Framework, name, a function from a variant to a model, and a function that runs the model."""


class Block(nn.Module):
    """Attention as in nanoGPT, with its norm."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm, self.c_attn, self.c_proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.c_attn(self.norm(x)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.c_proj(out.transpose(1, 2).flatten(2))


class Plain(nn.Module):
    """A transformer that no adapter knows: x [B, N, E] -> [B, N, E]."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(256, 4, causal) for _ in range(4))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block, mlp in zip(self.blocks, self.mlps, strict=True):
            x = block(x)
            x = x + mlp(x)
        return x


def injected(stock: Callable[[], nn.Module], example: Any = None) -> Callable[[str], nn.Module]:
    def make(variant: str) -> nn.Module:
        torch.manual_seed(0)
        return stock() if variant == "stock" else quest_core.inject(stock(), variant, example=example)[0]

    return make


def pytorch() -> Iterator[Made]:
    x = torch.randn(4, 256, 256)
    for name, causal in (("GPT, universal site", True), ("encoder, universal site", False)):
        yield "PyTorch", name, injected(lambda causal=causal: Plain(causal), x), lambda model: model(x)


def transformers() -> Iterator[Made]:
    import transformers as hf

    import quest_transformers  # noqa: F401  # transformers accepts the attention from here on

    sizes = {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    words = {**sizes, "vocab_size": 1000, "max_position_embeddings": 512}
    shared = {**words, "num_key_value_heads": 2}
    pair = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    configs = {
        "BERT": (hf.AutoModel, hf.BertConfig(**words)),
        "RoBERTa": (hf.AutoModel, hf.RobertaConfig(**words)),
        "ViT": (hf.AutoModel, hf.ViTConfig(**sizes, image_size=128, patch_size=8)),
        "GPT-2": (hf.AutoModel, hf.GPT2Config(vocab_size=1000, n_embd=256, n_layer=4, n_head=4, attn_pdrop=0.0)),
        "Llama": (hf.AutoModel, hf.LlamaConfig(**shared)),
        "Qwen3": (hf.AutoModel, hf.Qwen3Config(**shared, head_dim=64)),
        "Mistral": (hf.AutoModel, hf.MistralConfig(**shared, sliding_window=64)),
        "BART": (
            hf.AutoModel,
            hf.BartConfig(
                vocab_size=1000, d_model=256, encoder_ffn_dim=1024, decoder_ffn_dim=1024, attention_dropout=0.0, **pair
            ),
        ),
        "T5": (
            hf.AutoModel,
            hf.T5Config(vocab_size=1000, d_model=256, d_kv=64, d_ff=1024, num_layers=2, num_heads=4, dropout_rate=0.0),
        ),
    }
    ids, images = torch.randint(1000, (4, 256)), torch.randn(4, 3, 128, 128)
    for name, (kind, config) in configs.items():
        given = {"pixel_values": images} if name == "ViT" else {"input_ids": ids}
        given |= {"decoder_input_ids": ids} if name in ("BART", "T5") else {}

        def make(variant: str, kind: Any = kind, config: Any = config) -> nn.Module:
            torch.manual_seed(0)
            wanted = "sdpa" if variant == "stock" else variant
            return kind.from_config(copy.deepcopy(config), attn_implementation=wanted)

        yield "transformers", name, make, lambda model, given=given: model(**given).last_hidden_state


def timm() -> Iterator[Made]:
    import timm as library
    import torchvision

    import quest_timm  # noqa: F401  # timm accepts attention= from here on

    library.layers.set_fused_attn(True, experimental=True)  # Swin forms its weights otherwise
    names: dict[str, dict[str, Any]] = {
        "vit_tiny_patch16_224": {"depth": 4},
        "deit3_small_patch16_224": {"depth": 4},
        "eva02_tiny_patch14_224": {"depth": 4},
        "beit_base_patch16_224": {"depth": 2},
        "swin_tiny_patch4_window7_224": {"depths": (2, 2)},
        "crossvit_tiny_240": {},
    }
    for name, options in names.items():
        x = torch.randn(2, 3, 240 if "crossvit" in name else 224, 240 if "crossvit" in name else 224)

        def make(variant: str, name: str = name, options: Any = options) -> nn.Module:
            torch.manual_seed(0)
            given = {} if variant == "stock" else {"attention": variant}
            return library.create_model(name, **options, **given)

        yield "timm", name, make, lambda model, x=x: model(x)
    x = torch.randn(4, 3, 224, 224)
    stock = injected(lambda: torchvision.models.VisionTransformer(224, 16, 4, 4, 256, 1024))
    yield "torchvision", "VisionTransformer", stock, lambda model: model(x)


def decoding() -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    """Yield a name and, by variant, a function that decodes 8 tokens after 2048."""
    import transformers as hf

    sizes = {
        "vocab_size": 1000, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "intermediate_size": 2048, "max_position_embeddings": 4096,
    }  # fmt: skip
    for groups in (8, 2):
        runs: dict[str, Callable[[], Any]] = {}
        for variant in VARIANTS:
            torch.manual_seed(0)
            wanted = "sdpa" if variant == "stock" else variant
            config = hf.LlamaConfig(**sizes, num_key_value_heads=groups)
            model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=wanted).eval()
            cache = hf.DynamicCache()
            with torch.no_grad():
                model(input_ids=torch.randint(1000, (1, 2048)), past_key_values=cache)

            def run(model: Any = model, cache: Any = cache) -> None:
                with torch.no_grad():
                    for _ in range(8):
                        model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
                    cache.crop(-8)

            runs[variant] = run
        yield f"Llama, 8 query heads, {groups} key heads", runs


def compare(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each run in each round; the first two rounds are left out."""
    times: dict[str, list[float]] = {variant: [] for variant in runs}
    for round_ in range(rounds + 2):
        for variant in random.sample(list(runs), len(runs)):
            start = time.process_time()
            runs[variant]()
            if round_ > 1:
                times[variant].append(time.process_time() - start)
    return times


def measure(rounds: int) -> None:
    """Print one line of JSON for each model that this Python can build."""
    torch.set_num_threads(1)
    here = [pytorch, *(f for f in (transformers, timm) if importlib.util.find_spec(f.__name__))]
    for framework, name, make, run in (made for family in here[::-1] for made in family()):
        models = {variant: make(variant).train() for variant in VARIANTS}

        def step(model: nn.Module, run: Any = run) -> None:
            run(model).square().mean().backward()
            model.zero_grad()

        runs = {variant: lambda model=model, step=step: step(model) for variant, model in models.items()}
        print(json.dumps({"kind": "step", "of": [framework, name], "s": compare(runs, rounds)}), flush=True)
    if transformers in here:
        for name, runs in decoding():
            print(json.dumps({"kind": "decode", "of": ["transformers", name], "s": compare(runs, rounds)}), flush=True)


def row(result: dict[str, Any]) -> str:
    stock = result["s"]["stock"]
    cells = [*result["of"], f"{min(stock) * 1e3:.1f}"]
    for variant in VARIANTS[1:]:
        mine = result["s"][variant]
        low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, stock, strict=True)], n=4)
        cells.append(f"{min(mine) / min(stock):.3f} ({middle:.3f}; {low:.3f} to {high:.3f})")
    return f"| {' | '.join(cells)} |"


def page(results: list[dict[str, Any]], command: str, rounds: int, versions: list[str]) -> str:
    head = "| framework | model | stock, ms | `standard` | `quest` |\n|---|---|---:|---|---|"
    tables = {
        kind: "\n".join([head, *dict.fromkeys(row(x) for x in results if x["kind"] == kind)])
        for kind in ("step", "decode")
    }
    return f"""# The time of a training step, and of decoding, against stock

Stock is the framework's model with scaled_dot_product_attention: timm's Swin with `set_fused_attn(experimental=True)`;
CrossViT has no such path. Each cell is the least time over stock's least, and in brackets the median and the quartiles
of the ratios within a round.

```
{command}
```

{rounds} rounds, processor time of one thread, {platform.machine()} with {os.cpu_count()} cores; {"; ".join(versions)}.

## Training step

Forward and backward, float32, without dropout on the weights. Widths are 192 to 768, and sequences 196 to 1600 tokens.

{tables["step"]}

## Decoding

8 tokens, one at a time, after 2048 tokens, batch 1, width 512, 4 layers. transformers' caches hold the keys as the
model made them, so quest normalises all of them in each step.

{tables["decode"]}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", help="each with a plugin; none measures here and prints JSON")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    if not options.pythons:
        measure(options.rounds)
        return
    results, versions = [], []
    for python in options.pythons:
        command = [python, __file__, "--rounds", str(options.rounds)]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True)
        results += [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
        listed = "from importlib.metadata import version as v; print(v('{}'))"
        for name in ("torch", "transformers", "timm"):
            found = subprocess.run([python, "-c", listed.format(name)], capture_output=True, text=True, check=False)
            if found.returncode == 0:
                versions.append(f"{name} {found.stdout.strip().partition('+')[0]}")
    order = {"transformers": 0, "timm": 1, "torchvision": 2, "PyTorch": 3}
    results = list({tuple(x["of"]): x for x in results}.values())
    results.sort(key=lambda x: order[x["of"][0]])
    command = "python examples/training_step/run.py .nox/quest-transformers/bin/python .nox/quest-timm/bin/python"
    PAGE.write_text(page(results, command, options.rounds, [*dict.fromkeys(versions)]))
    print(PAGE.read_text(), file=sys.stderr)


if __name__ == "__main__":
    main()
