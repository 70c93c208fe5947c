"""`attention` in the configs of GraphGym and GraphGPS.

Their configs accept only declared keys, so `declare` adds `attention` and its companions to ``gnn`` and, in GraphGPS,
to ``gt``. PyTorch Geometric's GraphGymModule builds the model in both hosts, whatever the network. The attention is
injected there: before the optimizer, in all layers at once, under the parameter names of the stock model.
"""

import difflib
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from quest_core.checkpoints import ENTRY
from quest_core.errors import CheckpointError, ConfigError, InjectionError, UnsupportedError
from quest_core.hosts.adapter import Adapter, Site, require, sections
from quest_core.hosts.request import KEYS, Request, rehearse
from quest_core.registry import mechanisms

from . import watching
from .attention import GraphAttention

SECTIONS = ("gnn", "gt")
"""The sections of a config that have the keys: GraphGym's own, and the one that GraphGPS adds."""
REGISTERED = "quest"
"""The name of `declare` among GraphGym's registered configs."""
NO_SITE = ("Performer", "BigBird", "SANTransformer", "None")
"""Models, and second halves of gt.layer_type, whose attention cannot be replaced."""
FEATURES = 840
"""Features of a network that is built to be checked: the data say how many, and this number has many divisors."""

Stock = Callable[..., Any]


def install(adapter: Adapter) -> None:
    """Change GraphGym and GraphGPS through the patches of `adapter`, each module as soon as it is imported."""
    patches, config = adapter.patches, "torch_geometric.graphgym.config"
    patches.when_imported(config, lambda: patches.once("keys", register_keys, forget_keys))
    # A registered function of GraphGPS replaces the node `gt`, so ours must run after it.
    patches.when_imported("graphgps.config.gt_config", register_keys)
    patches.around(config, "load_cfg", _refuse_unknown_keys)
    patches.around(config, "assert_cfg", functools.partial(_check_when_merged, adapter))
    patches.around(config, "set_out_dir", _name_after_attention)
    module = "torch_geometric.graphgym.model_builder:GraphGymModule"
    patches.around(module, "__init__", _inject_when_built)
    patches.around("torch_geometric.graphgym.checkpoint", "load_ckpt", _load_in_own_words)
    watching.install(patches)
    patches.around("graphgps.finetuning", "load_pretrained_model_cfg", _keep_own_attention)
    patches.around("graphgps.finetuning", "init_model_from_pretrained", _load_only_the_checkpoint)


# --- the keys -------------------------------------------------------------------------------------------------------


def declare(cfg: Any) -> None:
    """Add `attention` and its companions to the sections of a config that lack them."""
    for section in SECTIONS:
        if section in cfg and "attention_from" not in cfg[section]:
            cfg[section].attention = cfg[section].attention_from = None
            cfg[section].allow_partial = False
    for key in watching.KEYS if "gnn" in cfg else ():
        cfg.gnn.setdefault(key, 0)


def register_keys() -> None:
    """Declare the keys in every config that GraphGym will make, after all other keys, and in the existing one."""
    from torch_geometric.graphgym import register
    from torch_geometric.graphgym.config import cfg

    register.config_dict.pop(REGISTERED, None)
    register.register_config(REGISTERED, declare)
    if cfg is not None:
        declare(cfg)


def forget_keys() -> None:
    """Remove the keys from GraphGym's registry and from its config."""
    from torch_geometric.graphgym import register
    from torch_geometric.graphgym.config import cfg

    register.config_dict.pop(REGISTERED, None)
    for section in SECTIONS if cfg is not None else ():
        for key in (*KEYS, *watching.KEYS):
            cfg.get(section, {}).pop(key, None)


def _refuse_unknown_keys(stock: Stock, cfg: Any, args: Any) -> Any:
    """load_cfg merges a file and the command line; yacs's errors about keys near ours do not say what to write."""
    file = yaml.safe_load(Path(args.cfg_file).read_text(encoding="utf-8"))
    written = [(f"{at}.{key}".lstrip("."), x) for at, part in sections(file) for key, x in part.items()]
    # A mapping ends with a dot, because a command line would go on with a key of it.
    given = [path + "." * isinstance(x, dict) for path, x in written]
    for path in (*given, *(args.opts or [])[::2]):
        section, _, rest = str(path).partition(".")
        key, dot, _ = rest.partition(".")
        path = path.rstrip(".")
        if section not in SECTIONS or section not in cfg:
            name, owner = (key, cfg.get(section)) if key else (section, cfg)
            if name in KEYS and not (isinstance(owner, dict) and name in owner):
                raise ConfigError(f"the config has no key {path}; write {'gt' if 'gt' in cfg else 'gnn'}.{name}")
            continue
        if key in cfg[section] and not (dot and key in KEYS):
            continue
        near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.8)
        if near and key not in KEYS:
            raise ConfigError(f"the config has no key {path}; did you mean {section}.{near[0]}?")
        if near or key in mechanisms() or any(o.name == key for part in mechanisms().values() for o in part.options):
            raise ConfigError(
                f"the config has no key {path}; write the attention and its options as one text, "
                f"{section}.attention: quest(kv_heads=2)"
            )
    return stock(cfg, args)


@contextmanager
def _own_words(cfg: Any) -> Iterator[None]:
    """Name the arguments of `inject` in an error as the keys that a user of the config writes."""
    try:
        yield
    except (InjectionError, CheckpointError) as error:
        section = next((s for s in SECTIONS if (cfg.get(s) or {}).get("attention") not in (None, "None")), SECTIONS[0])
        said = re.sub(r"\b(attention|attention_from|allow_partial)=('[^']*'|True)", rf"{section}.\1: \2", str(error))
        raise type(error)(said) from None


def _load_in_own_words(stock: Stock, *arguments: Any, **options: Any) -> Any:
    from torch_geometric.graphgym.config import cfg

    with _own_words(cfg):
        return stock(*arguments, **options)


def read_request(cfg: Any) -> Request | None:
    """Return what a config asks for; None means the stock model.

    Raises:
        ConfigError: an unknown name or option, a key without the `attention` that it belongs to, or two `attention`.
        UnsupportedError: `gt.attention` with a model or gt.layer_type whose attention cannot be replaced.
    """
    local, _, kind = str((cfg.get("gt") or {}).get("layer_type") or "").partition("+")  # GINE and Transformer
    meant = difflib.get_close_matches(kind.lower(), mechanisms(), n=1, cutoff=0.75)
    if meant:
        raise ConfigError(
            f"gt.layer_type is '{local}+{kind}'; write gt.layer_type: {local}+Transformer and gt.attention: {meant[0]}"
        )
    asked: dict[str, Request] = {}
    for section in SECTIONS:
        node = cfg.get(section) or {}
        try:
            request = Request.read({key: node.get(key) for key in KEYS}, "attention")
        except ConfigError as error:  # which begins with this word
            raise ConfigError(f"{section}.{error}") from None
        if request is not None:
            asked[section] = request
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


# --- the models -----------------------------------------------------------------------------------------------------


def _check_when_merged(adapter: Adapter, stock: Stock, cfg: Any) -> None:
    """load_cfg calls assert_cfg last: before a main deletes the folder of the previous run and reads the data."""
    stock(cfg)
    watched = any(watching.read(cfg))
    asked, mode = read_request(cfg), cfg.train.get("mode", "standard")  # of GraphGPS only
    if asked and cfg.model.type == "GPSModel":
        gt = cfg.gt
        attn = nn.MultiheadAttention(gt.dim_hidden, gt.n_heads, dropout=gt.attn_dropout, device="meta")
        needs = replace(GraphAttention.capabilities, dropout=gt.attn_dropout > 0, weights=mode == "log-attn-weights")
        site = Site("", attn, attn.num_heads, attn.head_dim, needs, fresh=True)
        require(adapter, site, asked.attention)
        adapter.replace(site, asked.attention)
    if (asked or watched) and not (cfg.get("pretrained") or {}).get("dir"):  # whose config will name another network
        _rehearse(asked, cfg)
    if asked and "name_tag" in cfg:  # of GraphGPS, whose main names the folder by it
        tag = _tag(asked)
        if not cfg.name_tag.endswith(tag):
            cfg.name_tag = f"{cfg.name_tag}-{tag}".lstrip("-")


def _rehearse(asked: Request | None, cfg: Any) -> None:
    """Build the network of a config, to raise what it cannot have; a network may write to the config."""
    from torch_geometric.graphgym.register import network_dict

    def build() -> None:
        network = network_dict[cfg.model.type](dim_in=FEATURES, dim_out=FEATURES)
        if asked:
            asked.apply(network, None)
        watching.begin(network, cfg)

    kept = cfg.clone()
    with _own_words(cfg):
        try:
            rehearse(build)
        finally:
            if cfg != kept:
                cfg.clear()
                cfg.update(kept)


def _name_after_attention(stock: Stock, out_dir: str, fname: str) -> None:
    """set_out_dir makes the folder of a run, and deletes one of this name: one attention must not delete another's."""
    from torch_geometric.graphgym.config import cfg, get_fname

    asked = read_request(cfg)
    stock(out_dir, f"{get_fname(fname)}-{_tag(asked)}" if asked else fname)


def _tag(asked: Request) -> str:
    """Return an attention as a part of a file name, such as quest-init=12.0+gqa-kv_heads=2."""
    return re.sub(r"[^\w.=+-]+", "-", str(asked.attention)).strip("-").replace("-+", "+")


def _inject_when_built(stock: Stock, self: Any, dim_in: int, dim_out: int, cfg: Any) -> None:
    """GraphGymModule builds the network of the config; all attention in it is then replaced at once."""
    asked = read_request(cfg)
    stock(self, dim_in, dim_out, cfg)
    if asked:
        with _own_words(cfg):
            asked.apply(self.model, None)
    watching.begin(self.model, cfg)


def _keep_own_attention(stock: Stock, cfg: Any) -> Any:
    """load_pretrained_model_cfg copies the pretrained run's whole nodes over the user's, who may have named another."""
    keys = KEYS if read_request(cfg) else ("attention_from",)  # which belongs to this run in any case
    own = {section: {key: cfg[section][key] for key in keys} for section in SECTIONS}
    own["gnn"] |= {key: cfg.gnn[key] for key in watching.KEYS}
    cfg = stock(cfg)
    for section, values in own.items():
        cfg[section].update(values)
    return cfg


def _load_only_the_checkpoint(stock: Stock, model: nn.Module, *arguments: Any, **options: Any) -> Any:
    """init_model_from_pretrained copies the checkpoint over the model's state dict, which names the model's attention.

    A checkpoint of standard attention names none and would pass as one of the model's, without a warning.
    """
    own = model.state_dict
    model.state_dict = lambda: {name: x for name, x in own().items() if not name.endswith(ENTRY)}  # type: ignore[assignment]
    try:
        return _load_in_own_words(stock, model, *arguments, **options)
    finally:
        del model.state_dict
