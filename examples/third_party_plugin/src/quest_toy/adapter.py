"""ToyAdapter: the attention classes of the host, their replacements, and the model that accepts `attention=`."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from quest_core.hosts.adapter import Adapter, Capabilities, HostAttention
from quest_core.hosts.request import KEYS, Request
from quest_core.projections import Packed, Separate


class FusedAttention(HostAttention):
    """Replaces stand_in.FusedAttention: one projection for queries, keys and values."""

    projections = Packed("qkv")

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """[B, N, E] -> [B, N, E]; keep [B, N], True = token, False = padding."""
        q, k, v = self.split_packed(self.qkv(x))  # [B, H, N, D], and [B, G, N, D] twice
        mask = None if keep is None else self.mechanism.padding_mask(keep, same_tokens=True)
        return self.proj(self.attend(q, k, v, mask))  # type: ignore[no-any-return]


class GroupedAttention(HostAttention):
    """Replaces stand_in.GroupedAttention: separate projections, shared key/value heads, and the cache of the host."""

    projections = Separate("q_proj", "k_proj", "v_proj")
    capabilities = Capabilities(causal=True, cached=True)

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        """Return the sizes of the heads, the shared ones included."""
        return {"num_heads": host.num_heads, "head_dim": host.head_dim, "kv_heads": host.num_kv_heads}

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        """[B, N, E] -> [B, N, E]; the cache holds the keys and values of all tokens, as the host projects them."""
        q, k, v = self.split(self.q_proj(x), self.k_proj(x), self.v_proj(x))  # [B, H, N, D], and [B, G, N, D] twice
        if cache is not None:
            k, v = cache.extend(self, k, v)  # [B, G, M, D]
        return self.o_proj(self.attend(q, k, v, is_causal=True))  # type: ignore[no-any-return]


class ToyAdapter(Adapter):
    """The attention of stand_in."""

    name: ClassVar[str] = "toy"
    replacements: ClassVar[dict[str, type[HostAttention]]] = {
        "stand_in.FusedAttention": FusedAttention,
        "stand_in.GroupedAttention": GroupedAttention,
    }

    def change_host(self) -> None:
        """Let the constructor of the model accept `attention`, as soon as the host is imported."""
        self.patches.around("stand_in:Model", "__init__", functools.partial(_build, self))


def _build(adapter: ToyAdapter, stock: Callable[..., None], model: nn.Module, *arguments: Any, **options: Any) -> None:
    """Build the model of the host, then replace its attention."""
    request = Request.read({key: options.pop(key, None) for key in KEYS}, type(model).__name__)
    stock(model, *arguments, **options)
    if request is not None:
        request.apply(model, adapter)
