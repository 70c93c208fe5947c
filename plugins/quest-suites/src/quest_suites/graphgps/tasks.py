"""graph/...: the graph benchmarks of the QUEST paper (tables 8 and 9), built by GraphGym.

Each suite starts from a shipped yaml (``configs/``) with GraphGPS's hyper-parameters and applies the suite's options.
The best epoch is chosen on the validation split; its test metric is the result, as in GraphGPS.

Differences from the paper's runs: PATTERN and CLUSTER are drawn from their published generator and are not the
published files; the network is `quest_suites.graphgps.gps`, whose parameters match GraphGPS's one by one.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import as_file, files
from typing import Any

import torch
from torch import Tensor

from quest_core.errors import ConfigError
from quest_suites.contract import Cell, Progress, Result, load_state, observe, over_rates, save_state, sweep_cell

SMOKE_GRAPHS = (24, 8, 8)
SMOKE_EPOCHS = 2
WATCHED = 32
"""Validation graphs on which stability/graph looks at the attention."""
TU = {
    "dataset.task_type": "classification",
    "dataset.edge_encoder_name": "DummyEdge",
    "model.loss_fun": "cross_entropy",
}
"""What graph/tu changes in ZINC's config: classes, and edges without features."""
FROM_ZINC = {"graph/tu": TU, "graph/molecules": {"model.loss_fun": "mse"}}
"""Suites whose config is ZINC's -> what they change."""


def run_graph(cell: Cell, progress: Progress, *, watch: int = 0) -> Result:
    """Train and evaluate one dataset with one attention and one seed.

    Args:
        watch: validation graphs on which `quest_suites.contract.observe` looks at the attention after each epoch.

    Returns:
        The suite's metric on the test split at the best validation epoch, its value on the validation split there,
        and ``epochs``; series ``train_loss`` and ``validation`` by epoch, and with `watch` those of `observe`.
    """
    from torch_geometric import seed_everything
    from torch_geometric.data import Batch
    from torch_geometric.graphgym.config import cfg
    from torch_geometric.graphgym.loader import create_loader
    from torch_geometric.graphgym.model_builder import create_model

    _configure(cell)
    seed_everything(cell.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch Geometric about its own code
        train, validation, test = create_loader()
    model = create_model()
    (optimizer,), (schedule,) = model.configure_optimizers()
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    metric, higher, measure = METRICS.get(cell.suite) or METRICS.get(cell.task, ("accuracy", True, accuracy))
    probe = Batch.from_data_list([*validation.dataset][:watch]).to(model.device) if watch else None

    @torch.no_grad()
    def evaluate(loader: Any) -> float:
        model.eval()
        steps = [model.validation_step(batch.to(model.device)) for batch in loader]
        return measure([(step["pred_score"].cpu(), step["true"].cpu()) for step in steps])

    losses: list[float] = []
    scores: list[float] = []  # of validation
    observed: dict[str, list[float]] = {}
    best: dict[str, Any] = {}  # the number of the best epoch, and its weights
    if state := load_state(cell):
        losses, scores, observed, best = (state[name] for name in ("losses", "scores", "observed", "best"))
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for epoch in range(len(scores), cfg.optim.max_epoch):
        model.train()
        batches: list[Tensor] = []
        for batch in train:
            loss = model.training_step(batch.to(model.device))["loss"]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.clip_grad_norm_value)
            optimizer.step()
            batches.append(loss.detach())
        schedule.step()
        losses.append(torch.stack(batches).mean().item())
        scores.append(evaluate(validation))
        sign = 1 if higher else -1
        if not best or sign * scores[-1] > sign * scores[best["epoch"]]:
            best = {"epoch": epoch, "weights": copy.deepcopy(model.state_dict())}
        if probe is not None:
            for name, value in observe(model, probe.clone()).items():
                observed.setdefault(name, []).append(value)
        kept = {name: part.state_dict() for name, part in parts.items()}
        save_state(cell, {"losses": losses, "scores": scores, "observed": observed, "best": best, **kept})
        progress(len(scores) / cfg.optim.max_epoch, f"epoch {len(scores)} validation {scores[-1]:.4f}")
    model.load_state_dict(best["weights"])
    return Result(
        metrics={metric: evaluate(test), "validation": scores[best["epoch"]], "epochs": float(len(scores))},
        series={"train_loss": losses, "validation": scores, **observed},
        details={
            "best_epoch": best["epoch"] + 1,
            "injected": str(model.model.attention_report),
            "parameters": sum(p.numel() for p in model.parameters()),
            "graphs": [len(loader.dataset) for loader in (train, validation, test)],
            "classes": cfg.share.dim_out,
            "config": cfg.dump(),
        },
    )


def _configure(cell: Cell) -> None:
    """Set GraphGym's global config, and the graphs in memory that it names, to what the cell runs."""
    from torch_geometric.graphgym.config import cfg, set_cfg

    from . import gps

    options = cell.options
    set_cfg(cfg)
    changes = FROM_ZINC.get(cell.suite)
    name = cell.task.lower() if changes is None else "zinc"
    with as_file(files("quest_graphgps") / "configs" / f"{name}.yaml") as path:
        cfg.merge_from_file(str(path))
    cfg.num_workers, cfg.seed = 0, cell.seed
    cfg.gt.attention = cell.attention
    cfg.train.batch_size, cfg.optim.base_lr = options["batch_size"], options["lr"]
    cfg.optim.max_epoch = min(options["epochs"], SMOKE_EPOCHS) if cell.smoke else options["epochs"]
    cfg.optim.num_warmup_epochs = 0 if cell.smoke else options["warmup_epochs"]
    cfg.gt.attn_dropout = options["attn_dropout"]
    cfg.gt.layers = min(options["layers"], 2) if cell.smoke else options["layers"]
    cfg.accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    cfg.dataset.format, cfg.dataset.name = "memory", cell.task
    gps.MEMORY[cell.task] = splits(cell)
    if changes is not None:
        cfg.merge_from_list([word for pair in changes.items() for word in pair])
        cfg.gt.n_heads = options["heads"]
        graphs = [graph for part in gps.MEMORY[cell.task] for graph in part]
        cfg.dataset.node_encoder_num_types = 1 + max(int(graph.x.max()) for graph in graphs)
        if graphs[0].edge_attr is not None:
            edges = torch.cat([graph.edge_attr for graph in graphs])  # a molecule of one atom has none
            cfg.dataset.edge_encoder_num_types = 1 + int(edges.max())


def run_rates(cell: Cell, progress: Progress) -> Result:
    """Train one dataset with one attention and one seed at every learning rate, from the same weights.

    Gradients are clipped, as in GraphGPS. A rate that diverges has the accuracy of guessing.

    Returns:
        What `quest_suites.contract.over_rates` returns, with the curves of `run_graph`.
    """
    run = partial(run_graph, watch=WATCHED)
    return over_rates(sweep_cell(cell, cell.options["lowest"], run, progress, lambda one: 100 / one.details["classes"]))


# --- metrics --------------------------------------------------------------------------------------------------------

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Predicted scores and truths, batch by batch."""


def class_accuracy(pairs: Pairs) -> float:
    """Return the mean over classes of the recall, in % (the benchmark's weighted accuracy)."""
    chosen, true = _predictions(pairs)
    right = torch.bincount(true[chosen == true], minlength=int(true.max()) + 1)
    count = torch.bincount(true)
    return 100 * (right / count)[count > 0].mean().item()


def errors(pairs: Pairs) -> Tensor:
    """Return the errors of all graphs and targets."""
    return torch.cat([pred.flatten() - true.flatten() for pred, true in pairs])


def accuracy(pairs: Pairs) -> float:
    """Return the share of graphs with the right class, in %."""
    chosen, true = _predictions(pairs)
    return 100 * (chosen == true.flatten()).float().mean().item()


def _predictions(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return the predicted classes and the true ones; with two classes a prediction is one probability."""
    pred, true = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return (pred > 0.5).long() if pred.dim() == 1 else pred.argmax(-1), true


METRICS: dict[str, tuple[str, bool, Callable[[Pairs], float]]] = {
    "PATTERN": ("accuracy", True, class_accuracy),
    "CLUSTER": ("accuracy", True, class_accuracy),
    "ZINC": ("mae", False, lambda pairs: errors(pairs).abs().mean().item()),
    "CIFAR10": ("accuracy", True, accuracy),
    "graph/molecules": ("rmse", False, lambda pairs: errors(pairs).square().mean().sqrt().item()),
}
"""Task, or suite -> its metric, whether higher is better, and the function that measures it."""

# --- data -----------------------------------------------------------------------------------------------------------


def splits(cell: Cell) -> list[list[Any]]:
    """Return the graphs of training, validation and test, as many as the cell's options request."""
    from . import gps
    from .data import GENERATORS, MOLECULES, molecules, tu_fold

    if cell.suite in FROM_ZINC:
        assert cell.data is not None
        read, name = (tu_fold, cell.task) if cell.suite == "graph/tu" else (molecules, MOLECULES[cell.task])
        parts = read(cell.data / name, cell.seed)
        return [part[:most] for part, most in zip(parts, SMOKE_GRAPHS, strict=True)] if cell.smoke else parts
    if cell.task in GENERATORS and cell.data is None:
        share = 5 if cell.task == "PATTERN" else 10
        train = cell.options["graphs"]
        if train < share:
            raise ConfigError(f"option graphs is {train}; {cell.task} needs at least {share}")
        sizes = SMOKE_GRAPHS if cell.smoke else (train, train // share, train // share)
        return GENERATORS[cell.task](sizes, 0)  # the same graphs for every seed
    graphs = cell.options["graphs"]  # all for 0, else this many of training and a tenth of the others
    tenth = max(1, graphs // 10) if graphs else None
    limits = SMOKE_GRAPHS if cell.smoke else (graphs or None, tenth, tenth)
    format, name = ("PyG-ZINC", "subset") if cell.task == "ZINC" else ("PyG-GNNBenchmarkDataset", cell.task)
    parts = gps.read(format, name, cell.data) or []
    return [list(part[:limit]) for part, limit in zip(parts, limits, strict=True)]
