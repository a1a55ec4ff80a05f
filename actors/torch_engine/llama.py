"""`Forward` for Llama on a CPU, written for decoding: fewer, larger operations and no second pass for new prompts.

Why it exists: with small models a decode pass is mostly the cost of starting operations, and with long rows that of
reading their caches. Here q, k, v are one product, as are gate and up; both rotations are one; attention over the cache
is two batched products, which on a CPU beat the fused kernel for single queries and read no further than the longest of
a few neighbouring rows (`segments`); and the tokens of prefixes travel through the same products as the running rows'
tokens. The results equal the model's own up to rounding (a test holds them to 1e-5). Used only for a model that
`can_serve` accepts; everything else goes through `ModelForward`.

The parameters of the model become views of the joined tensors, so nothing is stored twice and weights adopted by name
are in effect at once.

Axes: `S` tokens of the pass (N rows' tokens, then K chunks of P tokens each), `C` model width, `H` query heads,
`J` key heads, `G` = H / J, `D` head width, `T` visible columns, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from actors.torch_engine.cache import RowCache
from actors.torch_engine.chunks import PaddedChunks
from actors.torch_engine.forward import decode_mask
from actors.torch_engine.scheduler import Chunk
from actors.torch_engine.segments import Segment, segments

# Rotations whose angles depend on the position alone.
_STATIC_ROTATIONS = ("default", "linear", "llama3")


def can_serve(model: PreTrainedModel) -> bool:
    """Whether this file computes exactly what the model computes: plain Llama in float32 on a CPU."""
    if type(model) is not LlamaForCausalLM:
        return False
    config = model.config
    return (
        model.device.type == "cpu"
        and model.dtype == torch.float32
        and not config.attention_bias
        and not config.mlp_bias
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in _STATIC_ROTATIONS
    )


@dataclass(frozen=True)
class _Layer:
    """qkv [(H + 2 J) D, C], out [C, H D], gate_up [2 F, C], down [C, F], norms [C]."""

    norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class _Prefixes:
    """The chunks of a pass; mask [K, 1, P, T], None where each begins its row."""

    chunks: PaddedChunks
    mask: torch.Tensor | None

    @classmethod
    def of(cls, chunks: Sequence[Chunk], device: torch.device) -> _Prefixes | None:
        padded = PaddedChunks.of(chunks, device)
        if padded is None:
            return None
        return cls(padded, None if padded.continues is None else padded.mask(torch.float32))


class LlamaForward:
    """Owns the joined tensors and the table of rotations. The model must not be moved or cast afterwards."""

    def __init__(self, model: PreTrainedModel, cache: RowCache) -> None:
        config = model.config
        self._cache = cache
        self._num_heads, self._num_key_heads = config.num_attention_heads, config.num_key_value_heads
        self._width = model.model.layers[0].self_attn.head_dim
        self._epsilon = config.rms_norm_eps
        self._embedding = model.model.embed_tokens.weight
        self._layers = [_join(layer) for layer in model.model.layers]
        self._norm, self._head = model.model.norm.weight, model.lm_head.weight
        self._rotary = model.model.rotary_emb
        self._cos = self._sin = torch.empty(0, 1, self._width)

    def __call__(self, chunks: Sequence[Chunk], tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        """As in `Forward`, in one pass."""
        num_rows = len(tokens)
        ids, at = tokens, positions
        prefixes = _Prefixes.of(chunks, tokens.device)
        if prefixes is not None:
            ids = torch.cat((tokens, prefixes.chunks.ids.flatten()))
            at = torch.cat((positions, prefixes.chunks.positions.flatten()))
        self._cache.begin_tokens(positions, length)
        parts = [(segment, self._mask(positions, segment)) for segment in segments(positions.tolist())]
        if len(self._cos) < length:
            self._extend_rotations(length)
        cos, sin = self._cos[at], self._sin[at]
        x = F.embedding(ids, self._embedding)
        for index, layer in enumerate(self._layers):
            qkv = F.linear(self._normed(x, layer.norm), layer.qkv)
            attended = self._attend(index, qkv, cos, sin, num_rows, parts, prefixes)
            if index == len(self._layers) - 1:
                # Of the prefixes only the keys and values are wanted, and the last of them are stored.
                x, attended = x[:num_rows], attended[:num_rows]
            # In place wherever possible: fresh memory costs more than arithmetic on tensors of this size.
            x.addmm_(attended, layer.out.t())
            gate, up = F.linear(self._normed(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            x.addmm_(F.silu(gate, inplace=True).mul_(up), layer.down.t())
        return F.linear(self._normed(x, self._norm), self._head)

    def _mask(self, positions: torch.Tensor, segment: Segment) -> torch.Tensor:
        """[N J, G, T] of a segment: what is added to the scores of every layer."""
        heads, per_key = self._num_key_heads, self._num_heads // self._num_key_heads
        mask = decode_mask(positions[segment.start : segment.stop], segment.length, torch.float32)
        return mask.expand(-1, heads, per_key, -1).reshape(-1, per_key, segment.length)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._epsilon)

    def _attend(
        self,
        index: int,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        num_rows: int,
        parts: Sequence[tuple[Segment, torch.Tensor]],
        prefixes: _Prefixes | None,
    ) -> torch.Tensor:
        """Rotate, store, attend: [S, (H + 2 J) D] -> [S, H D]."""
        heads = self._num_heads
        qkv = qkv.view(len(qkv), heads + 2 * self._num_key_heads, self._width)
        qk, v = qkv[:, : -self._num_key_heads], qkv[:, -self._num_key_heads :]
        rolled = qk.roll(self._width // 2, -1)
        qk.mul_(cos).addcmul_(rolled, sin)
        q, k = qk[:, :heads], qk[:, heads:]
        if prefixes is None:
            return self._attend_rows(index, q, k, v, parts)
        # Prefixes first: their padding may cover the column that the row's own token is then written to, and that token
        # attends to them.
        of_prefixes = self._attend_prefixes(index, q[num_rows:], k[num_rows:], v[num_rows:], prefixes)
        of_rows = self._attend_rows(index, q[:num_rows], k[:num_rows], v[:num_rows], parts)
        return torch.cat((of_rows, of_prefixes))

    def _attend_rows(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Sequence[tuple[Segment, torch.Tensor]]
    ) -> torch.Tensor:
        """Each row's new token over its cache: [N, H, D] -> [N, H D]."""
        keys, values = self._cache.write_tokens(index, k, v)
        attended = []
        for (start, stop, length), mask in parts:
            seen, said = (part[start:stop, :, :length].flatten(0, 1) for part in (keys, values))
            asked = q[start:stop].reshape(len(seen), -1, self._width)
            scores = torch.baddbmm(mask, asked, seen.transpose(1, 2), alpha=self._width**-0.5)
            attended.append(torch.bmm(scores.softmax(dim=-1), said).view(stop - start, -1))
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend_prefixes(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefixes: _Prefixes
    ) -> torch.Tensor:
        """Chunks among their own tokens, and over what their rows hold before them: [K P, H, D] -> [K P, H D]."""
        chunks = prefixes.chunks
        q, k, v = (part.view(*chunks.ids.shape, -1, self._width).transpose(1, 2) for part in (q, k, v))
        k, v = self._cache.write_chunks(index, k, v, chunks)
        # Padding is on the right, so where every chunk begins its row causal suffices.
        causal = prefixes.mask is None
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=prefixes.mask, is_causal=causal, enable_gqa=True)
        return attended.transpose(1, 2).reshape(-1, self._num_heads * self._width)

    def _extend_rotations(self, length: int) -> None:
        """cos and sin [length, 1, D] of every position; sin is signed so that a roll stands for `rotate_half`."""
        positions = torch.arange(max(length, 2 * len(self._cos)))[None]
        cos, sin = self._rotary(self._embedding, positions)
        sign = torch.ones(self._width).index_fill_(0, torch.arange(self._width // 2), -1.0)
        self._cos, self._sin = cos[0][:, None], (sin[0] * sign)[:, None]


def _join(layer: LlamaDecoderLayer) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        norm=layer.input_layernorm.weight,
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.o_proj.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.weight,
    )


def _joined(*linears: torch.nn.Linear) -> torch.Tensor:
    """The weights one below the other; each layer's own parameter becomes a view of its part."""
    joined = torch.cat([linear.weight.detach() for linear in linears])
    parts = torch.split(joined, [len(linear.weight) for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight.data = part
    return joined
