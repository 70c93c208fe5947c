"""Try `attn_implementation="quest"` on every model type of the installed transformers, with tiny random configs.

python docs/coverage.py llama gemma3             # these types
python docs/coverage.py --out coverage.jsonl     # all types, a line of JSON for each

It says what was replaced. It does not compare numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING

import quest_core
import quest_transformers  # noqa: F401 - it makes transformers accept the name

TINY = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 64),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner"), 64),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head"), 4),
    **dict.fromkeys(("num_heads", "n_heads"), 4),
    **{"num_key_value_heads": 2, "head_dim": 16},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
}
"""Sizes of a tiny model, by the attribute of a config that holds them."""
FEW = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "encoder_layers", "decoder_layers")
MOST = 600_000_000
"""Parameters of a model that is built with values; a larger one is built on the meta device."""


@dataclass
class Row:
    """What happened to one model type: `kind` is taken, none, error or unbuilt."""

    model_type: str
    kind: str
    ways: dict[str, int]
    left: int = 0
    reason: str = ""
    size: str = "tiny"


def sizes(config: Any, names: Any) -> dict[str, Any]:
    """Return the arguments that make a config small; those of its parts are mappings."""
    made: dict[str, Any] = {}
    for name, value in TINY.items():
        if name in names and type(getattr(config, name, None)) is int and getattr(config, name) > value:
            made[name] = value
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if part is not None:
            kind = {"model_type": part.model_type} if part.model_type else {}
            made[name] = {**kind, **sizes(part, names)}
    return made


def configs(model_type: str) -> Any:
    """Yield configs of a model type, the smallest first, with a word for their size."""
    kind = CONFIG_MAPPING[model_type]
    widths = [name for name in TINY if name != "head_dim"]
    for names, word in ((TINY, "tiny"), (widths, "tiny"), (FEW, "few layers"), ((), "default")):
        with contextlib.suppress(Exception):
            made = kind()
            yield (kind(**sizes(made, names)) if names else made), word


def count(config: Any) -> int:
    """Return the number of parameters of a model with the host's attention."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModel.from_config(config).parameters())


def build(config: Any, **options: Any) -> nn.Module:
    """Return a model on the CPU, or on the meta device if it is large."""
    with torch.device("meta") if count(config) > MOST else contextlib.nullcontext():
        return AutoModel.from_config(config, **options).eval()


def attempt(model_type: str) -> Row:
    """Return what `attn_implementation="quest"` does to a model type."""
    error: Any = "no config of this type can be built"
    failed: Row | None = None
    for config, size in configs(model_type):
        try:
            build(config)
        except Exception as raised:
            error = raised
            continue
        try:
            model = build(config, attn_implementation="quest")
        except quest_core.errors.QuestError as raised:
            text = " ".join(str(raised).split())
            row = Row(model_type, "none" if "no softmax of q·k" in text else "error", {}, reason=text, size=size)
            if "only a run of it finds" in text:  # these sizes may not fit together, or are too large
                failed = failed or row
                continue
            return row
        except Exception as raised:
            text = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
            return Row(model_type, "error", {}, reason=f"raw {text}", size=size)
        report: Any = getattr(model, "attention_report", None)
        if report is None:
            return Row(model_type, "error", {}, reason="silent: nothing was replaced and nothing said", size=size)
        ways = Counter(replacement.adapter for replacement in report.replacements)
        return Row(model_type, "taken", dict(ways), len(report.left_alone), size=size)
    return failed or Row(
        model_type, "unbuilt", {}, reason=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    )


def types() -> list[str]:
    """Return the model types that AutoModel builds."""
    return sorted(name for name in CONFIG_MAPPING_NAMES if _known(name))


def _known(name: str) -> bool:
    try:
        return CONFIG_MAPPING[name] in MODEL_MAPPING
    except Exception:
        return False


def main(chosen: list[str], path: Path | None) -> None:
    rows = []
    with (path or Path("/dev/null")).open("a") as lines:
        for name in chosen:
            torch.manual_seed(0)
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                row = attempt(name)
            rows.append(row)
            print(f"{name}: {row.kind} {row.ways} left {row.left} ({row.size}) {row.reason[:500]}", flush=True)
            lines.write(json.dumps(asdict(row)) + "\n")
            lines.flush()
            gc.collect()
    print(Counter(row.kind for row in rows))


if __name__ == "__main__":
    transformers.logging.set_verbosity(transformers.logging.CRITICAL + 10)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--out", type=Path, help="file to which a line of JSON for each type is appended")
    given = parser.parse_args()
    main(given.types or types(), given.out)
