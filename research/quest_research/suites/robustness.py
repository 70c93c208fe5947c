"""Suite robustness/images: a small Vision Transformer on images that differ from those it was trained on.

Each task trains on some images and tests on others. The accuracy is the mean over these tests; each is an item.

- fog: trained on clean images and tested in fog, trained in fog and tested on clean images, and trained and tested in
  fog, as in Your Attention Matters (tables 1 to 3).
- corruptions: trained on clean images, tested under the 15 corruptions of Hendrycks and Dietterich (2019), each a mean
  over severities 1 to 5.
- attacks: trained on clean images, tested under FGSM and PGD at `epsilon` and under SPSA at 0.1, as in QUEST's
  tables 3 and 4.
- autoattack: as attacks, under AutoAttack; minutes a cell.
- patch: a small white square is at the place of an image's class, in `share` of the training images and in none of the
  test images. The others have it at the place of another class.

The relative accuracy is 100 · accuracy / accuracy on clean images after training on clean images; in the task patch on
images whose square is at the place of their class. Nothing is normalized by the errors of a reference network, as the
mean corruption error of the papers is.

Corruptions are those of the package imagecorruptions-imaug, attacks those of torchattacks. Their test images are the
same for all attentions and seeds.
"""

import math
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quest_core.errors import ConfigError, PluginError
from quest_suites import corruptions
from quest_suites.contract import Cell, Progress, Result, part

from .images import Images, Split, accuracy, build, classify, load
from .training import Fit

CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
SEVERITIES = range(1, 6)
SMALLEST = 32
"""Pixels a side that imagecorruptions needs; smaller images are padded with their edge and cropped again."""
SPSA_EPSILON = 0.1
PATCH = 4
"""Pixels a side of the square of the task patch."""


def run(cell: Cell, progress: Progress) -> Result:
    """Train one attention with one seed and test it on shifted images.

    Returns:
        Metrics ``accuracy`` (in %, the mean over the shifts) and ``relative accuracy``, with an item for each shift;
        and ``clean``, the accuracy that is the reference. NaN if a training diverged. Series ``train_loss`` and
        ``validation`` by epoch, of each training.
    """
    options = dict(cell.options)
    if cell.smoke:
        options |= {"train": 128, "validation": 64, "test": 32, "shifted": 4, "epochs": 1, "layers": 1}
    data = load(cell.data, options, torch.Generator().manual_seed(cell.seed))
    few = data.test[0][: options["shifted"]], data.test[1][: options["shifted"]]
    trainings: dict[str, Callable[[Split], Split]] = {"clean": lambda split: split}
    if cell.task == "fog":
        trainings["fog"] = lambda split: (corrupt(split[0], "fog", options["severity"]), split[1])
    if cell.task == "patch":
        trainings = {"patch": lambda split: patch(split, data.classes, options["share"])}
    if cell.task in ("attacks", "autoattack") and find_spec("torchattacks") is None:  # seen before the training
        # It declares torchvision and requests 2.25, which it does not import.
        raise PluginError(f"task '{cell.task}' needs torchattacks; pip install --no-deps torchattacks")

    torch.manual_seed(cell.seed)
    model = build(cell.attention, data, options)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    done: dict[str, Fit] = {}
    for place, (name, change) in enumerate(trainings.items()):
        model.load_state_dict(first)
        found = done[name] = classify(
            cell,
            name,
            model,
            change(data.train),
            {"validation": change(data.validation)},
            options,
            rate=options["rate"],
            draw=torch.Generator().manual_seed(cell.seed),
            progress=part(progress, place, len(trainings)),
        )
        if found.diverged:
            return Result(dict.fromkeys(("accuracy", "relative accuracy", "clean"), math.nan), found.series)

    def after(name: str) -> nn.Module:
        model.load_state_dict(done[name].weights)
        return model.eval()

    scores: dict[str, float] = {}
    if cell.task == "patch":
        clean = accuracy(after("patch"), *patch(data.test, data.classes, 1.0))
        scores["place_of_another_class"] = accuracy(model, *patch(data.test, data.classes, 0.0))
    elif cell.task == "fog":
        foggy = trainings["fog"](data.test)
        clean = accuracy(after("clean"), *data.test)
        scores["trained_clean,_tested_in_fog"] = accuracy(model, *foggy)
        scores["trained_in_fog,_tested_clean"] = accuracy(after("fog"), *data.test)
        scores["trained_and_tested_in_fog"] = accuracy(model, *foggy)
    else:
        clean = accuracy(after("clean"), *few)
    if cell.task == "corruptions":
        for name in CORRUPTIONS:
            found_here = [accuracy(model, corrupt(few[0], name, level), few[1]) for level in SEVERITIES]
            scores[name] = sum(found_here) / len(found_here)
    if cell.task in ("attacks", "autoattack"):
        for name, attack in attacks(cell.task, model, data, options["epsilon"] / 255, cell.smoke).items():
            torch.manual_seed(cell.seed)
            scores[name] = accuracy(model, attack(*few), few[1])
    accuracies = {"accuracy": sum(scores.values()) / len(scores)}
    accuracies |= {f"accuracy/{name}": score for name, score in scores.items()}
    relative = {f"relative {name}": 100 * score / clean if clean else math.nan for name, score in accuracies.items()}
    series = {f"{key}/trained on {name}": found.series[key] for name, found in done.items() for key in found.series}
    return Result(
        {**accuracies, **relative, "clean": clean},
        series,
        {"best_epochs": {name: found.selected + 1 for name, found in done.items()}},
    )


def corrupt(images: Tensor, name: str, severity: int) -> Tensor:
    """Return images [n, C, S, S] of 1 or 3 channels under one of `CORRUPTIONS`.

    The random numbers depend only on the corruption, its severity and the image's place.
    """
    channels, size = images.shape[1:3]
    margin = max(0, SMALLEST - size)
    low, high = margin // 2, margin - margin // 2
    pixels = F.pad(images.cpu(), (low, high, low, high), mode="replicate") * 255
    pixels = pixels.round().byte().expand(-1, 3, -1, -1).permute(0, 2, 3, 1)  # [n, S, S, 3]
    made = [
        corruptions.corrupt(image, name, severity, f"{name}/{severity}/{place}")
        for place, image in enumerate(pixels.numpy())
    ]
    result = torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).float() / 255  # [n, 3, S, S]
    result = result.mean(1, keepdim=True) if channels == 1 else result
    return result[:, :, low : low + size, low : low + size].contiguous().to(images.device)


def patch(split: Split, classes: int, share: float) -> Split:
    """Return images [n, C, S, S] with a white square. Each class has a place on a grid of squares.

    A `share` of the images has it at the place of their own class, the others at that of another class, drawn at
    random; which images these are depends only on their place in the split.
    """
    images, labels = split[0].clone(), split[1]
    side = images.shape[-1] // PATCH
    if classes > side**2:
        raise ConfigError(
            f"task 'patch' has {side**2} places in images of {images.shape[-1]} pixels a side, and there are {classes} "
            "classes; use larger images"
        )
    draw = torch.Generator().manual_seed(0)
    other = torch.randint(1, classes, labels.shape, generator=draw).to(labels.device)
    false = (torch.rand(labels.shape, generator=draw) >= share).to(labels.device)
    place = (labels + other * false) % classes * (side**2 // classes)  # [n]
    for image, cell in zip(images, place.tolist(), strict=True):
        top, left = PATCH * (cell // side), PATCH * (cell % side)
        image[:, top : top + PATCH, left : left + PATCH] = 1
    return images, labels


def attacks(
    task: str, model: nn.Module, data: Images, epsilon: float, smoke: bool
) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return the attacks of a task by name: (images, labels) -> images.

    PGD takes 20 steps of a quarter of epsilon. SPSA has torchattacks' defaults, one step with 128 samples.
    """
    import torchattacks

    if task == "autoattack":
        auto = torchattacks.AutoAttack(model, eps=epsilon, n_classes=data.classes, seed=0)
        if smoke:
            auto._autoattack.attacks = auto._autoattack.attacks[:1]
        return {"AutoAttack": auto}
    return {
        "FGSM": torchattacks.FGSM(model, eps=epsilon),
        "PGD": torchattacks.PGD(model, eps=epsilon, alpha=epsilon / 4, steps=20),
        "SPSA": torchattacks.SPSA(model, eps=SPSA_EPSILON, nb_sample=4 if smoke else 128),
    }
