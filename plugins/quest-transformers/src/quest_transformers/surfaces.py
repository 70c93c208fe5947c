"""Wrappers of transformers' own functions, which put the attention of a config into a model and compare it with a
checkpoint's. `install` puts them in place.

    Model(config)            _accept_names, the modules are built, _inject_new
    from_config              the same within _build
    from_pretrained          within _load_model: _accept_names, the modules are built, _load_weights, _inject_loaded
    set_attn_implementation  _set_attention
"""

import copy
import functools
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from quest_core.checkpoints import refuse_entries
from quest_core.config import STANDARD, AttentionConfig, AttentionSpec
from quest_core.errors import ConfigError, InjectionError, UnsupportedError, check_flag
from quest_core.hosts.adapter import Adapter
from quest_core.hosts.inject import REPORT
from quest_core.hosts.patching import Patches
from quest_core.mechanism import Mechanism, has_mechanism

from . import configs
from .anatomy import is_attention
from .caching import CACHE_LAYERS, keep_unit_keys
from .choice import Choice
from .chosen import inject_chosen
from .comparing import fits, load_mechanisms, mechanism_tensors, take_unexpected, verify
from .configs import KEY, as_text, attention_of, choice_of, function_for, parse, parts_of
from .layers import OUR_FUNCTION, OUR_FUNCTION_WHOLE_MASKS, OUR_FUNCTIONS, dispatch, make_mask, make_whole_mask, refuse


@dataclass
class Loading:
    """One call of from_pretrained.

    Attributes:
        attention_from, allow_partial, example: see quest_core.inject.
        pending: the checkpoint has another attention, so modules are replaced once their weights are loaded.
        stored: tensors of mechanisms in the checkpoint, of modules that only a run of the loaded model finds.
        missing: keys of the model that the checkpoint lacks.
    """

    attention_from: AttentionConfig | None
    allow_partial: bool
    example: Any = None
    pending: bool = False
    stored: dict[str, Tensor] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()

    @property
    def options(self) -> dict[str, Any]:
        """The options of quest_core.inject."""
        options = ("attention_from", "allow_partial", "example")
        return {name: getattr(self, name) for name in options}


_loading: ContextVar[Loading | None] = ContextVar("loading", default=None)
_allow_partial: ContextVar[bool] = ContextVar("allow_partial", default=False)
"""Whether the model that is being built may keep attention modules of the host."""


def install(adapter: Adapter, patches: Patches) -> None:
    """Register the attention function and its mask, and wrap what builds and loads models."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import PreTrainedModel

    for name, masks in ((OUR_FUNCTION, make_mask), (OUR_FUNCTION_WHOLE_MASKS, make_whole_mask)):
        for interface, function in ((AttentionInterface, refuse), (AttentionMaskInterface, masks)):
            register = functools.partial(interface.register, name, function)
            remove = functools.partial(interface._global_mapping.pop, name)
            patches.once(f"{interface.__name__} {name}", register, remove)
    for look_up in ("get_interface", "__getitem__"):
        patches.wrap(AttentionInterface, look_up, dispatch)
    for layer in CACHE_LAYERS:
        patches.wrap(layer, "update", keep_unit_keys)
    configs.install(patches)
    for name, change in (
        ("get_correct_attn_implementation", _accept_names),
        ("set_attn_implementation", functools.partial(_set_attention, adapter)),
        ("post_init", functools.partial(_inject_new, adapter)),
        ("load_state_dict", _refuse_unexpected),
        ("_initialize_weights", _initialize),
        ("_from_config", _build),
        ("from_pretrained", _load_model),
        ("_load_pretrained_model", functools.partial(_load_weights, adapter)),
        ("_finalize_model_loading", functools.partial(_inject_loaded, adapter)),
    ):
        patches.around(PreTrainedModel, name, change)
    patches.around("transformers.trainer:Trainer", "get_decay_parameter_names", _decay_no_mechanism)
    batching = "transformers.generation.continuous_batching.continuous_api:ContinuousMixin"
    patches.around(batching, "init_continuous_batching", _refuse_pages)
    for owner in (
        "big_bird.modeling_big_bird:BigBirdModel",
        "bigbird_pegasus.modeling_bigbird_pegasus:BigBirdPegasusEncoder",
    ):
        patches.around(f"transformers.models.{owner}", "set_attention_type", _keep_blocks)


# --- models -----------------------------------------------------------------------------------------------------------


def _accept_names(stock: Any, model: Any, requested_attention: str | None, *arguments: Any, **options: Any) -> str:
    """Check a name, which happens before a model's modules are built."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    asked = choice_of(model.config)
    if requested_attention in (None, *OUR_FUNCTIONS) and asked is not None:
        name = function_for(model, asked)
        return name if name in OUR_FUNCTIONS else stock(model, None, *arguments, **options)
    if requested_attention in OUR_FUNCTIONS:
        raise ConfigError(
            f"{type(model).__name__}: attn_implementation={requested_attention!r} is the name of a function; say "
            "which attention, for example attn_implementation='quest'"
        )
    try:
        return stock(model, requested_attention, *arguments, **options)  # type: ignore[no-any-return]
    except ValueError as error:
        own = requested_attention in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys())
        if own or str(requested_attention).startswith(("flash_attention_", "paged|")):
            raise  # a function of transformers, which this model does not support
        try:
            Choice.parse(requested_attention or STANDARD)
        except ConfigError as ours:
            raise ConfigError(f"{ours}. It names no function of transformers either: {error}") from None
        raise


def _inject_new(adapter: Adapter, stock: Any, model: Any) -> None:
    """Run the last step of a model's constructor, and inject."""
    stock(model)
    # from_pretrained replaces modules once it knows what the checkpoint was trained with.
    if _loading.get() is not None or _is_built_around(model):
        return
    if inject_chosen(adapter, model, fresh=True, allow_partial=_allow_partial.get()):
        getattr(model, REPORT).announce()


def _initialize(stock: Any, model: Any, module: Any, *arguments: Any, **options: Any) -> None:
    """Initialize one module of a model, and the mechanism in it, unless it was initialized or loaded before."""
    done = getattr(module, "_is_hf_initialized", False)
    stock(model, module, *arguments, **options)
    mechanism = module._modules.get("mechanism")
    if done or not isinstance(mechanism, Mechanism):
        return
    if not any(getattr(each, "_is_hf_initialized", False) for each in mechanism.state_dict(keep_vars=True).values()):
        mechanism.reset_parameters()


def _decay_no_mechanism(stock: Any, trainer: Any, model: Any) -> list[str]:
    """Return the parameters with weight decay: none of a mechanism, as Trainer leaves out the scales of norms."""
    return [name for name in stock(trainer, model) if "mechanism" not in name.split(".")]


def _is_built_around(model: Any) -> bool:
    """Return whether a model that asks for an attention builds `model` in its constructor, which judges both."""
    from transformers.modeling_utils import PreTrainedModel

    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "__init__":
            owner = frame.f_locals.get("self")
            if isinstance(owner, PreTrainedModel) and owner is not model:
                config = getattr(owner, "config", None)
                if config is not None and attention_of(config) is not None:
                    return True
    return False


def _refuse_unreplaced(model: Any) -> None:
    """Raise InjectionError if a model, or a part of one that asks for nothing, asks for an attention and has none."""
    from transformers.modeling_utils import PreTrainedModel

    asking: list[str] = []
    for path, part in model.named_modules():
        if not isinstance(part, PreTrainedModel) or attention_of(part.config) is None:
            continue
        if any(not around or path.startswith(f"{around}.") for around in asking):
            continue  # a part of it may have no attention
        asking.append(path)
        if not has_mechanism(part):
            raise InjectionError(
                f"attention '{attention_of(part.config)}' was given to {type(part).__name__}, and no module of it was "
                "replaced: its constructor does not end with post_init, or its weights were loaded in a way that this "
                "plugin does not know; build it without attn_implementation, and say quest_core.inject(model, 'quest', "
                "example=batch), or from_pretrained(..., example=batch)"
            )


def _build(stock: Any, cls: Any, /, config: Any, *, allow_partial: bool = False, **options: Any) -> Any:
    """Run from_config, which writes its option into the config: models that were built from it before keep theirs."""
    check_flag("allow_partial", allow_partial)
    token = _allow_partial.set(allow_partial or _allow_partial.get())
    try:
        made = stock(cls, copy.deepcopy(config) if KEY in options else config, **options)
    finally:
        _allow_partial.reset(token)
    if _loading.get() is None and not _is_built_around(made):  # else a part of a model
        _refuse_unreplaced(made)
    return made


def _set_attention(
    adapter: Adapter,
    stock: Any,
    model: Any,
    attn_implementation: Any,
    *arguments: Any,
    allow_partial: bool = False,
    **options: Any,
) -> None:
    """Change the attention function of a model, or inject."""
    from transformers.modeling_utils import PreTrainedModel

    given = as_text(model.config, attn_implementation)
    choice, parts = parse(given), dict[str, Choice]()
    if isinstance(given, Mapping):
        parts, given = _chosen_parts(model, given)
    elif choice is None and model.config._attn_implementation in OUR_FUNCTIONS:
        raise _refusal(model.config, given)
    configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    functions = [config._attn_implementation for config in configs]
    try:
        if choice is None and given != {}:
            stock(model, given, *arguments, **options)
        if choice is not None or parts:
            inject_chosen(adapter, model, fresh=False, choice=choice, parts=parts, allow_partial=allow_partial)
    except BaseException:
        for config, function in zip(configs, functions, strict=True):
            config._attn_implementation_internal = function  # of this config, not of its parts
        raise
    if report := vars(model).get(REPORT):  # which names the function that was changed
        ours = (site for site in adapter.sites(model) if hasattr(site.module, "mechanism"))
        kernels = {site.path: adapter.kernel(site, site.module) for site in ours}
        rows = (replace(row, kernel=kernels.get(row.path, row.kernel)) for row in report.replacements)
        vars(model)[REPORT] = replace(report, replacements=tuple(rows))
        vars(model)[REPORT].announce()


def _chosen_parts(model: Any, given: Mapping[str, Any]) -> tuple[dict[str, Choice], dict[str, Any]]:
    """Split a mapping of the parts of a model, as transformers reads it.

    Returns:
        The choice for the path of each attention module that shall have one of quest, and the rest of the mapping.

    Raises:
        InjectionError: a part has no attention module.
        UnsupportedError: a part shall have a function of the host, and its attention takes the place of any.
    """
    from transformers.modeling_utils import PreTrainedModel

    owners: dict[str, Any] = {}  # the config of the innermost model around each attention module
    for path, owner in model.named_modules():
        if isinstance(owner, PreTrainedModel):
            owners |= {inner: owner.config for inner, part in owner.named_modules(prefix=path) if is_attention(part)}
    chosen: dict[str, Choice] = {}
    taken = object()  # what `rest` returns for a value that is in `chosen` as a whole

    def rest(config: Any, value: Any, name: str) -> Any:
        value = as_text(config, value)
        if isinstance(value, Mapping):
            left = {key: rest(getattr(config, key, config), each, key) for key, each in value.items()}
            left = {key: each for key, each in left.items() if each is not taken}
            return left if left or not name else taken
        parts = list(parts_of(config)) if name else [config]
        paths = [path for path, owner in owners.items() if any(owner is part for part in parts)]
        choice = parse(value)
        if choice is None:
            if any(part._attn_implementation in OUR_FUNCTIONS for part in parts):
                raise _refusal(config, value)
            return value
        if not paths:
            raise InjectionError(
                f"{KEY}={{{name!r}: '{choice}'}}: no module of this part of {type(model).__name__} calls "
                "transformers' AttentionInterface"
            )
        chosen.update(dict.fromkeys(paths, choice))
        return taken

    left: dict[str, Any] = rest(model.config, given, "")
    return chosen, left


def _refusal(config: Any, value: Any) -> UnsupportedError:
    return UnsupportedError(
        f"set_attn_implementation({value!r}): attention '{attention_of(config)}' takes the place of the host's "
        "function; set_attn_implementation('standard') gives this model standard attention, unless the attention has "
        "reduced its keys and values (gqa): then build the model again"
    )


def _refuse_pages(stock: Any, model: Any, *arguments: Any, **options: Any) -> Any:
    """Raise UnsupportedError for continuous batching with an attention that calls no function of the host."""
    for module in model.modules():
        if "rules" in vars(module) and not module.rules.prepares:
            raise UnsupportedError(
                f"continuous batching pages the cache for the host's functions, and attention "
                f"'{module.mechanism.config}' takes the place of any; use model.generate"
            )
    return stock(model, *arguments, **options)


def _keep_blocks(stock: Any, model: Any, value: str) -> None:
    """Raise UnsupportedError where BigBird would put new modules, with its own attention, in the place of ours."""
    if value != model.attention_type and has_mechanism(model):
        least = (5 + 2 * model.config.num_random_blocks) * model.config.block_size + 1
        raise UnsupportedError(
            f"{type(model).__name__}.set_attention_type({value!r}) would put in new modules with the host's attention; "
            f"build the model with attention_type={value!r}. Sequences below {least} tokens "
            "change a model to 'original_full'; pad them"
        )
    stock(model, value)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def _load_model(
    stock: Any,
    cls: Any,
    /,
    *arguments: Any,
    attention_from: AttentionSpec | None = None,
    allow_partial: bool = False,
    example: Any = None,
    **options: Any,
) -> Any:
    """Run from_pretrained, whose options `attention_from`, `allow_partial` and `example` are ours."""
    check_flag("allow_partial", allow_partial)
    trained = None if attention_from is None else AttentionConfig.parse(attention_from)
    token = _loading.set(Loading(trained, allow_partial, example))
    try:
        made = stock(cls, *arguments, **options)
    finally:
        _loading.reset(token)
    _refuse_unreplaced(made[0] if isinstance(made, tuple) else made)
    return made


def _load_weights(
    adapter: Adapter, stock: Any, model: Any, state_dict: Any, checkpoint_files: Any, *arguments: Any, **options: Any
) -> Any:
    """Load weights, which happens once the modules are built and before they are initialized.

    Weights of the attention that the model shall have load into modules with mechanisms. Others load into the host's
    own modules, which are replaced afterwards (`_inject_loaded`): so heads are pooled, and what a mechanism learns is
    initialized.
    """
    if getattr(model, "_hf_peft_config_loaded", False):  # an adapter on a model with weights
        return stock(model, state_dict, checkpoint_files, *arguments, **options)
    loading = _loading.get() or Loading(None, False)
    stored = mechanism_tensors(state_dict, checkpoint_files)
    if loading.attention_from and not stored and not any(map(attention_of, parts_of(model.config))):
        raise ConfigError(
            f"attention_from='{loading.attention_from}' is given, and neither {KEY} nor the checkpoint names an "
            f"attention; add {KEY}='quest', or leave attention_from out"
        )
    loading.pending = not fits(model, stored, loading.attention_from, loading)
    if not loading.pending:
        inject_chosen(adapter, model, fresh=True, loads=True, runs=False, **loading.options)
    info, *others = stock(model, state_dict, checkpoint_files, *arguments, **options)
    if loading.pending:
        paths = [f"{site.path}.mechanism." for site in adapter.sites(model)]
        info.unexpected_keys = {key for key in info.unexpected_keys if not any(path in key for path in paths)}
    else:
        if choice_of(model.config) is not None:
            loading.stored, loading.missing = take_unexpected(model, info, stored), frozenset(info.missing_keys)
        rest = {key: stored[key] for key in stored if key not in loading.stored}
        verify(model, info.missing_keys, info.unexpected_keys, rest)
    return info, *others


def _refuse_unexpected(
    stock: Any, model: Any, state_dict: Any, strict: bool = True, *arguments: Any, **options: Any
) -> Any:
    """Run load_state_dict, which with strict=False ignores the key that names the attention; Trainer resumes so."""
    if not strict:
        refuse_entries(model, state_dict, "the host")
    return stock(model, state_dict, strict, *arguments, **options)


def _inject_loaded(adapter: Adapter, stock: Any, model: Any, *arguments: Any, **options: Any) -> Any:
    """End the loading: modules that were loaded as the host's own are replaced."""
    made = stock(model, *arguments, **options)
    loading = _loading.get()
    late = choice_of(model.config) is not None and not has_mechanism(model)  # only a run finds its attention
    known = {path for path, part in model.named_modules() if isinstance(part, Mechanism)}
    if loading is not None and (loading.pending or loading.stored or late or loading.example is not None):
        inject_chosen(adapter, model, fresh=False, **loading.options)
        load_mechanisms(model, loading.stored, loading.missing, known)
    if loading is not None:
        _refuse_offloaded(model, pending=loading.pending)
    if has_mechanism(model):
        getattr(model, REPORT).announce()
    return made


def _refuse_offloaded(model: Any, *, pending: bool) -> None:
    """Raise UnsupportedError for attention on disk, from where accelerate reads only the host's weights back.

    It is refused if it learns weights, or was put into a model whose checkpoint has another one.
    """
    if all(weight.is_meta for weight in model.parameters()):
        return  # a model without values was asked for
    for path, part in model.named_modules():
        if not hasattr(part, "mechanism") or not any(weight.is_meta for weight in part.parameters()):
            continue
        if pending or any(True for _ in part.mechanism.parameters()):
            raise UnsupportedError(
                f"'{path}' is offloaded to disk, from where attention '{part.mechanism.config}' is not read back; load "
                "without offloading. A model that was converted and saved so can be offloaded, unless its attention "
                "learns weights"
            )
