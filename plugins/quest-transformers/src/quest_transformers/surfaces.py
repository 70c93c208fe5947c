"""Wrappers of transformers' own functions, which read the attention from a config and compare it with a checkpoint's.

`TransformersAdapter.install` puts them in place. A config says its attention in ``attn_implementation``, an attribute
that transformers writes into config.json and hands to the model that is built from it. Without this plugin,
transformers refuses the name there. While a model exists, its ``config._attn_implementation`` is `layers.INTERFACE`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor, nn

from quest_core.checkpoints import ENTRY, compare, read
from quest_core.config import STANDARD, AttentionConfig, AttentionSpec
from quest_core.errors import CheckpointError, ConfigError, InjectionError, UnsupportedError, one_of
from quest_core.hosts.injection import REPORT, inject
from quest_core.hosts.patching import Patches
from quest_core.mechanism import Mechanism

from . import peft_adapters
from .caching import LAYERS, keep_unit_keys
from .choice import ROLES, Choice
from .layers import INTERFACE, WHOLE_MASKS, attend, is_attention, mask, role, whole_mask

if TYPE_CHECKING:
    from .adapter import TransformersAdapter

KEY = "attn_implementation"
"""The attribute of a config that holds the attention as text, and its key in config.json."""


@dataclass
class Loading:
    """One call of from_pretrained.

    Attributes:
        attention_from, allow_partial: see quest_core.inject.
        pending: the checkpoint has another attention, so modules are replaced once their weights are loaded.
    """

    attention_from: AttentionConfig | None
    allow_partial: bool
    pending: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of quest_core.inject."""
        return {"attention_from": self.attention_from, "allow_partial": self.allow_partial}


_NAMES = {INTERFACE: mask, WHOLE_MASKS: whole_mask}
_loading: ContextVar[Loading | None] = ContextVar("loading", default=None)
_partly: ContextVar[bool] = ContextVar("partly", default=False)
"""Whether the model that is being built may keep attention modules of the host."""


def install(adapter: TransformersAdapter, patches: Patches) -> None:
    """Register the attention function and its mask, and wrap what builds and loads models."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel

    for name, masks in _NAMES.items():
        for interface, function in ((AttentionInterface, attend), (AttentionMaskInterface, masks)):
            register = functools.partial(interface.register, name, function)
            remove = functools.partial(interface._global_mapping.pop, name)
            patches.once(f"{interface.__name__} {name}", register, remove)
    for layer in LAYERS:
        patches.wrap(layer, "update", keep_unit_keys)
    patches.wrap(PreTrainedConfig, "_attn_implementation", _implementation)
    patches.put(PreTrainedConfig, "attention", property(_attention, _set_attention))
    patches.put(PreTrainedConfig, KEY, property(_attention, _set_implementation))
    patches.wrap(PreTrainedModel, "get_correct_attn_implementation", _accept_names)
    patches.wrap(PreTrainedModel, "set_attn_implementation", functools.partial(_inject_instead, adapter))
    patches.wrap(PreTrainedModel, "post_init", functools.partial(_inject_new, adapter))
    patches.wrap(PreTrainedModel, "load_state_dict", _refuse_unread)
    patches.wrap(PreTrainedModel, "_from_config", _copy_config)
    patches.wrap(PreTrainedModel, "from_pretrained", _remember_loading)
    patches.wrap(PreTrainedModel, "_load_pretrained_model", functools.partial(_compare, adapter))
    patches.wrap(PreTrainedModel, "_finalize_model_loading", functools.partial(_inject_loaded, adapter))
    peft_adapters.install(patches)


# --- configs --------------------------------------------------------------------------------------------------------


def _implementation(stock: property) -> property:
    """Wrap the property that holds a config's attention function: an attention of quest is kept as text."""

    def set_implementation(self: Any, value: Any) -> None:
        value = _text(self, value)
        assert stock.fset is not None
        stock.fset(self, value)
        own = self._attn_implementation_internal
        choice = _parse(own)
        if choice is not None:
            self.__dict__[KEY] = str(choice)
            self._attn_implementation_internal = INTERFACE
        elif own is not None and own not in _NAMES:
            self.__dict__.pop(KEY, None)

    return property(stock.fget, set_implementation)


def _text(config: Any, value: Any) -> Any:
    """A mapping of an attention's options or of roles as text; others, such as one of a config's parts, as they are."""
    parts = {"", *config.sub_configs}
    unknown = sorted({*value} - parts, key=str) if isinstance(value, Mapping) else []
    if {"name", *ROLES}.intersection(unknown):
        return str(Choice.parse(value))
    if any(_parse(value[key]) for key in unknown):  # transformers ignores the key
        choices = sorted({*parts, *ROLES, "name"} - {""})
        raise ConfigError(
            f"{KEY}: {unknown[0]!r} is not a part of {type(config).__name__}; {one_of(unknown[0], choices)}"
        )
    return value


def _parse(text: Any) -> Choice | None:
    """The choice that a text means; None for the names of transformers' own functions and for unknown ones."""
    try:
        return Choice.parse(text) if isinstance(text, str) and text not in _NAMES else None
    except ConfigError:
        return None


def _attention(config: Any) -> str | None:
    """The attention as text; None where it is the host's own."""
    return config.__dict__.get(KEY)


def _set_implementation(config: Any, value: Any) -> None:
    config._attn_implementation = value  # from_pretrained sets the keys of config.json that it is given


def _set_attention(config: Any, attention: Any) -> None:
    config._attn_implementation = None if attention is None else str(Choice.parse(attention))
    if attention is None:
        config.__dict__.pop(KEY, None)


def _choice(config: Any) -> Choice | None:
    text = _attention(config)
    return None if text is None else Choice.parse(text)


def write_configs(model: nn.Module) -> None:
    """Make every config of an injected model say the attention that its modules have.

    A config may belong to another model too, so a copy takes its place where it has to change.
    """
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel

    wanted: dict[int, tuple[Any, str | None, str]] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            found: list[Any] = [part for part in module.modules() if is_attention(part)]
            if not found or not all(hasattr(part, "mechanism") for part in found):
                continue  # parts of it have configs of their own
            choice = _choice(module.config)
            if not (choice and all(choice.of(role(part)) == part.mechanism.config for part in found)):
                wanted[id(module.config)] = (module.config, _summary(found), _interface(module))
    if not wanted:
        return
    memo: dict[int, Any] = {}
    held = [value for module in model.modules() for value in vars(module).values()]
    for config in held:
        if isinstance(config, PreTrainedConfig) and any(id(part) in wanted for part in _parts(config)):
            copy.deepcopy(config, memo)
    for config, text, interface in wanted.values():
        new = memo[id(config)]
        new.__dict__.pop(KEY, None)
        if text is not None:
            new.__dict__[KEY], new._attn_implementation_internal = text, interface
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig) and id(value) in memo:
                setattr(module, name, memo[id(value)])


def _parts(config: Any) -> Iterator[Any]:
    """A config and those that it holds."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)


def _interface(model: Any) -> str:
    """The name of our function for a model."""
    return INTERFACE if model._supports_sdpa else WHOLE_MASKS


def _summary(modules: list[Any]) -> str | None:
    """The text that says the attention of all modules; None where none can."""
    configs: dict[str, set[AttentionConfig]] = {}
    for module in modules:
        configs.setdefault(role(module), set()).add(module.mechanism.config)
    if any(len(found) > 1 for found in configs.values()):
        return None
    chosen = {role: next(iter(found)) for role, found in configs.items()}
    if len(set(chosen.values())) == 1:
        return str(next(iter(chosen.values())))
    return str(Choice(**{role: chosen.get(role, STANDARD) for role in ROLES}))


def _accept_names(stock: Any) -> Any:
    """Wrap the check of a name, which runs before a model's modules are built."""

    @functools.wraps(stock)
    def get_correct_attn_implementation(
        self: Any, requested_attention: str | None, *arguments: Any, **options: Any
    ) -> str:
        if requested_attention in (None, *_NAMES) and _attention(self.config) is not None:
            return _interface(self)
        if requested_attention in _NAMES:
            raise ConfigError(
                f"{type(self).__name__}: attn_implementation={requested_attention!r} is the name of a function; say "
                "which attention, for example attn_implementation='quest'"
            )
        try:
            return stock(self, requested_attention, *arguments, **options)  # type: ignore[no-any-return]
        except ValueError as error:
            try:
                Choice.parse(requested_attention or STANDARD)
            except ConfigError as ours:
                raise ConfigError(f"{error} As an attention of quest it is refused too: {ours}") from None
            raise

    return get_correct_attn_implementation


# --- models ---------------------------------------------------------------------------------------------------------


def fulfil(
    adapter: TransformersAdapter,
    model: nn.Module,
    *,
    fresh: bool,
    loads: bool = False,
    choice: Choice | None = None,
    parts: Mapping[str, Choice] | None = None,
    **options: Any,
) -> bool:
    """Put into a model what its configs ask for; return whether a module was replaced.

    Args:
        adapter: of this plugin.
        model: a PreTrainedModel; parts of it may have been built, and replaced, before.
        fresh: the weights have only been initialised.
        loads: they will be overwritten by those of a checkpoint, so none is scaled.
        choice: what to put instead of what the configs ask for.
        parts: the same for the attention modules with these paths.
        options: `attention_from` and `allow_partial` of quest_core.inject.

    Raises:
        As quest_core.inject.
    """
    asked = choice or _choice(model.config)
    if asked is None and not parts and not any(_asks(part) for part in model.modules()):
        return False  # and a model of which nothing is asked is not looked at
    chosen: dict[str, AttentionConfig] = {}
    kept: list[str] = []
    changed = False
    for site in adapter.sites(model):
        module: Any = site.module
        held: Any = getattr(module, "mechanism", None)
        own = choice or (parts or {}).get(site.path) or (_choice(module.config) if held is None else None)
        if own is None and held is None:
            kept.append(site.path)
            continue
        chosen[site.path] = held.config if own is None else own.of(role(module))
        changed = changed or held is None or held.config != chosen[site.path]
    if (
        asked is not None
        and not chosen
        and (kept or any("attention" in _kind(part).lower() for part in model.modules()))
    ):
        inject(model, asked.encoder, adapter=adapter.only({}, ()))  # raises: nothing to replace
    if chosen:
        # Modules whose own config asks for nothing keep the host's attention, unless the whole model asks for another.
        apart = {_kind(part) for path in kept for part in _along(model, path)} if asked is None else set()
        configs = sorted({*chosen.values()}, key=str)
        # inject links layers if its own argument is chained, and refuses one with a start for trained weights.
        main = max(configs, key=lambda config: (not fresh and bool(config.starts), _chained(config)))
        some = adapter.only(chosen, apart, scales=fresh and not loads)
        _, report = inject(model, main, adapter=some, fresh=fresh, **options)
        setattr(model, REPORT, replace(report, attention=", ".join(map(str, configs))))
    return changed


def _chained(config: AttentionConfig) -> bool:
    return any(part.chained for part in config.specs())


def _along(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules on the way to a path, and the one there."""
    names = path.split(".")
    return [model.get_submodule(".".join(names[: i + 1])) for i in range(len(names))]


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _has_mechanism(module: nn.Module) -> bool:
    return any(hasattr(part, "mechanism") for part in module.modules() if is_attention(part))


def _asks(part: Any) -> bool:
    """Whether a module is an attention of quest, or its config asks for one."""
    return is_attention(part) and (hasattr(part, "mechanism") or _attention(part.config) is not None)


def _inject_new(adapter: TransformersAdapter, stock: Any) -> Any:
    """Wrap the last step of a model's constructor."""

    @functools.wraps(stock)
    def post_init(self: Any) -> None:
        stock(self)
        # from_pretrained replaces modules once it knows what the checkpoint was trained with.
        if _loading.get() is None and fulfil(adapter, self, fresh=True, allow_partial=_partly.get()):
            getattr(self, REPORT).announce()

    return post_init


def _refuse_nothing(model: Any) -> None:
    """Raise InjectionError if a model asks for an attention and has none of quest."""
    if _attention(model.config) is not None and not _has_mechanism(model):
        raise InjectionError(
            f"attention '{_attention(model.config)}' was given to {type(model).__name__}, and no module of it was "
            "replaced: none calls transformers' AttentionInterface, or the weights were loaded by a door that this "
            "plugin does not know"
        )


@contextmanager
def _explained(cls: type) -> Iterator[None]:
    """Name what is wrong where a model (Falcon, GPT-J, SAM) looks for its own class under the name of our function."""
    try:
        yield
    except KeyError as error:
        if error.args not in [(name,) for name in _NAMES]:
            raise
        raise InjectionError(
            f"{cls.__name__} chooses among attention classes of its own and does not call transformers' "
            "AttentionInterface; build it without attn_implementation, and try quest_core.inject(model, …, example=…)"
        ) from error


def _copy_config(stock: Any) -> Any:
    """Wrap from_config, which writes its option into the config: models that were built from it before keep theirs."""

    @functools.wraps(stock)
    def _from_config(cls: Any, config: Any, *, allow_partial: bool = False, **options: Any) -> Any:
        token = _partly.set(allow_partial or _partly.get())
        try:
            with _explained(cls):
                made = stock(cls, copy.deepcopy(config) if KEY in options else config, **options)
        finally:
            _partly.reset(token)
        if _loading.get() is None:  # else a part of a model that from_pretrained builds
            _refuse_nothing(made)
        return made

    return _from_config


def _inject_instead(adapter: TransformersAdapter, stock: Any) -> Any:
    """Wrap the method that changes the attention function of a model."""

    @functools.wraps(stock)
    def set_attn_implementation(
        self: Any, attn_implementation: Any, *arguments: Any, allow_partial: bool = False, **options: Any
    ) -> None:
        given = _text(self.config, attn_implementation)
        choice, parts = _parse(given), dict[str, Choice]()
        if isinstance(given, Mapping):
            parts, given = _chosen_parts(self, given)
        elif choice is None and _has_mechanism(self):
            raise _kept(self.config, given)
        if choice is not None or parts:
            fulfil(adapter, self, fresh=False, choice=choice, parts=parts, allow_partial=allow_partial)
            getattr(self, REPORT).announce()
        if choice is None and given != {}:
            stock(self, given, *arguments, **options)

    return set_attn_implementation


def _chosen_parts(model: Any, given: Mapping[str, Any]) -> tuple[dict[str, Choice], dict[str, Any]]:
    """Split a mapping of the parts of a model, as transformers reads it.

    Returns:
        The choice for the path of each attention module that shall have one of quest, and the rest of the mapping.

    Raises:
        InjectionError: a part has no attention module.
        UnsupportedError: a part has an attention of quest and shall have a function of the host.
    """
    from transformers.modeling_utils import PreTrainedModel

    owners: dict[str, Any] = {}  # the config of the innermost model around each attention module
    for path, owner in model.named_modules():
        if isinstance(owner, PreTrainedModel):
            owners |= {inner: owner.config for inner, part in owner.named_modules(prefix=path) if is_attention(part)}
    chosen: dict[str, Choice] = {}

    def rest(config: Any, value: Any, name: str) -> Any:
        value = _text(config, value)
        if isinstance(value, Mapping):
            left = {key: rest(getattr(config, key, config), each, key) for key, each in value.items()}
            return {key: each for key, each in left.items() if each is not chosen}
        parts = list(_parts(config)) if name else [config]
        paths = [path for path, owner in owners.items() if any(owner is part for part in parts)]
        choice = _parse(value)
        if choice is None:
            if any(hasattr(model.get_submodule(path), "mechanism") for path in paths):
                raise _kept(config, value)
            return value
        if not paths:
            raise InjectionError(
                f"{KEY}={{{name!r}: '{choice}'}}: no module of this part of {type(model).__name__} calls transformers' "
                "AttentionInterface"
            )
        chosen.update(dict.fromkeys(paths, choice))
        return chosen

    left: dict[str, Any] = rest(model.config, given, "")
    return chosen, left


def _kept(config: Any, value: Any) -> UnsupportedError:
    return UnsupportedError(
        f"set_attn_implementation({value!r}) cannot replace attention '{config.attention}'; "
        "set_attn_implementation('standard') gives this model standard attention"
    )


# --- checkpoints ----------------------------------------------------------------------------------------------------


def _remember_loading(stock: Any) -> Any:
    """Wrap from_pretrained: its options `attention_from` and `allow_partial` are ours."""

    @functools.wraps(stock)
    def from_pretrained(
        cls: Any,
        *arguments: Any,
        attention_from: AttentionSpec | None = None,
        allow_partial: bool = False,
        **options: Any,
    ) -> Any:
        trained = None if attention_from is None else AttentionConfig.parse(attention_from)
        token = _loading.set(Loading(trained, allow_partial))
        try:
            with _explained(cls):
                made = stock(cls, *arguments, **options)
        finally:
            _loading.reset(token)
        _refuse_nothing(made[0] if isinstance(made, tuple) else made)
        return made

    return from_pretrained


def _compare(adapter: TransformersAdapter, stock: Any) -> Any:
    """Wrap the loading of weights, which happens once the modules are built and before they are initialised.

    Weights of the attention that the model shall have load into modules with mechanisms. Others load into the host's
    own modules, which are replaced afterwards (`_inject_loaded`): so heads are pooled, and what a mechanism learns is
    initialised.
    """

    @functools.wraps(stock)
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, *arguments: Any, **options: Any
    ) -> Any:
        loading = _loading.get() or Loading(None, False)
        stored = _spelled(state_dict, checkpoint_files)
        if getattr(model, "_hf_peft_config_loaded", False):
            peft_adapters.compare_adapter(model, stored)
            with peft_adapters.keeping_own(model):
                info, *others = stock(model, state_dict, checkpoint_files, *arguments, **options)
            info.unexpected_keys = {key for key in info.unexpected_keys if not key.endswith(ENTRY)}
            return info, *others
        loading.pending = not _fits(model, stored, loading)
        if not loading.pending:
            fulfil(adapter, model, fresh=True, loads=True, **loading.options)
        info, *others = stock(model, state_dict, checkpoint_files, *arguments, **options)
        if loading.pending:
            paths = [f"{site.path}.mechanism." for site in adapter.sites(model)]
            info.unexpected_keys = {key for key in info.unexpected_keys if not any(path in key for path in paths)}
        else:
            _verify(model, info, stored)
        return info, *others

    return _load_pretrained_model


def _fits(model: Any, stored: Mapping[str, Tensor], loading: Loading) -> bool:
    """Whether a checkpoint was trained with the attention that the model shall have.

    Args:
        stored: the entries of a checkpoint that spell its attention.

    Raises:
        CheckpointError: the checkpoint has another attention, which `attention_from` does not name.
    """
    choices = [(part, _choice(part.config)) for part in model.modules() if is_attention(part)]
    wanted = {choice.of(role(part)) for part, choice in choices if choice is not None}
    special = sorted((config for config in wanted if not config.is_standard), key=str)
    for key, spelled in stored.items():
        trained = read(spelled)
        if not any(config.means(trained) for config in special):
            if not wanted:
                return True  # `_verify` refuses it, if it is not of a part that the model lacks
            config = special[0] if special else next(iter(wanted))
            compare(spelled, config, loading.attention_from, key.removesuffix(f".{ENTRY}"), loading)
            return False
    if special and not stored:
        compare(None, special[0], loading.attention_from, type(model).__name__, loading)
        return False
    return True


def _spelled(state_dict: Any, files: Any) -> dict[str, Tensor]:
    """The entries of a checkpoint that spell its attention."""
    found: dict[str, Tensor] = {}
    if state_dict is not None:
        return {key: value for key, value in state_dict.items() if key.endswith(ENTRY)}
    for file in files or ():
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                found |= {key: opened.get_tensor(key) for key in opened.keys() if key.endswith(ENTRY)}  # noqa: SIM118
        else:
            stored = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
            found |= {key: value for key, value in stored.items() if key.endswith(ENTRY)}
    return found


def _verify(model: Any, info: Any, stored: Mapping[str, Tensor]) -> None:
    """Compare what was loaded with what the model has.

    Args:
        model: with its weights.
        info: the keys that were missing or unexpected.
        stored: the entries of the checkpoint that spell its attention.

    Raises:
        CheckpointError: some module has another attention than the checkpoint, or lacks parameters of it.
    """
    paths = {path for path, _ in model.named_modules()}
    unread = sorted(key for key in info.unexpected_keys if key.endswith(ENTRY))
    for key in unread:
        if key.removesuffix(f".mechanism.{ENTRY}") not in paths:
            continue  # of a part that the model lacks, such as the text model of CLIP
        if _has_mechanism(model):
            raise CheckpointError(
                f"'{key}': this checkpoint has an attention of quest in a module that shall have another; say the "
                "attention that the checkpoint was trained with"
            )
        raise _unread(key, stored.get(key, next(iter(stored.values()))))
    if len(unread) < len(stored) and not _has_mechanism(model):  # a loader that does not name what it leaves out
        raise _unread(*next(iter(stored.items())))
    for path, module in model.named_modules():
        if isinstance(module, Mechanism):
            missing = sorted(key for key in info.missing_keys if key.startswith(f"{path}."))
            if missing:
                raise CheckpointError(
                    f"the checkpoint lacks {', '.join(missing)}, so '{path}' was not trained with attention "
                    f"'{module.config}'"
                )
            spelled = module.attention_is_not_standard
            # A tensor without values was left on disk, or the whole model was; `_fits` has read the file.
            if spelled is not None and not spelled.is_meta and not module.config.means(read(spelled)):
                compare(spelled, module.config, None, path, info)


def _refuse_unread(stock: Any) -> Any:
    """Wrap load_state_dict, which with strict=False ignores the key that names the attention; Trainer resumes so."""

    @functools.wraps(stock)
    def load_state_dict(self: Any, state_dict: Any, strict: bool = True, *arguments: Any, **options: Any) -> Any:
        if not strict and not _has_mechanism(self):
            for key in state_dict:
                if key.endswith(ENTRY):
                    raise _unread(key, state_dict[key])
        return stock(self, state_dict, strict, *arguments, **options)

    return load_state_dict


def _unread(key: str, spelled: Tensor) -> CheckpointError:
    trained = read(spelled)
    return CheckpointError(
        f"'{key}': this checkpoint was trained with attention '{trained}', and the model has the host's own; build it "
        f"with attn_implementation='{trained}', or with attn_implementation='standard' and attention_from='{trained}' "
        "if you mean to go on from these weights with standard attention"
    )


def _inject_loaded(adapter: TransformersAdapter, stock: Any) -> Any:
    """Wrap the end of loading: modules that were loaded as the host's own are replaced."""

    @functools.wraps(stock)
    def _finalize_model_loading(model: Any, *arguments: Any, **options: Any) -> Any:
        made = stock(model, *arguments, **options)
        loading = _loading.get()
        if loading is not None and loading.pending:
            fulfil(adapter, model, fresh=False, **loading.options)
        if loading is not None:
            _refuse_offloaded(model, loading)
        if _has_mechanism(model):
            getattr(model, REPORT).announce()
        return made

    return _finalize_model_loading


def _refuse_offloaded(model: Any, loading: Loading) -> None:
    """Raise UnsupportedError if weights are on disk that a mechanism learns, or that have just been pooled."""
    if all(weight.is_meta for weight in model.parameters()):
        return  # a model without values was asked for
    for path, part in model.named_modules():
        if not hasattr(part, "mechanism") or not any(weight.is_meta for weight in part.parameters()):
            continue
        where = f"'{path}' is offloaded to disk, and attention '{part.mechanism.config}'"
        if any(True for _ in part.mechanism.parameters()):  # a mechanism reads those of its score, and calls no forward
            raise UnsupportedError(
                f"{where} learns weights, which are not read back from there; load without offloading"
            )
        if loading.pending and part.head_sizes.kv_heads != part.head_sizes.full.kv_heads:
            raise UnsupportedError(
                f"{where} pools key/value heads there; load the model once without offloading, save_pretrained it, and "
                "load what was saved"
            )
