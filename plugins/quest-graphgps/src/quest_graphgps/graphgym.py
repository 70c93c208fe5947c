"""`attention` in the configs of GraphGym and GraphGPS.

Their configs know a key only if it was declared, so the keys are registered: ``gnn.attention`` and, where GraphGPS is
imported, ``gt.attention``, each with a node of options. The model is built by PyTorch Geometric's GraphGymModule in
both hosts, whatever the network, and that is where the attention is injected: before the optimizer, at all layers at
once, under the names of the stock model.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError, InjectionError, UnsupportedError
from quest_core.import_hook import when_imported
from quest_core.inject import inject
from quest_core.registry import parts

OPTIONS = "quest"
"""The node beside `attention` that holds its options: gt.quest.kv_heads."""
LAYER = "Quest"
"""The name of our attention in gt.layer_type: GINE+Quest."""
NO_SITE = ("Performer", "BigBird", "None")
"""Kinds of attention in gt.layer_type that have no place for another mechanism."""


def install() -> None:
    """Wrap what is imported already, and the rest when it is. May run twice."""
    when_imported("torch_geometric.graphgym.model_builder", _accept_in_graphgym)
    # GraphGPS makes its node `gt` in a registered function too; ours is registered, and so runs, after that one.
    when_imported("graphgps.config.gt_config", functools.partial(_register, "gt"))
    when_imported("graphgps.layer.gps_layer", _accept_in_gps_layer)
    when_imported("graphgps.finetuning", _accept_in_finetuning)


# --- the keys -------------------------------------------------------------------------------------------------------


def declare(cfg: Any, section: str) -> None:
    """Add `attention` and its options to a section of a config."""
    from yacs.config import CfgNode

    node = cfg[section]
    node.attention = None
    names = dict.fromkeys(option.name for part in parts().values() for option in part.options)
    node[OPTIONS] = CfgNode(dict.fromkeys(names))


def _register(section: str) -> None:
    """Have GraphGym declare the keys of a section in every config it makes, and in the one it has made."""
    from torch_geometric.graphgym import register
    from torch_geometric.graphgym.config import cfg

    name = f"quest_{section}"
    if name not in register.config_dict:
        register.register_config(name, functools.partial(declare, section=section))
        if cfg is not None and section in cfg and "attention" not in cfg[section]:
            declare(cfg, section)


def requested(cfg: Any) -> AttentionConfig | None:
    """The attention that a config asks for; None where it asks for none.

    Raises:
        ConfigError: an unknown name or option, or two keys that say different things.
        UnsupportedError: `attention` beside a gt.layer_type that has no place for it.
    """
    found: dict[str, AttentionConfig] = {}
    for section in ("gnn", "gt"):
        node = cfg.get(section) or {}
        options = {key: value for key, value in dict(node.get(OPTIONS) or {}).items() if value is not None}
        if node.get("attention") not in (None, "", "None"):
            found[f"{section}.attention"] = _parse(f"{section}.attention", node["attention"], options)
        elif section == "gt" and _kind(cfg) == LAYER:
            found["gt.layer_type"] = _parse("gt.layer_type", "quest", options)
        elif options:
            given = ", ".join(f"{section}.{OPTIONS}.{key}" for key in options)
            raise ConfigError(f"{given} given without {section}.attention, whose options they are; name one")
    said = found.get("gt.attention")
    if said is not None and _kind(cfg) == LAYER and "quest" not in said.name.split("+"):
        raise ConfigError(
            f"gt.layer_type is {cfg.gt.layer_type!r} but gt.attention is '{said}'; write "
            f"gt.layer_type: {cfg.gt.layer_type.replace(LAYER, 'Transformer')}, or drop gt.attention"
        )
    if len(set(found.values())) > 1:
        both = " and ".join(f"{key}: {value}" for key, value in found.items())
        raise ConfigError(f"two keys choose the attention, {both}; keep one")
    config = next(iter(found.values()), None)
    if "gt.attention" in found and _kind(cfg) in NO_SITE:
        raise UnsupportedError(
            f"gt.attention is {str(config)!r}, which cannot be used with gt.layer_type {cfg.gt.layer_type!r}: "
            f"{_kind(cfg)} has no attention that it could replace. Write "
            f"gt.layer_type: {cfg.gt.layer_type.split('+')[0]}+Transformer"
        )
    return config


def _parse(key: str, value: Any, options: Mapping[str, Any]) -> AttentionConfig:
    try:
        plain = AttentionConfig.parse(value)  # text or JSON, perhaps with options of its own
        return AttentionConfig.parse({**plain.to_dict(), **options}) if options else plain
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _kind(cfg: Any) -> str | None:
    """The second half of gt.layer_type: Transformer in GINE+Transformer."""
    layer_type = (cfg.get("gt") or {}).get("layer_type") or ""
    return layer_type.split("+")[1] if layer_type.count("+") == 1 else None


# --- the models -----------------------------------------------------------------------------------------------------


def _accept_in_graphgym() -> None:
    """Wrap GraphGymModule.__init__ in place, once: it builds the network of the config, then injects."""
    from torch_geometric.graphgym.model_builder import GraphGymModule

    _register("gnn")
    stock: Any = GraphGymModule.__init__
    if hasattr(stock, "accepts_attention"):
        return

    @functools.wraps(stock)
    def __init__(self: Any, dim_in: int, dim_out: int, cfg: Any) -> None:
        config = requested(cfg)  # a misspelt name is refused before the model is built
        stock(self, dim_in, dim_out, cfg)
        if config is not None:
            put(self.model, config, f"model.type {cfg.model.type!r}")

    __init__.accepts_attention = True  # type: ignore[attr-defined]
    GraphGymModule.__init__ = __init__


def put(model: nn.Module, config: AttentionConfig, where: str) -> None:
    """Inject into a model that has just been built, and say so where the host says things."""
    from .adapter import GraphGPSAdapter

    try:
        _, report = inject(model, config, adapter=GraphGPSAdapter(), fresh=True)
    except InjectionError as error:
        raise InjectionError(f"attention '{config}' cannot be used in {where}: {error}") from None
    if logging.getLogger().isEnabledFor(logging.INFO) and logging.getLogger().handlers:
        logging.info(f"quest: {report}")  # GraphGym writes this to the terminal and to the run's logging.log
    else:
        report.announce()


def _accept_in_gps_layer() -> None:
    """Wrap GPSLayer.__init__ in place, once: global_model_type 'Quest' is its Transformer with quest inside."""
    from graphgps.layer.gps_layer import GPSLayer

    from .adapter import GraphGPSAdapter

    stock: Any = GPSLayer.__init__
    if hasattr(stock, "accepts_attention"):
        return

    @functools.wraps(stock)
    def __init__(
        self: Any, dim_h: int, local_gnn_type: str, global_model_type: str, *rest: Any, **options: Any
    ) -> None:
        ours = global_model_type == LAYER
        stock(self, dim_h, local_gnn_type, "Transformer" if ours else global_model_type, *rest, **options)
        if ours:  # also in a network that GraphGymModule did not build; there the config's options follow
            inject(self, "quest", adapter=GraphGPSAdapter(), fresh=True)

    __init__.accepts_attention = True  # type: ignore[attr-defined]
    GPSLayer.__init__ = __init__


def _accept_in_finetuning() -> None:
    """Wrap load_pretrained_model_cfg, once: it copies the whole node `gt` of the pretrained model over the user's."""
    from graphgps import finetuning

    stock: Any = finetuning.load_pretrained_model_cfg
    if hasattr(stock, "accepts_attention"):
        return

    @functools.wraps(stock)
    def load_pretrained_model_cfg(cfg: Any) -> Any:
        asked = requested(cfg)
        cfg = stock(cfg)
        trained = requested(cfg)
        if asked is not None and asked != trained:
            logging.warning(
                f"quest: fine-tuning with attention '{asked}' a model that was pretrained with "
                f"'{trained or AttentionConfig.parse('standard')}'"
            )
            if _kind(cfg) == LAYER:
                cfg.gt.layer_type = cfg.gt.layer_type.replace(LAYER, "Transformer")
            cfg.gt.attention = str(asked)
            for name in cfg.gt[OPTIONS]:
                cfg.gt[OPTIONS][name] = None
        return cfg

    load_pretrained_model_cfg.accepts_attention = True  # type: ignore[attr-defined]
    finetuning.load_pretrained_model_cfg = load_pretrained_model_cfg
