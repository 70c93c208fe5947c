"""toy/spurious: the data, the models side by side against a single model, the optimizer, and the verdicts."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from cells import cell

from quest_research.suites import suites, toy

ATTENTIONS = ("standard", "quest", "qnorm", "qknorm-hs", "qknorm-ds", "qknorm", "qknorm-hs(init=1)")
BLOCKS = ("prenorm", "printed")
MODEL = {"seq_len": 14, "embed_std": 0.3}


def make_models(attention, seeds, block):
    return toy.Models(attention, seeds, block=block, **MODEL)


def make_alone(attention, seed, block):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(toy._mix("weights", seed))
        return toy.Transformer(attention, block=block, **MODEL)


def run_smoke(**changes):
    fractions = []
    given = dataclasses.replace(cell("toy/spurious", "retrieval"), **changes)
    result = toy.run(given, lambda fraction, text: fractions.append(fraction))
    return result, fractions


# --- data ---------------------------------------------------------------------------------------------------------


def test_data_follows_the_paper():
    train, test = toy.make_data(3, samples=4000, test_samples=4000, seq_len=20)
    every = torch.arange(4000)
    for data in (train, test):
        keys, values = data.x.split([toy.KEY_DIM, toy.CLASSES], dim=-1)
        assert (values.sum(-1) == 1).all()
        assert (values.max(-1).values == 1).all()
        assert (values[every, data.location].argmax(-1) == data.label).all()
        assert data.location.bincount().argmax() == 10
        assert (data.location == 10).float().mean() == pytest.approx(0.2, abs=0.02)  # A.3: the usual one has 20 %
        others = keys[(torch.arange(20) != data.location[:, None])]
        assert others.mean(0).abs().max() < 0.02
        assert (others.T.cov() - torch.eye(10)).abs().max() < 0.03
    assert train.biased.float().mean() == pytest.approx(0.5, abs=0.03)
    assert not test.biased.any()

    answers = train.x[every, train.location, : toy.KEY_DIM]
    noise = answers[train.biased] - answers[train.biased].mean(0)
    assert (noise.T.cov() - 0.1 * torch.eye(10)).abs().max() < 0.02
    seen, unseen = answers[~train.biased].T.cov(), test.x[every, test.location, : toy.KEY_DIM].T.cov()
    assert (seen - unseen).norm() < 0.2 * seen.norm()  # one Σ for a realisation
    assert (seen - torch.eye(10)).norm() > 3


def test_data_of_a_seed_is_fixed_and_test_samples_do_not_depend_on_training_samples():
    few, one_test = toy.make_data(0, samples=8, test_samples=16, seq_len=14)
    again, _ = toy.make_data(0, samples=8, test_samples=16, seq_len=14)
    _, other_test = toy.make_data(0, samples=99, test_samples=16, seq_len=14)
    other_seed, _ = toy.make_data(1, samples=8, test_samples=16, seq_len=14)
    assert torch.equal(few.x, again.x)
    assert torch.equal(one_test.x, other_test.x)
    assert not torch.equal(few.x, other_seed.x)


def test_answers_stay_inside_a_short_sequence():
    train, _ = toy.make_data(0, samples=500, test_samples=1, seq_len=11)
    assert train.location.max() == 10
    assert train.location.min() >= 0


# --- side by side = alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_model_trains_side_by_side_as_it_does_alone(attention, block):
    """The plain module, over the full sequence, with torch.optim.AdamW, follows the same losses."""
    settings = [(0.003, 0.0, 4), (0.01, 0.1, 7), (0.001, 0.05, 4)]  # learning rate, weight decay, weight seed
    models = make_models(attention, [seed for _, _, seed in settings], block)
    optimizer = toy.AdamW(
        models.parameters.values(), torch.tensor([s[0] for s in settings]), torch.tensor([s[1] for s in settings])
    )
    data, _ = toy.make_data(0, samples=32 * 25, test_samples=1, seq_len=MODEL["seq_len"])
    batches = list(zip(data.x.split(32), data.label.split(32), strict=True))
    together = torch.stack([toy.train_step(models, optimizer, x, y) for x, y in batches])  # [steps, M]

    for index, (rate, decay, seed) in enumerate(settings):
        alone = make_alone(attention, seed, block)
        plain = torch.optim.AdamW(alone.parameters(), lr=rate, weight_decay=decay)
        losses = []
        for x, y in batches:
            loss = F.cross_entropy(alone(x)[0], y)
            plain.zero_grad()
            loss.backward()
            plain.step()
            losses.append(loss.detach())
        torch.testing.assert_close(together[:, index], torch.stack(losses), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("block", BLOCKS)
def test_models_return_the_projected_keys(block):
    models, alone = make_models("quest", [5, 6], block), make_alone("quest", 6, block)
    x = toy.make_data(0, samples=4, test_samples=1, seq_len=MODEL["seq_len"])[0].x
    tokens = torch.cat([alone.cls.expand(4, 1, -1), x], dim=1) + alone.positions
    wanted = alone.key(alone.norm1(tokens) if block == "prenorm" else tokens)
    torch.testing.assert_close(models(x)[1][1], wanted)


def test_key_norms_tell_the_kinds_of_tokens_apart():
    models = make_models("quest", [5, 6], "prenorm")
    data, _ = toy.make_data(0, samples=40, test_samples=1, seq_len=MODEL["seq_len"])
    norms = models(data.x)[1].norm(dim=-1)  # [M, 40, 1 + N]
    kinds = {kind: [] for kind in toy.KINDS}
    for sample, (answer, biased) in enumerate(zip(data.location.tolist(), data.biased.tolist(), strict=True)):
        for position in range(MODEL["seq_len"]):
            kind = "other" if position != answer else "biased" if biased else "unbiased"
            kinds[kind].append(norms[:, sample, 1 + position])
    wanted = torch.stack([torch.stack(kinds[kind]).mean(0) for kind in toy.KINDS])
    torch.testing.assert_close(toy._key_norms(models, data), wanted)


def test_initial_weights_are_those_of_torch():
    """Only the embeddings are initialized by this module; everything else is as nn.Linear and nn.LayerNorm make it."""
    models = make_models("quest", [0, 0, 1], "prenorm")
    weights = models.parameters["key.weight"]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert 0.95 / math.sqrt(toy.DIM) < weights.abs().max() <= 1 / math.sqrt(toy.DIM)
    assert models.parameters["positions"].std().item() == pytest.approx(MODEL["embed_std"], rel=0.1)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_diverged_model_leaves_the_others_alone(block):
    data, _ = toy.make_data(0, samples=64, test_samples=1, seq_len=MODEL["seq_len"])

    def train(break_second):
        models = make_models("qknorm-hs", [0, 1, 2], block)
        optimizer = toy.AdamW(models.parameters.values(), torch.full((3,), 0.01), torch.zeros(3))
        if break_second:
            models.parameters["value.weight"].data[1] = math.nan
        return torch.stack([toy.train_step(models, optimizer, data.x, data.label) for _ in range(3)])

    broken, healthy = train(True), train(False)
    assert broken[:, 1].isnan().all()
    assert torch.equal(broken[:, [0, 2]], healthy[:, [0, 2]])


# --- verdicts and results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "test", "expected"),
    [
        (99, 95, "correct"),
        (91, 90, "other"),
        (65, 30, "biased"),
        (80, 20, "biased"),
        (85, 30, "other"),
        (65, 45, "other"),
        (10, 11, "degenerate"),
        (40, 10, "other"),
        (100, 12, "other"),
    ],
)
def test_outcome(train, test, expected):
    assert toy.outcome(train, test) == expected


def test_a_diverged_model_is_counted_as_degenerate_and_said():
    grid = [(0.1, 0.0, 0), (0.2, 0.0, 0)]
    train, test = torch.tensor([99.0, math.nan]), torch.tensor([97.0, math.nan])
    losses, norms = torch.tensor([[1.0, 2.0], [0.5, math.nan]]), torch.ones(2, 3, 2)
    norms[:, 0] = math.nan  # no biased answer among the first samples
    result = toy._judge(grid, train, test, losses, norms)
    assert result.metrics["success_rate"] == result.metrics["degenerate_rate"] == result.metrics["diverged_rate"] == 50
    assert [row["diverged"] for row in result.details["models"]] == [False, True]
    assert result.series["loss"] == [1.0, 0.5]
    assert set(result.series) == {"loss"} | {
        f"key_norm_{k}{o}" for k in ("unbiased", "other") for o in ("", "/correct")
    }
    json.dumps(dataclasses.asdict(result), allow_nan=False)


@pytest.mark.parametrize("attention", ["quest", "qknorm-ds"])
def test_smoke_cell(attention):
    result, fractions = run_smoke(attention=attention)
    assert fractions == [0.5, 1.0]
    json.dumps(dataclasses.asdict(result), allow_nan=False)
    assert len(result.details["models"]) == 4
    rates = [result.metrics[name] for name in ("success_rate", "biased_rate", "degenerate_rate", "other_rate")]
    assert sum(rates) == pytest.approx(100)
    assert all(len(values) == 2 for values in result.series.values())
    again, _ = run_smoke(attention=attention)
    assert again == result
    assert run_smoke(attention=attention, seed=1)[0] != result


def test_a_cell_learns_the_shortcut():
    """Half of the training samples are solved by looking for b, which is learned in a few hundred steps."""
    train, test = toy.make_data(0, samples=512, test_samples=256, seq_len=MODEL["seq_len"])
    models = make_models("standard", [0, 1], "prenorm")
    optimizer = toy.AdamW(models.parameters.values(), torch.tensor([0.01, 0.005]), torch.zeros(2))
    for _ in range(15):
        for x, y in zip(train.x.split(32), train.label.split(32), strict=True):
            toy.train_step(models, optimizer, x, y)
    on_train, on_test = toy._accuracy(models, train), toy._accuracy(models, test)
    assert (on_train > 35).all()
    assert (on_test < on_train - 10).all()


def test_options_need_only_the_standard_library():
    code = f"import runpy, sys; runpy.run_path({suites.__file__!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert all({"name", "kind", "default", "doc"} <= option.keys() for option in suites.TOY_OPTIONS)
