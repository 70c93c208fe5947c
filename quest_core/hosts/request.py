"""What a host's configuration asks for: ``attention``, ``attention_from`` and ``allow_partial``."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import AttentionConfig
from ..errors import ConfigError, QuestError
from ..registry import mechanisms
from .adapter import Adapter, sections
from .inject import REHEARSES, inject

KEYS = ("attention", "attention_from", "allow_partial")
"""What every host's configuration calls the arguments of `inject`."""


@dataclass(frozen=True)
class Request:
    """What a host's configuration says about attention, checked before anything is built; see `inject`."""

    attention: AttentionConfig
    attention_from: AttentionConfig | None = None
    allow_partial: bool = False

    @classmethod
    def read(cls, options: Mapping[str, Any], where: str, others: Iterable[str] = ()) -> "Request | None":
        """Return what `options` ask for, or None; ConfigError for an unknown, misspelt or misplaced key or value.

        Args:
            options: of a model in a host's configuration, those of the host among them.
            where: the owner of the options, as messages name it.
            others: names among `options` that nothing else reads.
        """
        for name in others:
            near = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.8)
            if near and name not in KEYS:
                raise ConfigError(f"{where} has no option {name!r}; did you mean {near[0]!r}?")
        given = map(options.get, KEYS)
        # The texts are of command lines, and of yaml, where "None" and "none" are texts.
        attention, trained, partial = (None if x in ("None", "none") else x for x in given)
        if attention is None:
            if lone := [key for key in KEYS[1:] if options.get(key)]:
                raise ConfigError(
                    f"{where}: {lone[0]}={options[lone[0]]!r} is given without attention; add attention=... too "
                    "(attention='standard' for the host's own)"
                )
            return None
        config = AttentionConfig.parse(attention)
        misplaced = sorted({option.name for part in mechanisms().values() for option in part.options} & set(others))
        if misplaced:
            inner = {"name": str(config), **{name: options[name] for name in misplaced}}
            raise ConfigError(f"{where} has no option {misplaced[0]!r}; write attention={inner!r}")
        if not isinstance(partial, bool | None):
            raise ConfigError(f"{where}: allow_partial={partial!r} must be true or false")  # a text is true in Python
        try:
            source = None if trained is None else AttentionConfig.parse(trained)
        except ConfigError as error:  # which speaks of an attention, and another key has that name
            raise ConfigError(f"attention_from={trained!r}: {error}") from None
        return cls(config, source, bool(partial))

    def apply(
        self, model: nn.Module, adapter: str | Adapter | Sequence[str | Adapter] | None, *, fresh: bool = True
    ) -> None:
        """Inject into a model that its constructor has just built, and write the report to the host's log."""
        inject(model, adapter=adapter, fresh=fresh, **vars(self))[1].announce()


def open_texts(config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Make each attention that is a text a mapping, in a host's nested config, if one of `options` is a key of it.

    The options are by dotted name, as of a command line. The host raises TypeError for a key of a text.

    Returns:
        The options, with a text among them as the key `name` if others are keys of it.
    """

    def opened(path: str, value: Any) -> bool:
        return isinstance(value, str) and any(option.startswith(f"{path}.") for option in options)

    for path, section in sections(config):
        for key in KEYS[:2]:
            if opened(f"{path}.{key}".lstrip("."), section.get(key)):
                section[key] = {"name": section[key]}  # type: ignore[index]
    ours = {path for path, value in options.items() if path.rpartition(".")[2] in KEYS[:2] and opened(path, value)}
    return {f"{path}.name" if path in ours else path: value for path, value in options.items()}


def rehearse(build: Callable[[], Any]) -> None:
    """Build a model and throw it away, to see before a run touches a file that the model can have its attention.

    No report is written. Errors of the host are ignored, because the host raises them when it builds the model.
    """
    rehearses = REHEARSES.set(True)
    try:
        with torch.random.fork_rng(devices=[]):
            build()
    except QuestError:
        raise
    except Exception:
        return
    finally:
        REHEARSES.reset(rehearses)
