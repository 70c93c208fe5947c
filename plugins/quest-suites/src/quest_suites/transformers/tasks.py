"""transformers/bytes-lm: a small decoder predicts the bytes of Python's own documentation.

The text is pydoc_data.topics of the standard library, so nothing is downloaded. Every tenth piece of it is held out.
"""

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import quest_transformers  # noqa: F401  # makes transformers accept the attention
from quest_suites.contract import Cell, Progress, Result, about, train_steps

LENGTH, BATCH, PIECE = 64, 16, 2048
SMOKE_STEPS = 3


def text() -> tuple[Tensor, Tensor]:
    """Return training and held-out bytes, both [bytes]."""
    pieces = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode())).split(PIECE)
    return torch.cat([piece for i, piece in enumerate(pieces) if i % 10]), torch.cat(pieces[::10])


def make_model(task: str, width: int, attention: str) -> Any:
    """Return a decoder of four layers and four heads."""
    if task == "gpt2":
        config: Any = GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=width, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
        )
    else:
        config = LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def run_bytes_lm(cell: Cell, progress: Progress) -> Result:
    """Train and evaluate with one attention and one seed.

    Returns:
        The metric ``perplexity`` per byte of held-out text, and the series ``train_loss`` by step.
    """
    steps = SMOKE_STEPS if cell.smoke else cell.options["steps"]
    data, held_out = text()
    torch.manual_seed(cell.seed)
    model = make_model(cell.task, cell.options["width"], cell.attention)
    generator = torch.Generator().manual_seed(cell.seed)  # its own: the same batches for every attention
    optimizer = torch.optim.AdamW(model.parameters(), lr=cell.options["lr"], weight_decay=0.01)
    model.train()

    def loss(step: int) -> Tensor:
        optimizer.param_groups[0]["lr"] = cell.options["lr"] * min((step + 1) / 50, 1) * (1 - step / steps)
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator).tolist()
        ids = torch.stack([data[start : start + LENGTH] for start in starts])  # [B, N]
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    losses = train_steps(cell, progress, steps, model, optimizer, generator, loss, clip=1.0)
    model.eval()
    windows = held_out[: len(held_out) // LENGTH * LENGTH].view(-1, LENGTH)
    windows = windows[:BATCH] if cell.smoke else windows
    with torch.no_grad():
        held = [model(input_ids=ids, labels=ids).loss.double() * len(ids) for ids in windows.split(64)]
    return Result(
        metrics={"perplexity": (sum(held) / len(windows)).exp().item()},  # infinite at a loss that math.exp refuses
        series={"train_loss": losses},
        details=about(model),
    )
