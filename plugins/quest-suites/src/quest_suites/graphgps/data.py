"""Graphs that need no download of graphs: PATTERN and CLUSTER by their generator, and encodings of position.

The generator is that of Dwivedi et al., "Benchmarking Graph Neural Networks" (JMLR 2023): stochastic block models. Here
a set depends only on its seed and sizes; it is not the set of files that the authors published.
"""

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import from_smiles

from quest_core.errors import ConfigError, PluginError

from .superpixels import superpixel_graphs

SMALLEST, LARGEST = 5, 34
"""Nodes of a block, uniform, both included."""
PATTERNS = 100
"""Fixed patterns of PATTERN; each is hidden in the same number of graphs of every split."""
SPLITS = ("train", "val", "test")


def block_model(sizes: Tensor, inside: float, across: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a graph in which two nodes are linked with probability `inside` in one block, `across` otherwise.

    Args:
        sizes: nodes of each block [blocks].

    Returns:
        The symmetric adjacency without loops, boolean [N, N], and the block of each node [N].
    """
    block = torch.repeat_interleave(torch.arange(len(sizes)), sizes)  # [N]
    chance = torch.where(block[:, None] == block, inside, across)  # [N, N]
    linked = (torch.rand(chance.shape, generator=generator) < chance).triu(1)
    return linked | linked.T, block


def pattern_graphs(sizes: Sequence[int], seed: int) -> list[list[Data]]:
    """PATTERN: which nodes belong to a hidden pattern? The graphs of training, validation and test.

    Five blocks (links 0.5 inside, 0.35 across) and a pattern (0.5 inside, 0.5 to the rest), each of 5 to 34 nodes;
    features are uniform in {0, 1, 2}, one-hot. The 100 patterns, links and features, are the same in all splits.

    Args:
        sizes: graphs of each split, multiples of 100 (or fewer than 100, for tests).
    """
    if any(graphs > PATTERNS and graphs % PATTERNS for graphs in sizes):
        raise ConfigError(
            f"{' + '.join(map(str, sizes))} graphs; PATTERN hides {PATTERNS} patterns equally often in each split, so "
            f"write multiples of {PATTERNS}, or fewer"
        )
    generator = torch.Generator().manual_seed(seed)
    patterns = []
    for _ in range(PATTERNS):
        adjacency, _ = block_model(_sizes(1, generator), 0.5, 0.5, generator)
        patterns.append((adjacency, torch.randint(3, (len(adjacency),), generator=generator)))
    splits = []
    for graphs in sizes:
        splits.append([_hide(*patterns[i % PATTERNS], generator) for i in range(graphs)])
    return splits


def _hide(adjacency: Tensor, feature: Tensor, generator: torch.Generator) -> Data:
    """One graph of PATTERN around a pattern [P, P] with features [P]."""
    rest, _ = block_model(_sizes(5, generator), 0.5, 0.35, generator)
    p, n = len(adjacency), len(rest) + len(adjacency)
    linked = torch.zeros(n, n, dtype=torch.bool)
    linked[:p, :p], linked[p:, p:] = adjacency, rest
    linked[:p, p:] = torch.rand(p, n - p, generator=generator) < 0.5
    linked[p:, :p] = linked[:p, p:].T
    features = torch.cat([feature, torch.randint(3, (n - p,), generator=generator)])
    return _data(linked, features, 3, (torch.arange(n) < p).long(), generator)


def cluster_graphs(sizes: Sequence[int], seed: int) -> list[list[Data]]:
    """CLUSTER: which of six communities does a node belong to? The graphs of training, validation and test.

    Six blocks of 5 to 34 nodes, links 0.55 inside and 0.25 across. One random node of each block carries the block's
    number from 1 to 6 as its feature, all others 0; seven values, one-hot.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Data:
        sizes = _sizes(6, generator)
        linked, block = block_model(sizes, 0.55, 0.25, generator)
        feature = torch.zeros(len(block), dtype=torch.long)
        first = sizes.cumsum(0) - sizes
        chosen = first + (torch.rand(6, generator=generator) * sizes).long()
        feature[chosen] = torch.arange(1, 7)
        return _data(linked, feature, 7, block, generator)

    return [[draw() for _ in range(graphs)] for graphs in sizes]


def _sizes(blocks: int, generator: torch.Generator) -> Tensor:
    return torch.randint(SMALLEST, LARGEST + 1, (blocks,), generator=generator)


def _data(linked: Tensor, feature: Tensor, kinds: int, label: Tensor, generator: torch.Generator) -> Data:
    """A graph with its nodes in random order: x [N, kinds] one-hot, y [N], both directions of every edge."""
    order = torch.randperm(len(linked), generator=generator)
    edges = linked[order][:, order].nonzero().T.contiguous()  # [2, E], sorted by the first row
    x = torch.nn.functional.one_hot(feature[order], kinds).float()
    return Data(x=x, edge_index=edges, y=label[order])


GENERATORS = {"PATTERN": pattern_graphs, "CLUSTER": cluster_graphs}


def write_raw(folder: Path, name: str, splits: Sequence[Sequence[Data]]) -> Path:
    """Write a dataset into GraphGPS's dataset.dir, where PyTorch Geometric's GNNBenchmarkDataset looks for it."""
    path = folder / "GNNBenchmarkDataset" / name / "raw" / f"{name}_v2.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save([[data.to_dict() for data in split] for split in splits], path)
    return path


# --- TU datasets with published folds -------------------------------------------------------------------------------


def tu_tasks(data: Path) -> dict[str, dict[str, Any]]:
    """Return the datasets of a folder: name -> its files and, if some are missing, the problem in words."""
    found = {}
    for folder in sorted(path.parent for path in data.glob("*/10fold_idx")):
        files = [folder / f"{folder.name}.txt"]
        files += [folder / "10fold_idx" / f"{part}_idx-{i}.txt" for part in ("train", "test") for i in range(1, 11)]
        lost = [str(path) for path in files if not path.is_file()]
        found[folder.name] = {
            "files": [*map(str, files)],
            "problem": f"{', '.join(lost)} not found; is the clone whole?" if lost else None,
        }
    return found


def tu_fold(folder: Path, fold: int) -> list[list[Data]]:
    """Return the graphs of training, validation and test of one of ten published folds.

    The validation graphs are drawn from the fold's training graphs, as many as it tests.

    Args:
        folder: NAME.txt and 10fold_idx/, as in github.com/muhanzhang/pytorch_DGCNN and the code of GIN.
        fold: 0 to 9.
    """
    if not 0 <= fold < 10:
        raise ConfigError(f"seed is {fold}; a seed of graph/tu is one of the published folds, 0 to 9")
    train, test = (
        [int(word) for word in (folder / "10fold_idx" / f"{part}_idx-{fold + 1}.txt").read_text().split()]
        for part in ("train", "test")
    )
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(fold)).tolist()
    drawn = [train[i] for i in order]
    graphs = tu_graphs(folder / f"{folder.name}.txt")
    return [[graphs[i] for i in part] for part in (drawn[len(test) :], drawn[: len(test)], test)]


def tu_graphs(path: Path) -> list[Data]:
    """Read graphs: the types of nodes x [N, 1] and the class y [1], both numbered from 0, and edge_index [2, E].

    The first line has the number of graphs. A graph is a line "nodes class", then for each node a line "type m" with
    the numbers of its m neighbors. Attributes after these are ignored.
    """
    rows = (line.split() for line in path.read_text().splitlines()[1:])
    graphs = []
    for nodes, label in rows:
        lines = [next(rows) for _ in range(int(nodes))]
        edges = [(i, int(j)) for i, line in enumerate(lines) for j in line[2 : 2 + int(line[1])]]
        edge_index = torch.tensor(edges, dtype=torch.long).view(-1, 2).T.contiguous()
        kinds = torch.tensor([[int(line[0])] for line in lines])
        graphs.append(Data(x=kinds, y=torch.tensor([int(label)]), edge_index=edge_index))
    for key in ("x", "y"):
        known = torch.cat([graph[key] for graph in graphs]).unique()
        for graph in graphs:
            graph[key] = torch.searchsorted(known, graph[key])
    return graphs


# --- molecules ------------------------------------------------------------------------------------------------------

MOLECULES = {"ESOL": "esol.csv", "FreeSolv": "freesolv.csv", "Lipophilicity": "lipo.csv"}


def molecule_tasks(data: Path) -> dict[str, dict[str, Any]]:
    """Return the datasets of a folder: name -> its file and, if it is missing, the problem in words."""
    if find_spec("rdkit") is None:
        raise PluginError("graph/molecules needs RDKit; fix: pip install 'quest-suites[molecules]'")
    fix = "git clone --depth 1 https://github.com/tencent-ailab/grover, and --data grover/exampledata/finetune"
    files = {task: data / name for task, name in MOLECULES.items()}
    return {
        task: {"files": [str(path)], "problem": None if path.is_file() else f"{path} not found; fix: {fix}"}
        for task, path in files.items()
    }


def molecules(path: Path, seed: int) -> list[list[Data]]:
    """Return molecules of training, validation and test: 80, 10 and 10 % at random, as MoleculeNet splits these sets.

    The type of an atom, x [N, 1], numbers the combination of the nine features that PyTorch Geometric reads from
    SMILES, and that of a bond, edge_attr [E], of its three. From y [1] the mean of the training molecules is taken.

    Args:
        path: a csv file with a heading, and in each line a SMILES text and a number.
    """
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    graphs, y = [from_smiles(smiles) for smiles, _ in rows], torch.tensor([float(value) for _, value in rows])
    atoms, bonds = (_kinds([graph[key] for graph in graphs]) for key in ("x", "edge_attr"))
    order = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(seed)).tolist()
    tenth = len(graphs) // 10
    parts = order[2 * tenth :], order[:tenth], order[tenth : 2 * tenth]
    y -= y[parts[0]].mean()

    def graph(i: int) -> Data:
        return Data(x=atoms[i][:, None], edge_index=graphs[i].edge_index, edge_attr=bonds[i], y=y[i, None])

    return [[graph(i) for i in part] for part in parts]


def _kinds(features: list[Tensor]) -> Sequence[Tensor]:
    """Return a number for each row of each matrix; equal rows have equal numbers in all matrices."""
    return torch.cat(features).unique(dim=0, return_inverse=True)[1].split([len(rows) for rows in features])


def join_positions(data: Data) -> Data:
    """Superpixels of MNIST and CIFAR10: append pos [N, 2] to the colors in x [N, colors], as in GraphGPS."""
    data.x = torch.cat([data.x, data.pos], dim=1).float()
    return data


# --- encodings of position ------------------------------------------------------------------------------------------


def adjacency(data: Data) -> Tensor:
    """[N, N] in float64, from the edges of a graph."""
    dense = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
    dense[data.edge_index[0], data.edge_index[1]] = 1
    return dense


def add_eigenvectors(data: Data, count: int) -> Data:
    """Attach the `count` lowest eigenpairs of the graph's Laplacian D − A; missing ones are NaN.

    EigVecs [N, count] has unit columns; EigVals [N, count, 1] repeats the eigenvalues for every node, as GraphGPS
    stores them (Kreuzer et al., 2021).
    """
    links = adjacency(data)
    values, vectors = torch.linalg.eigh(torch.diag(links.sum(1)) - links)
    values, vectors = values[:count].clamp(min=0), vectors[:, :count]
    vectors = vectors / vectors.norm(dim=0).clamp(min=1e-12)
    missing = (0, count - len(values))
    data.EigVecs = torch.nn.functional.pad(vectors.float(), missing, value=math.nan)
    row = torch.nn.functional.pad(values.float(), missing, value=math.nan)
    data.EigVals = row.expand(data.num_nodes, -1)[..., None].contiguous()
    return data


def add_random_walks(data: Data, steps: Sequence[int]) -> Data:
    """Attach the probability that a random walk returns to its start after each number of steps [N, steps]."""
    links = adjacency(data)
    walk = links / links.sum(1, keepdim=True).clamp(min=1)
    back, power = [], torch.eye(len(walk), dtype=torch.float64)
    for step in range(1, max(steps) + 1):
        power = power @ walk
        if step in steps:
            back.append(power.diagonal())
    data.pestat_RWSE = torch.stack(back, dim=1).float()
    return data


def main(argv: Sequence[str] | None = None) -> None:
    """Write generated graphs to the path where GraphGPS and PyTorch Geometric look for the download."""
    parser = argparse.ArgumentParser(
        prog="python -m quest_suites.graphgps.data",
        description="Draw PATTERN or CLUSTER from its published generator, or CIFAR10's superpixels from its images, "
        "and write it to the path where GraphGPS and PyTorch Geometric look for the downloaded file. The graphs differ "
        "from the published files.",
    )
    parser.add_argument("name", choices=["CIFAR10", *sorted(GENERATORS)])
    parser.add_argument("--images", type=Path, metavar="DIR", help="CIFAR10: its images, cifar-10-batches-bin")
    parser.add_argument("--graphs", type=int, nargs=3, default=(1000, 200, 200), metavar=("TRAIN", "VAL", "TEST"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("datasets"), help="dataset.dir of the config")
    given = parser.parse_args(argv)
    if min(given.graphs) < 1:
        parser.error(f"--graphs is {' '.join(map(str, given.graphs))}; every split has at least one graph")
    if given.name == "CIFAR10" and given.images is None:
        parser.error(
            "CIFAR10 is drawn from images: give --images cifar-10-batches-bin (cs.toronto.edu/~kriz/cifar.html)"
        )
    if given.name != "CIFAR10" and given.images is not None:
        parser.error(f"--images is {given.images}, but {given.name} is drawn without images; leave it out")
    try:
        generate = GENERATORS.get(given.name) or partial(superpixel_graphs, folder=given.images)
        path = write_raw(given.out, given.name, generate(given.graphs, given.seed))
    except (ConfigError, PluginError) as error:
        parser.error(str(error))
    if (path.parents[1] / "processed").exists():
        print(f"{path.parents[1] / 'processed'} was made from an older file; delete it", file=sys.stderr)
    print(f"wrote {path}: {' + '.join(map(str, given.graphs))} graphs, seed {given.seed}")


if __name__ == "__main__":
    main()
