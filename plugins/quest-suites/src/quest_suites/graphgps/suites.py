"""The suites of this plugin as data."""

from typing import Any

from quest_suites.declaring import RATES, choice, number, papers, text, timing_suite, whole


def _options(
    graphs: str,
    sizes: int,
    layers: int,
    batch: int,
    lr: float,
    epochs: int,
    warmup: int,
    rates: int = 0,
    dropout: float = 0.5,
) -> list[dict[str, Any]]:
    """Return the options that every suite has, with the paper's defaults; with `rates`, several rates from `lr` on."""
    rate = [number("lr", lr, "highest learning rate of AdamW")]
    if rates:
        rate = [whole("rates", rates, "learning rates, half a decade apart"), number("lowest", lr, "lowest of them")]
    return [
        whole("graphs", sizes, graphs, 0),
        whole("epochs", epochs, "epochs of training"),
        whole("batch_size", batch, "graphs a training step"),
        *rate,
        whole(
            "warmup_epochs", warmup, "epochs of a rising rate; with any, the first has almost none, as in GraphGPS", 0
        ),
        number("attn_dropout", dropout, "of attention weights; 0 for linear, cosine and aft-simple, which have none"),
        whole("layers", layers, "GPS layers"),
    ]


_HEADS = whole("heads", 4, "attention heads; they divide 64")
_SBM = "training graphs; PATTERN has a fifth as many of validation and of test, CLUSTER a tenth"
_ALL = "training graphs to use, with a tenth as many of validation and of test; 0 for all"
_PAPER = papers(__file__)


def _dataset(name: str, metric: str, summary: str, options: list[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """Return a suite of one dataset of the paper. PATTERN and CLUSTER are generated unless --data is given."""
    folder = "ZINC" if name == "ZINC" else "GNNBenchmarkDataset"
    source = ""
    data = f"a folder with {folder}/, as PyTorch Geometric's {folder} lays it out"
    if generated := name in ("PATTERN", "CLUSTER"):
        source = "graphs drawn from the published generator, not the published files; "
        data = "a folder with GNNBenchmarkDataset/ of PyTorch Geometric; without one, the graphs are generated"
    return {
        "summary": f"{summary}; {source}the best epoch is chosen on the validation split",
        "tasks": [name],
        "metric": metric,
        "selection": "validation",
        **({"unit": "%"} if metric == "accuracy" else {"higher_is_better": False}),
        "data": data,
        "data_files": ["ZINC/raw" if name == "ZINC" else f"{folder}/{name}/raw"],
        "data_required": not generated,
        "options": options,
        **facts,
    }


SUITES: dict[str, dict[str, Any]] = {
    "graph/pattern": _dataset(
        "PATTERN",
        "accuracy",
        "which nodes of a graph belong to a hidden pattern, GPS",
        _options(_SBM, 10000, 6, 32, 0.0005, 100, 5),
        paper=_PAPER["graph/pattern"],
    ),
    "graph/cluster": _dataset(
        "CLUSTER",
        "accuracy",
        "which of six communities a node belongs to, GPS",
        _options(_SBM, 10000, 16, 16, 0.0005, 100, 5),
        paper=_PAPER["graph/cluster"],
    ),
    "graph/zinc": _dataset(
        "ZINC",
        "mae",
        "constrained solubility of molecules, GPS",
        _options(_ALL, 0, 10, 32, 0.001, 2000, 50),
        paper=_PAPER["graph/zinc"],
    ),
    "graph/cifar10": _dataset(
        "CIFAR10",
        "accuracy",
        "the class of an image from its superpixels, GPS",
        _options(_ALL, 0, 3, 16, 0.001, 100, 5),
        paper=_PAPER["graph/cifar10"],
    ),
    "graph/tu": {
        "summary": "the class of a graph on TU datasets, GPS; seed s is the published fold s, a part of its training "
        "graphs chooses epoch and rate",
        "tasks": ["ENZYMES", "IMDBBINARY", "MUTAG", "NCI1", "PROTEINS"],
        "metric": "best accuracy",
        "unit": "%",
        "selection": "validation",
        "tasks_from_data": "quest_suites.graphgps.data:tu_tasks",
        "data": "the folder data of a clone: git clone --depth 1 https://github.com/muhanzhang/pytorch_DGCNN",
        "data_required": True,
        "options": [
            *_options("", 0, 2, 64, 0.001, 20, 0, rates=2, dropout=0.0)[1:],
            _HEADS,
        ],
    },
    "graph/molecules": {
        "summary": "solubility, free energy in water and lipophilicity of molecules (MoleculeNet), GPS; random splits",
        "tasks": ["ESOL", "FreeSolv", "Lipophilicity"],
        "metric": "rmse",
        "higher_is_better": False,
        "selection": "validation",
        "tasks_from_data": "quest_suites.graphgps.data:molecule_tasks",
        "data": "exampledata/finetune of: git clone --depth 1 https://github.com/tencent-ailab/grover",
        "data_required": True,
        "options": [*_options("", 0, 3, 32, 0.001, 50, 5, dropout=0.0)[1:], _HEADS],
    },
    "stability/graph": _dataset(
        "PATTERN",
        "accuracy",
        "accuracy over learning rates up to divergence, GPS on PATTERN",
        _options(_SBM, 300, 2, 8, 0.0001, 8, 0, rates=4),
        also=RATES,
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
    "time/graphgps": timing_suite(
        "an attention layer, or a model of GPSConv, on 32 graphs against the host's own on padded batches",
        [
            *("gps-zinc", "gps-pattern", "gps-peptides"),
            *("2000-among-50", "1000-among-50", "zinc", "pattern", "molecules-and-a-peptide", "peptides"),
            *(f"{nodes}-among-30" for nodes in (30, 40, 45, 50, 60, 80, 120, 200)),
        ],
        15,
        choice("packing", ("auto", "always", "never"), "whether ragged batches are packed"),
    ),
}
