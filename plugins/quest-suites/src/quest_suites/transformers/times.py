"""time/transformers: a training step, and decoding with a full cache, against transformers' attn_implementation "sdpa".

Sizes: 4 layers (2 and 2 in encoder-decoders) of width 256, 4 sequences of 256 tokens (a ViT has 257); the decoders
of the tasks decode-* have width 512 and a cache of 2048 tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf

import quest_transformers  # noqa: F401  # makes transformers accept the attention
from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import DEVICE, Step, against_stock, training_step

STEPS = 8  # tokens decoded in a round, one at a time
VIT: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
WORDS = {**VIT, "vocab_size": 1000, "max_position_embeddings": 4096}
GROUPED = {**WORDS, "num_key_value_heads": 2}
WIDE = {**WORDS, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
BART = {
    "vocab_size": 1000, "d_model": 256, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, "attention_dropout": 0.0,
    "max_position_embeddings": 4096,
}  # fmt: skip
T5 = {
    "vocab_size": 1000,
    "d_model": 256,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
GPT2 = {"vocab_size": 1000, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 4096, "attn_pdrop": 0.0}
CONFIGS: dict[str, Callable[[], Any]] = {
    "bert": lambda: hf.BertConfig(**WORDS),
    "roberta": lambda: hf.RobertaConfig(**WORDS),
    "vit": lambda: hf.ViTConfig(**VIT, image_size=128, patch_size=8),
    "gpt2": lambda: hf.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0),
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED, head_dim=64),
    "mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=64),
    "bart": lambda: hf.BartConfig(**BART),
    "t5": lambda: hf.T5Config(**T5),
    "decode-mha": lambda: hf.LlamaConfig(**WIDE, num_key_value_heads=8),
    "decode-gqa": lambda: hf.LlamaConfig(**WIDE, num_key_value_heads=2),
}


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_suites.timing.against_stock`."""
    length, batch, past = (16, 1, 16) if cell.smoke else (256, 4, 2048)

    def make(attention: str | None) -> Step:
        model = hf.AutoModel.from_config(CONFIGS[cell.task](), attn_implementation=attention or "sdpa").to(DEVICE)
        if cell.task.startswith("decode"):
            ids = torch.randint(1000, (1, past), device=DEVICE)
            with torch.no_grad():
                filled = model.eval()(input_ids=ids, past_key_values=hf.DynamicCache(config=model.config))
            return partial(decode, model, filled.past_key_values, ids[:, :1])
        ids = torch.randint(1000, (batch, length), device=DEVICE)
        given = {"input_ids": ids, **({"decoder_input_ids": ids} if cell.task in ("bart", "t5") else {})}
        if cell.task == "vit":
            given = {"pixel_values": torch.randn(batch, 3, 128, 128, device=DEVICE)}
        model.train()
        return training_step(model, lambda: model(**given).last_hidden_state.square().mean())

    return against_stock(cell, progress, make)


@torch.no_grad()
def decode(model: Any, cache: Any, token: torch.Tensor) -> None:
    """Decode `token` [B, 1] `STEPS` times, and take these tokens out of the cache again."""
    for _ in range(STEPS):
        model(input_ids=token, past_key_values=cache)
    cache.crop(-STEPS)
