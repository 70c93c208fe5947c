"""Small made-up files where GraphGPS's own loaders look for downloads, in the layout of those."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import torch
from models import SPLITS, graph, write_superpixels, write_zinc

from quest_suites.graphgps.data import cluster_graphs, pattern_graphs, write_raw

PEPTIDES, CONTACTS = "701eb743e899f4d793f0e13c8fa5a1b4", "f7ffb27942145a2e72f6f5f51716d3bc"
"""The files that mark a checked download."""


def write_all(folder: Path) -> None:
    """All datasets that configs of `configs/GPS` name and that can be made up."""
    write_raw(folder, "PATTERN", pattern_graphs((16, 8, 8), seed=0))
    write_raw(folder, "CLUSTER", cluster_graphs((8, 4, 4), seed=0))
    write_zinc(folder)
    for name in ("CIFAR10", "MNIST"):
        write_superpixels(folder, name)
    for name in ("VOC", "COCO"):
        write_classes_of_superpixels(folder / f"{name}Superpixels")
    write_peptides(folder / "peptides-functional")
    write_contacts(folder / "pcqm4m-v2-contact" / "530k")


def write_classes_of_superpixels(root: Path) -> None:
    """PascalVOC-SP and COCO-SP: rings of 12, whose nodes are of three classes."""
    raw = root / "slic_compactness_30" / "edge_wt_region_boundary" / "raw"
    raw.mkdir(parents=True)
    torch.manual_seed(0)
    for split, graphs in SPLITS:
        rows = []
        for _ in range(graphs):
            edges = graph(12).edge_index
            rows.append((torch.randn(12, 14), torch.rand(edges.shape[1], 2), edges, torch.arange(12) % 3))
        (raw / f"{split}.pickle").write_bytes(pickle.dumps(rows))


def _splits() -> dict[str, np.ndarray]:
    ends = np.cumsum([0, *(graphs for _, graphs in SPLITS)])
    return {split: np.arange(ends[i], ends[i + 1]) for i, (split, _) in enumerate(SPLITS)}


def write_peptides(root: Path) -> None:
    """Chains of glycine, with random labels."""
    (root / "raw").mkdir(parents=True)
    (root / PEPTIDES).touch()
    (root / "splits_random_stratified_peptide.pickle").write_bytes(pickle.dumps(_splits()))
    labels = np.random.default_rng(0).integers(2, size=(sum(graphs for _, graphs in SPLITS), 10))
    with gzip.open(root / "raw" / "peptide_multi_class_dataset.csv.gz", "wt") as file:
        file.write("smiles,labels\n")
        for i, row in enumerate(labels):
            file.write("N" + "CC(=O)N" * (2 + i % 5) + f'CC(=O)O,"{row.tolist()}"\n')


def write_contacts(root: Path) -> None:
    """PCQM-Contact: chains of carbon, in which the first atom is close to the last; GraphGPS reads every sixth row."""
    (root / "raw").mkdir(parents=True)
    (root / CONTACTS).touch()
    torch.save({key: torch.from_numpy(x) for key, x in _splits().items()}, root / "530k_shuffle_split_dict.pt")
    with gzip.open(root / "raw" / "pcqm4m-contact.tsv.gz", "wt") as file:
        file.write("cxsmiles\n")
        for i in range(6 * sum(graphs for _, graphs in SPLITS)):
            length = 6 + i // 6 % 5
            contacts = f"atomProp:0.contact.0:1.contact.1:{length - 1}.contact.0:{length}.contact.1"
            file.write("[CH3]" + "[CH2]" * (length - 1) + f"[OH] |{contacts}|\n")
