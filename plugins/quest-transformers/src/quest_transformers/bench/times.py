"""time/transformers: forward and backward of small models, against transformers' own attn_implementation "sdpa"."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as hf

import quest_transformers  # noqa: F401  # makes transformers accept the attention
from quest_core.benchmarks import Cell, Progress, Result, beside_stock

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 2048,
}


def make_model(task: str, attention: str) -> Any:
    """Return a model without dropout of attention weights."""
    if task == "bert":
        return hf.AutoModel.from_config(
            hf.BertConfig(**SIZES, attention_probs_dropout_prob=0.0), attn_implementation=attention
        )
    if task == "vit":
        sizes = {name: SIZES[name] for name in list(SIZES)[1:5]}
        config: Any = hf.ViTConfig(**sizes, image_size=128, patch_size=8)
        return hf.AutoModel.from_config(config, attn_implementation=attention)
    if task == "gpt2":
        config = hf.GPT2Config(vocab_size=1000, n_embd=256, n_layer=4, n_head=4, n_positions=2048, attn_pdrop=0.0)
    else:
        config = hf.LlamaConfig(**SIZES, num_key_value_heads=2)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_core.benchmarks.beside_stock`."""
    options = {**cell.options, **({"length": 16, "batch": 1, "rounds": 2} if cell.smoke else {})}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = []
    for attention in ("sdpa", cell.attention):
        torch.manual_seed(cell.seed)
        models.append(make_model(cell.task, attention).to(device).train())
    given = {"input_ids": torch.randint(0, 1000, (options["batch"], options["length"]), device=device)}
    if cell.task == "vit":
        given = {"pixel_values": torch.randn(options["batch"], 3, 128, 128, device=device)}
    return beside_stock(*(partial(step, model, given) for model in models), rounds=options["rounds"], progress=progress)


def step(model: Any, given: dict[str, torch.Tensor]) -> None:
    """One forward and backward pass."""
    model.zero_grad(set_to_none=True)
    out = model(**given)
    (out.logits if hasattr(out, "logits") else out.last_hidden_state).float().square().mean().backward()
