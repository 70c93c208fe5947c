"""What `quest new-plugin` reads from the attention class of a host, and the code that it writes from it.

Only names are known: which attributes the class sets, and how its forward is called. The order of rows in a packed
projection, norms, rotary embeddings and masks are not; the written adapter refuses sub-modules and arguments that it
does not use, and its tests compare it with the host.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from ..config import AttentionConfig
from ..errors import ConfigError, PluginError
from ..hosts.adapter import Capabilities, refusal
from ..hosts.universal import HEADS
from ..packages import contained

GUIDE = "https://quest-attention.github.io/quest/writing-an-adapter/"
PROJECTIONS = (
    ("qkv",),
    ("to_qkv",),
    ("qkv_proj",),
    ("Wqkv",),
    ("in_proj",),
    ("c_attn",),
    ("q_proj", "k_proj", "v_proj"),
    ("to_q", "to_k", "to_v"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("to_q", "to_kv"),
    ("q_proj", "kv_proj"),
    ("q", "kv"),
)
"""Names of packed projections, of one for each role, and of queries with packed keys and values."""
HEAD_DIMS = ("head_dim", "dim_head", "d_head", "attention_head_size")
KV_HEADS = ("num_kv_heads", "n_kv_heads", "kv_heads", "num_key_value_heads", "n_kv_head")
DROPOUTS = ("attn_drop", "attn_dropout", "attention_dropout", "dropout", "dropout_p")
OUTPUTS = ("proj", "out_proj", "to_out", "o_proj", "wo", "c_proj", "proj_out", "out_lin", "output_proj", "dense", "o")
OUTPUT_DROPOUTS = ("proj_drop", "resid_dropout", "resid_drop", "out_drop")
CONTEXTS = ("context", "encoder_hidden_states", "key_value_states", "memory", "kv")
WIDTHS = ("dim", "embed_dim", "embed_dims", "hidden_size", "d_model", "width", "query_dim", "n_embd", "channels")


@dataclass(frozen=True)
class Anatomy:
    """An attention class of a host.

    Attributes:
        module, name: where it is, and what it is called.
        projections: one name of `PROJECTIONS`.
        heads, head_dim, kv_heads, dropout, output, output_dropout: attributes, or None without one. One of the first
            two is known.
        shared: whether several query heads may share a key head.
        listed: whether the output is a ModuleList.
        causal: whether its source says is_causal=True or makes a triangle.
        parameters: of its forward, without self.
        built: arguments with which it can be built for a test, or None if they could not be guessed.
    """

    module: str
    name: str
    projections: tuple[str, ...]
    heads: str | None
    head_dim: str | None
    kv_heads: str | None
    shared: bool
    dropout: str | None
    output: str | None
    output_dropout: str | None
    listed: bool
    causal: bool
    parameters: tuple[Parameter, ...]
    built: dict[str, Any] | None

    @property
    def replacement(self) -> str:
        """The name of the class that replaces it."""
        return f"Injected{self.name}"

    @property
    def roles(self) -> tuple[Parameter, ...]:
        """The parameters for queries, keys and values, or only the one for all of them."""
        given = [p for p in self.parameters if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
        apart = len(given) > 2 and given[0].name[:1] == "q" and given[1].name[:1] == "k" and given[2].name[:1] == "v"
        return tuple(given[: 3 if apart else 1])

    @property
    def context(self) -> str | None:
        """The parameter for another sequence of keys and values, or None."""
        if len(self.roles) == 1 and len(self.projections) > 1:
            return next((p.name for p in self.parameters if p.name in CONTEXTS), None)
        return None

    @property
    def cross(self) -> bool:
        """Whether queries and keys may come from different sequences."""
        return len(self.roles) == 3 or self.context is not None

    def __str__(self) -> str:
        seen = {"heads": self.heads, "head size": self.head_dim, "key/value heads": self.kv_heads}
        seen |= {"dropout": self.dropout, "output": self.output}
        parts = [f"{what} in {attribute}" for what, attribute in seen.items() if attribute is not None]
        unread = self.unread
        text = f"{self.name}: projections in {', '.join(self.projections)}; {'; '.join(parts)}"
        return text + (f"; refuses {', '.join(unread)} until its forward uses them" if unread else "")

    @property
    def unread(self) -> list[str]:
        """The parameters of forward that the written one refuses."""
        used = {p.name for p in self.roles} | {self.context}
        return [p.name for p in self.parameters if p.name not in used]

    def code(self) -> str:
        """Return the replacement as Python."""
        uses = [*self.projections, *(x for x in (self.dropout, self.output, self.output_dropout) if x is not None)]
        lines = ["", "", f"class {self.replacement}(Injected):", f'    """Replaces {self.module}.{self.name}."""', ""]
        lines += [f"    projections = {self._described()}"]
        lines += [f"    uses = frozenset({{{', '.join(_quoted(name) for name in uses)}}})"]
        lines += [f"    dropout_name = {_quoted(self.dropout)}"] if self.dropout else []
        lines += ["    causal = True"] if self.causal else []
        lines += ["    cross = True"] if self.cross else []
        lines += ["", "    @staticmethod", "    def sizes(module: Any) -> dict[str, int]:"]
        lines += ['        """Return the sizes of the heads."""', *self._sizes(), ""]
        return "\n".join([*lines, *self._forward(), ""])

    def _described(self) -> str:
        first, *others = self.projections
        if not others:
            return f"Packed({_quoted(first)})"
        if len(others) == 2:
            return f"Separate({', '.join(map(_quoted, self.projections))})"
        return f'Separate(q={_quoted(first)}) + Packed({_quoted(others[0])}, roles="kv")'

    def _sizes(self) -> list[str]:
        packed = len(self.projections) == 1
        first, second = (f"module.{self.projections[i]}.out_features" for i in (0, 0 if packed else 1))
        kv_heads = f"module.{self.kv_heads}" if self.kv_heads else ""
        if self.head_dim is not None:
            width = f"module.{self.head_dim}"
        elif packed:
            width = (
                f"{first} // ({f'module.{self.heads} + 2 * {kv_heads}' if kv_heads else f'3 * module.{self.heads}'})"
            )
        else:
            width = f"{first} // module.{self.heads}"
        pairs = {"num_heads": f"module.{self.heads}" if self.heads else f"{first} // {width}", "head_dim": width}
        if self.shared and not packed:
            kv_heads = kv_heads or f"{second} // {f'({width})' if '/' in width else width}"
            kv_heads += "" if self.kv_heads or len(self.projections) == 3 else " // 2"
        pairs |= {"num_kv_heads": kv_heads} if kv_heads else {}
        line = f"        return {{{', '.join(f'{_quoted(key)}: {value}' for key, value in pairs.items())}}}"
        if len(line) <= 120:
            return [line]
        return [
            "        return {",
            *(f"            {_quoted(key)}: {value}," for key, value in pairs.items()),
            "        }",
        ]

    def _forward(self) -> list[str]:
        kinds: dict[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
        given, keyword_only = ["self"], False
        for p in self.parameters:
            if p.kind is Parameter.KEYWORD_ONLY and not keyword_only and "*" not in "".join(x[:1] for x in given):
                given.append("*")
                keyword_only = True
            default = f" = {p.default!r}" if _literal(p.default) else ""
            given.append(f"{kinds.get(p.kind, '')}{p.name}: Any{default}")
        head = f"    def forward({', '.join(given)}) -> Any:"
        if len(head) > 120:
            head = "\n".join(["    def forward(", *(f"        {x}," for x in given), "    ) -> Any:"])
        lines = [head, '        """[B, N, E] -> [B, N, E]."""']
        refused = ", ".join(self._refused())
        if refused:
            lines += [
                "        # Host 4: use these arguments; a mask is boolean (True = may attend) or added to logits."
            ]
            call = f"        refuse_arguments(self, {refused})"
            wrapped = [
                "        refuse_arguments(",
                *(f"            {x}," for x in ("self", *self._refused())),
                "        )",
            ]
            lines += [call] if len(call) <= 120 else wrapped
        lines += ["        # Host 4: norms and rotary embeddings come between the projections and `attend`."]
        inputs = [p.name for p in self.roles]
        if len(inputs) == 1:
            other = inputs[0]
            if self.context is not None:
                other = "other"
                lines += [f"        other = {inputs[0]} if {self.context} is None else {self.context}"]
            inputs = [inputs[0], other, other]
        names = [f"self.{name}" for name in self.projections]
        if len(names) == 1:
            lines += [f"        q, k, v = {names[0]}({inputs[0]}).split(self.head_sizes.widths, dim=-1)"]
        elif len(names) == 3:
            made = ", ".join(f"{name}({x})" for name, x in zip(names, inputs, strict=True))
            lines += [f"        q, k, v = {made}"]
        else:
            lines += [f"        q = {names[0]}({inputs[0]})"]
            lines += [f"        k, v = {names[1]}({inputs[1]}).split(self.head_sizes.widths[1:], dim=-1)"]
        lines += ["        out = attend(self, q, k, v)"]
        if self.output is not None and self.listed:
            lines += [f"        for layer in self.{self.output}:", "            out = layer(out)"]
        elif self.output is not None:
            lines += [f"        out = self.{self.output}(out)"]
        if self.output_dropout is not None:
            lines += [f"        out = self.{self.output_dropout}(out)"]
        return [*lines, "        return out"]

    def _refused(self) -> list[str]:
        made = []
        for p in self.parameters:
            if p.name not in self.unread:
                continue
            if p.kind is Parameter.VAR_KEYWORD:
                made.append(f"**{p.name}")
            elif p.kind is Parameter.VAR_POSITIONAL or p.default in (None, False) or p.default is Parameter.empty:
                made.append(f"{p.name}={p.name}{' or None' if p.kind is Parameter.VAR_POSITIONAL else ''}")
            else:
                made.append(f"{p.name}={p.name} != {p.default!r}" if _literal(p.default) else f"{p.name}={p.name}")
        return made

    def test(self, package: str, adapter: str) -> str:
        """Return a class of conformance tests as Python; empty if no module can be built."""
        if self.built is None:
            return ""
        arguments = ", ".join(f"{key}={value}" for key, value in self.built.items())
        drops = self.dropout is not None and any(isinstance(value, float) for value in self.built.values())
        asked = Capabilities(causal=self.causal, dropout=drops)
        refused = [name for name in ("sinkhorn", "linear") if refusal(AttentionConfig.parse(name), asked)]
        lines = ["", "", f"class Test{self.name}(AdapterConformance):"]
        lines += [f"    adapter = {adapter}()", "    sites = 1"]
        if self.causal:
            lines += ['    mechanisms = tuple(name for name in AdapterConformance.mechanisms if name != "sinkhorn")']
        if refused:
            lines += [f"    refused = ({', '.join(map(_quoted, refused))}{',' * (len(refused) == 1)})"]
        lines += ["", "    def make_model(self):", f"        return torch.nn.Sequential({self.name}({arguments}))"]
        return "\n".join([*lines, "", "    def make_inputs(self):", "        return (torch.randn(2, 7, 16),)", ""])


def examine(text: str, distribution: str) -> Anatomy:
    """Read an attention class.

    Args:
        text: "module:Class".
        distribution: which pip installs.

    Raises:
        ConfigError: it cannot be imported, or does not have the parts of an attention.
    """
    module, _, name = text.partition(":")
    without = "or leave --attention-class out and write the replacement yourself"
    try:
        with contained(module):
            kind = getattr(importlib.import_module(module), name)
    except PluginError as error:
        raise ConfigError(
            f"attention-class is '{text}', and {error}; fix: pip install {distribution}, run this in the folder "
            f"of a module of your own, correct the name, {without}"
        ) from error
    try:
        owners = [owner for owner in kind.__mro__ if owner.__module__.partition(".")[0] not in ("torch", "builtins")]
        source = "\n".join(inspect.getsource(vars(owner)["__init__"]) for owner in owners if "__init__" in vars(owner))
        forward = inspect.getsource(kind.forward)
        parameters = tuple(inspect.signature(kind.forward).parameters.values())[1:]
    except (AttributeError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"attention-class is '{text}', whose source cannot be read ({error}); {without}") from error
    kinds: dict[str, str] = {}
    for found in re.finditer(r"^\s*self\.(\w+)\s*(?::[^=\n]+)?=(?!=)(.*)$", source, re.MULTILINE):
        kinds[found[1]] = kinds.get(found[1], "") + found[2]
    projections = next((names for names in PROJECTIONS if all(name in kinds for name in names)), None)
    first = {what: next((x for x in names if x in kinds), None) for what, names in {
        "heads": HEADS, "head_dim": HEAD_DIMS, "kv_heads": KV_HEADS, "dropout": DROPOUTS, "output": OUTPUTS,
        "output_dropout": OUTPUT_DROPOUTS,
    }.items()}  # fmt: skip
    sized = first["heads"] or (first["head_dim"] and len(projections or ()) > 1)
    if projections is None or not sized or not parameters:
        linear = [attribute for attribute, made in kinds.items() if "Linear" in made]
        lacks = "a forward with arguments" if not parameters else "projections" if projections is None else "heads"
        raise ConfigError(
            f"attention-class is '{text}', which has no {lacks} of a known name (Linear layers: "
            f"{', '.join(linear) or 'none'}; heads would be in {', '.join(HEADS)}); {without}, or keep its forward "
            f"with quest_core.hosts.universal.route ({GUIDE})"
        )
    return Anatomy(
        module=module,
        name=name,
        projections=projections,
        **first,
        shared=any(re.search(r"kv_|_kv|key_value|n_rep", attribute) for attribute in kinds),
        listed="ModuleList" in kinds.get(str(first["output"]), ""),
        causal=bool(re.search(r"is_causal\s*=\s*True|\.tril\(|\.triu\(", source + forward)),
        parameters=parameters,
        built=_guess(kind, first["dropout"]),
    )


def _guess(kind: Any, dropout: str | None) -> dict[str, Any] | None:
    """Return arguments with which a module can be built and called on [B, N, 16], or None."""
    import torch

    given: dict[str, Any] = {}
    for p in tuple(inspect.signature(kind.__init__).parameters.values())[1:]:
        if p.name in WIDTHS and 16 not in given.values():
            given[p.name] = 16
        elif p.name in HEADS or p.name in HEAD_DIMS:
            given[p.name] = 4
        elif p.name in DROPOUTS and dropout is not None:
            given[p.name] = 0.1
    try:
        with contained(kind.__module__), torch.random.fork_rng(), torch.no_grad():
            kind(**given)(torch.randn(2, 7, 16))
    except PluginError:
        return None
    return given


def _literal(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _quoted(text: str) -> str:
    return f'"{text}"'
