"""The GPS graph Transformer (Rampášek et al., 2022) in PyTorch Geometric's own GraphGym, with nothing but pip.

GraphGPS is on no package index. This module registers the part of it that the QUEST paper's experiments use: config
keys, encoders, layers, heads, losses, schedules and datasets; GINE or gated graph convolution with full attention;
Laplacian or random-walk encodings. Keys, modules and parameters have GraphGPS's names, so one yaml works in both, and a
checkpoint of one loads into the other.

Importing it together with GraphGPS raises PluginError, because both register the same names.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import InMemoryDataset
from torch_geometric.datasets import ZINC, GNNBenchmarkDataset
from torch_geometric.graphgym import register
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.graphgym.loader import set_dataset_attr
from torch_geometric.graphgym.models.gnn import FeatureEncoder
from torch_geometric.graphgym.models.layer import MLP, new_layer_config
from torch_geometric.nn import GINEConv
from torch_geometric.utils import to_dense_batch
from yacs.config import CfgNode

from quest_core.errors import ConfigError, PluginError, one_of
from quest_graphgps import graphgym
from quest_graphgps.adapter import HOSTS

from .data import SPLITS, add_eigenvectors, add_random_walks, join_positions

if "graphgps" in sys.modules:
    raise PluginError(
        "quest_suites.graphgps.gps and GraphGPS register the same names in GraphGym; GraphGPS is imported, so use its "
        "GPSModel"
    )

# --- keys -----------------------------------------------------------------------------------------------------------


def declare(cfg: Any) -> None:
    """Add the keys of GraphGPS's yaml files to `cfg`, with GraphGPS's defaults."""
    sizes = {"layer_type": "GINE+Transformer", "layers": 3, "n_heads": 8, "dim_hidden": 64}
    cfg.gt = CfgNode({**sizes, "dropout": 0.0, "attn_dropout": 0.0, "layer_norm": False, "batch_norm": True})
    common = {"enable": False, "model": "none", "dim_pe": 16, "layers": 3, "n_heads": 4, "raw_norm_type": "none"}
    eigen = {"laplacian_norm": "none", "eigvec_norm": "L2", "max_freqs": 10}
    cfg.posenc_LapPE = CfgNode({**common, "eigen": CfgNode(eigen)})
    cfg.posenc_RWSE = CfgNode({**common, "kernel": CfgNode({"times": [], "times_func": ""})})
    cfg.dataset.node_encoder_num_types = 0
    cfg.dataset.edge_encoder_num_types = 0
    cfg.dataset.split_mode = "standard"
    cfg.dataset.slic_compactness = 10
    cfg.optim.num_warmup_epochs = 50
    cfg.optim.clip_grad_norm = False
    cfg.optim.clip_grad_norm_value = 1.0
    cfg.wandb = CfgNode({"use": False, "project": ""})
    cfg.name_tag = ""
    cfg.train.mode = "custom"


# --- encoders -------------------------------------------------------------------------------------------------------


class Position(nn.Module):
    """Base of position encoders: the encoding takes `dim_pe` of the features, the node's own features the rest."""

    def __init__(self, dim_emb: int, dim_pe: int, expand_x: bool) -> None:
        super().__init__()
        if dim_pe > dim_emb:
            raise ConfigError(f"dim_pe is {dim_pe}, wider than the {dim_emb} features that hold it")
        self.expand_x = expand_x and dim_pe < dim_emb
        if self.expand_x:
            self.linear_x = nn.Linear(cfg.share.dim_in, dim_emb - dim_pe)

    def join(self, batch: Any, encoding: Tensor) -> Any:
        x = self.linear_x(batch.x) if self.expand_x else batch.x
        batch.x = torch.cat([x, encoding], dim=1)
        return batch


@register.register_node_encoder("LapPE")
class LapPENodeEncoder(Position):
    """Laplacian eigenvectors through a DeepSet: a sum over eigenvectors of a network of (component, eigenvalue).

    In training, each eigenvector's sign is drawn at random for every batch, because signs are arbitrary.
    """

    def __init__(self, dim_emb: int, expand_x: bool = True) -> None:
        pe = cfg.posenc_LapPE
        super().__init__(dim_emb, pe.dim_pe, expand_x)
        if pe.model != "DeepSet" or pe.layers < 2 or pe.raw_norm_type != "none":
            raise ConfigError(
                f"posenc_LapPE has model {pe.model!r}, layers {pe.layers} and raw_norm_type {pe.raw_norm_type!r}; here "
                "it takes DeepSet, at least 2 and none"
            )
        wide = 2 * pe.dim_pe
        self.linear_A = nn.Linear(2, wide)
        layers: list[nn.Module] = [nn.ReLU()]
        for _ in range(pe.layers - 2):
            layers += [nn.Linear(wide, wide), nn.ReLU()]
        self.pe_encoder = nn.Sequential(*layers, nn.Linear(wide, pe.dim_pe), nn.ReLU())

    def forward(self, batch: Any) -> Any:
        vectors = batch.EigVecs  # [T, K]
        if self.training:
            flipped = torch.rand(vectors.shape[1], device=vectors.device) < 0.5
            vectors = vectors * torch.where(flipped, -1.0, 1.0)
        pairs = torch.cat([vectors[..., None], batch.EigVals], dim=-1)  # [T, K, 2]
        missing = pairs[..., 0].isnan()  # graphs with fewer nodes than eigenvectors asked for
        encoded = self.pe_encoder(self.linear_A(pairs.nan_to_num(0)))  # [T, K, dim_pe]
        return self.join(batch, encoded.masked_fill(missing[..., None], 0).sum(1))


@register.register_node_encoder("RWSE")
class RWSENodeEncoder(Position):
    """A linear layer on the return probabilities of random walks."""

    def __init__(self, dim_emb: int, expand_x: bool = True) -> None:
        pe = cfg.posenc_RWSE
        super().__init__(dim_emb, pe.dim_pe, expand_x)
        if pe.model.lower() != "linear":
            raise ConfigError(f"posenc_RWSE.model is {pe.model!r}; this encoder takes Linear")
        steps = len(walk_lengths())
        self.raw_norm = nn.BatchNorm1d(steps) if pe.raw_norm_type.lower() == "batchnorm" else None
        self.pe_encoder = nn.Linear(steps, pe.dim_pe)

    def forward(self, batch: Any) -> Any:
        back = batch.pestat_RWSE if self.raw_norm is None else self.raw_norm(batch.pestat_RWSE)  # [T, steps]
        return self.join(batch, self.pe_encoder(back))


def walk_lengths() -> list[int]:
    """Return the lengths of random walks in the config, which is a list or a text such as range(1,21)."""
    kernel = cfg.posenc_RWSE.kernel
    if not kernel.times_func:
        return list(kernel.times)
    text = kernel.times_func.strip()
    try:
        bounds = [int(word) for word in text.removeprefix("range(").removesuffix(")").split(",")]
        return list(range(*bounds))
    except (ValueError, TypeError):
        raise ConfigError(f"posenc_RWSE.kernel.times_func is {text!r}; write for example range(1,21)") from None


@register.register_node_encoder("TypeDictNode")
class TypeDictNodeEncoder(nn.Module):
    """An embedding of the node's type, x [T, 1]."""

    def __init__(self, dim_emb: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(cfg.dataset.node_encoder_num_types, dim_emb)

    def forward(self, batch: Any) -> Any:
        batch.x = self.encoder(batch.x[:, 0])
        return batch


@register.register_edge_encoder("TypeDictEdge")
class TypeDictEdgeEncoder(nn.Module):
    """An embedding of the edge's type, edge_attr [E]."""

    def __init__(self, dim_emb: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(cfg.dataset.edge_encoder_num_types, dim_emb)

    def forward(self, batch: Any) -> Any:
        batch.edge_attr = self.encoder(batch.edge_attr)
        return batch


@register.register_edge_encoder("DummyEdge")
class DummyEdgeEncoder(nn.Module):
    """One learned vector, shared by all edges, for graphs whose edges have no features."""

    def __init__(self, dim_emb: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(1, dim_emb)

    def forward(self, batch: Any) -> Any:
        batch.edge_attr = self.encoder(batch.edge_index.new_zeros(batch.edge_index.shape[1]))
        return batch


@register.register_edge_encoder("LinearEdge")
class LinearEdgeEncoder(nn.Module):
    """A linear layer on the edge's one number, edge_attr [E] or [E, 1]."""

    def __init__(self, dim_emb: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(1, dim_emb)

    def forward(self, batch: Any) -> Any:
        batch.edge_attr = self.encoder(batch.edge_attr.view(-1, 1))
        return batch


@register.register_node_encoder("TypeDictNode+RWSE")
class TypedWalksNodeEncoder(nn.Module):
    """The node's type and its random walks, concatenated."""

    def __init__(self, dim_emb: int) -> None:
        super().__init__()
        self.encoder1 = TypeDictNodeEncoder(dim_emb - cfg.posenc_RWSE.dim_pe)
        self.encoder2 = RWSENodeEncoder(dim_emb, expand_x=False)

    def forward(self, batch: Any) -> Any:
        return self.encoder2(self.encoder1(batch))


# --- layers ---------------------------------------------------------------------------------------------------------


class GatedGCNLayer(nn.Module):
    """Gated graph convolution with residuals for nodes and edges (Bresson & Laurent, 2017).

    x_i + ReLU(BN(A x_i + Σ_j σ(e_ij) ⊙ B x_j / Σ_j σ(e_ij))), with e_ij = C e_ij + D x_i + E x_j over edges j → i.
    """

    def __init__(self, dim: int, dropout: float, act: str) -> None:
        super().__init__()
        self.A, self.B, self.C, self.D, self.E = (nn.Linear(dim, dim) for _ in range(5))
        self.bn_node_x, self.bn_edge_e = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.act_fn_x, self.act_fn_e = register.act_dict[act](), register.act_dict[act]()
        self.dropout = dropout

    def forward(self, x: Tensor, edges: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes x [T, E] and edges [edges, E] -> updated nodes [T, E] and edges [edges, E]."""
        source, target = edge_index
        scores = self.C(edges) + self.D(x)[target] + self.E(x)[source]  # [edges, E]
        gates = scores.sigmoid()
        nothing = gates.new_zeros(x.shape)  # in the type that autocast gives to projections
        summed = nothing.index_add(0, target, gates * self.B(x)[source])  # [T, E]
        weight = nothing.index_add(0, target, gates)
        fresh = self.act_fn_x(self.bn_node_x(self.A(x) + summed / (weight + 1e-6)))
        marked = self.act_fn_e(self.bn_edge_e(scores))
        if self.dropout:
            fresh = F.dropout(fresh, self.dropout, self.training)
            marked = F.dropout(marked, self.dropout, self.training)
        return x + fresh, edges + marked


HOSTS[__name__, "GPSLayer"] = "self_attn", False


class GPSLayer(nn.Module):
    """Message passing plus attention among all nodes of a graph; the sum goes through a feed-forward network."""

    def __init__(self, dim: int, local: str, heads: int, *, act: str, dropout: float, attn_dropout: float) -> None:
        super().__init__()
        activation = register.act_dict[act]
        self.local_gnn_type = local
        if local == "CustomGatedGCN":
            self.local_model: nn.Module = GatedGCNLayer(dim, dropout, act)
        else:
            self.local_model = GINEConv(nn.Sequential(nn.Linear(dim, dim), activation(), nn.Linear(dim, dim)))
        self.self_attn = nn.MultiheadAttention(dim, heads, dropout=attn_dropout, batch_first=True)
        self.norm1_local, self.norm1_attn, self.norm2 = (nn.BatchNorm1d(dim) for _ in range(3))
        self.dropout_local, self.dropout_attn = nn.Dropout(dropout), nn.Dropout(dropout)
        self.ff_linear1, self.ff_linear2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.act_fn_ff = activation()
        self.ff_dropout1, self.ff_dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, batch: Any) -> Any:
        x = batch.x  # [T, E]
        if self.local_gnn_type == "CustomGatedGCN":
            local, batch.edge_attr = self.local_model(x, batch.edge_attr, batch.edge_index)
        else:
            local = x + self.dropout_local(self.local_model(x, batch.edge_index, batch.edge_attr))
        local = self.norm1_local(local)
        dense, real = to_dense_batch(x, batch.batch)  # [B, N, E], [B, N]
        attended = self.self_attn(dense, dense, dense, key_padding_mask=~real, need_weights=False)[0][real]
        x = local + self.norm1_attn(x + self.dropout_attn(attended))
        x = x + self.ff_dropout2(self.ff_linear2(self.ff_dropout1(self.act_fn_ff(self.ff_linear1(x)))))
        batch.x = self.norm2(x)
        return batch


@register.register_network("GPSModel")
class GPSModel(nn.Module):
    """Encoders, GPS layers and a head, built from `cfg`."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        gt = cfg.gt
        local, _, kind = gt.layer_type.partition("+")
        if local not in ("GINE", "CustomGatedGCN") or kind != "Transformer":
            raise ConfigError(
                f"gt.layer_type is {gt.layer_type!r}; this model takes GINE+Transformer or "
                "CustomGatedGCN+Transformer. For other layers use GraphGPS: quest run main.py --cfg ..."
            )
        if gt.layer_norm or not gt.batch_norm or cfg.gnn.layers_pre_mp:
            raise ConfigError(
                "gt.layer_norm, gt.batch_norm False and gnn.layers_pre_mp need GraphGPS; remove them here"
            )
        self.encoder = FeatureEncoder(dim_in)
        if not gt.dim_hidden == cfg.gnn.dim_inner == self.encoder.dim_in:
            raise ConfigError(
                f"gt.dim_hidden {gt.dim_hidden}, gnn.dim_inner {cfg.gnn.dim_inner} and the encoder's "
                f"{self.encoder.dim_in} must be equal"
            )
        options = {"act": cfg.gnn.act, "dropout": gt.dropout, "attn_dropout": gt.attn_dropout}
        self.layers = nn.Sequential(*(GPSLayer(gt.dim_hidden, local, gt.n_heads, **options) for _ in range(gt.layers)))
        self.post_mp = register.head_dict[cfg.gnn.head](dim_in=cfg.gnn.dim_inner, dim_out=dim_out)

    def forward(self, batch: Any) -> Any:
        return self.post_mp(self.layers(self.encoder(batch)))


@register.register_head("inductive_node")
class InductiveNodeHead(nn.Module):
    """A prediction for every node of graphs not seen in training."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.layer_post_mp = MLP(
            new_layer_config(dim_in, dim_out, cfg.gnn.layers_post_mp, has_act=False, has_bias=True, cfg=cfg)
        )

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.layer_post_mp(batch).x, batch.y


@register.register_head("san_graph")
class GraphHead(nn.Module):
    """A prediction for every graph: pooled nodes through layers that halve the features twice."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.pool = register.pooling_dict[cfg.model.graph_pooling]
        self.FC_layers = nn.ModuleList(
            [nn.Linear(dim_in, dim_in // 2), nn.Linear(dim_in // 2, dim_in // 4), nn.Linear(dim_in // 4, dim_out)]
        )
        self.activation = register.act_dict[cfg.gnn.act]()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        x = self.pool(batch.x, batch.batch)
        for layer in self.FC_layers[:-1]:
            x = self.activation(layer(x))
        return self.FC_layers[-1](x), batch.y


# --- training -------------------------------------------------------------------------------------------------------


@register.register_loss("weighted_cross_entropy")
def weighted_cross_entropy(pred: Tensor, true: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cross entropy with class weight 1 − the class's share of the batch (Dwivedi et al., 2023)."""
    if cfg.model.loss_fun != "weighted_cross_entropy":
        return None
    classes = pred.shape[1] if pred.dim() > 1 else 2
    count = torch.bincount(true, minlength=classes)
    weight = (len(true) - count).float() / len(true) * (count > 0)
    if pred.dim() > 1:
        scores = F.log_softmax(pred, dim=-1)
        return F.nll_loss(scores, true, weight=weight), scores
    loss = F.binary_cross_entropy_with_logits(pred, true.float(), weight=weight[true])
    return loss, pred.sigmoid()


@register.register_loss("l1")
def l1(pred: Tensor, true: Tensor) -> tuple[Tensor, Tensor] | None:
    return (F.l1_loss(pred, true), pred) if cfg.model.loss_fun == "l1" else None


@register.register_optimizer("adamW")
def adamw(params: Iterable[nn.Parameter], base_lr: float, weight_decay: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=base_lr, weight_decay=weight_decay)


@register.register_scheduler("cosine_with_warmup")
def cosine_with_warmup(optimizer: Any, num_warmup_epochs: int, max_epoch: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then half a cosine, stepped by epoch; with a warm-up the first epoch's rate is almost 0."""

    def factor(epoch: int) -> float:
        if epoch < num_warmup_epochs:
            return max(1e-6, epoch / num_warmup_epochs)
        return 0.5 * (1 + math.cos(math.pi * (epoch - num_warmup_epochs) / max(1, max_epoch - num_warmup_epochs)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# --- datasets -------------------------------------------------------------------------------------------------------


class Graphs(InMemoryDataset):
    """Three splits of graphs as one dataset of GraphGym, with the encodings of position that the config enables."""

    def __init__(self, splits: Sequence[Iterable[Any]]) -> None:
        super().__init__()
        lists = [[_prepare(data) for data in split] for split in splits]
        self.data, self.slices = self.collate([data for split in lists for data in split])
        start = 0
        for name, split in zip(SPLITS, lists, strict=True):
            index = torch.arange(start, start + len(split))
            set_dataset_attr(self, f"{name}_graph_index", index, len(index))
            start += len(split)


def _prepare(data: Any) -> Any:
    if cfg.posenc_LapPE.enable:
        kind = (cfg.posenc_LapPE.eigen.laplacian_norm, cfg.posenc_LapPE.eigen.eigvec_norm)
        if kind != ("none", "L2"):
            raise ConfigError(
                f"posenc_LapPE.eigen has laplacian_norm and eigvec_norm {kind}; this model takes none and L2"
            )
        data = add_eigenvectors(data, cfg.posenc_LapPE.eigen.max_freqs)
    if cfg.posenc_RWSE.enable:
        data = add_random_walks(data, walk_lengths())
    return data


MEMORY: dict[str, Sequence[Iterable[Any]]] = {}
"""Splits by name, for `dataset.format: memory`."""


def read(format: str, name: str, folder: object) -> list[Any] | None:
    """Return the three splits of ZINC, PATTERN, CLUSTER, MNIST or CIFAR10 in `folder`, or None for another format."""
    if format == "PyG-ZINC":
        return [ZINC(f"{folder}/ZINC", subset=name == "subset", split=split) for split in SPLITS]
    if format != "PyG-GNNBenchmarkDataset":
        return None
    transform = join_positions if name in ("MNIST", "CIFAR10") else None
    root = f"{folder}/GNNBenchmarkDataset"
    return [GNNBenchmarkDataset(root, name, split, transform=transform) for split in SPLITS]


@register.register_loader("quest_graphgps")
def load(format: str, name: str, dataset_dir: str) -> Graphs | None:
    """Return the dataset in a config, or None if another loader of GraphGym must read it."""
    if format == "memory":
        if name not in MEMORY:
            raise ConfigError(f"dataset.name is {name!r}, which is not in MEMORY; {one_of(name, MEMORY)}")
        return Graphs(MEMORY[name])
    splits = read(format, name, dataset_dir)
    return Graphs(splits) if splits else None


register.register_config("gps", declare)
graphgym.register_keys()
set_cfg(cfg)
