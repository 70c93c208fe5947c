"""Suite toy/spurious: can attention find the odd vector out when a shortcut serves half of the samples?

The task of the QUEST paper (arXiv 2604.00199, sections 2.2, A.3 and A.4). A sequence holds N vectors [key | value] of
10 + 10 numbers. All keys are N(0, I) but one, at the answer's position L = Int(N(10, 2)); all values are one-hot at
random, and the class to predict is the one-hot value at L. In training, the answer's key is N(0, Σ) for half of the
samples (the robust signal: Σ = S Sᵀ, S standard normal, so that it is longer and of other directions than the rest),
and N(b, 0.1 I) for the other half (the shortcut: one b ~ N(0, Σ) for all). A model that only looks for b solves half
of the training samples.

One cell is one attention and one realisation of the data. It trains every model of the paper's grid (6 learning rates
× 5 weight decays × weight seeds) at once.

The paper leaves open, and this suite chooses:

- Sequence length and number of samples: options `seq_len`, `samples`, `test_samples`.
- Int(·) rounds: of rounding and truncating, it gives one most frequent position, 20 % of the samples, as A.3 says.
  Positions outside the sequence are clipped into it.
- Test samples are all unbiased, with answers placed as in training. This is the reading under which a model that
  knows b and the usual position has the 20-40 % test accuracy that section 2.2 reports for it.
- The block, option `block`. Algorithm A2 as printed is `block=printed`: queries, keys and values come from X + P, not
  from LayerNorm1(X + P), which only feeds the residual, and the residuals of LayerNorm2 and of the MLP are X + P again.
  That cannot be what the paper ran: the [CLS] query is then one constant and keys are linear in the data, so the
  logits of standard attention and QNorm are linear in an answer's key, which is symmetric about 0. Such logits are
  high for at most about half of the unbiased answers, while section 2.2 reports correct models for both. The default
  `block=prenorm` is what A.3 calls the standard implementation: x + Attention(LayerNorm1(x)), then
  x + MLP(LayerNorm2(x)), where LayerNorm shrinks the one-hot part of a long vector and so shows its length to a
  linear key.
- Projections of queries, keys and values are printed without bias and have none; the output projection (algorithm A1,
  line 12), MLP and classifier have one. The MLP is linear, GELU, linear. Dropout is not used.
- Weights start as torch.nn.Linear does; [CLS] and positions are normal with standard deviation `embed_std`.
- Weight decay acts on every parameter, as in torch.optim.AdamW given model.parameters().
- The initial scale of the QK norms is an option of the attention: "qknorm-hs(init=1)".
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quest_core
from quest_core.config import AttentionConfig, AttentionSpec
from quest_core.mechanism import head_sizes
from quest_core.projections import Projected, Separate, init_norms
from quest_suites.contract import Cell, Progress, Result, load_state, save_state

LEARNING_RATES = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01)
WEIGHT_DECAYS = (0.0, 0.01, 0.02, 0.05, 0.1)
CLASSES = 10
KEY_DIM = 10
DIM = KEY_DIM + CLASSES
KINDS = ("biased", "unbiased", "other")
"""Tokens whose key norms are shown separately: answers with either kind of key, and all other tokens."""
OUTCOMES = ("correct", "biased", "degenerate", "other")
PROBE = 256
"""Training samples whose key norms are measured after every epoch."""
CHUNK = 128
"""Samples evaluated at once; bounds the memory, does not change results."""


@dataclass(frozen=True)
class Sequences:
    x: Tensor  # [S, N, 20], the vectors [key | value]
    location: Tensor  # [S], the answer's position in 0..N-1
    biased: Tensor  # [S], True where the answer's key was drawn around b
    label: Tensor  # [S], the class


def make_data(seed: int, *, samples: int, test_samples: int, seq_len: int) -> tuple[Sequences, Sequences]:
    """Training and test samples of one realisation of the data: S and b belong to the realisation."""
    draw = _generator("distribution", seed)
    root = torch.randn(KEY_DIM, KEY_DIM, generator=draw)  # S, with Σ = S Sᵀ
    bias = root @ torch.randn(KEY_DIM, generator=draw)  # b ~ N(0, Σ)
    return (
        _draw_sequences(_generator("training", seed), samples, seq_len, root, bias, biased_share=0.5),
        _draw_sequences(_generator("test", seed), test_samples, seq_len, root, bias, biased_share=0.0),
    )


def _draw_sequences(
    draw: torch.Generator, samples: int, seq_len: int, root: Tensor, bias: Tensor, *, biased_share: float
) -> Sequences:
    location = (10 + 2 * torch.randn(samples, generator=draw)).round().long().clamp(0, seq_len - 1)  # [S]
    biased = torch.rand(samples, generator=draw) < biased_share  # [S]
    keys = torch.randn(samples, seq_len, KEY_DIM, generator=draw)  # [S, N, 10]
    noise = torch.randn(samples, KEY_DIM, generator=draw)  # [S, 10]
    answer = torch.where(biased[:, None], bias + math.sqrt(0.1) * noise, noise @ root.T)  # [S, 10]
    every = torch.arange(samples)
    keys[every, location] = answer
    classes = torch.randint(CLASSES, (samples, seq_len), generator=draw)  # [S, N]
    x = torch.cat([keys, F.one_hot(classes, CLASSES).to(keys.dtype)], dim=-1)
    return Sequences(x, location, biased, classes[every, location])


def _generator(purpose: str, seed: int) -> torch.Generator:
    """A stream of its own for each purpose, so that the test set does not depend on the number of training samples."""
    return torch.Generator().manual_seed(_mix(purpose, seed))


def _mix(purpose: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{purpose} {seed}".encode()).digest()[:7], "big")


class Transformer(Projected):
    """One model, with one head of 20 features, written plainly; what `Models` computes for many at once."""

    projections = Separate("query", "key", "value")

    def __init__(self, attention: AttentionSpec, *, block: str, seq_len: int, embed_std: float) -> None:
        super().__init__()
        self.config, self.head_sizes = AttentionConfig.parse(attention), head_sizes(attention, 1, DIM)
        self.block = block
        self.cls = nn.Parameter(embed_std * torch.randn(1, DIM))
        self.positions = nn.Parameter(embed_std * torch.randn(seq_len + 1, DIM))
        self.norm1 = nn.LayerNorm(DIM)
        self.query = nn.Linear(DIM, DIM, bias=False)
        self.key = nn.Linear(DIM, DIM, bias=False)
        self.value = nn.Linear(DIM, DIM, bias=False)
        self.mechanism = quest_core.Mechanism(attention, num_heads=1, head_dim=DIM, projected=True)
        self.out = nn.Linear(DIM, DIM)
        self.norm2 = nn.LayerNorm(DIM)
        self.hidden = nn.Linear(DIM, DIM)
        self.shrink = nn.Linear(DIM, DIM)
        self.classifier = nn.Linear(DIM, CLASSES)
        init_norms(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, 20] -> class logits [B, 10] and the projected keys [B, N + 1, 20], before any normalization."""
        x = torch.cat([self.cls.expand(len(x), 1, DIM), x], dim=1) + self.positions  # [B, N + 1, 20]
        y = self.norm1(x)
        source = y if self.block == "prenorm" else x
        q, k, v = self.query(source[:, :1]), self.key(source), self.value(source)
        x, y = x[:, :1], y[:, :1]  # only the [CLS] row reaches the classifier
        attended = self.out(self.mechanism(*(z[:, None] for z in (q, k, v)))[:, 0])  # [B, 1, 20]
        if self.block == "prenorm":
            x = x + attended
            x = x + self._mlp(self.norm2(x))
        else:
            x = x + self._mlp(x + self.norm2(y + attended))
        return self.classifier(x[:, 0]), k

    def _mlp(self, x: Tensor) -> Tensor:
        return self.shrink(F.gelu(self.hidden(x)))  # type: ignore[no-any-return]


class Models:
    """M transformers that differ in their weights, computed side by side by `torch.func.vmap`.

    `parameters` has tensors [M, ...] by name, and `options` are those of `Transformer`.
    """

    def __init__(self, attention: AttentionSpec, weight_seeds: Sequence[int], **options: Any) -> None:
        made = []
        for seed in weight_seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_mix("weights", seed))
                made.append(Transformer(attention, **options))
        self.parameters, self._buffers = torch.func.stack_module_state(made)
        self._one = made[0]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, 20] -> class logits [M, B, 10] and keys [M, B, N + 1, 20]."""

        def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Any:
            return torch.func.functional_call(self._one, (parameters, buffers), (x,))

        found: tuple[Tensor, Tensor] = torch.func.vmap(call)(self.parameters, self._buffers)
        return found


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW on tensors [M, ...] with a learning rate and a weight decay for each model, [M]."""

    def __init__(self, parameters: Iterable[Tensor], learning_rate: Tensor, weight_decay: Tensor) -> None:
        super().__init__(parameters, lr=1.0, weight_decay=0.0)  # a step is as long as that of the rate 1
        self.rate, self.decay = learning_rate, weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients, and remove these."""
        own = self.param_groups[0]["params"]
        before = [p.clone() for p in own]
        super().step()
        for p, old in zip(own, before, strict=True):
            rate, decay = (x.view(-1, *[1] * (p.dim() - 1)) for x in (self.rate, self.decay))
            p.copy_(old * (1 - rate * decay) + rate * (p - old))
        self.zero_grad()


def outcome(train: float, test: float) -> str:
    """What a model learned, from its accuracies in percent: the categories of section 2.2.

    "correct" is above 90 on both, "biased" 50-80 in training and 20-40 in the test, "degenerate" at most 15 on both
    (chance is 10). Section 2.2 does not name the rest, such as models that learned the training set by heart: "other".
    """
    if train > 90 and test > 90:
        return "correct"
    if 50 <= train <= 80 and 20 <= test <= 40:
        return "biased"
    if train <= 15 and test <= 15:
        return "degenerate"
    return "other"


def run(cell: Cell, progress: Progress) -> Result:
    """Train and judge the whole grid of models for one attention and one realisation of the data (`cell.seed`).

    All models see the same mini-batches in the same order. A model whose loss stops being finite trains on without
    touching the others, and counts as degenerate, marked `diverged` in the details.

    Returns:
        metrics: success_rate, biased_rate, degenerate_rate, other_rate and diverged_rate in percent of the models, and
            train_accuracy, test_accuracy in percent, their means over the models.
        series, one value for each epoch: loss, the mean over the epoch; key_norm_biased, key_norm_unbiased and
            key_norm_other, the mean norms of the projected keys, before any normalization, of biased answers, unbiased
            answers and all other vectors, after the epoch. They are means over the models that did not diverge;
            "key_norm_biased/correct" and so on are means over those with one outcome.
        details: `models`, a mapping for each with learning_rate, weight_decay, weight_seed, train_accuracy,
            test_accuracy, outcome and diverged.
    """
    options = dict(cell.options)
    rates: Sequence[float] = LEARNING_RATES
    decays: Sequence[float] = WEIGHT_DECAYS
    if cell.smoke:
        options |= {"samples": 64, "test_samples": 64, "epochs": 2, "weight_seeds": 1}
        rates, decays = rates[1:3], decays[:2]
    grid = [(rate, decay, seed) for rate in rates for decay in decays for seed in range(options["weight_seeds"])]

    train, test = make_data(cell.seed, **{name: options[name] for name in ("samples", "test_samples", "seq_len")})
    models = Models(
        cell.attention,
        [seed for _, _, seed in grid],
        **{name: options[name] for name in ("block", "seq_len", "embed_std")},
    )
    optimizer = AdamW(
        models.parameters.values(),
        torch.tensor([rate for rate, _, _ in grid]),
        torch.tensor([decay for _, decay, _ in grid]),
    )

    shuffle = _generator("order", cell.seed)
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    if state := load_state(cell):
        losses, norms = state["losses"], state["norms"]
        optimizer.load_state_dict(state["optimizer"])
        for name, value in state["parameters"].items():
            models.parameters[name].data.copy_(value)
        shuffle.set_state(state["shuffle"])
    for epoch in range(len(losses), options["epochs"]):
        total = torch.zeros(len(grid))
        for chosen in torch.randperm(len(train.x), generator=shuffle).split(options["batch"]):
            loss = train_step(models, optimizer, train.x[chosen], train.label[chosen])  # [M]
            total += loss * len(chosen)
        losses.append(total / len(train.x))
        norms.append(_key_norms(models, train))
        kept = {"optimizer": optimizer.state_dict(), "parameters": models.parameters, "shuffle": shuffle.get_state()}
        save_state(cell, {"losses": losses, "norms": norms, **kept})
        progress((epoch + 1) / options["epochs"], f"epoch {epoch + 1} loss {losses[-1].nanmean():.3f}")
    return _judge(grid, _accuracy(models, train), _accuracy(models, test), torch.stack(losses), torch.stack(norms))


def train_step(models: Models, optimizer: AdamW, x: Tensor, label: Tensor) -> Tensor:
    """One mini-batch: x [B, N, 20], label [B] -> the loss of each model before the step, [M]."""
    logits, _ = models(x)  # [M, B, 10]
    each = F.cross_entropy(logits.flatten(0, 1), label.repeat(len(logits)), reduction="none")
    loss = each.view(logits.shape[:2]).mean(dim=1)  # [M]
    loss.sum().backward()  # the models share nothing, so the sum gives each its own gradient
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def _accuracy(models: Models, data: Sequences) -> Tensor:
    """Percent of the samples that each model classifies correctly, [M]; NaN where its logits are not finite."""
    right, finite = [], []
    for x, label in zip(data.x.split(CHUNK), data.label.split(CHUNK), strict=True):
        logits, _ = models(x)
        right.append((logits.argmax(-1) == label).sum(-1))
        finite.append(logits.isfinite().flatten(1).all(-1))
    percent = 100 * torch.stack(right).sum(0) / len(data.label)
    return percent.where(torch.stack(finite).all(0), torch.nan)


@torch.no_grad()
def _key_norms(models: Models, data: Sequences) -> Tensor:
    """Mean key norm of each of KINDS on the first samples, [3, M]; NaN for a kind that they lack."""
    _, keys = models(data.x[:PROBE])
    norms = keys[:, :, 1:].norm(dim=-1)  # [M, B, N]
    answer = F.one_hot(data.location[:PROBE], norms.shape[-1]).bool()  # [B, N]
    biased = data.biased[:PROBE, None]
    return torch.stack([norms[:, mask].mean(dim=1) for mask in (answer & biased, answer & ~biased, ~answer)])


def _judge(grid: list[tuple[float, float, int]], train: Tensor, test: Tensor, losses: Tensor, norms: Tensor) -> Result:
    """The result from accuracies [M], losses [E, M] and key norms [E, 3, M]."""
    finite = train.isfinite() & test.isfinite() & losses.isfinite().all(0)
    train, test = train.nan_to_num(0.0), test.nan_to_num(0.0)
    judged = zip(grid, finite.tolist(), train.tolist(), test.tolist(), strict=True)
    rows: list[dict[str, Any]] = [
        {
            "learning_rate": rate,
            "weight_decay": decay,
            "weight_seed": seed,
            "train_accuracy": on_train,
            "test_accuracy": on_test,
            "outcome": outcome(on_train, on_test) if good else "degenerate",
            "diverged": not good,
        }
        for (rate, decay, seed), good, on_train, on_test in judged
    ]

    def percent(key: str, value: Any) -> float:
        return 100 * len([row for row in rows if row[key] == value]) / len(rows)

    metrics = {
        "success_rate": percent("outcome", "correct"),
        **{f"{name}_rate": percent("outcome", name) for name in OUTCOMES[1:]},
        "diverged_rate": percent("diverged", True),
        "train_accuracy": train.mean().item(),
        "test_accuracy": test.mean().item(),
    }
    groups = {"": finite}
    for name in OUTCOMES:
        groups[f"/{name}"] = finite & torch.tensor([row["outcome"] == name for row in rows])
    curves = {"loss": losses[:, finite]}  # name -> [E, models]
    for suffix, members in groups.items():
        curves |= {f"key_norm_{kind}{suffix}": norms[:, index, members] for index, kind in enumerate(KINDS)}
    means = {name: curve.mean(1) for name, curve in curves.items()}
    # Without a model, or without such a token among the first samples, the curve is omitted.
    series = {name: mean.tolist() for name, mean in means.items() if mean.isfinite().all()}
    return Result(metrics, series, {"models": rows})
