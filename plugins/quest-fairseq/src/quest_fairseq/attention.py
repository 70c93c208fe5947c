"""fairseq's MultiheadAttention with another mechanism inside.

It keeps fairseq's sub-modules under their names. With fewer key/value heads (gqa, mqa) the key and value projections
are smaller, and a checkpoint of the full size is pooled on load. fairseq passes tensors as [T, B, E], tokens first.
"""

import math
from typing import Any

import torch
from fairseq.modules.multihead_attention import MultiheadAttention
from torch import Tensor, nn

from quest_core import Cache
from quest_core.config import AttentionConfig
from quest_core.errors import InputError, UnsupportedError
from quest_core.hosts.adapter import Capabilities, HostAttention
from quest_core.ops import hides_the_future, mask_of_host, merge_causal
from quest_core.projections import Separate

State = dict[str, dict[str, Any]]
"""fairseq's incremental state: module and name -> its values between two steps of decoding."""

HIDDEN = -1e4
"""fairseq's encoder layers write this, or -1e8 in float32, into a mask of numbers where a pair is hidden."""


class Attention(HostAttention, MultiheadAttention):
    """Accepts fairseq's call with any mechanism."""

    projections = Separate("q_proj", "k_proj", "v_proj")

    @classmethod
    def asks(cls, host: Any, path: str, model: nn.Module) -> Capabilities:
        """Return what a module asks for: a decoder is causal, and has a cache of tokens unless they are an encoder's.

        Raises:
            UnsupportedError: self-attention of a decoder that also sees the encoder's tokens.
        """
        parent = model.get_submodule(path.rpartition(".")[0])
        decodes = path != "" and any("DecoderLayer" in kind.__name__ for kind in type(parent).__mro__)
        cross = host.encoder_decoder_attention  # in a decoder of any kind, LightConv's for example
        if decodes and getattr(parent, "cross_self_attention", False) and not cross:
            raise UnsupportedError(
                f"'{path}': cross_self_attention joins encoder and decoder tokens, and the attention of such a decoder "
                "cannot be replaced; leave the option out"
            )
        dropout = host.dropout_module.p > 0
        return Capabilities(causal=decodes or cross, cached=decodes and not cross, cross=cross, dropout=dropout)

    @classmethod
    def refuses(cls, host: Any, path: str, config: AttentionConfig) -> str | None:
        """Refuse options of fairseq that need its own attention."""
        noisy = [name for name in ("q", "k", "v", "out") if getattr(host, f"{name}_proj")._forward_pre_hooks]
        cross = host.encoder_decoder_attention
        for there, option in (
            (host.use_xformers, "xformers_att_config brings an attention of its own"),
            (host.bias_k is not None or host.add_zero_attn, "add_bias_kv and add_zero_attn are not supported"),
            (bool(noisy), "quant_noise hooks the projections, whose shapes and blocks belong to fairseq"),
        ):
            if there:
                return f"{option}; leave the option out"
        if cross and any("order" in part.reads for part in config.components):
            return (
                f"'{config.name}' counts the positions of queries, and in cross-attention a decoder brings its queries "
                "one by one"
            )
        return None

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: State | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention over embeddings.

        Args:
            query: [T, B, E]; key and value [S, B, E or the encoder's], by default the query. A decoding step of
                self-attention does not read them.
            key_padding_mask: [B, S], True = padding.
            incremental_state: fairseq's state of decoding; None otherwise.
            need_weights: return the weights too, averaged over heads.
            static_kv: keys are those of an encoder, the same in every step of decoding.
            attn_mask: [T, S], boolean (True = hidden) or additive.
            need_head_weights: return the weights of every head.

        Returns:
            [T, B, E], and the weights [B, T, S] or [H, B, T, S], or None: without `need_weights`, while decoding by
            self-attention, and for mechanisms that never form them.

        Raises:
            InputError: for `before_softmax`.
        """
        if before_softmax:
            raise InputError(f"before_softmax asks for raw scores, which attention '{self.config}' does not return")
        dropped = self.training or self.dropout_module.apply_during_inference
        dropout_p = float(self.dropout_module.p) if dropped else 0.0
        q = self._split(self.q_proj(query), self.num_heads)  # [B, H, T, D]
        weights: Tensor | None = None
        if incremental_state is not None and not self.encoder_decoder_attention:
            if self.self_attention or key is None:  # else of the other channel of speech
                key = value = query
            value = key if value is None else value
            out = self._step(q, key, value, key_padding_mask, incremental_state, attn_mask, dropout_p)
        else:
            k, v, padding = self._keys(query, key, value, key_padding_mask, incremental_state, static_kv)
            # The beams of a sentence share its keys: they are further queries of one sample.
            beams = q.shape[0] // k.shape[0]
            q = q.unflatten(0, (-1, beams)).transpose(1, 2).flatten(2, 3)
            mask, causal = self._visible(attn_mask, padding)
            if (need_weights or need_head_weights) and self.mechanism.family is None:
                out, weights = self._with_weights(q, k, v, mask, causal, dropout_p)
                weights = weights.unflatten(2, (beams, -1)).transpose(1, 2).flatten(0, 1)
            else:
                unit_keys = incremental_state is not None and self.mechanism.takes_unit_keys
                out = self.mechanism(
                    q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout_p, unit_keys=unit_keys
                )
            out = out.unflatten(2, (beams, -1)).transpose(1, 2).flatten(0, 1)
        merged: Tensor = self.out_proj(out.permute(2, 0, 1, 3).flatten(2))  # [T, B, E]
        if weights is not None:
            weights = weights.transpose(0, 1) if need_head_weights else weights.mean(1)
        return merged, weights

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """[T, B, heads·D] -> [B, heads, T, D]."""
        return x.reshape(*x.shape[:2], heads, self.head_dim).permute(1, 2, 0, 3)

    def _keys(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        padding: Tensor | None,
        state: State | None,
        static_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return k, v [B, G, S, D] of `key` and `value` [S, B, E], and their padding [B, S]. An encoder's are kept.

        Those that decoding keeps are unit vectors already where the mechanism makes them so.
        """
        kept = self._get_input_buffer(state)
        if static_kv and kept:
            return kept["prev_key"], kept["prev_value"], kept["prev_key_padding_mask"]
        key = query if key is None else key
        value = key if value is None else value
        if state is not None and self.beam_size > 1 and query.shape[1] == key.shape[1]:
            key, value = (x[:, :: self.beam_size] for x in (key, value))  # fairseq repeats them for every beam
            padding = None if padding is None else padding[:: self.beam_size]
        k, v = self._split(self.k_proj(key), self.kv_heads), self._split(self.v_proj(value), self.kv_heads)
        if state is not None:
            k = self.mechanism.score.key(k) if self.mechanism.takes_unit_keys else k
            self._set_input_buffer(state, {"prev_key": k, "prev_value": v, "prev_key_padding_mask": padding})
        return k, v, padding

    def _step(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        state: State,
        attn_mask: Tensor | None,
        dropout_p: float,
    ) -> Tensor:
        """Return one step of decoding [B, H, T, D], from the cache and the new tokens' `key` and `value` [T, B, E]."""
        if attn_mask is not None:
            raise InputError("a decoding step is causal by itself and takes no attn_mask")
        kept = self._get_input_buffer(state)
        if kept:
            cache: Cache = kept["cache"]
        else:
            cache = Cache()
            self._set_input_buffer(state, {"cache": cache})
        real = mask = None
        if padding is not None or "real" in cache:
            batch, tokens = q.shape[0], q.shape[2]
            earlier = cache["real"] if "real" in cache else q.new_ones(batch, len(cache), dtype=torch.bool)
            new = q.new_ones(batch, tokens, dtype=torch.bool) if padding is None else ~padding.bool()
            real = torch.cat([earlier, new], dim=1)  # [B, tokens so far]
            mask = real[:, None, None]
        k, v = self._split(self.k_proj(key), self.kv_heads), self._split(self.v_proj(value), self.kv_heads)
        out = self.mechanism.decode(q, k, v, cache, attn_mask=mask, dropout_p=dropout_p)
        if real is not None:
            cache["real"] = real
        return out

    def reorder_incremental_state(self, incremental_state: State, new_order: Tensor) -> State | None:
        """Keep the samples `new_order` [B'], which a beam search has chosen."""
        if self.encoder_decoder_attention:
            return super().reorder_incremental_state(incremental_state, new_order)  # type: ignore[no-any-return]
        kept = self._get_input_buffer(incremental_state)
        if "cache" in kept:
            kept["cache"].reorder(new_order)
        return incremental_state

    def _adaptive_prune_heads(self, *_: Any) -> None:
        raise UnsupportedError(
            f"--mha-heads-to-keep removes heads from attention '{self.config}', which was made for "
            f"{self.num_heads}; prune the stock model, and inject quest into the result"
        )

    def _visible(self, attn_mask: Tensor | None, padding: Tensor | None) -> tuple[Tensor | None, bool]:
        """Return one mask for fairseq's two, and whether `attn_mask` hides the future and nothing else."""
        ours = mask_of_host(attn_mask)
        causal = ours is not None and hides_the_future(ours, only=True)
        if not causal and attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.masked_fill(attn_mask <= HIDDEN, -math.inf)
        seen = None  # [B, 1, 1 or S, S]
        if padding is not None:
            seen = self.mechanism.padding_mask(~padding.bool(), same_tokens=not self.encoder_decoder_attention)
        return mask_of_host(None if causal else attn_mask, seen), causal

    def _with_weights(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the weights [B, H, T, S] before dropout, as fairseq does."""
        out, weights, scores = self.mechanism.forward_with_logits(
            q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout_p
        )
        if dropout_p > 0:
            seen = mask if mask is None or mask.dtype == torch.bool else mask > -math.inf
            seen = merge_causal(seen, q.shape[2], k.shape[2], q.device) if causal else seen
            weights = self.mechanism.normalizer.weights(scores, seen)
        return out, weights
