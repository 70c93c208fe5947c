"""`attention` in the configs of GraphGym and GraphGPS.

Their configs accept only declared keys, so `declare` adds `attention` and its companions to ``gnn`` and, in GraphGPS,
to ``gt``. PyTorch Geometric's GraphGymModule builds the model in both hosts, whatever the network. The attention is
injected there: before the optimizer, in all layers at once, under the parameter names of the stock model.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from quest_core.catalogue import parts
from quest_core.checkpoints import ENTRY
from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError, InjectionError, UnsupportedError
from quest_core.hosts.adapter import Adapter, Capabilities, Site, require
from quest_core.hosts.injection import KEYS, Request

SECTIONS = ("gnn", "gt")
"""The sections of a config that have the keys: GraphGym's own, and the one that GraphGPS adds."""
OPTIONS = "quest"
"""The node that holds the options of `attention` one by one: gt.quest.kv_heads."""
LAYER = "Quest"
"""The name of QUEST in gt.layer_type: GINE+Quest."""
NO_SITE = ("Performer", "BigBird", "SANTransformer", "None")
"""Models, and second halves of gt.layer_type, whose attention cannot be replaced."""

Wrapper = Callable[..., Any]


def install(adapter: Adapter) -> None:
    """Change GraphGym and GraphGPS through the patches of `adapter`, each module as soon as it is imported."""
    patches = adapter.patches

    def change_yacs() -> None:
        from yacs import config

        patches.wrap(config, "_check_and_coerce_cfg_value_type", _mapping_as_text)

    def change_config() -> None:
        patches.once("keys", register_keys, forget_keys)
        config = import_module("torch_geometric.graphgym.config")  # the package's attribute of that name is another
        patches.wrap(config, "assert_cfg", functools.partial(_check_when_merged, adapter))

    def change_models() -> None:
        from torch_geometric.graphgym.model_builder import GraphGymModule

        patches.wrap(GraphGymModule, "__init__", functools.partial(_inject_when_built, adapter))

    def change_finetuning() -> None:
        from graphgps import finetuning

        patches.wrap(finetuning, "load_pretrained_model_cfg", _keep_own_attention)
        patches.wrap(finetuning, "init_model_from_pretrained", _load_only_the_checkpoint)

    patches.when_imported("yacs.config", change_yacs)
    patches.when_imported("torch_geometric.graphgym.config", change_config)
    patches.when_imported("torch_geometric.graphgym.model_builder", change_models)
    # A registered function of GraphGPS replaces the node `gt`, so ours must run after it.
    patches.when_imported("graphgps.config.gt_config", register_keys)
    patches.when_imported("graphgps.finetuning", change_finetuning)


# --- the keys -------------------------------------------------------------------------------------------------------


def declare(cfg: Any) -> None:
    """Add `attention` and its companions to the sections of a config that lack them."""
    from yacs.config import CfgNode

    names = list(dict.fromkeys(option.name for part in parts().values() for option in part.options))
    for section in SECTIONS:
        if section not in cfg or "attention_from" in cfg[section]:
            continue
        node = cfg[section]
        node.attention = node.attention_from = None
        node.allow_partial = False
        node[OPTIONS] = CfgNode(dict.fromkeys(names))
        for name in names:
            below = f"{section}.attention.{name}"
            if not cfg.key_is_renamed(below):
                cfg.register_renamed_key(below, f"{section}.{OPTIONS}.{name}")  # yacs's error names the right key


def register_keys() -> None:
    """Declare the keys in every config that GraphGym will make, after all other keys, and in the existing one."""
    from torch_geometric.graphgym import register
    from torch_geometric.graphgym.config import cfg

    register.config_dict.pop(OPTIONS, None)
    register.register_config(OPTIONS, declare)
    if cfg is not None:
        declare(cfg)


def forget_keys() -> None:
    """Remove the keys from GraphGym's registry and from its config."""
    from torch_geometric.graphgym import register
    from torch_geometric.graphgym.config import cfg

    register.config_dict.pop(OPTIONS, None)
    for section in SECTIONS:
        for key in (*KEYS, OPTIONS) if cfg is not None and section in cfg else ():
            cfg[section].pop(key, None)


def _mapping_as_text(stock: Wrapper) -> Wrapper:
    """Turn a mapping under our keys into text of the same meaning, because yacs keeps one type under a key."""
    keys = {f"{section}.{key}" for section in SECTIONS for key in ("attention", "attention_from")}

    @functools.wraps(stock)
    def check_and_coerce(replacement: Any, original: Any, key: str, full_key: str) -> Any:
        if full_key in keys and isinstance(replacement, Mapping) and not isinstance(original, Mapping):
            replacement = str(_parse(full_key, dict(replacement)))
        return stock(replacement, original, key, full_key)

    return check_and_coerce


def requested(cfg: Any) -> Request | None:
    """Return what a config asks for; None means the stock model.

    ``gt.layer_type: GINE+Quest`` is rewritten in place to GINE+Transformer and ``gt.attention: quest``.

    Raises:
        ConfigError: an unknown name or option, a key without the `attention` that it belongs to, or two `attention`.
        UnsupportedError: `gt.attention` with a model or gt.layer_type whose attention cannot be replaced.
    """
    local, _, kind = str((cfg.get("gt") or {}).get("layer_type") or "").partition("+")  # GINE and Transformer
    if kind == LAYER:
        if _given(cfg.gt.attention):
            raise ConfigError(
                f"gt.layer_type is '{local}+{LAYER}' and gt.attention is {cfg.gt.attention!r}; write gt.layer_type: "
                f"{local}+Transformer"
            )
        cfg.gt.attention, cfg.gt.layer_type = "quest", f"{local}+Transformer"
    elif kind.lower() in parts() or difflib.get_close_matches(kind, [LAYER]):
        meant = kind.lower() if kind.lower() in parts() else "quest"
        raise ConfigError(
            f"gt.layer_type is '{local}+{kind}', whose second half is one of GraphGPS's or '{LAYER}'; write "
            f"gt.layer_type: {local}+Transformer and gt.attention: {meant}"
        )
    asked: dict[str, Request] = {}
    for section in SECTIONS:
        node = cfg.get(section) or {}
        options = {name: value for name, value in (node.get(OPTIONS) or {}).items() if value is not None}
        given = {key: node[key] for key in KEYS if _given(node.get(key))}
        unread = ", ".join(f"{section}.{key}" for key in (*(f"{OPTIONS}.{name}" for name in options), *given))
        if "attention" in given:
            attention = _parse(f"{section}.attention", given["attention"], options)
            trained = given.get("attention_from")
            source = None if trained is None else _parse(f"{section}.attention_from", trained)
            asked[section] = Request(attention, source, "allow_partial" in given)
        elif unread:
            raise ConfigError(
                f"{unread} given without {section}.attention; name the attention, for example {section}.attention: "
                "standard"
            )
    if len(asked) > 1:
        both = " and ".join(f"{section}.attention: {found.attention}" for section, found in asked.items())
        raise ConfigError(f"two keys choose the attention, {both}; keep one")
    without = [name for name in (cfg.model.type, kind) if name in NO_SITE]
    if "gt" in asked and without:
        raise UnsupportedError(
            f"gt.attention is '{asked['gt'].attention}', and {without[0]} has no attention that can be replaced; "
            f"write model.type: GPSModel and gt.layer_type: {local if kind else 'GINE'}+Transformer"
        )
    return next(iter(asked.values()), None)


def _given(value: Any) -> bool:
    return value not in (None, "None", False)  # empty text, which an unset variable leaves, is an error


def _parse(key: str, value: Any, options: Mapping[str, Any] | None = None) -> AttentionConfig:
    """Parse text, JSON, yaml or a mapping, together with options from the node `quest`."""
    import yaml

    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(yaml.YAMLError):  # AttentionConfig.parse reports it
            value = yaml.safe_load(value)
    try:
        plain = AttentionConfig.parse(value)
        config = AttentionConfig.parse({**plain.to_dict(), **options}) if options else plain
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    for name, own in plain.options:
        if options and name in options and dict(config.options)[name] != own:
            section = key.partition(".")[0]
            raise ConfigError(
                f"two keys choose {name}: {key} is '{plain}' and {section}.{OPTIONS}.{name} is {options[name]!r}; "
                "keep one"
            )
    return config


def _check_when_merged(adapter: Adapter, stock: Wrapper) -> Wrapper:
    """load_cfg calls assert_cfg last: before a main deletes the folder of the previous run and reads the data."""

    @functools.wraps(stock)
    def assert_cfg(cfg: Any) -> None:
        stock(cfg)
        asked = requested(cfg)
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if asked and cfg.train.mode == "custom" and processes > 1:
            raise ConfigError(
                f"train.mode is 'custom', whose loop trains in one process, and WORLD_SIZE is {processes}: each would "
                "train the whole model into one folder; start main.py without torchrun"
            )
        if asked and cfg.model.type == "GPSModel":
            gt = cfg.gt
            attn = nn.MultiheadAttention(gt.dim_hidden, gt.n_heads, dropout=gt.attn_dropout, device="meta")
            needs = Capabilities(
                ordered=False, dropout=gt.attn_dropout > 0, weights=cfg.train.mode == "log-attn-weights"
            )
            site = Site("", attn, 0, attn.num_heads, attn.head_dim, needs, fresh=True)
            require(adapter, site, asked.attention)
            adapter.replace(site, asked.attention)

    return assert_cfg


# --- the models -----------------------------------------------------------------------------------------------------


def _inject_when_built(adapter: Adapter, stock: Wrapper) -> Wrapper:
    """GraphGymModule builds the network of the config; all layers of it are then replaced at once."""

    @functools.wraps(stock)
    def __init__(self: Any, dim_in: int, dim_out: int, cfg: Any) -> None:
        asked = requested(cfg)
        stock(self, dim_in, dim_out, cfg)
        if asked is None:
            return
        try:
            asked.apply(self.model, adapter)
        except InjectionError as error:
            raise InjectionError(
                f"attention '{asked.attention}' cannot be used in model.type {cfg.model.type!r}: {error} (in a config, "
                "write gt.allow_partial: True, or gnn.allow_partial: True)"
            ) from None

    return __init__


def _keep_own_attention(stock: Wrapper) -> Wrapper:
    """load_pretrained_model_cfg copies the pretrained run's whole nodes over the user's, who may have named another."""

    @functools.wraps(stock)
    def load_pretrained_model_cfg(cfg: Any) -> Any:
        keys = (*KEYS, OPTIONS) if requested(cfg) else ("attention_from",)  # which belongs to this run in any case
        own = {section: {key: cfg[section][key] for key in keys} for section in SECTIONS}
        cfg = stock(cfg)
        for section, values in own.items():
            cfg[section].update(values)
        return cfg

    return load_pretrained_model_cfg


def _load_only_the_checkpoint(stock: Wrapper) -> Wrapper:
    """init_model_from_pretrained copies the checkpoint over the model's state dict, which names the model's attention.

    A checkpoint of standard attention names none and would pass as one of the model's, without a warning.
    """

    @functools.wraps(stock)
    def init_model_from_pretrained(model: nn.Module, *arguments: Any, **options: Any) -> Any:
        own = model.state_dict

        def state_dict() -> dict[str, Any]:
            return {name: value for name, value in own().items() if not name.endswith(ENTRY)}

        model.state_dict = state_dict  # type: ignore[assignment]
        try:
            return stock(model, *arguments, **options)
        finally:
            del model.state_dict

    return init_model_from_pretrained
