"""The policy as one module: from a micro-batch to log-probabilities, entropies and (with a critic) values of its tokens.

Owns the Hugging Face model, its output layer's use in chunks, and how it is computed (type, gradient checkpointing, compiled).
Dropout is off: a policy gradient needs the policy that was sampled from. Waits for nothing.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from async_rlhf.buffers.attention import FAMILIES, Reach, attention, max_length
from async_rlhf.buffers.errors import ConfigError, RecordError
from async_rlhf.buffers.images.tower import ImageTower, PromptPlace
from async_rlhf.learner.batch.micro_batch import MicroBatch, PolicyInputs, attention_bias, attention_mask, digests
from async_rlhf.learner.batch.packing import Sharing
from async_rlhf.learner.config import LOGITS_MIB, LearnerConfig, chunk_tokens, token_cost, tokens_within
from async_rlhf.learner.model.blocks import attend_in_blocks, planned
from async_rlhf.learner.model.logprobs import chunked_logprobs, token_energy, token_entropy, token_ids, token_logprobs
from async_rlhf.learner.model.routing import RoutingReplay
from async_rlhf.learner.model.sequence import Share, share_attention

_log = logging.getLogger(__name__)
# An output layer that is followed by nothing else agrees with the model's own logits to rounding: a share of the largest.
_SAME_LOGITS = 1e-5
# Beyond every cap on logits that models have.
_LARGE = 1e4
# Mean difference of log-probabilities, in nats. Rounding in float32 makes 1e-6 to 1e-5; a wrong mask or state 1e-2 and more.
MAX_DIFFERENCE = 5e-4
# The families' names of a layer's attention.
_ATTENTION = frozenset({"attn", "self_attn", "attention", "self_attention"})
# The backend of `learner.compile`, and the most forms of a layer.
_COMPILER = "inductor"
_MAX_VARIANTS = 64


class Critic(nn.Module):
    """Values float32 [N]: the expected return from each of the N tokens on that are predicted at positions `source_N` of the
    flattened rows. Its last layer begins at zero, so that the first advantages are those of no critic. trunk: of its own; None
    reads the policy's last states."""

    def __init__(self, width: int, trunk: nn.Module | None) -> None:
        super().__init__()
        self.trunk = trunk
        self.value = nn.Linear(width, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, hidden_ND: Tensor | None, inputs: Mapping[str, Any], source_N: Tensor) -> Tensor:
        """`hidden_ND` are the policy's states, `inputs` the arguments of its trunk."""
        if self.trunk is not None:
            hidden_ND = self.trunk(**inputs).last_hidden_state.flatten(0, 1)[source_N]
        assert hidden_ND is not None, "a head without the policy's states"
        with torch.autocast(hidden_ND.device.type, enabled=False):
            # DeepSpeed's weights may have 16 bits.
            values: Tensor = self.value(hidden_ND.to(self.value.weight.dtype)).squeeze(-1)
        return values.float()


class Predicted(NamedTuple):
    """Log-probability, entropy and value of each token, float32 [N] with gradients; its energy (see `token_energy`), without.
    others_NK: int64 [N, K], other tokens in its place; logp_others_NK: float32 [N, K], with gradients. None: not available,
    or not requested."""

    logp_N: Tensor
    entropy_N: Tensor
    value_N: Tensor | None
    energy_N: Tensor | None
    others_NK: Tensor | None
    logp_others_NK: Tensor | None


class Policy(nn.Module):
    """`model` is the language model, `critic` estimates values where there is one, `images` reads those of prompts.

    Raises ConfigError when the model does not support gradient checkpointing, or to be compiled.
    """

    def __init__(
        self, model: nn.Module, config: LearnerConfig, *, with_critic: bool = False, images: ImageTower | None = None
    ) -> None:
        super().__init__()
        self.images = images
        for setting in ("gradient_checkpointing", "compile"):
            if getattr(config, setting) and not _layers(model):
                raise ConfigError(f"learner.{setting} = true: this model has no layers that support it; use false")
        self.model = cast(Any, model)
        self.config: dict[str, Any] = self.model.config.get_text_config().to_dict()
        self.attention = attention(self.config)
        self._sequence_ranks = config.sequence_parallel
        self.sharings = self._sharings(config)
        self.sharing = self.sharings[0]
        self.critic: Critic | None = None
        if with_critic and config.critic.kind != "none":
            trunk = copy.deepcopy(self.trunk) if config.critic.kind == "model" else None
            if trunk is not None and config.critic.freeze_attention:
                _freeze_attention(trunk)
            self.critic = Critic(self.output_layer.weight.shape[1], trunk).to(self.device)
        self._autocast = torch.bfloat16 if config.dtype == "bfloat16" else None
        self.compiled = config.compile
        self._replay: RoutingReplay | None = None
        if config.ranks_per_row == 1 and not config.compile:
            with suppress(ConfigError):  # a model whose experts cannot be recorded
                self._replay = RoutingReplay(model)
        self.routing = None if self._replay is None else self._replay.routing  # the routing that passes replay
        if config.gradient_checkpointing:
            _checkpoint_gradients(model, self._replay)
        if config.compile:
            _compile(self)
        with self._plainly():
            self._chunked = self._output_layer_is_last()
        if self._sequence_ranks > 1:
            if self.attention is None:
                raise ConfigError(
                    f"learner.sequence_parallel = {self._sequence_ranks}: how model type {self.config.get('model_type')!r} "
                    f"attends is not known here; set it to 1, or use one of {', '.join(sorted(FAMILIES))}"
                )
            share_attention(model)

    def _sharings(self, config: LearnerConfig) -> tuple[Sharing, ...]:
        """The ways in which completions may share the computation of a prompt, the best first."""
        if self.attention is None:
            return ("none",)
        plain = config.device == "cpu" and config.sequence_parallel == 1 and not config.compile
        plain = plain and not (self.images is not None and self.images.is_bidirectional)
        return ("blocks", "rows", "none") if plain and attend_in_blocks(self.model) else ("rows", "none")

    @property
    def packs(self) -> bool:
        """Whether completions share the computation of their prompt."""
        return self.sharing != "none"

    @property
    def token_cost(self) -> float:
        """See `config.token_cost`."""
        if self.attention is None:
            return math.inf
        text = self.model.config.get_text_config()
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        weights = sum(p.numel() for p in self.trunk.parameters()) - self.model.get_input_embeddings().weight.numel()
        return token_cost(weights / text.num_hidden_layers, text.num_attention_heads * width)

    @property
    def device(self) -> torch.device:
        return cast(torch.device, next(self.model.parameters()).device)

    @property
    def trunk(self) -> nn.Module:
        """The model without its output layer, and without what reads images; the model itself where it is not built of them."""
        reads_images = hasattr(self.model.config, "vision_config")
        return cast(nn.Module, self.model.get_decoder() if reads_images else self.model.base_model)

    @property
    def output_layer(self) -> nn.Linear:
        return cast(nn.Linear, self.model.get_output_embeddings())

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)

    def forward(self, batch: MicroBatch, energies: bool = False, others: int | Tensor = 0) -> Predicted:
        """energies: compute them too. others: the number of likeliest tokens (at most all), or the tokens themselves."""
        if self._sequence_ranks == 1:
            return self._forward(batch, self._mask(batch, self._autocast), self._autocast, energies, others)
        share = Share.of(batch, dist.get_rank(), self._sequence_ranks)
        masks = self._masks(share.blocks_B4, share.positions_RL, self._autocast)
        wanted = others if isinstance(others, int) else others[share.index_M]
        predicted = self._forward(share.own, masks, self._autocast, energies, wanted)
        return Predicted(*(None if each is None else share.joined(each) for each in predicted))  # type: ignore[arg-type]

    def values(self, batch: MicroBatch) -> Tensor:
        """float32 [N]: those of a critic with a trunk of its own, without a pass of the policy."""
        assert self.critic is not None and self.critic.trunk is not None
        inputs = self._inputs(batch, self._mask(batch, self._autocast), self.critic.trunk)
        with torch.autocast(batch.ids_RL.device.type, dtype=self._autocast, enabled=self._autocast is not None):
            values_N: Tensor = self.critic(None, inputs=inputs, source_N=batch.source_N)
        return values_N

    def exactly(self, batch: MicroBatch) -> Tensor:
        """float32 [N]: log-probability of each token, everything computed in float32 and by this rank alone."""
        return self._forward(batch, self._mask(batch, None), None).logp_N

    def _mask(self, batch: MicroBatch, dtype: torch.dtype | None) -> Any:
        """The model's `attention_mask` argument. Rows of one piece need no mask of ours: padding stands on the right, where no
        token attends. Without a mask attention takes its fastest kernels."""
        if not batch.is_packed and not (batch.prompts_Q4 is not None and self.images and self.images.is_bidirectional):
            return None
        if self.sharing == "blocks" and self.attention is not None and len(batch.ids_RL) == 1:
            last = self.model.config.get_text_config().num_hidden_layers - 1
            return self.attention.masks(lambda reach: planned(batch, reach, dtype or torch.float32, last))
        together = self.images.together(batch.ids_RL, _places(batch)) if self.images else None
        return self._masks(batch.blocks_B4, batch.positions_RL, dtype, together)

    def _masks(
        self, blocks_B4: Tensor, positions_RL: Tensor, dtype: torch.dtype | None, together_RL: Tensor | None = None
    ) -> Any:
        """One for each kind of layer, in the type that attention is computed in."""
        assert self.attention is not None, "rows of several completions for a model that takes one"

        def bias(reach: Reach) -> Tensor:
            return attention_bias(attention_mask(blocks_B4, positions_RL, reach, together_RL), dtype or torch.float32)

        return self.attention.masks(bias)

    def _forward(
        self, batch: PolicyInputs, masks: Any, dtype: torch.dtype | None, energies: bool = False, others: int | Tensor = 0
    ) -> Predicted:
        inputs = self._inputs(batch, masks)
        replayed = nullcontext() if self._replay is None else self._replay.given(batch.experts_PMk)
        with replayed, torch.autocast(batch.ids_RL.device.type, dtype=dtype, enabled=dtype is not None):
            if self._chunked:
                hidden_ND = self.trunk(**inputs).last_hidden_state.flatten(0, 1)[batch.source_N]
                head = self.output_layer
                rows = chunk_tokens(head.weight.shape[0], batch.ids_RL.device.type)
                remembered = tokens_within(head.weight.shape[0], LOGITS_MIB) if torch.is_grad_enabled() else 0
                tokens = batch.target_N, batch.temperature_N, rows, batch.sampling_masks, remembered, energies, others
                logp_NJ, entropy_N, energy_N, ids_NJ = chunked_logprobs(hidden_ND, head.weight, head.bias, *tokens)
            else:
                out = self.model(**inputs, output_hidden_states=self.critic is not None)
                hidden_ND = out.hidden_states[-1].flatten(0, 1)[batch.source_N] if self.critic is not None else None
                logits_NV, left = out.logits.flatten(0, 1)[batch.source_N], batch.sampling_masks
                ids_NJ = token_ids(logits_NV, batch.target_N, others)
                logp_NJ = token_logprobs(logits_NV, ids_NJ, batch.temperature_N, left)
                entropy_N = token_entropy(logits_NV, batch.temperature_N, left)
                energy_N = token_energy(logits_NV, batch.target_N, batch.temperature_N, left).detach() if energies else None
            # By name: DeepSpeed's hooks replace positional tensors, and the plan of a mask would be lost.
            if batch.prompts_Q4 is not None and self.critic is not None and self.critic.trunk is not None:
                inputs = self._inputs(batch, masks, self.critic.trunk)
            value_N = None if self.critic is None else self.critic(hidden_ND, inputs=inputs, source_N=batch.source_N)
        of_others = (ids_NJ[:, 1:], logp_NJ[:, 1:]) if ids_NJ.shape[1] > 1 else (None, None)
        return Predicted(logp_NJ[:, 0], entropy_N, value_N, energy_N, *of_others)

    def _inputs(self, batch: PolicyInputs, masks: Any, trunk: nn.Module | None = None) -> dict[str, Any]:
        """The arguments of a trunk; None: the policy's own. Raises RecordError for images where none are read."""
        if batch.prompts_Q4 is None:
            inputs: dict[str, Any] = {"input_ids": batch.ids_RL, "use_cache": False}
            return inputs if masks is None else inputs | {"position_ids": batch.positions_RL, "attention_mask": masks}
        if self.images is None:
            raise RecordError("a group has images, and this learner was given no store of them; give the run's (data/images)")
        prompts, length = _places(batch), batch.ids_RL.shape[1]
        embedding = None if trunk is None else cast(Any, trunk).get_input_embeddings()
        behind = [(end - 1) % length + 1 for end in batch.prompts_Q4[:, 2].tolist()]
        positions = self.images.turned(batch.positions_RL, prompts, behind)
        read = {**self.images.embedded(batch.ids_RL, prompts, embedding), "use_cache": False}
        if masks is None and not self.images.turns:  # where positions begin again transformers would begin another text
            return read
        return read | {"position_ids": positions, "attention_mask": masks}

    def room(self, prompt: PromptPlace | None) -> int:
        """The most tokens behind a prompt that the model can take, one less for engines, which add one."""
        return (max_length(self.config) or sys.maxsize) - len(prompt.ids if prompt else ()) - 1

    def probe(self, ids: Tensor, prompt: PromptPlace | None = None) -> Tensor:
        """float32 [len(ids) - 1]: log-probability of each token of one plain text after its first, at temperature 1.
        prompt: with images, before it."""
        with self._plainly():
            if prompt is None or self.images is None:
                logits = self.model(input_ids=ids[None, :-1], use_cache=False).logits[0]
            else:
                whole = torch.cat((torch.tensor(prompt.ids, device=ids.device), ids[:-1]))
                logits = self.images.logits(whole, prompt)[len(prompt.ids) :]
        return token_logprobs(logits, ids[1:], torch.ones(len(ids) - 1, device=ids.device))

    def _plainly(self) -> AbstractContextManager[Any]:
        """Within, nothing is compiled: for comparisons and for single computations."""
        return torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()

    @torch.no_grad()
    def _output_layer_is_last(self) -> bool:
        """False for models that do something to the trunk's states before the output layer, or to what that gives (scale it,
        cap it); their logits are then computed whole."""
        head = self.output_layer
        if not isinstance(head, nn.Linear) or self.trunk is self.model:
            return False
        ids = torch.arange(min(8, self.vocabulary), device=self.device)[None]
        plain = head(self.trunk(input_ids=ids, use_cache=False).last_hidden_state)
        scale = _LARGE / float(plain.abs().max().clamp(min=1e-30))
        with head.register_forward_hook(lambda module, inputs, logits: logits * scale):  # small ones would not show a cap
            capped = self.model(input_ids=ids, use_cache=False).logits
        return bool((capped - plain * scale).abs().max() < _SAME_LOGITS * _LARGE)


def _places(batch: PolicyInputs) -> list[PromptPlace]:
    """The prompts with images."""
    if batch.prompts_Q4 is None or batch.images_I2 is None:
        return []
    found, images, width = [], iter(digests(batch.images_I2)), batch.ids_RL.shape[1]
    for begin, end, _, count in batch.prompts_Q4.tolist():
        row, column = divmod(begin, width)
        ids = tuple(batch.ids_RL[row, column : column + end - begin].tolist())
        found.append(PromptPlace(row, column, ids, tuple(islice(images, count))))
    return found


def _freeze_attention(trunk: nn.Module) -> None:
    frozen = [module for name, module in trunk.named_modules() if name.rpartition(".")[2] in _ATTENTION]
    if not frozen:
        raise ConfigError(
            "learner.critic.freeze_attention = true: which layers of this model attend is not known here; set it to false"
        )
    for module in frozen:
        module.requires_grad_(False)


def _layers(module: nn.Module) -> list[nn.Module]:
    return [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]


def _checkpoint_gradients(model: nn.Module, replay: RoutingReplay | None) -> None:
    """Let layers drop their activations and compute them again in the backward pass."""
    options: dict[str, Any] = {"use_reentrant": False} | ({} if replay is None else {"context_fn": replay.again})
    # Before transformers 5.24 it has the other name only.
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")(options)
    for layer in _layers(model):
        layer.training = True  # checkpointing asks the layer; its children, and so dropout, stay in evaluation mode


def _compile(policy: nn.Module) -> None:
    """Each layer by itself, in place: equal ones share what is compiled, and sizes may change. What is compiled anew is for a
    mask or none, a gradient or none, one row or more; past the limit it is an error, and not computed without."""
    torch._dynamo.config.recompile_limit = _MAX_VARIANTS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in _layers(policy):
        layer.compile(backend=_COMPILER, dynamic=True)
