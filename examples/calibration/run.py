"""Does calibration help? A small language model, pretrained with standard attention, is fine-tuned with QUEST.

OMP_NUM_THREADS=1 python examples/calibration/run.py

The text is the documentation of Python's own topics (pydoc_data.topics), which every Python installation contains,
read character by character. For every seed a model is pretrained; then three copies are fine-tuned on the same batches
in the same order: one keeps standard attention, one gets QUEST by quest_core.inject, one by quest_core.calibrate.
Writes README.md, results.json and, where matplotlib is installed, curve.png.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import statistics
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quest_core

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 3, 4, 64, 96, 16
ARMS = ("standard", "quest", "quest, calibrated")
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # two-sided


class LanguageModel(nn.Module):
    """A causal pre-norm transformer over characters: tokens [B, N] -> logits [B, N, vocabulary]."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        return self.out(self.encoder(x, self.mask, is_causal=True))


def corpus() -> tuple[Tensor, Tensor, int]:
    """Characters as numbers: training text, held-out text (the last tenth of the topics), size of the vocabulary."""
    text = "\n".join(topics[name] for name in sorted(topics))
    known = sorted(set(text))
    number = {character: i for i, character in enumerate(known)}
    tokens = torch.tensor([number[character] for character in text])
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:], len(known)


def draw(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of the text and, for every character, the next one: [B, N] each."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    pieces = text[starts + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, held_out: list[tuple[Tensor, Tensor]]) -> float:
    """Mean loss on held-out text, in nats a character."""
    model.eval()
    mean = statistics.fmean(loss_of(model, batch).item() for batch in held_out)
    model.train()
    return mean


def train(
    model: nn.Module, text: Tensor, held_out: list[tuple[Tensor, Tensor]], steps: int, rate: float, seed: int, name: str
) -> dict[int, float]:
    """AdamW, warm-up over a twentieth of the steps, then cosine decay; returns the held-out loss by step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm) / (steps - warm))),
    )
    asked = {0, 1, 2, 5, 10, 20, 40, 80, 160, 240, *range(320, steps, 160), steps}
    losses: dict[int, float] = {}
    begin = time.monotonic()
    for step in range(steps + 1):
        if step in asked:
            losses[step] = evaluate(model, held_out)
            print(f"\r{name}: step {step}/{steps}, held-out {losses[step]:.4f} ", end="", file=sys.stderr, flush=True)
        if step < steps:
            optimizer.zero_grad()
            loss_of(model, draw(text, generator)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    print(f"({time.monotonic() - begin:.0f} s)", file=sys.stderr)
    return losses


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval (Student's t)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, T_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def write(value: tuple[float, float], sign: str = "") -> str:
    return f"{value[0]:{sign}.4f} ± {value[1]:.4f}"


def report(result: dict) -> str:
    """README.md, from numbers alone."""
    seeds = result["seeds"]
    steps = [int(step) for step in result["curves"]["quest"][str(seeds[0])]]
    curves = {
        arm: {step: [result["curves"][arm][str(seed)][str(step)] for seed in seeds] for step in steps} for arm in ARMS
    }

    def paired(step: int, arm: str, other: str) -> tuple[float, float]:
        return interval([a - b for a, b in zip(curves[arm][step], curves[other][step], strict=True)])

    rows = [
        f"| {step} | "
        + " | ".join(write(interval(curves[arm][step])) for arm in ARMS)
        + f" | {write(paired(step, ARMS[2], ARMS[1]), '+')} |"
        for step in steps
    ]
    before = statistics.fmean(result["pretrained"].values())
    factors = [f for one in result["calibration"].values() for layer in one["factors"].values() for f in layer]
    changes = {
        kind: interval([one[kind] for one in result["calibration"].values()]) for kind in ("uncalibrated", "calibrated")
    }
    start, end = paired(0, ARMS[2], ARMS[1]), paired(steps[-1], ARMS[2], ARMS[1])
    to_standard = paired(steps[-1], ARMS[2], ARMS[0])

    def verdict(value: tuple[float, float]) -> str:
        if abs(value[0]) <= value[1]:
            return f"the two cannot be told apart ({write(value, '+')} nats, calibrated − uncalibrated)"
        word = "lower" if value[0] < 0 else "higher"
        return f"the calibrated model is {word} ({write(value, '+')} nats, calibrated − uncalibrated)"

    options = result["options"]
    return f"""# Calibration: from standard attention to QUEST

A causal language model over the characters of Python's documentation topics (`pydoc_data.topics`:
{result["characters"]:,} characters, the last tenth held out), an `nn.TransformerEncoder` of {LAYERS} layers and
{HEADS} heads of {WIDTH // HEADS} features, context {CONTEXT}, {result["parameters"]:,} parameters. It is pretrained
with standard attention for {options["pretrain"]} steps of {BATCH} pieces (held-out loss {before:.3f} nats a character),
then fine-tuned for {options["finetune"]} steps on the same text at a learning rate of {options["rate"]:g}. For each of
{len(seeds)} seeds the three fine-tuned models start from the same pretrained weights and see the same batches in the
same order.

Held-out loss in nats a character; mean ± 95 % interval over seeds (Student's t). The last column is the difference
paired by seed, which leaves out how pretrained models differ among each other.

| step | standard, continued | quest | quest, calibrated | calibrated − uncalibrated |
|---|---|---|---|---|
{chr(10).join(rows)}

What was found:

- Before the first step, {verdict(start)}.
  Standard attention is {write(paired(0, ARMS[1], ARMS[0]))} nats lower than uncalibrated QUEST, and
  {write(paired(0, ARMS[2], ARMS[0]))} lower than calibrated: one factor a head does not replace norms that differ from
  key to key.
- After the last step, {verdict(end)}.
- Against standard attention trained on for as long, calibrated QUEST ends at {write(to_standard, "+")} nats.
- When attention is replaced, the outputs change by {write(changes["uncalibrated"])} of their RMS uncalibrated and by
  {write(changes["calibrated"])} calibrated.
- The factors of the heads lie between {min(factors):.2f} and {max(factors):.2f}.

What this does not show: it is one small model, one text, one learning rate and one length of training, with
{len(seeds)} seeds.

Command (took {result["minutes"]:.0f} minutes):

```
OMP_NUM_THREADS=1 python examples/calibration/run.py{result["arguments"]}
```

Python {result["python"]} (the text differs a little between versions), PyTorch {result["torch"]}, one thread of a
shared {result["machine"]} CPU, float32. All losses and all factors are in `results.json`.{result["picture"]}
"""


def draw_curve(result: dict, path: Path) -> bool:
    """The held-out losses over steps; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for arm, colour in zip(ARMS, ("0.45", "tab:orange", "tab:blue"), strict=True):
        curves = [list(result["curves"][arm][str(seed)].values()) for seed in result["seeds"]]
        steps = [int(step) for step in result["curves"][arm][str(result["seeds"][0])]]
        for curve in curves:
            axes.plot(steps, curve, color=colour, alpha=0.3, linewidth=0.8)
        mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        axes.plot(steps, mean, color=colour, label=arm, linewidth=2)
    axes.set_xscale("symlog", linthresh=5)
    axes.set_xlim(0)
    axes.set_xlabel("steps of fine-tuning")
    axes.set_ylabel("held-out loss, nats a character")
    axes.legend()
    figure.savefig(path, dpi=130)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, 2 to 10")
    parser.add_argument("--pretrain", type=int, default=1500, help="steps of pretraining")
    parser.add_argument("--finetune", type=int, default=300, help="steps of fine-tuning")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of fine-tuning")
    parser.add_argument("--out", type=Path, default=Path("docs/results/calibration"), help="folder of the report")
    options = parser.parse_args()
    if not 2 <= options.seeds <= len(T_95) + 1:
        parser.error(f"--seeds is {options.seeds}; an interval needs 2 to {len(T_95) + 1}")
    torch.set_num_threads(1)
    begin = time.monotonic()
    text, rest, vocabulary = corpus()
    held_out = [draw(rest, torch.Generator().manual_seed(1000 + i)) for i in range(12)]
    changed = [f"--{name} {getattr(options, name)}" for name in ("seeds", "pretrain", "finetune", "rate")]
    changed = [c for c in changed if str(parser.get_default(c.split()[0][2:])) != c.split()[1]]
    result: dict = {
        "options": {"pretrain": options.pretrain, "finetune": options.finetune, "rate": options.rate},
        "arguments": "".join(f" {c}" for c in changed),
        "seeds": list(range(options.seeds)),
        "characters": len(text) + len(rest),
        "pretrained": {},
        "calibration": {},
        "curves": {arm: {} for arm in ARMS},
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "machine": platform.machine(),
    }
    for seed in result["seeds"]:
        torch.manual_seed(seed)
        model = LanguageModel(vocabulary)
        result["parameters"] = sum(p.numel() for p in model.parameters())
        losses = train(model, text, held_out, options.pretrain, 3e-3, seed, f"seed {seed}, pretraining")
        result["pretrained"][str(seed)] = losses[options.pretrain]
        generator = torch.Generator().manual_seed(500 + seed)
        samples = [draw(text, generator)[0] for _ in range(4)]
        for arm in ARMS:
            tuned = copy.deepcopy(model)
            if arm == "quest":
                tuned, _ = quest_core.inject(tuned, "quest")
            elif arm == "quest, calibrated":
                tuned, made = quest_core.calibrate(tuned, samples)
                result["calibration"][str(seed)] = {
                    "uncalibrated": made.uncalibrated,
                    "calibrated": made.calibrated,
                    "factors": {layer.path: layer.factors for layer in made.layers},
                }
                print(made, file=sys.stderr)
            losses = train(
                tuned, text, held_out, options.finetune, options.rate, 100 + seed, f"seed {seed}, fine-tuning {arm}"
            )
            result["curves"][arm][str(seed)] = {str(step): loss for step, loss in losses.items()}
    result["minutes"] = (time.monotonic() - begin) / 60
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = draw_curve(result, options.out / "curve.png")
    result["picture"] = "\n\n![held-out loss over the steps of fine-tuning](curve.png)" if drawn else ""
    (options.out / "README.md").write_text(report(result))
    (options.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    print((options.out / "README.md").read_text())


if __name__ == "__main__":
    main()
