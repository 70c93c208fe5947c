"""Time of a training step (forward and backward): transformers' sdpa, `standard` and another mechanism.

    OMP_NUM_THREADS=1 python benchmarks/step_time.py [--attention quest] [--length 256] [--models bert gpt2]

Models of one architecture have equal weights and run in turn, in a random order in each round, so that a change of the
machine's load meets all alike. A figure is the smallest time of a variant over that of stock; in brackets is the median
of the rounds' ratios. CPU time of the process, or wall time on a GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
import transformers as hf

import quest_transformers  # noqa: F401  # makes transformers accept the attention

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 2048,
}
CONFIGS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "bert": lambda: hf.BertConfig(**SIZES, attention_probs_dropout_prob=0.0),
    "gpt2": lambda: hf.GPT2Config(vocab_size=1000, n_embd=256, n_layer=4, n_head=4, n_positions=2048, attn_pdrop=0.0),
    "llama": lambda: hf.LlamaConfig(**SIZES, num_key_value_heads=2),
    "vit": lambda: hf.ViTConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        image_size=128,
        patch_size=8,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="quest")
    parser.add_argument("--length", type=int, default=256, help="tokens; a ViT has 257")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    clock = time.perf_counter if cuda else time.process_time
    for name in options.models:
        variants = {}
        for variant in ("sdpa", "standard", options.attention):
            torch.manual_seed(0)
            kind = hf.AutoModel if name in ("bert", "vit") else hf.AutoModelForCausalLM
            variants[variant] = kind.from_config(CONFIGS[name](), attn_implementation=variant).to(device).train()
        ids = torch.randint(0, 1000, (options.batch, options.length), device=device)
        given = {"pixel_values": torch.randn(options.batch, 3, 128, 128, device=device)} if name == "vit" else {
            "input_ids": ids
        }  # fmt: skip

        def step(model: torch.nn.Module, given: dict[str, torch.Tensor] = given) -> float:
            if cuda:
                torch.cuda.synchronize()
            started = clock()
            out = model(**given)
            (out.logits if hasattr(out, "logits") else out.last_hidden_state).float().square().mean().backward()
            if cuda:
                torch.cuda.synchronize()
            return clock() - started

        times: dict[str, list[float]] = {variant: [] for variant in variants}
        for round_ in range(options.rounds + 2):
            for variant in random.sample(list(variants), len(variants)):
                taken = step(variants[variant])
                if round_ >= 2:
                    times[variant].append(taken)
        stock = times["sdpa"]
        line = f"{name:<6} sdpa {min(stock) * 1e3:7.1f} ms"
        for variant in list(variants)[1:]:
            ratio = min(times[variant]) / min(stock)
            median = statistics.median(mine / theirs for mine, theirs in zip(times[variant], stock, strict=True))
            line += f"   {variant} {ratio:.3f} ({median:.3f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
