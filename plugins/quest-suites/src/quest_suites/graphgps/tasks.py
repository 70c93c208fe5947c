"""graph/...: the graph benchmarks of the QUEST paper (tables 8 and 9), trained by GraphGym with PyTorch Lightning.

Each suite starts from a shipped yaml (``configs/``) with GraphGPS's hyper-parameters and applies the suite's options.
The best epoch is chosen on the validation split; its test metric is the result, as in GraphGPS.

Differences from the paper's runs: PATTERN and CLUSTER are drawn from their published generator and are not the
published files; the network is `quest_suites.graphgps.gps`, whose parameters match GraphGPS's one by one; Lightning
trains it in place of GraphGPS's own loop.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib.util
import logging
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quest_core.errors import ConfigError, PluginError
from quest_suites.contract import Cell, Progress, Result, Trained, load_state, observe, over_rates, save_state

SMOKE_GRAPHS = (24, 8, 8)
SMOKE_EPOCHS = 2
WATCHED = 32
"""Validation graphs on which stability/graph looks at the attention."""
GUESS = 50.0
"""PATTERN's accuracy of guessing, in %, because its metric is the mean over two classes."""
MOLECULE_TYPES = ("C", "N", "O", "S", "F", "Cl", "Br", "I", "P", "H", "B", "Si")

CONFIGS = {
    "graph/pattern": "pattern",
    "graph/cluster": "cluster",
    "graph/zinc": "zinc",
    "graph/cifar10": "cifar10",
    "graph/molecules": "zinc",
    "graph/superpixels": None,
    "graph/peptides-func": "peptides-func",
    "graph/peptides-struct": "peptides-struct",
    "graph/pcqm-contact": "pcqm-contact",
}
"""Suite -> its yaml; None: the yaml has the task's name."""


def run_graph(cell: Cell, progress: Progress, *, watch: int = 0) -> Result:
    """Train and evaluate one dataset with one attention and one seed.

    Args:
        cell: `data` is a folder with datasets in PyTorch Geometric's layout (ZINC/, LRGB/, GNNBenchmarkDataset/), or
            for graph/molecules a csv file of molsets. PATTERN and CLUSTER are generated without one, from `data_seed`.
        progress: called after each epoch.
        watch: validation graphs on which `quest_suites.contract.observe` looks at the attention after each epoch.

    Returns:
        The suite's metric on the test split at the best validation epoch, its value on the validation split there,
        ``epochs`` and ``seconds_per_epoch``; series ``train_loss`` and ``validation`` by epoch, and with `watch` those
        of `observe`.

    Raises:
        ConfigError: an option is invalid, or the data is missing.
        PluginError: the package that reads the data is not installed.
    """
    from pytorch_lightning import Callback, Trainer, seed_everything
    from torch_geometric.data import Batch
    from torch_geometric.graphgym.config import cfg, set_cfg
    from torch_geometric.graphgym.model_builder import create_model
    from torch_geometric.graphgym.train import GraphGymDataModule

    from . import gps

    options = dict(cell.options)
    set_cfg(cfg)
    name = CONFIGS[cell.suite] or cell.task.lower()
    with as_file(files("quest_graphgps") / "configs" / f"{name}.yaml") as path:
        cfg.merge_from_file(str(path))
    cfg.accelerator, cfg.num_workers, cfg.seed = "auto", 0, cell.seed
    cfg.gt.attention = cell.attention
    cfg.train.batch_size, cfg.optim.base_lr = options["batch_size"], options["lr"]
    cfg.optim.max_epoch = min(options["epochs"], SMOKE_EPOCHS) if cell.smoke else options["epochs"]
    cfg.optim.num_warmup_epochs = 0 if cell.smoke else options["warmup_epochs"]
    cfg.gt.attn_dropout = options["attn_dropout"]
    cfg.gt.layers = min(options["layers"], 2) if cell.smoke else options["layers"]
    cfg.accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    cfg.dataset.format, cfg.dataset.name = "memory", cell.task
    gps.MEMORY[cell.task] = splits(cell)

    seed_everything(cell.seed, verbose=False)
    with _quiet():
        module = GraphGymDataModule()
        model = create_model()
    higher, measure = METRICS[cell.suite]
    probe = Batch.from_data_list([*module.loaders[1].dataset][:watch]) if watch else None
    losses: list[float] = []
    found: list[float] = []
    seen: dict[str, list[float]] = {}
    best: dict[str, Any] = {"state": None, "epoch": -1}

    class Watch(Callback):
        """Records losses, measures each epoch on the validation split, and keeps the best epoch's weights."""

        def on_train_epoch_start(self, trainer: Any, lightning: Any) -> None:
            self.batches: list[Tensor] = []

        def on_train_batch_end(self, trainer: Any, lightning: Any, outputs: Any, *rest: Any) -> None:
            self.batches.append(outputs["loss"].detach())

        def on_validation_epoch_start(self, trainer: Any, lightning: Any) -> None:
            self.pairs: list[tuple[Tensor, Tensor]] = []

        def on_validation_batch_end(self, trainer: Any, lightning: Any, outputs: Any, batch: Any, *rest: Any) -> None:
            if METRIC_NAMES[cell.suite] == "mrr":
                self.pairs.append(reciprocal_ranks(batch))
            else:
                self.pairs.append((outputs["pred_score"].cpu(), outputs["true"].cpu()))

        on_test_epoch_start, on_test_batch_end = on_validation_epoch_start, on_validation_batch_end

        def on_train_epoch_end(self, trainer: Any, lightning: Any) -> None:
            losses.append(torch.stack(self.batches).mean().item())
            found.append(measure(self.pairs))
            sign = 1 if higher else -1
            if best["state"] is None or sign * found[-1] > sign * found[best["epoch"]]:
                best["epoch"] = len(found) - 1
                best["state"] = {key: value.clone() for key, value in lightning.state_dict().items()}
            if probe is not None:
                for name, value in observe(lightning, probe.clone().to(lightning.device)).items():
                    seen.setdefault(name, []).append(value)
                lightning.train()
            name = f"epoch-{len(found)}.ckpt"
            trainer.save_checkpoint(cell.workdir / name)
            save_state(cell, {"losses": losses, "found": found, "seen": seen, "best": best, "checkpoint": name})
            for old in cell.workdir.glob("epoch-*.ckpt"):
                if old.name != name:
                    old.unlink()
            progress(len(found) / cfg.optim.max_epoch, f"epoch {len(found)} validation {found[-1]:.4f}")

    watch = Watch()
    with _quiet():
        trainer = Trainer(
            max_epochs=cfg.optim.max_epoch,
            accelerator="gpu" if cfg.accelerator == "cuda" else "cpu",
            devices=1,
            callbacks=[watch],
            gradient_clip_val=cfg.optim.clip_grad_norm_value,
            default_root_dir=cell.workdir,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        checkpoint = None
        if state := load_state(cell):
            losses += state["losses"]
            found += state["found"]
            seen |= state["seen"]
            best |= state["best"]
            checkpoint = str(cell.workdir / state["checkpoint"])
        first = len(found)
        started = time.perf_counter()
        if first < cfg.optim.max_epoch:
            trainer.fit(model, datamodule=module, ckpt_path=checkpoint)
        seconds = (time.perf_counter() - started) / max(1, len(found) - first)
        model.load_state_dict(best["state"])
        trainer.test(model, datamodule=module, verbose=False)
    metric = measure(watch.pairs)
    return Result(
        metrics={
            METRIC_NAMES[cell.suite]: metric,
            "validation": found[best["epoch"]],
            "epochs": float(len(found)),
            "seconds_per_epoch": seconds,
        },
        series={"train_loss": losses, "validation": found, **seen},
        details={
            "best_epoch": best["epoch"] + 1,
            "injected": str(model.model.attention_report),
            "parameters": sum(p.numel() for p in model.parameters()),
            "graphs": [len(loader.dataset) for loader in module.loaders],
            "config": cfg.dump(),
        },
    )


def run_rates(cell: Cell, progress: Progress) -> Result:
    """Train graph/pattern with one attention and one seed at every learning rate, from the same weights.

    Gradients are clipped, as in GraphGPS.

    Args:
        cell, progress: as in `run_graph`.

    Returns:
        What `quest_suites.contract.over_rates` returns, with the curves of `run_graph`.

    Raises:
        ConfigError, PluginError: as `run_graph`.
    """
    done: dict[str, Trained] = load_state(cell) or {}

    def train(rate: float, name: str, progress: Progress) -> Trained:
        if name not in done:
            folder = cell.workdir / name
            folder.mkdir(exist_ok=True)
            options = {**cell.options, "lr": rate}
            one = run_graph(
                replace(cell, suite="graph/pattern", workdir=folder, options=options), progress, watch=WATCHED
            )
            if all(map(math.isfinite, one.series["train_loss"])):
                done[name] = Trained(one.metrics["accuracy"], one.metrics["validation"], one.series)
            else:
                done[name] = Trained(GUESS, GUESS, one.series, diverged=True)
            save_state(cell, done)
            shutil.rmtree(folder)
        return done[name]

    rates = min(cell.options["rates"], 2) if cell.smoke else cell.options["rates"]
    return over_rates(cell.options["lowest"], rates, train, progress)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's and PyTorch Geometric's messages about devices, deprecations and workers."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# --- metrics --------------------------------------------------------------------------------------------------------

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Predicted scores and truths, batch by batch."""


def class_accuracy(pairs: Pairs) -> float:
    """Return the mean over classes of the recall, in % (the benchmark's weighted accuracy)."""
    pred, true = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    chosen = (pred > 0.5).long() if pred.dim() == 1 else pred.argmax(-1)
    right = torch.bincount(true[chosen == true], minlength=int(true.max()) + 1)
    count = torch.bincount(true)
    return 100 * (right / count)[count > 0].mean().item()


def absolute_error(pairs: Pairs) -> float:
    """Return the mean absolute error over all graphs and targets."""
    pred, true = (torch.cat([part.flatten() for part in parts]) for parts in zip(*pairs, strict=True))
    return (pred - true).abs().mean().item()


def macro_f1(pairs: Pairs) -> float:
    """Return F1, the mean over classes."""
    from sklearn.metrics import f1_score

    pred, true = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return float(f1_score(true.numpy(), pred.argmax(-1).numpy(), average="macro", zero_division=0))


def average_precision(pairs: Pairs) -> float:
    """Return the average precision, the mean over labels that occur."""
    from sklearn.metrics import average_precision_score

    pred, true = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    labels = [i for i in range(true.shape[1]) if 0 < true[:, i].sum() < len(true)]
    scores = [average_precision_score(true[:, i].numpy(), pred[:, i].numpy()) for i in labels]
    return float(sum(scores) / max(1, len(scores)))


def reciprocal_ranks(batch: Any) -> tuple[Tensor, Tensor]:
    """Rank each contact (i, j) among all pairs (i, ·) of its graph, other contacts of i included.

    Args:
        batch: graphs with their nodes' features x [T, E] after the head, edge_label_index [2, L] and edge_label [L].

    Returns:
        1 / rank [C], where equal scores share the mean of their ranks, and the number of the graph in the batch [C].
    """
    contacts = batch.edge_label_index[:, batch.edge_label == 1]  # [2, C]
    graph = batch.batch[contacts[0]]  # [C]
    scores = batch.x[contacts[0]] @ batch.x.T  # [C, T]
    scores = scores.masked_fill(batch.batch != graph[:, None], -math.inf)
    own = scores.gather(1, contacts[1][:, None])  # [C, 1]
    rank = 1 + (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    return rank.reciprocal().cpu(), graph.cpu()


def mean_reciprocal_rank(pairs: Pairs) -> float:
    """Return the mean over graphs of the mean over their contacts.

    As in GraphGPS, other contacts of the same atom count as rivals; later work also reports the filtered rank.
    """
    means = []
    for inverse, graph in pairs:
        count = torch.bincount(graph)
        means.append((torch.bincount(graph, weights=inverse) / count)[count > 0])
    return torch.cat(means).mean().item()


def accuracy(pairs: Pairs) -> float:
    """Return the share of graphs with the right class, in %."""
    pred, true = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return 100 * (pred.argmax(-1) == true.flatten()).float().mean().item()


METRICS: dict[str, tuple[bool, Callable[[Pairs], float]]] = {
    "graph/pattern": (True, class_accuracy),
    "graph/cluster": (True, class_accuracy),
    "graph/zinc": (False, absolute_error),
    "graph/cifar10": (True, accuracy),
    "graph/molecules": (False, absolute_error),
    "graph/superpixels": (True, macro_f1),
    "graph/peptides-func": (True, average_precision),
    "graph/peptides-struct": (False, absolute_error),
    "graph/pcqm-contact": (True, mean_reciprocal_rank),
}
"""Suite -> (whether higher is better, the function that measures it)."""
METRIC_NAMES = {
    "graph/pattern": "accuracy",
    "graph/cluster": "accuracy",
    "graph/zinc": "mae",
    "graph/cifar10": "accuracy",
    "graph/molecules": "mae",
    "graph/superpixels": "f1",
    "graph/peptides-func": "ap",
    "graph/peptides-struct": "mae",
    "graph/pcqm-contact": "mrr",
}

# --- data -----------------------------------------------------------------------------------------------------------


def splits(cell: Cell) -> list[list[Any]]:
    """Return the graphs of training, validation and test, as many as the cell's options request."""
    from torch_geometric.datasets import ZINC, LRGBDataset

    from .data import GENERATORS, PATTERNS, SPLITS
    from .gps import gnn_benchmark

    if cell.data is not None and not cell.data.exists():
        raise ConfigError(f"data is '{cell.data}', which does not exist; give a file or a folder")
    if cell.suite == "graph/molecules":
        return molecules(cell)
    if cell.task in GENERATORS and cell.data is None:
        share = 5 if cell.task == "PATTERN" else 10
        train = cell.options["graphs"]
        if train < share:
            raise ConfigError(f"option graphs is {train}; {cell.task} needs at least {share}")
        if cell.task == "PATTERN" and any(n > PATTERNS and n % PATTERNS for n in (train, train // share)):
            raise ConfigError(
                f"option graphs is {train}; each of PATTERN's {PATTERNS} patterns is hidden equally often in every "
                f"split: write a multiple of {share * PATTERNS}, one of {PATTERNS} below that, or at most {PATTERNS}"
            )
        sizes = SMOKE_GRAPHS if cell.smoke else (train, train // share, train // share)
        return GENERATORS[cell.task](sizes, cell.options["data_seed"])
    kinds: dict[str, tuple[str, Callable[[str], Any]]] = {
        "graph/zinc": ("ZINC/raw", lambda split: ZINC(f"{cell.data}/ZINC", subset=True, split=split)),
    }
    if cell.task in (*GENERATORS, "CIFAR10"):
        kinds[cell.suite] = (
            f"GNNBenchmarkDataset/{cell.task}/raw",
            lambda split: gnn_benchmark(cell.data, cell.task, split),
        )
    folder, read = kinds.get(
        cell.suite,
        (f"LRGB/{cell.task.lower()}/raw", lambda split: LRGBDataset(f"{cell.data}/LRGB", cell.task, split)),
    )
    if cell.data is None or not (cell.data / folder).is_dir():
        raise ConfigError(
            f"{cell.suite} reads {cell.task} from --data DIR, in which PyTorch Geometric has put {folder}; found none"
            + (f" in '{cell.data}'" if cell.data else ", and no data was given")
        )
    limits = SMOKE_GRAPHS if cell.smoke else _limits(cell.options["graphs"])
    return [list(read(split)[:limit]) for split, limit in zip(SPLITS, limits, strict=True)]


def _limits(graphs: int) -> tuple[int | None, int | None, int | None]:
    """Return the number of graphs of each split: all for 0, else `graphs` of training and a tenth of the others."""
    return (graphs, max(1, graphs // 10), max(1, graphs // 10)) if graphs else (None, None, None)


def molecules(cell: Cell) -> list[list[Any]]:
    """Return molecules of molsets with a target computed by RDKit: Crippen's octanol-water partition coefficient logP.

    The target is a sum over atoms and their surroundings. It is computed, not measured; numbers are not comparable with
    published results.
    """
    from torch_geometric.data import Data

    try:
        from rdkit import Chem, RDLogger
        from rdkit.Chem import Crippen
    except ImportError:
        raise PluginError(
            "graph/molecules reads SMILES with RDKit, which is not installed; pip install rdkit"
        ) from None
    RDLogger.DisableLog("rdApp.*")
    made: list[list[Any]] = []
    limits = SMOKE_GRAPHS if cell.smoke else (cell.options["graphs"], *[max(1, cell.options["graphs"] // 10)] * 2)
    lines = iter(read_smiles(cell.data))
    for limit in limits:
        split: list[Any] = []
        while len(split) < limit:
            smiles = next(lines, None)
            if smiles is None:
                raise ConfigError(f"graph/molecules has fewer than {sum(limits)} molecules; lower option graphs")
            molecule = Chem.MolFromSmiles(smiles)
            types = [atom.GetSymbol() for atom in molecule.GetAtoms()]
            if not set(types) <= set(MOLECULE_TYPES):
                continue
            bonds = [
                (bond.GetBeginAtomIdx(), bond.GetEndAtomIdx(), int(bond.GetBondType())) for bond in molecule.GetBonds()
            ]
            both = sorted([(i, j, kind) for i, j, kind in bonds] + [(j, i, kind) for i, j, kind in bonds])
            table = torch.tensor(both).view(-1, 3)
            split.append(
                Data(
                    x=torch.tensor([[MOLECULE_TYPES.index(kind)] for kind in types]),
                    edge_index=table[:, :2].T.contiguous(),
                    edge_attr=table[:, 2].remainder(4),  # single, double, triple, aromatic (12) -> 1, 2, 3, 0
                    y=torch.tensor([Crippen.MolLogP(molecule)]),
                )
            )
        made.append(split)
    return made


def read_smiles(path: Path | None) -> Iterator[str]:
    """Yield the SMILES of molsets, the first column of its csv file: `path`, or the file in the installed package."""
    if path is None:
        spec = importlib.util.find_spec("moses")
        if spec is None or spec.origin is None:
            raise ConfigError(
                "graph/molecules needs the SMILES of molsets; pip install --no-deps molsets, or give a csv as --data"
            )
        path = Path(spec.origin).parent / "dataset" / "data" / "train.csv.gz"
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for row in csv.DictReader(file):
            yield row["SMILES"]
