"""Which attention a config asks for: one for all modules, or one for each role in an encoder-decoder model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from quest_core.config import AttentionConfig, AttentionSpec
from quest_core.errors import ConfigError, one_of

ROLES = ("encoder", "decoder", "cross")
"""Self-attention that sees every token, causal self-attention, and attention over another sequence."""

ChoiceSpec: TypeAlias = "AttentionSpec | Mapping[str, AttentionSpec] | Choice"
"""What `attn_implementation` and `config.attention` accept."""


@dataclass(frozen=True)
class Choice:
    """The attention of each role.

    >>> str(Choice.parse({"encoder": "quest", "decoder": "standard", "cross": "quest"}))
    'encoder=quest;decoder=standard;cross=quest'
    """

    encoder: AttentionConfig
    decoder: AttentionConfig
    cross: AttentionConfig

    @classmethod
    def parse(cls, spec: ChoiceSpec) -> "Choice":
        """Return the choice that `spec` means.

        Args:
            spec: an attention for all roles, a mapping with the keys encoder, decoder and cross, or what `str` wrote.

        Raises:
            ConfigError: an unknown mechanism or option, or a mapping that lacks a role.
        """
        if isinstance(spec, Choice):
            return spec
        given: Any = spec
        if isinstance(spec, str) and spec.partition("=")[0].strip() in ROLES:
            given = {key.strip(): value for key, _, value in (part.partition("=") for part in spec.split(";"))}
        if isinstance(given, Mapping) and "name" not in given:
            for role in given:
                if role not in ROLES:
                    raise ConfigError(f"attention: {role!r} is not a role; {one_of(role, ROLES)}")
            missing = [role for role in ROLES if role not in given]
            if missing:
                raise ConfigError(
                    f"attention {dict(given)!r} lacks {', '.join(missing)}; name all of {', '.join(ROLES)} "
                    "('standard' keeps what the host computes)"
                )
            return cls(**{role: AttentionConfig.parse(given[role]) for role in ROLES})
        config = AttentionConfig.parse(given)
        return cls(config, config, config)

    def __str__(self) -> str:
        """The text that `parse` reads back."""
        if self.encoder == self.decoder == self.cross:
            return str(self.encoder)
        return ";".join(f"{role}={getattr(self, role)}" for role in ROLES)

    def of(self, role: str) -> AttentionConfig:
        """Return the attention of one role."""
        config: AttentionConfig = getattr(self, role)
        return config
