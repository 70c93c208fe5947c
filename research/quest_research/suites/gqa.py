"""gqa/fashion-mnist: grouped attentions that start from a multi-head checkpoint (Key-Driven GQA, tables 2 to 5).

A small Vision Transformer with multi-head attention is pretrained on classes 0 to 4 of Fashion-MNIST. For each number
of key/value heads below that of query heads, its checkpoint is loaded into a model with the cell's grouping, which
averages the key and value heads of a group (`quest_core.projections`), and is up-trained for equal steps on a part of
the same images. With half the heads, the largest number that gqa can have, the up-trained model is fine-tuned with a
new classifier on classes 5 to 9; so is one that takes the weights of an up-trained gqa and changes the grouping only
then (table 4).

A cell with multi-head attention is trained for the same steps without pooling. Nothing is selected: every number is of
the last step.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import quest_core
from quest_core.checkpoints import set_attention_from
from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError
from quest_core.registry import find
from quest_suites.contract import Cell, Progress, Result, part
from quest_suites.timing import time_in_turns

from .images import Images, VisionTransformer, accuracy, classify, read
from .training import Curves

SPLIT = 5
"""Classes below this one are pretrained and up-trained, the others fine-tuned."""
PROBE = 256
"""Images on which groups are counted and times measured."""


class DivergedError(Exception):
    """A phase has diverged, so the others make no sense."""


def run(cell: Cell, progress: Progress) -> Result:
    """Pretrain, pool, up-train and fine-tune with one grouping and one seed.

    Args:
        cell: `attention` without `kv_heads`, which takes every divisor of the option heads.

    Returns:
        Metrics in %: ``accuracy`` after up-training with half the heads, ``accuracy/kv_heads=G`` for each G,
        ``pooled/kv_heads=G`` before up-training on validation images, ``fine-tuned``, and ``fine-tuned from gqa``;
        ``pretrained``; ``time of gqa`` and ``memory of gqa``, ratios at inference; ``non-uniform groups`` and ``first
        non-uniform groups``, the share of layers in % after and before up-training with half the heads. Series of that
        up-training: ``train_loss``, ``validation`` and ``non-uniform groups``.
    """
    options = dict(cell.options)
    if cell.smoke:
        options |= dict.fromkeys(("train", "uptrain_images", "downstream"), 128) | {"validation": 64, "test": 64}
        options |= dict.fromkeys(("pretrain", "uptrain", "finetune"), 1) | {"layers": 2, "rounds": 2}
    heads = options["heads"]
    grouped = [count for count in range(1, heads) if heads % count == 0]
    if not grouped:
        raise ConfigError(f"option heads is {heads}; grouping needs two heads or more")
    config = AttentionConfig.parse(cell.attention)
    if config.family or config.option("kv_heads") is not None:
        raise ConfigError(f"attention '{config}' is a family or has kv_heads, which this suite chooses: {grouped}")
    try:
        return _phases(cell, progress, options, config, grouped)
    except DivergedError:
        return Result({"accuracy": math.nan, "fine-tuned": math.nan, "fine-tuned from gqa": math.nan})


def _phases(
    cell: Cell, progress: Progress, options: Mapping[str, Any], config: AttentionConfig, grouped: list[int]
) -> Result:
    upstream, downstream = halves(cell, options)
    half = grouped[-1]
    multi_head = not any(part.reshapes for part in config.components)
    own = {count: with_heads(config, count) for count in ([half] if multi_head else grouped)}
    plain = with_heads(regrouped(config, "gqa"), half)
    is_gqa = own[half] == plain
    planned = 2 + len(own) + (0 if is_gqa or multi_head else 2)
    done = 0

    def train(name: str, phase: str, model: VisionTransformer, data: Images, count: int) -> Curves:
        nonlocal done
        before, done = done, done + 1
        found = classify(
            cell,
            name,
            model,
            (data.train[0][:count], data.train[1][:count]),
            {"validation": data.validation},
            {**options, "epochs": options[phase]},
            rate=options[f"{phase}_rate"],
            progress=part(progress, before, planned),
            watch=lambda model: {"non-uniform groups": non_uniform(model, data.validation[0][:PROBE])},
        )
        if found.diverged:
            raise DivergedError(found.diverged)
        return found.series

    base = regrouped(config, "mha")
    pretrained = build(base, cell.seed, options)
    train("pretraining", "pretrain", pretrained, upstream, options["train"])
    metrics = {"pretrained": accuracy(pretrained, *upstream.test)}
    models: dict[int, VisionTransformer] = {}
    curves: Curves = {}
    for count, attention in own.items():
        models[count] = convert(pretrained, base, attention, cell.seed, options)
        metrics[f"pooled/kv_heads={count}"] = accuracy(models[count], *upstream.validation)
        first = non_uniform(models[count], upstream.validation[0][:PROBE])
        curves = train(f"kv_heads={count}", "uptrain", models[count], upstream, options["uptrain_images"])
        metrics[f"accuracy/kv_heads={count}"] = accuracy(models[count], *upstream.test)
    if multi_head:  # nothing is pooled, so one model stands for every count
        metrics |= {f"accuracy/kv_heads={count}": metrics[f"accuracy/kv_heads={half}"] for count in grouped}
    metrics["accuracy"] = metrics[f"accuracy/kv_heads={half}"]
    metrics["non-uniform groups"] = curves["non-uniform groups"][-1]
    metrics["first non-uniform groups"] = first

    late = models[half]  # for table 4
    if not (is_gqa or multi_head):
        shared = convert(pretrained, base, plain, cell.seed, options)
        train("gqa", "uptrain", shared, upstream, options["uptrain_images"])
        late = convert(shared, plain, own[half], cell.seed, options)
    probe = upstream.validation[0][:PROBE]
    stock, model = build(plain, cell.seed, options).eval(), models[half]
    with torch.no_grad():
        timed = time_in_turns(lambda: stock(probe), lambda: model(probe), rounds=options["rounds"])
    ratios = {name: timed.metrics.get(f"{name} of stock") for name in ("time", "memory")}
    metrics |= {f"{name} of gqa": ratio for name, ratio in ratios.items() if ratio is not None}
    for name, model in {"fine-tuned": models[half], "fine-tuned from gqa": late}.items():
        if name == "fine-tuned" or late is not models[half]:
            nn.init.zeros_(model.classifier.weight)
            nn.init.zeros_(model.classifier.bias)
            train(name, "finetune", model, downstream, options["downstream"])
        metrics[name] = accuracy(model, *downstream.test)
    return Result(metrics, curves, {"parameters": sum(p.numel() for p in models[half].parameters())})


def halves(cell: Cell, options: Mapping[str, Any]) -> list[Images]:
    """Return the images [n, 28, 28] of classes 0 to 4 and those of 5 to 9, drawn by the seed and normalized alike."""
    images, labels = read(cell.data, "train")
    test, test_labels = read(cell.data, "t10k")
    draw = torch.Generator().manual_seed(cell.seed)
    found = []
    mean = deviation = torch.zeros(())
    for name, late in (("train", False), ("downstream", True)):
        own = ((labels >= SPLIT) == late).nonzero()[:, 0]
        own = own[torch.randperm(len(own), generator=draw)]
        count, held_out = options[name], options["validation"]
        if count + held_out > len(own):
            raise ConfigError(f"{name} + validation is {count + held_out}, and these classes have {len(own)} images")
        chosen, rest = own[:count], own[count : count + held_out]
        if not late:
            mean, deviation = images[chosen].mean(), images[chosen].std()
        kept = ((test_labels >= SPLIT) == late).nonzero()[: options["test"], 0]
        found.append(
            Images(
                ((images[chosen] - mean) / deviation, labels[chosen]),
                ((images[rest] - mean) / deviation, labels[rest]),
                ((test[kept] - mean) / deviation, test_labels[kept]),
                classes=10,
            )
        )
    return found


def regrouped(config: AttentionConfig, grouping: str) -> AttentionConfig:
    """Return the same score and normalizer with another grouping, without the options of the old one."""
    old = {option.name for option in find(config["grouping"]).options}
    names = [name for axis, name in config.parts if axis != "grouping"]
    kept = {name: value for name, value in config.options if name not in old}
    return AttentionConfig.parse({"name": "+".join([*names, grouping]), **kept})


def with_heads(config: AttentionConfig, kv_heads: int) -> AttentionConfig:
    """Return the attention with this number of key/value heads; one without a grouping is returned as it is."""
    if not any(part.reshapes for part in config.components):
        return config
    return AttentionConfig.parse({**config.to_dict(), "kv_heads": kv_heads})


def build(attention: AttentionConfig, seed: int, options: Mapping[str, Any]) -> VisionTransformer:
    torch.manual_seed(seed)
    return VisionTransformer(str(attention), options, size=(28, 28))


def convert(
    trained: nn.Module, trained_with: AttentionConfig, attention: AttentionConfig, seed: int, options: Mapping[str, Any]
) -> VisionTransformer:
    """Return a model with another attention and the weights of a trained one; loading averages key and value heads."""
    model = build(attention, seed, options)
    set_attention_from(model, trained_with)
    model.load_state_dict(trained.state_dict())
    return model.eval()


def group_sizes(model: nn.Module, images: Tensor) -> list[list[int]]:
    """Return how many query heads each key/value head serves, by layer, while a model in evaluation sees `images`."""
    found: list[list[int]] = []
    watched = [module for module in model.modules() if isinstance(module, quest_core.Mechanism)]

    def observe(_: nn.Module, args: tuple[Tensor, ...], given: dict[str, Any], __: object) -> None:
        heads, groups = args[0].shape[1], args[1].shape[1]
        if given["head"] is None:  # equal, consecutive groups
            found.append([heads // groups] * groups)
        else:
            found.append(torch.bincount(given["head"], minlength=groups).tolist())

    hooks = [mechanism.score.register_forward_hook(observe, with_kwargs=True) for mechanism in watched]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return found


def non_uniform(model: nn.Module, images: Tensor) -> float:
    """Return the share of layers whose groups differ in size, in %."""
    sizes = group_sizes(model, images)
    return 100 * sum(len(set(layer)) > 1 for layer in sizes) / len(sizes)
