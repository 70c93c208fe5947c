"""The suites of this plugin as data."""

from __future__ import annotations

from typing import Any

from quest_suites.declaring import RATES, choice, number, papers, text, timed, whole

_GENERATED = (
    "graphs drawn from the published generator, not the published files; "
    "the best epoch is chosen on the validation split"
)
_FROM_DATA = "the best epoch is chosen on the validation split"


def _options(
    graphs: str, sizes: int, layers: int, batch: int, lr: float, epochs: int, warmup: int, dropout: float = 0.5
) -> list[dict[str, Any]]:
    """Return the options that every suite has, with the paper's defaults."""
    return [
        whole("graphs", sizes, graphs, 0),
        whole("epochs", epochs, "epochs of training"),
        whole("batch_size", batch, "graphs a training step"),
        number("lr", lr, "highest learning rate of AdamW"),
        whole(
            "warmup_epochs", warmup, "epochs of a rising rate; with any, the first has almost none, as in GraphGPS", 0
        ),
        number("attn_dropout", dropout, "of attention weights; 0 for linear, cosine and aft-simple, which have none"),
        whole("layers", layers, "GPS layers"),
    ]


_SEED = whole("data_seed", 0, "seed of the generated graphs", 0)
_SBM = "training graphs; PATTERN has a fifth as many of validation and of test, CLUSTER a tenth"
_ALL = "training graphs to use, with a tenth as many of validation and of test; 0 for all"
_SBM_DATA = "a folder with GNNBenchmarkDataset/ of PyTorch Geometric; without one, the graphs are generated"
_PAPER = papers(__file__)


def _dataset(name: str, folder: str, metric: str, **facts: Any) -> dict[str, Any]:
    """Return a suite of one dataset of the paper."""
    return {
        "tasks": [name],
        "metric": metric,
        "selection": "validation",
        **({"unit": "%"} if metric == "accuracy" else {"higher_is_better": False}),
        "data_files": [f"{folder}/raw"],
        **facts,
    }


SUITES: dict[str, dict[str, Any]] = {
    "graph/pattern": _dataset(
        "PATTERN",
        "GNNBenchmarkDataset/PATTERN",
        "accuracy",
        summary=f"which nodes of a graph belong to a hidden pattern, GPS; {_GENERATED}",
        paper=_PAPER["graph/pattern"],
        data=_SBM_DATA,
        options=[*_options(_SBM, 10000, 6, 32, 0.0005, 100, 5), _SEED],
    ),
    "graph/cluster": _dataset(
        "CLUSTER",
        "GNNBenchmarkDataset/CLUSTER",
        "accuracy",
        summary=f"which of six communities a node belongs to, GPS; {_GENERATED}",
        paper=_PAPER["graph/cluster"],
        data=_SBM_DATA,
        options=[*_options(_SBM, 10000, 16, 16, 0.0005, 100, 5), _SEED],
    ),
    "graph/zinc": _dataset(
        "ZINC",
        "ZINC",
        "mae",
        summary=f"constrained solubility of molecules, GPS; {_FROM_DATA}",
        paper=_PAPER["graph/zinc"],
        data="a folder with ZINC/, as PyTorch Geometric's ZINC lays it out",
        data_required=True,
        options=_options(_ALL, 0, 10, 32, 0.001, 2000, 50),
    ),
    "graph/cifar10": _dataset(
        "CIFAR10",
        "GNNBenchmarkDataset/CIFAR10",
        "accuracy",
        summary=f"the class of an image from its superpixels, GPS; {_FROM_DATA}",
        paper=_PAPER["graph/cifar10"],
        data="a folder with GNNBenchmarkDataset/, as PyTorch Geometric's GNNBenchmarkDataset lays it out",
        data_required=True,
        options=_options(_ALL, 0, 3, 16, 0.001, 100, 5),
    ),
    "graph/tu": {
        "summary": "the class of a graph on TU datasets, GPS; seed s is the published fold s, a part of its training "
        "graphs chooses epoch and rate",
        "tasks": ["ENZYMES", "IMDBBINARY", "MUTAG", "NCI1", "PROTEINS"],
        "metric": "best accuracy",
        "unit": "%",
        "selection": "validation",
        "tasks_from_data": "quest_suites.graphgps.data:tu_tasks",
        "data": "the folder data of github.com/muhanzhang/pytorch_DGCNN",
        "data_required": True,
        "options": [
            *(
                option
                for option in _options("", 0, 2, 64, 0.0, 20, 0, dropout=0.0)
                if option["name"] not in ("graphs", "lr")
            ),
            whole("heads", 4, "attention heads; they divide 64"),
            whole("rates", 2, "learning rates, half a decade apart"),
            number("lowest", 0.001, "lowest learning rate"),
        ],
    },
    "stability/graph": _dataset(
        "PATTERN",
        "GNNBenchmarkDataset/PATTERN",
        "accuracy",
        summary=f"accuracy over learning rates up to divergence, GPS on PATTERN; {_GENERATED}",
        also=RATES,
        plots="quest_research.suites.stability:plots",
        data=_SBM_DATA,
        options=[
            *(option for option in _options(_SBM, 300, 2, 8, 0.0, 8, 0) if option["name"] != "lr"),
            whole("rates", 4, "learning rates, half a decade apart", 2),
            number("lowest", 0.0001, "lowest learning rate"),
            _SEED,
        ],
    ),
    "graphgps": {
        "summary": "GraphGPS's own main.py in a checkout of GraphGPS, with any of its configs",
        "tasks": [],
        "metric": "metric_best",  # each config names its own
        "selection": "validation",
        "data": "a checkout of GraphGPS; a task is a config in it, such as configs/GPS/zinc-GPS+RWSE.yaml",
        "data_required": True,
        "tasks_from_data": "quest_suites.graphgps.own:tasks",
        "options": [text("set", "further words for main.py, such as 'gt.dropout 0.1'")],
    },
    "time/graphgps": timed(
        "an attention layer, or a model of GPSConv, on 32 graphs against the host's own on padded batches",
        [
            *("gps-zinc", "gps-pattern", "gps-peptides"),
            *("2000-among-50", "1000-among-50", "zinc", "pattern", "molecules-and-a-peptide", "peptides"),
            *(f"{nodes}-among-30" for nodes in (30, 40, 45, 50, 60, 80, 120, 200)),
        ],
        15,
        choice("packing", ("auto", "always", "never"), "whether ragged batches are packed"),
        number("dropout", 0.0, "dropout of attention weights"),
    ),
}
