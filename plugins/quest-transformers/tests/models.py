"""Small models of every architecture that the plugin names, built from their configs with random weights."""

import torch
import transformers as hf

from quest_transformers.anatomy import is_attention

BERT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
LLAMA = {**BERT, "num_key_value_heads": 2, "attention_dropout": 0.1}
SEQ2SEQ = {
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    **{"vocab_size": 50, "d_model": 32, "attention_dropout": 0.1, "max_position_embeddings": 64},
    "forced_eos_token_id": None,
}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8, "patch_size": 2}

CONFIGS = {
    "bert": lambda: hf.BertConfig(**BERT),
    "vit": lambda: hf.ViTConfig(**VIT, intermediate_size=48, attention_probs_dropout_prob=0.1),
    "gpt2": lambda: hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "llama": lambda: hf.LlamaConfig(**LLAMA),
    "qwen3": lambda: hf.Qwen3Config(**LLAMA, head_dim=16),
    "mistral": lambda: hf.MistralConfig(**LLAMA, sliding_window=4),
    "bart": lambda: hf.BartConfig(**SEQ2SEQ),
    "t5": lambda: hf.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
}
if not any(is_attention(module) for module in hf.T5Model(CONFIGS["t5"]()).modules()):
    del CONFIGS["t5"]  # an older transformers, where T5 does not call the AttentionInterface; it is refused by name
SITES = {"bart": 6, "t5": 6}
CLASSES = {
    "bert": hf.AutoModelForMaskedLM,
    "vit": hf.AutoModelForImageClassification,
    "bart": hf.AutoModelForSeq2SeqLM,
    "t5": hf.AutoModelForSeq2SeqLM,
}
SEQ2SEQ_MODELS = tuple(name for name in ("bart", "t5") if name in CONFIGS)
CAUSAL = ("gpt2", "llama", "qwen3", "mistral")


def build(name, seed=0, attention=None, **options):
    """A model with freshly drawn weights; with `attention`, the plugin's."""
    torch.manual_seed(seed)
    if attention is not None:
        options["attn_implementation"] = attention
    return CLASSES.get(name, hf.AutoModelForCausalLM).from_config(CONFIGS[name](), **options)


def inputs(name, padded=False):
    """Arguments of the model's forward."""
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8)}
    ids = torch.randint(3, 50, (2, 9))
    made = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name in ("bart", "t5"):
        made["decoder_input_ids"] = torch.randint(3, 50, (2, 7))
    if padded:
        hidden = slice(None, 3) if name in CAUSAL else slice(6, None)
        made["attention_mask"][0, hidden] = 0
        if name in CAUSAL:
            made["position_ids"] = (made["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return made


def sharp(model):
    """Move the logits of a model far apart, so that rounding decides nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.eval()
