"""`Forward` for Llama on a CPU, written for decoding: fewer, larger operations and no second pass for new prompts.

Why it exists: with small models a decode pass is mostly the cost of starting operations, with larger ones that of the
products with their weights, and with long rows that of reading their caches. Here weights are packed (`Product`); q, k,
v are one product, as are gate and up; both rotations are one; attention over the cache is two batched products, which on
a CPU beat the fused kernel for single queries and read no further than the longest of a few neighbouring rows
(`segments`); and the tokens of prefixes travel through the same products as the running rows' tokens. Used only for a
model that `can_serve` accepts; everything else goes through the model's own code. Of images it reads what the tower made of
them, in the places of their prompt.

In bfloat16 the products with weights are computed, and keys and values kept; everything else is float32, as where a
learner autocasts. So float32 equals the model's own code up to rounding, and what is served in bfloat16 is nearer to
float32 than the model's own code, which rounds after every operation (tests hold both).

Axes: `S` tokens of the pass (N rows' tokens, then K chunks of P tokens each), `C` model width, `H` query heads,
`J` key heads, `G` = H / J, `D` head width, `T` visible columns, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from async_rlhf.actors.torch_engine.cache import RowCache
from async_rlhf.actors.torch_engine.chunks import PaddedChunks, position_mask
from async_rlhf.actors.torch_engine.forward import Forward
from async_rlhf.actors.torch_engine.scheduler import PrefillChunk
from async_rlhf.actors.torch_engine.segments import segments
from async_rlhf.buffers.attention import FULL
from async_rlhf.buffers.images.tower import ImageTower, PromptPlace

# Families whose decoder reads images as it reads text: each token those before it, at the positions of their indices.
_AROUND_LLAMA = ("idefics3", "smolvlm")
# Rotations whose angles depend on the position alone.
_STATIC_ROTATIONS = ("default", "linear", "llama3")

# To call oneDNN costs 10 to 30 us more: float32 products of fewer weights than this with so few rows take longer through it.
_SMALL, _FEW = 1 << 17, 16

# Of a layer, by its index: queries float32 [S, H, D], keys and values [S, J, D] -> what was attended to, float32 [S, H D].
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this processor have such products; else the ordinary one gives the same up to rounding."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class Product:
    """Weights packed once per weight set, in oneDNN's own order.

    A decode step multiplies few rows with every weight there is; an ordinary product reorders the weights each time, which for
    few rows takes as long as the product itself, or leaves them to a library that does not use all of the processor.

    x W^T for the weights of one or more linear layers without bias, one below the other, computed in their type. few: rows
    up to which small float32 weights are multiplied as they are, with another rounding.

    Owns a copy of the weights, of small ones two, so it is made again when they change.
    """

    @torch.no_grad()
    def __init__(self, *weights: torch.Tensor, few: int = _FEW) -> None:
        joined = torch.cat(weights)
        self.dtype, self._few = joined.dtype, few
        self.shape = joined.shape
        is_small = joined.dtype == torch.float32 and joined.numel() < _SMALL and few > 0
        self._packed = torch.ops.mkldnn._reorder_linear_weight(joined) if can_pack(joined.dtype) else None
        self._plain = joined if is_small or self._packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [S, in] -> float32 [S, out], fresh memory."""
        x = x.to(self.dtype)
        if self._plain is not None and (self._packed is None or x.shape[0] <= self._few):  # `len` costs ten times as much
            return F.linear(x, self._plain).float()
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return product.float()


def can_serve(model: PreTrainedModel) -> bool:
    """Whether this file computes what the model computes: plain Llama in float32 or bfloat16 on a CPU, also as the decoder of
    Idefics 3."""
    if type(model) is not LlamaForCausalLM and model.config.model_type not in _AROUND_LLAMA:
        return False
    if type(model.get_decoder()) is not LlamaModel:
        return False
    config = model.config.get_text_config()
    return (
        model.device.type == "cpu"
        and model.dtype in (torch.float32, torch.bfloat16)
        and not config.attention_bias
        and not config.mlp_bias
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in _STATIC_ROTATIONS
    )


@dataclass(frozen=True)
class _Layer:
    """qkv: C -> (H + 2 J) D; out: H D -> C; gate_up: C -> 2 F; down: F -> C; norms float32 [C]."""

    norm: torch.Tensor
    qkv: Product
    out: Product
    post_norm: torch.Tensor
    gate_up: Product
    down: Product

    @classmethod
    def of(cls, layer: LlamaDecoderLayer, few: int) -> _Layer:
        attention, mlp, product = layer.self_attn, layer.mlp, partial(Product, few=few)
        return cls(
            norm=layer.input_layernorm.weight.detach().float(),
            qkv=product(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            out=product(attention.o_proj.weight),
            post_norm=layer.post_attention_layernorm.weight.detach().float(),
            gate_up=product(mlp.gate_proj.weight, mlp.up_proj.weight),
            down=product(mlp.down_proj.weight),
        )


@dataclass(frozen=True)
class Prefixes:
    """The chunks of a pass; mask [K, 1, P, T], None where each begins its row; those that are prompts with images."""

    chunks: PaddedChunks
    mask: torch.Tensor | None
    prompts: Sequence[PromptPlace] = ()

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], device: torch.device) -> Prefixes | None:
        padded = PaddedChunks.of(chunks, device)
        if padded is None:
            return None
        prompts = [PromptPlace(number, 0, each.ids, each.images) for number, each in enumerate(chunks) if each.images]
        return cls(padded, None if padded.sources is None else padded.mask(torch.float32), prompts)


class AttentionPart(NamedTuple):
    """Rows whose newest tokens attend together, B of them, and what is added to their scores, [B J, G, T]."""

    rows: slice
    mask: torch.Tensor


class LlamaForward(Forward):
    """Owns the packed weights (so all weights exist twice) and the table of rotations."""

    _few = _FEW

    def __init__(self, model: PreTrainedModel, cache: RowCache, tower: ImageTower | None = None) -> None:
        super().__init__(model, cache)
        self._decoder, self._tower = model.get_decoder(), tower
        config = model.config.get_text_config()
        self._num_heads, self._num_key_heads = config.num_attention_heads, config.num_key_value_heads
        self._width = self._decoder.layers[0].self_attn.head_dim
        self._epsilon = config.rms_norm_eps
        self._dtype = model.dtype
        self._layers: dict[int, _Layer] = {}
        self._scratch = torch.empty(0)
        self._cos = self._sin = torch.empty(0, 1, self._width)
        self.refresh()

    def refresh(self) -> None:
        for index, layer in enumerate(self._decoder.layers):
            # One layer at a time, so that no more than one exists twice.
            self._layers[index] = _Layer.of(layer, self._few)
        self._embedding = self._decoder.embed_tokens.weight.detach()
        self._norm = self._decoder.norm.weight.detach().float()
        self._head = Product(self._model.lm_head.weight, few=self._few)

    def __call__(
        self, chunks: Sequence[PrefillChunk], tokens: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        """As in `Forward`, in one pass."""
        self._cache.begin_tokens(positions, length)
        parts = [
            AttentionPart(
                slice(start, stop), self._of_heads(position_mask(positions[start:stop, None], length, torch.float32, FULL))
            )
            for start, stop, length in segments(positions.tolist())
        ]
        return self._in_one_pass(Prefixes.of(chunks, tokens.device), tokens, positions, length, parts)

    def _in_one_pass(
        self,
        prefixes: Prefixes | None,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        length: int,
        parts: Sequence[AttentionPart],
    ) -> torch.Tensor:
        """Prefixes together with one token in each row, [N], which attend in these parts: logits [N, V]."""
        num_rows, x, at = len(tokens), self._embedded(tokens[None]), positions
        if prefixes is not None:
            x = torch.cat((x, self._embedded(prefixes.chunks.ids, prefixes.prompts)))
            at = torch.cat((positions, prefixes.chunks.positions.flatten()))

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if prefixes is None:
                return self._attend_rows(index, q, k, v, parts)
            # Prefixes first: their padding may cover the column that the row's own token is then written to, and that
            # token attends to them.
            of_prefixes = self._attend_prefixes(index, q[num_rows:], k[num_rows:], v[num_rows:], prefixes)
            of_rows = self._attend_rows(index, q[:num_rows], k[:num_rows], v[:num_rows], parts)
            return torch.cat((of_rows, of_prefixes))

        self._extend_rotations(length)
        return self._compute(x, at, num_rows, attend)

    def logits(self, ids: torch.Tensor, prompt: PromptPlace | None = None) -> torch.Tensor:
        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.float().transpose(0, 1)[None] for part in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return attended[0].transpose(0, 1).flatten(1)

        self._extend_rotations(len(ids))
        return self._compute(self._embedded(ids[None], [prompt] if prompt else ()), torch.arange(len(ids)), len(ids), attend)

    def _embedded(self, ids: torch.Tensor, prompts: Sequence[PromptPlace] = ()) -> torch.Tensor:
        """int64 [K, T] -> float32 [K T, C], fresh memory. prompts: those with images."""
        if not prompts or self._tower is None:
            return F.embedding(ids.flatten(), self._embedding).float()
        embedded: torch.Tensor = self._tower.embedded(ids, prompts)["inputs_embeds"]
        return embedded.flatten(0, 1).float()

    def _compute(self, x: torch.Tensor, positions: torch.Tensor, num_wanted: int, attend: Attend) -> torch.Tensor:
        """Logits of the first tokens of [S, C], which are overwritten: float32 [num_wanted, V]."""
        cos, sin = self._cos[positions], self._sin[positions]
        for index, layer in self._layers.items():
            attended = attend(index, *self._before(layer, x, cos, sin))
            if index == len(self._layers) - 1:
                # Of the others only the keys and values are wanted, and the last of them are stored.
                x, attended = x[:num_wanted], attended[:num_wanted]
            self._after(layer, x, attended)
        return self._head(self._normed(x, self._norm))

    def _before(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The part of a layer before attention: [S, C] -> q [S, H, D], k and v [S, J, D] as they are kept."""
        return self._rotated(layer.qkv(self._normed(x, layer.norm)), cos, sin)

    def _after(self, layer: _Layer, x: torch.Tensor, attended: torch.Tensor) -> None:
        """The part of a layer after attention [S, H D]: x [S, C] in place, since fresh memory costs more than arithmetic on
        tensors of this size."""
        x.add_(layer.out(attended))
        gate, up = layer.gate_up(self._normed(x, layer.post_norm)).chunk(2, dim=-1)
        x.add_(layer.down(F.silu(gate, inplace=True).mul_(up)))

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, x.shape[-1:], weight, self._epsilon)

    def _rotated(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[S, (H + 2 J) D] -> q [S, H, D], k and v [S, J, D] as they are kept."""
        qkv = qkv.view(qkv.shape[0], -1, self._width)
        qk, v = qkv[:, : -self._num_key_heads], qkv[:, -self._num_key_heads :]
        rolled = qk.roll(self._width // 2, -1)
        qk.mul_(cos).addcmul_(rolled, sin)
        return qk[:, : self._num_heads], qk[:, self._num_heads :].to(self._dtype), v.to(self._dtype)

    def _of_heads(self, mask: torch.Tensor) -> torch.Tensor:
        """[B, 1, P, T] -> [B J, P G, T]."""
        heads, per_key = self._num_key_heads, self._num_heads // self._num_key_heads
        return mask[:, :, :, None].expand(-1, heads, -1, per_key, -1).flatten(2, 3).flatten(0, 1)

    def _attend_rows(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Sequence[AttentionPart]
    ) -> torch.Tensor:
        """New tokens over the caches of their rows: [N, H, D] -> [N, H D]."""
        keys, values = self._cache.write_tokens(index, k, v)
        attended = []
        for rows, mask in parts:
            row_keys, row_values = (part[rows, :, : mask.shape[-1]].flatten(0, 1) for part in (keys, values))
            queries, row_keys = q[rows].reshape(*mask.shape[:2], self._width), self._widened(row_keys)
            scores = torch.baddbmm(mask, queries, row_keys.transpose(1, 2), alpha=self._width**-0.5)
            attended.append(torch.bmm(scores.softmax(dim=-1), self._widened(row_values)).view(-1, q.shape[1] * self._width))
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _widened(self, kept: torch.Tensor) -> torch.Tensor:
        """Keys or values in float32, until the next call: batched products of bfloat16 take longer than this and theirs."""
        if kept.dtype == torch.float32:
            return kept
        if len(self._scratch) < kept.numel():
            self._scratch = torch.empty(kept.numel() * 3 // 2)
        return self._scratch[: kept.numel()].view(kept.shape).copy_(kept)

    def _attend_prefixes(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefixes: Prefixes
    ) -> torch.Tensor:
        """Chunks among their own tokens, and over what their rows hold before them: [K P, H, D] -> [K P, H D]."""
        chunks = prefixes.chunks
        q, k, v = (part.view(*chunks.ids.shape, -1, self._width).transpose(1, 2) for part in (q, k, v))
        k, v = (part.float() for part in self._cache.write_chunks(index, k, v, chunks))
        # Padding is on the right, so where every chunk begins its row causal suffices.
        causal = prefixes.mask is None
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=prefixes.mask, is_causal=causal, enable_gqa=True)
        return attended.transpose(1, 2).reshape(-1, self._num_heads * self._width)

    def _extend_rotations(self, length: int) -> None:
        """cos and sin, float32 [length or more, 1, D] of every position; sin is signed so that a roll stands for
        `rotate_half`."""
        if length <= len(self._cos):
            return
        positions = torch.arange(max(length, 2 * len(self._cos)))[None]
        cos, sin = self._decoder.rotary_emb(self._norm, positions)
        sign = torch.ones(self._width).index_fill_(0, torch.arange(self._width // 2), -1.0)
        self._cos, self._sin = cos[0][:, None], (sin[0] * sign)[:, None]
