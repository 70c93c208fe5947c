"""CIFAR10's superpixel graphs from its images, by the recipe of Dwivedi et al. (JMLR 2023) and Knyazev et al. (2019).

Their files are a download. Here scikit-image segments the images again, as its versions of 2019 did: the first graph of
each split has as many nodes as the published one (110, 123 and 118). Nodes are in another random order.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

from quest_core.errors import ConfigError, PluginError
from quest_suites import cifar

MOST = 150
"""Superpixels of an image at most. The published ones were asked for in numbers that fall from 200 until there are."""
ASKED = 163
"""The first of these numbers that SLIC can meet: its grid has 16 × 16 cells for more, and 11 × 11 from here on."""
COMPACTNESS = 10.0
NEIGHBOURS = 8
SIDE = 32
VALIDATION = 5000
"""The first images of the training batches are the validation split."""
LARGEST = (50000 - VALIDATION, VALIDATION, 10000)


def superpixel_graphs(sizes: Sequence[int], seed: int, folder: Path) -> list[list[Data]]:
    """The first images of each of the published splits (training, validation, test), as graphs.

    The folder is cifar-10-batches-bin, the binary version of CIFAR-10. The seed draws the order of nodes.
    """
    if any(size > most for size, most in zip(sizes, LARGEST, strict=True)):
        raise ConfigError(f"{' '.join(map(str, sizes))} graphs; CIFAR10 has at most {' '.join(map(str, LARGEST))}")
    train, validation, test = sizes
    batches = cifar.TRAIN[: -(-(VALIDATION + train) // 10000)]
    images, labels = cifar.read(folder / name for name in batches)
    parts = [
        (images[VALIDATION:][:train], labels[VALIDATION:][:train]),
        (images[:validation], labels[:validation]),
        tuple(x[:test] for x in cifar.read(folder / name for name in cifar.TEST)),
    ]
    found = [len(labels) for _, labels in parts]
    if found != [*sizes]:
        raise ConfigError(
            f"'{folder}' holds {' '.join(map(str, found))} of {' '.join(map(str, sizes))} images; is it whole?"
        )
    generator = torch.Generator().manual_seed(seed)
    with tqdm(total=sum(sizes), unit="image", desc="superpixels", disable=None) as bar:

        def one(image: Tensor, label: Tensor) -> Data:
            bar.update()
            return superpixels(image, int(label), generator)

        return [[one(image, label) for image, label in zip(*part, strict=True)] for part in parts]


def superpixels(image: Tensor, label: int, generator: torch.Generator) -> Data:
    """One image, bytes [3, 32, 32], as a graph: a node per superpixel, with edges to the eight nearest in position.

    Returns:
        A graph with mean colors x [N, 3] and centers pos [N, 2] (row and column), both from 0 to 1; edge_index
        [2, 8 N] from every node to its neighbors; and edge_attr [8 N], the weight (w_ij + w_ji) / 2 with
        w_ij = exp(−‖p_i − p_j‖² / σ_i²), where σ_i is the mean distance of i's eight nearest nodes.
    """
    segment = segments(image)  # [32, 32], from 0 on
    pixels = image.flatten(1).T.double() / 255  # [1024, 3]
    place = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).double() / SIDE  # [1024, 2]
    count = torch.bincount(segment.flatten())  # [N]
    total = torch.zeros(len(count), 5, dtype=torch.float64)
    total.index_add_(0, segment.flatten(), torch.cat([pixels, place], 1))
    mean = (total / count[:, None])[torch.randperm(len(count), generator=generator)]  # [N, 5]
    x, pos = mean[:, :3], mean[:, 3:]
    most = min(NEIGHBOURS, len(mean) - 1)
    distance = torch.cdist(pos, pos, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)  # [N, N]
    scale = distance.topk(most, largest=False).values.mean(1, keepdim=True)  # [N, 1]
    weight = torch.exp(-((distance / scale) ** 2))  # 0 from a node to itself
    near = (weight + weight.T).div(2).topk(most)  # [N, most]
    source = torch.arange(len(mean)).repeat_interleave(most)
    edges = torch.stack([source, near.indices.flatten()])
    return Data(
        x=x.float(), pos=pos.float(), edge_index=edges, edge_attr=near.values.flatten().float(), y=torch.tensor([label])
    )


def segments(image: Tensor) -> Tensor:
    """Return the superpixel of each pixel [32, 32], numbered from 0, of an image of bytes [3, 32, 32]."""
    try:
        from skimage.color import rgb2lab
        from skimage.segmentation import slic
    except ImportError as error:
        raise PluginError(
            "superpixels are drawn by scikit-image, which is not installed; pip install 'quest-suites[superpixels]'"
        ) from error
    lab = rgb2lab((image.permute(1, 2, 0).float() / 255).double().numpy())  # [32, 32, 3]
    spread = max(float(lab.max() - lab.min()), 1e-12)  # today's slic divides by it; the compactness takes that back
    for asked in range(ASKED, 0, -1):
        # Today's slic measures the smallest and largest segment in cells of its grid; then it was size / asked.
        cells = len(range(int((SIDE**2 / asked) ** 0.5 // 2), SIDE, round((SIDE**2 / asked) ** 0.5))) ** 2
        drawn = slic(
            lab,
            n_segments=asked,
            compactness=COMPACTNESS / spread,
            convert2lab=False,
            start_label=0,
            min_size_factor=0.5 * cells / asked,
            max_size_factor=3 * cells / asked,
        )
        names, segment = torch.from_numpy(drawn).unique(return_inverse=True)
        if len(names) <= MOST:
            break
    return segment
