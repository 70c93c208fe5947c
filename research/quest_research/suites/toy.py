"""Suite toy/spurious: can attention find the odd vector out when a shortcut serves half of the samples?

The task of the QUEST paper (arXiv 2604.00199, sections 2.2, A.3 and A.4). A sequence holds N vectors [key | value] of
10 + 10 numbers. All keys are N(0, I) but one, at the answer's position L = Int(N(10, 2)); all values are one-hot at
random, and the class to predict is the one-hot value at L. In training, the answer's key is N(0, Σ) for half of the
samples (the robust signal: Σ = S Sᵀ, S standard normal, so that it is longer and of other directions than the rest),
and N(b, 0.1 I) for the other half (the shortcut: one b ~ N(0, Σ) for all). A model that only looks for b solves half
of the training samples.

One cell is one attention and one realisation of the data. It trains every model of the paper's grid (6 learning rates
× 5 weight decays × weight seeds) at once, as heads of one mechanism: see `Models`.

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

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quest_core
from quest_core.config import AttentionConfig, AttentionSpec
from quest_core.errors import ConfigError
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
LAYER_NORM_EPS = 1e-5
"""As torch.nn.LayerNorm has it."""
PROBE = 256
"""Training samples whose key norms are measured after every epoch."""
CHUNK = 128
"""Samples evaluated at once; bounds the memory, does not change results."""


@dataclass(frozen=True)
class Sequences:
    """Samples of the retrieval task.

    Attributes:
        x: [S, N, 20], the vectors [key | value].
        location: [S], the answer's position in 0..N-1.
        biased: [S], True where the answer's key was drawn around b.
        label: [S], the class.
    """

    x: Tensor
    location: Tensor
    biased: Tensor
    label: Tensor


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
    """One model, written plainly; what `Models` computes for many at once.

    Args:
        attention: the attention, with one head of 20 features.
        block: "prenorm" or "printed", see the module's docstring.
        seq_len: vectors N in a sequence.
        embed_std: standard deviation of the initial [CLS] token and positions.
    """

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

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, 20] -> class logits [B, 10]."""
        x = torch.cat([self.cls.expand(len(x), 1, DIM), x], dim=1) + self.positions  # [B, N + 1, 20]
        y = self.norm1(x)
        if self.block == "prenorm":
            x = x + self._attention(y)
            x = x + self._mlp(self.norm2(x))
        else:
            y = y + self._attention(x)
            y = x + self.norm2(y)
            x = x + self._mlp(y)
        return self.classifier(x[:, 0])  # type: ignore[no-any-return]

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (project(x)[:, None] for project in (self.query, self.key, self.value))  # [B, 1, N + 1, 20]
        return self.out(self.mechanism(q, k, v)[:, 0])  # type: ignore[no-any-return]

    def _mlp(self, x: Tensor) -> Tensor:
        return self.shrink(F.gelu(self.hidden(x)))  # type: ignore[no-any-return]


class Models:
    """M transformers that differ in their weights, computed side by side.

    The models lie on the mechanism's head axis, so that mechanisms work unchanged and a scale for each head is a scale
    for each model. Three facts about the task make it cheap, none of which changes a result:

    - Only the [CLS] row reaches the classifier, so there is one query, and it is the same for every sample: the tokens
      of a whole mini-batch are the keys of one product.
    - A token is a row of `design` (its data, and which position it has), which all models share, times the model's
      `basis` (the identity, and the learned position vectors), so adding positions takes no pass over the tokens.
    - Attention is linear in the values and its weights sum to 1, so the value projection, and LayerNorm1's scale and
      shift before it, act on the average of the tokens.

    Args:
        attention: the attention; each model has one head of it.
        weight_seeds: the seed of each model's initial weights.
        block, seq_len, embed_std: as in `Transformer`.

    Raises:
        ConfigError: for an attention that is not a score with softmax, or that has parameters shared among heads.
    """

    def __init__(
        self, attention: AttentionSpec, weight_seeds: list[int], *, block: str, seq_len: int, embed_std: float
    ) -> None:
        self.block = block
        config = AttentionConfig.parse(attention)
        if config.family or config.name != config["score"]:
            raise ConfigError(
                f"attention '{config}': toy/spurious studies the scores of one softmax head; name only a score, "
                "for example 'quest'"
            )
        if any(part.chained for part in config.components):
            raise ConfigError(
                f"attention '{config}' reads what the previous layer left behind, but toy/spurious has one layer"
            )
        self.mechanism = quest_core.Mechanism(config, num_heads=len(weight_seeds), head_dim=DIM, projected=True)

        states = {}
        for seed in set(weight_seeds):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_mix("weights", seed))
                states[seed] = Transformer(config, block=block, seq_len=seq_len, embed_std=embed_std).state_dict()
        side_by_side = {
            name: torch.stack([states[seed][name] for seed in weight_seeds]) for name in next(iter(states.values()))
        }  # name -> [M, ...]
        self.weights = {
            name: nn.Parameter(value) for name, value in side_by_side.items() if not name.startswith("mechanism.")
        }
        for name, parameter in list(self.mechanism.named_parameters()):
            own = side_by_side[f"mechanism.{name}"].squeeze(1)
            # Sharing a parameter among the heads of a one-head model is having it for each head.
            if parameter.shape not in (own.shape, own.shape[1:]):
                raise ConfigError(_not_for_each_head(config))
            owner, _, leaf = name.rpartition(".")
            self.mechanism.get_submodule(owner).register_parameter(leaf, nn.Parameter(own))
        self.eye = torch.eye(DIM).expand(len(weight_seeds), DIM, DIM)
        self._compare(config, states[weight_seeds[-1]])

    def _compare(self, config: AttentionConfig, state: Mapping[str, Tensor]) -> None:
        """Raise ConfigError unless the last head has the logits of its model's own mechanism."""
        single = quest_core.Mechanism(config, num_heads=1, head_dim=DIM, projected=True)
        single.load_state_dict({name: state[f"mechanism.{name}"] for name in single.state_dict()})
        q, k = torch.randn(2, 1, len(self.eye), 4, DIM, generator=torch.Generator().manual_seed(0))  # [1, M, 4, DIM]
        if not torch.allclose(self.mechanism.logits(q, k)[:, -1:], single.logits(q[:, -1:], k[:, -1:]), atol=1e-5):
            raise ConfigError(_not_for_each_head(config))

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter, [M, ...]."""
        return [*self.weights.values(), *self.mechanism.parameters()]

    def __call__(self, design: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits and keys.

        Args:
            design: [B, N + 1, 20 + N + 1], see `make_design`.

        Returns:
            logits [M, B, 10] and keys [M, B, N + 1, 20], as projected, before any normalization.
        """
        w = self.weights
        batch, tokens, width = design.shape
        first = w["cls"] + w["positions"][:, :1]  # [M, 1, 20], the [CLS] token with its position
        basis = torch.cat([self.eye, first, w["positions"][:, 1:]], dim=1)  # [M, W, 20]
        query = first
        if self.block == "prenorm":
            inverse = _inverse_deviation(design, basis)  # [M, B, T]
            basis = (basis - basis.mean(-1, keepdim=True)) * w["norm1.weight"][:, None]
            shift = w["norm1.bias"][:, None]  # [M, 1, 20]
            query = self._norm("norm1", first)
        k = design.view(-1, width) @ (basis @ w["key.weight"].mT)  # [M, B·T, 20]
        if self.block == "prenorm":
            k = torch.addcmul(shift @ w["key.weight"].mT, k, inverse.reshape(-1, batch * tokens, 1))
        q = query @ w["query.weight"].mT  # [M, 1, 20]

        scores = self.mechanism.logits(q[None], k[None]).view(1, -1, batch, tokens)  # samples on the query axis
        weights = self.mechanism.normalizer.weights(scores, None)[0]  # [M, B, T]
        if self.block == "prenorm":
            mean = torch.baddbmm(shift, _average(weights * inverse, design), basis)  # [M, B, 20]
        else:
            mean = _average(weights, design) @ basis
        attended = self._linear("out", mean @ w["value.weight"].mT)  # [M, B, 20]

        if self.block == "prenorm":
            y = first + attended
            y = y + self._mlp(self._norm("norm2", y))
        else:
            y = self._norm("norm1", first) + attended
            y = first + self._norm("norm2", y)
            y = first + self._mlp(y)
        return self._linear("classifier", y), k.view(-1, batch, tokens, DIM)

    def _mlp(self, x: Tensor) -> Tensor:
        return self._linear("shrink", F.gelu(self._linear("hidden", x)))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return torch.baddbmm(self.weights[f"{name}.bias"][:, None], x, self.weights[f"{name}.weight"].mT)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale, shift = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]  # [M, 20]
        return torch.addcmul(shift[:, None], F.layer_norm(x, (DIM,)), scale[:, None])


def _not_for_each_head(config: AttentionConfig) -> str:
    return (
        f"attention '{config}': a parameter of it is not one for each head, so models cannot be trained side by side "
        "as heads"
    )


def _average(weights: Tensor, design: Tensor) -> Tensor:
    """Sum of the rows of design [B, T, W] with weights [M, B, T] -> [M, B, W]."""
    return (weights.transpose(0, 1) @ design).transpose(0, 1)


def _inverse_deviation(design: Tensor, basis: Tensor) -> Tensor:
    """LayerNorm's 1 / √(variance + eps) of every token of every model.

    The sum of squares |x + p|² of a token's centred data x and position p is |x|² + 2 x·p + |p|², so that no model
    needs its tokens written out.

    Args:
        design: [B, T, W].
        basis: [M, W, 20].

    Returns:
        [M, B, T].
    """
    x = design[..., :DIM] - design[..., :DIM].mean(-1, keepdim=True)  # [B, T, 20]
    p = basis[:, DIM:] - basis[:, DIM:].mean(-1, keepdim=True)  # [M, T, 20]
    squares = 2 * torch.einsum("btd,mtd->mbt", x, p) + x.square().sum(-1) + p.square().sum(-1)[:, None]
    return (squares / DIM + LAYER_NORM_EPS).rsqrt()


def make_design(x: Tensor) -> Tensor:
    """Rows that say what every token is made of: [B, N, 20] -> [B, N + 1, 20 + N + 1].

    Row 0 is the [CLS] token, which has no data. The first 20 columns are data, the others the position, one-hot.
    """
    data = F.pad(x, (0, 0, 1, 0))  # [B, N + 1, 20]
    position = torch.eye(data.shape[1]).expand(len(x), -1, -1)
    return torch.cat([data, position], dim=-1)


class AdamW:
    """torch.optim.AdamW (decoupled weight decay) with a learning rate and a weight decay for each model.

    Parameters and gradients are moved into one flat buffer each, so that a step is a few operations.

    Args:
        parameters: tensors [M, ...].
        learning_rate, weight_decay: [M].
    """

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: Tensor, weight_decay: Tensor) -> None:
        parameters = list(parameters)
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters])  # [T]
        self.grad, self.mean, self.square = (torch.zeros_like(self.flat) for _ in range(3))
        self.rate = torch.cat([_spread(learning_rate, p) for p in parameters])
        self.keep = 1 - self.rate * torch.cat([_spread(weight_decay, p) for p in parameters])
        self.steps = 0
        start = 0
        for p in parameters:
            inside = slice(start, start + p.numel())
            p.data = self.flat[inside].view(p.shape)
            p.grad = self.grad[inside].view(p.shape)
            start = inside.stop

    def state(self) -> dict[str, Any]:
        """What `restore` needs, the parameters included."""
        return {"flat": self.flat, "mean": self.mean, "square": self.square, "steps": self.steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set parameters and moments as they were."""
        for name in ("flat", "mean", "square"):
            getattr(self, name).copy_(state[name])
        self.steps = state["steps"]

    def step(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        """Update the parameters from their gradients, and zero these."""
        self.steps += 1
        self.mean.lerp_(self.grad, 1 - betas[0])
        self.square.mul_(betas[1]).addcmul_(self.grad, self.grad, value=1 - betas[1])
        denominator = self.square.sqrt().mul_(1 / math.sqrt(1 - betas[1] ** self.steps)).add_(eps)
        change = denominator.reciprocal_().mul_(self.mean).mul_(self.rate)
        self.flat.mul_(self.keep).sub_(change, alpha=1 / (1 - betas[0] ** self.steps))
        self.grad.zero_()


def _spread(value: Tensor, parameter: Tensor) -> Tensor:
    """[M] -> a value for each element of a parameter [M, ...], flat."""
    return value.repeat_interleave(parameter.numel() // len(value))


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

    Raises:
        ConfigError: see `Models`.
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
        models.parameters(), torch.tensor([rate for rate, _, _ in grid]), torch.tensor([decay for _, decay, _ in grid])
    )

    design = make_design(train.x)
    shuffle = _generator("order", cell.seed)
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    if state := load_state(cell):
        losses, norms = state["losses"], state["norms"]
        optimizer.restore(state["optimizer"])
        shuffle.set_state(state["shuffle"])
    for epoch in range(len(losses), options["epochs"]):
        total = torch.zeros(len(grid))
        for chosen in torch.randperm(len(design), generator=shuffle).split(options["batch"]):
            loss = train_step(models, optimizer, design[chosen], train.label[chosen])  # [M]
            total += loss * len(chosen)
        losses.append(total / len(design))
        norms.append(_key_norms(models, train))
        kept = {"optimizer": optimizer.state(), "shuffle": shuffle.get_state()}
        save_state(cell, {"losses": losses, "norms": norms, **kept})
        progress((epoch + 1) / options["epochs"], f"epoch {epoch + 1} loss {losses[-1].nanmean():.3f}")
    return _judge(grid, _accuracy(models, train), _accuracy(models, test), torch.stack(losses), torch.stack(norms))


def train_step(models: Models, optimizer: AdamW, design: Tensor, label: Tensor) -> Tensor:
    """One mini-batch: design [B, N + 1, W], label [B] -> the loss of each model before the step, [M]."""
    logits, _ = models(design)  # [M, B, 10]
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
        logits, _ = models(make_design(x))
        right.append((logits.argmax(-1) == label).sum(-1))
        finite.append(logits.isfinite().flatten(1).all(-1))
    percent = 100 * torch.stack(right).sum(0) / len(data.label)
    return percent.where(torch.stack(finite).all(0), torch.nan)


@torch.no_grad()
def _key_norms(models: Models, data: Sequences) -> Tensor:
    """Mean key norm of each of KINDS on the first samples, [3, M]; NaN for a kind that they lack."""
    kinds: list[list[Tensor]] = [[] for _ in KINDS]
    for start in range(0, min(PROBE, len(data.x)), CHUNK):
        inside = slice(start, start + CHUNK)
        _, keys = models(make_design(data.x[inside]))
        norms = keys[:, :, 1:].norm(dim=-1)  # [M, B, N]
        answer = F.one_hot(data.location[inside], norms.shape[-1]).bool()  # [B, N]
        biased = data.biased[inside, None]
        for kind, mask in zip(kinds, (answer & biased, answer & ~biased, ~answer), strict=True):
            kind.append(norms[:, mask])
    return torch.stack([torch.cat(kind, dim=1).mean(dim=1) for kind in kinds])


def _judge(grid: list[tuple[float, float, int]], train: Tensor, test: Tensor, losses: Tensor, norms: Tensor) -> Result:
    """The result from accuracies [M], losses [E, M] and key norms [E, 3, M]."""
    finite = train.isfinite() & test.isfinite() & losses.isfinite().all(0)
    train, test = train.nan_to_num(0.0), test.nan_to_num(0.0)
    rows: list[dict[str, Any]] = []
    for (rate, decay, seed), good, on_train, on_test in zip(
        grid, finite.tolist(), train.tolist(), test.tolist(), strict=True
    ):
        rows.append(
            {
                "learning_rate": rate,
                "weight_decay": decay,
                "weight_seed": seed,
                "train_accuracy": on_train,
                "test_accuracy": on_test,
                "outcome": outcome(on_train, on_test) if good else "degenerate",
                "diverged": not good,
            }
        )

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
    curves = {"loss": losses[:, finite]} | {
        f"key_norm_{kind}{suffix}": norms[:, index, members]
        for suffix, members in groups.items()
        for index, kind in enumerate(KINDS)
    }  # name -> [E, models]
    means = {name: curve.mean(1) for name, curve in curves.items()}
    # Without a model, or without such a token among the first samples, the curve is omitted.
    series = {name: mean.tolist() for name, mean in means.items() if mean.isfinite().all()}
    return Result(metrics, series, {"models": rows})
