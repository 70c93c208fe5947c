"""`attention` in the configs of GraphGym and GraphGPS.

Their configs know a key only if it was declared, so the keys are registered: ``gnn.attention`` and, where GraphGPS is
imported, ``gt.attention``, each with a node of options. The model is built by PyTorch Geometric's GraphGymModule in
both hosts, whatever the network, and that is where the attention is injected: before the optimizer, at all layers at
once, under the names of the stock model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from quest_core.catalogue import parts
from quest_core.checkpoints import differences
from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError, InjectionError, UnsupportedError, one_of
from quest_core.hosts.injection import inject
from quest_core.hosts.patching import when_imported

SECTIONS = ("gnn", "gt")
"""The sections of a config that have the keys: GraphGym's own, and the one that GraphGPS adds."""
OPTIONS = "quest"
"""The node beside `attention` that holds its options: gt.quest.kv_heads."""
LAYER = "Quest"
"""The name of our attention in gt.layer_type: GINE+Quest."""
FROM = "attention_from"
"""The key beside `attention` that lets a run resume a checkpoint which was trained with the attention it names."""
NO_SITE = ("Performer", "BigBird", "None")
"""Kinds of attention in gt.layer_type that have no place for another mechanism."""


def install() -> None:
    """Wrap what is imported already, and the rest when it is. May run twice."""
    when_imported("yacs.config", _accept_mappings)
    when_imported("torch_geometric.graphgym.model_builder", _accept_in_graphgym)
    when_imported("torch_geometric.graphgym.checkpoint", _guard_checkpoints)
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
    node[FROM] = None
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


def _accept_mappings() -> None:
    """Wrap the two ways into a config, once: yacs keeps no mapping under a key that may hold text as well.

    A mapping, of yaml or of a command line, becomes the text that means the same, and that is what is kept and dumped.
    """
    from yacs.config import CfgNode

    stock: Any = CfgNode.merge_from_other_cfg
    if hasattr(stock, "accepts_attention"):
        return
    stock_list: Any = CfgNode.merge_from_list

    @functools.wraps(stock)
    def merge_from_other_cfg(self: Any, cfg_other: Any) -> None:
        """What merge_from_file calls too."""
        cfg_other = copy.deepcopy(cfg_other)
        for section in _sections(self):
            given = cfg_other.get(section)
            if not isinstance(given, Mapping):
                continue
            if isinstance(given.get(OPTIONS), Mapping):
                for option in given[OPTIONS]:
                    _known_option(self, section, option)
            for key in {"attention", FROM} & set(given):
                dict.__setitem__(
                    cfg_other[section], key, _as_text(f"{section}.{key}", given[key])
                )  # also where it is frozen
        stock(self, cfg_other)

    @functools.wraps(stock_list)
    def merge_from_list(self: Any, cfg_list: Sequence[Any]) -> None:
        """What a command line goes through: keys and values in turn."""
        given, sections = list(cfg_list), _sections(self)
        for i in range(0, len(given) - 1, 2):
            names = str(given[i]).split(".")
            if len(names) < 2 or names[0] not in sections:
                continue
            (section, key), below = names[:2], names[2:]
            if key == OPTIONS and below:
                _known_option(self, section, below[0])
            elif key in ("attention", FROM) and below:
                text = f"{below[0]}: {given[i + 1]}"
                raise ConfigError(
                    f"{given[i]}: {section}.{key} is one value; write {section}.{key} '{{name: quest, {text}}}'"
                    + (f" or {section}.{OPTIONS}.{below[0]} {given[i + 1]}" if key == "attention" else "")
                )
            elif key in ("attention", FROM):
                given[i + 1] = _as_text(given[i], given[i + 1])
        stock_list(self, given)

    merge_from_other_cfg.accepts_attention = True  # type: ignore[attr-defined]
    CfgNode.merge_from_other_cfg = merge_from_other_cfg
    CfgNode.merge_from_list = merge_from_list


def _sections(cfg: Any) -> list[str]:
    """The sections of a config in which our keys were declared; none in what is no config of GraphGym."""
    return [section for section in SECTIONS if isinstance(cfg.get(section), Mapping) and FROM in cfg[section]]


def _as_text(key: str, value: Any) -> Any:
    """A mapping, given as such or written as JSON or yaml, as the text of the same attention; text stays as it is."""
    import yaml

    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(yaml.YAMLError):  # left to the parser, which says what is wrong with it
            value = yaml.safe_load(value)
    return str(_parse(key, dict(value), {})) if isinstance(value, Mapping) else value


def _known_option(cfg: Any, section: str, option: str) -> None:
    known = cfg[section][OPTIONS]
    if option not in known and not known.is_new_allowed():
        raise ConfigError(f"{section}.{OPTIONS}.{option}: no attention has such an option; {one_of(option, known)}")


def requested(cfg: Any) -> AttentionConfig | None:
    """The attention that a config asks for; None where it asks for none.

    Raises:
        ConfigError: an unknown name or option, or two keys that say different things.
        UnsupportedError: `attention` beside a gt.layer_type that has no place for it.
    """
    found: dict[str, AttentionConfig] = {}
    kind = _kind(cfg)
    if kind is not None and kind != LAYER and _is_attention(kind):
        raise ConfigError(
            f"gt.layer_type is {cfg.gt.layer_type!r}, whose second half is one of GraphGPS's or {LAYER!r}; write "
            f"gt.layer_type: {cfg.gt.layer_type.split('+')[0]}+Transformer and gt.attention: {kind.lower()}"
        )
    for section in SECTIONS:
        node = cfg.get(section) or {}
        options = {key: value for key, value in dict(node.get(OPTIONS) or {}).items() if value is not None}
        if _given(node.get(FROM)):
            _parse(f"{section}.{FROM}", node[FROM], {})  # a misspelt name is refused before hours of training
        if _given(node.get("attention")):
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


def _given(value: Any) -> bool:
    return value not in (None, "None")  # an empty text is what an unset variable leaves behind: an error, not stock


def _parse(key: str, value: Any, options: Mapping[str, Any]) -> AttentionConfig:
    try:
        plain = AttentionConfig.parse(value)  # text or JSON, perhaps with options of its own
        config = AttentionConfig.parse({**plain.to_dict(), **options}) if options else plain
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    for name, own in plain.options:
        if name in options and dict(config.options).get(name) != own:
            both = f"{key} is '{plain}' and {key.split('.')[0]}.{OPTIONS}.{name} is {options[name]!r}"
            raise ConfigError(f"two keys choose {name}: {both}; keep one")
    return config


def _kind(cfg: Any) -> str | None:
    """The second half of gt.layer_type: Transformer in GINE+Transformer."""
    layer_type = (cfg.get("gt") or {}).get("layer_type") or ""
    return layer_type.split("+")[1] if layer_type.count("+") == 1 else None


def _is_attention(text: str) -> bool:
    try:
        AttentionConfig.parse(text.lower())
    except ConfigError:
        return False
    return True


# --- the models -----------------------------------------------------------------------------------------------------


def _accept_in_graphgym() -> None:
    """Wrap GraphGymModule.__init__ in place, once: it builds the network of the config, then injects."""
    from torch_geometric.graphgym.model_builder import GraphGymModule

    _register("gnn")
    stock: Any = GraphGymModule.__init__
    if hasattr(stock, "accepts_attention"):
        return
    stock_load: Any = GraphGymModule.on_load_checkpoint

    @functools.wraps(stock)
    def __init__(self: Any, dim_in: int, dim_out: int, cfg: Any) -> None:
        config = requested(cfg)  # a misspelt name is refused before the model is built
        stock(self, dim_in, dim_out, cfg)
        if config is not None:
            put(self.model, config, f"model.type {cfg.model.type!r}")

    @functools.wraps(stock_load)
    def on_load_checkpoint(self: Any, checkpoint: Any) -> None:
        """Lightning calls this before it loads anything: to go on with training, to test, or to load alone."""
        if self._trainer is not None and self._trainer.state.fn == "fit":
            refuse_other_attention(self, checkpoint["state_dict"], str(self._trainer.ckpt_path), self.cfg)
        stock_load(self, checkpoint)

    __init__.accepts_attention = True  # type: ignore[attr-defined]
    GraphGymModule.__init__ = __init__
    GraphGymModule.on_load_checkpoint = on_load_checkpoint


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
        resumed = cfg.gt[FROM]  # of this run, not of the pretraining
        cfg = stock(cfg)
        cfg.gt[FROM] = resumed
        trained = requested(cfg)
        if asked is not None and asked != trained:
            logging.warning(
                f"quest: fine-tuning with attention '{asked}' a model that was pretrained with "
                f"'{trained or AttentionConfig.parse('standard')}'"
            )
            if _kind(cfg) == LAYER:
                cfg.gt.layer_type = cfg.gt.layer_type.replace(LAYER, "Transformer")
            cfg.gt.attention, cfg.gnn.attention = str(asked), None
            for node in (cfg.gt[OPTIONS], cfg.gnn[OPTIONS]):
                node.update(dict.fromkeys(node))
        return cfg

    load_pretrained_model_cfg.accepts_attention = True  # type: ignore[attr-defined]
    finetuning.load_pretrained_model_cfg = load_pretrained_model_cfg


# --- checkpoints ----------------------------------------------------------------------------------------------------


def _guard_checkpoints() -> None:
    """Wrap load_ckpt, once: with an optimizer, training goes on from the checkpoint, and must have its attention."""
    from torch_geometric.graphgym import checkpoint

    stock: Any = checkpoint.load_ckpt
    if hasattr(stock, "compares_attention"):
        return

    @functools.wraps(stock)
    def load_ckpt(model: nn.Module, optimizer: Any = None, scheduler: Any = None, epoch: int = -1) -> int:
        if optimizer is None:  # to evaluate: another attention is warned of
            return int(stock(model, optimizer, scheduler, epoch))
        path = checkpoint.get_ckpt_path(checkpoint.get_ckpt_epoch(epoch))

        def compare(module: nn.Module, state_dict: Any, *rest: Any) -> None:
            refuse_other_attention(module, state_dict, path, checkpoint.cfg)

        # The hook comes before the first weight is loaded: what is refused has changed nothing.
        with model.register_load_state_dict_pre_hook(compare):
            return int(stock(model, optimizer, scheduler, epoch))

    load_ckpt.compares_attention = True  # type: ignore[attr-defined]
    # GraphGym's package has the function under a name of its own, and so has a trainer that was imported before us.
    for module in list(sys.modules.values()):
        if vars(module).get("load_ckpt") is stock:
            module.load_ckpt = load_ckpt  # type: ignore[attr-defined]


def refuse_other_attention(model: nn.Module, state_dict: Any, path: str, cfg: Any) -> None:
    """Let no training go on from a checkpoint of another attention, unless `attention_from` names that one.

    Args:
        model: what the checkpoint is about to be loaded into.
        state_dict: the model's part of the checkpoint, whose metadata name the attention of every layer; a stock
            layer, which says nothing, was trained with `standard`.
        path: the checkpoint, for the error.
        cfg: the config of the run.

    Raises:
        ConfigError: the attentions differ, naming both and the keys.
    """
    differ = differences(model, state_dict)
    if differ is None:
        logging.warning(f"quest: {path} does not say with which attention it was trained; the model is not compared")
        return
    asked = {f"{name}.{FROM}": cfg[name][FROM] for name in SECTIONS if name in cfg and _given(cfg[name].get(FROM))}
    said = [_parse(key, value, {}) for key, value in asked.items()]
    refused = [layer for layer in differ if not any(config.means(layer.trained) for config in said)]
    if refused:
        _, own, text = refused[0]
        section = "gt" if "gt" in cfg and not _given(cfg.gnn.get("attention")) else "gnn"
        raise ConfigError(
            f"{path} was trained with attention '{text}', and the model has '{own}'"
            + "".join(f"; {key} is {str(value)!r}" for key, value in asked.items())
            + f". To go on as trained, say {section}.attention: {text}. To go on with another attention all the same, "
            f"say so with {section}.{FROM}: {text}. To begin anew, choose another out_dir"
        )
