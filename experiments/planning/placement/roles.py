"""What each role takes on so many devices: time for one batch, memory of a device, in each layout that could be best.

Roles are the passes of a step: `generate`, the frozen `reference` and `reward` models, the critic's `values`, `train` of the
policy and `train_critic`. Rows of training and inference are taken to be equally long, at their mean; memory has room for the
longest one. Key-value caches are paged: an engine decodes so many rows as fit at the mean context of those alive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal

from async_rlhf.actors.config import GenerationConfig
from async_rlhf.experiments.planning.model.model_costs import ModelCosts, Recompute
from async_rlhf.experiments.planning.model.schedules import StageTime
from async_rlhf.experiments.planning.model.stages import (
    Layout,
    Place,
    catalogue,
    decode_step_s,
    inference_s,
    prefill_s,
    replica_s,
    training_s,
)
from async_rlhf.experiments.planning.placement.spec import Spec, costs_of
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.run.checks import memory

Role = Literal["generate", "reference", "reward", "values", "train", "train_critic"]
SCORING: tuple[Role, ...] = ("reference", "reward", "values")
LEARNING: tuple[Role, ...] = ("train", "train_critic")
Kind = Literal["any", "here", "zero-3"]
"""Of training. here: what this learner has, data parallelism by ZeRO, or all devices one tensor or one sequence group. zero-3:
that stage over all devices."""
MOST_RANKS = 64
"""Of this learner."""
_LONG_ROW = 16384  # tokens, from which on context parallelism is tried
_MOST_MICRO_ROWS = 16
_RECOMPUTES: tuple[Recompute, ...] = ("none", "full")
_LOGITS_BYTES = 1 << 30  # of the float32 logits of a chunk of tokens, as this learner computes them
_LEAST_SLOTS = 8
_PASS_TOKENS = 32768  # of one forward pass of a frozen model


@dataclass(frozen=True)
class Choice:
    """One way to do a role. kept_bytes: of a device, always; working_bytes: besides, while the role works."""

    layout: Layout
    seconds: float
    kept_bytes: float
    working_bytes: float


class Roles:
    """The roles of a spec. Results are kept, so that a search computes each once."""

    def __init__(self, spec: Spec) -> None:
        """Raises ConfigError for models and files that are not there."""
        self.spec = spec
        self.device = spec.cluster.own or catalogue()[spec.cluster.device]
        self.policy = costs_of(spec.models.policy)
        critic = None if spec.models.critic is None else costs_of(spec.models.critic)
        reward = None if spec.models.reward is None else costs_of(spec.models.reward)
        self.lengths = spec.lengths.batch(spec.batch.rows)
        self.rows, self.prompt = spec.batch.rows, spec.lengths.prompt
        self.read = self.prompt + spec.environment.read_tokens
        """Tokens of a row that are not sampled; those of an environment are counted from the row's begin on."""
        self.mean = sum(self.lengths) / self.rows
        self.alive_tokens = sum(length * length for length in self.lengths) / sum(self.lengths) / 2
        """Of the completion of a row that decodes, in the mean: long ones decode for longer."""
        models: dict[Role, ModelCosts | None] = {
            "generate": self.policy,
            "reference": self.policy if spec.loss.needs_reference else None,
            "reward": reward,
            "values": critic,
            "train": self.policy,
            "train_critic": critic,
        }
        self.models: Mapping[Role, ModelCosts] = {role: model for role, model in models.items() if model is not None}
        self.inference = cache(self._inference)
        self.training = cache(self._training)
        self._generated = cache(self._generate)

    @property
    def room_bytes(self) -> float:
        """Of a device that a plan may fill."""
        return self.spec.search.memory_share * self.device.memory_bytes - memory.CONTEXT

    def place(self, role: Role, layout: Layout) -> Place:
        efficiency, spread = self.spec.efficiency, layout.devices > self.spec.cluster.devices_per_node
        reached = efficiency.of_training if role.startswith("train") else efficiency.of_inference
        return Place(model=self.models[role], device=self.device, layout=layout, spread=spread, efficiency=reached)

    def tensors(self, role: Role, count: int) -> list[int]:
        """Powers of two within a node that divide heads and devices."""
        node, heads = self.spec.cluster.devices_per_node, self.models[role].heads
        return [size for size in powers(min(count, node)) if count % size == 0 and heads % size == 0]

    def _inference(self, role: Role, count: int) -> tuple[Choice, ...]:
        """Passes of a frozen model or of values over a batch, weights in tensor groups, or in shards over all devices."""
        found = []
        head = role == "reference"
        for tensor in self.tensors(role, count):
            for zero_stage in (0, 3) if count > tensor else (0,):
                layout = Layout(tensor=tensor, data=count // tensor, zero_stage=zero_stage)
                place = self.place(role, layout)
                seconds = inference_s(place, self.rows, round(self.read + self.mean), head=head)
                weights = self.models[role].weight_bytes / tensor
                if zero_stage:
                    passes = math.ceil(self.rows * (self.read + self.mean) / layout.data / _PASS_TOKENS)
                    seconds += passes * place.far.gather_s(weights, layout.data)
                    weights /= layout.data
                working = 2 * 8 * _PASS_TOKENS / tensor * self.models[role].hidden + (_LOGITS_BYTES if head else 0)
                # values are read by the weights that train
                found.append(Choice(layout, seconds, 0.0 if role == "values" else weights, working))
        return _front(found)

    def _training(self, role: Role, count: int, kind: Kind = "any") -> tuple[Choice, ...]:
        found = [
            self._trained(role, layout, whole_groups=kind == "here") for layout in self._training_layouts(role, count, kind)
        ]
        return _front([self._as_checked(choice) for choice in found] if kind == "here" else found)

    def _training_layouts(self, role: Role, count: int, kind: Kind) -> Iterator[Layout]:
        """Of all `count` devices."""
        model, batch = self.models[role], self.spec.batch
        update_rows, update_groups = self.rows // batch.updates_per_step, batch.groups // batch.updates_per_step
        node = self.spec.cluster.devices_per_node
        contexts = powers(min(count, node)) if self.spec.row_tokens >= _LONG_ROW else [1]
        for tensor, context in product(self.tensors(role, count), contexts):
            for pipeline in powers(min(count // tensor // context, model.layers)):
                data = count // (tensor * context * pipeline)
                if data * tensor * context * pipeline != count or (kind == "zero-3" and data < count):
                    continue
                alone = pipeline == 1 and tensor in (1, count) and context in (1, count)
                if kind == "here" and not (alone and count <= MOST_RANKS):
                    continue
                # Here a rank trains on whole groups.
                if data > (update_groups if kind == "here" else update_rows):
                    continue
                shared = data * context
                stages = (0,) if shared == 1 else (1,) if pipeline > 1 else (3,) if kind == "zero-3" else (1, 2, 3)
                experts = sorted({1, math.gcd(model.experts, data)}) if model.experts and kind == "any" else [1]
                micro = powers(min(math.ceil(update_rows / data), _MOST_MICRO_ROWS))
                for zero_stage, few, recompute, micro_rows in product(stages, experts, _RECOMPUTES, micro):
                    yield Layout(
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        experts=few,
                        data=data,
                        zero_stage=zero_stage,
                        micro_rows=micro_rows,
                        recompute=recompute,
                    )

    def critic_beside(self, layout: Layout) -> Choice:
        """This learner's critic lies as its policy does, whose memory counts it."""
        return replace(self._trained("train_critic", layout, whole_groups=True), kept_bytes=0.0, working_bytes=0.0)

    def _trained(self, role: Role, layout: Layout, *, whole_groups: bool) -> Choice:
        """whole_groups: a group stays on one rank, as here; the rank with the most sets the pace."""
        place, model, updates = self.place(role, layout), self.models[role], self.spec.batch.updates_per_step
        tokens, rows = round(self.read + self.mean), self.rows // updates
        if whole_groups:
            rows = math.ceil(self.spec.batch.groups // updates / layout.data) * layout.data * self.spec.batch.group_size
        micro_batches = layout.micro_batches(rows)
        seconds = updates * training_s(place, rows, tokens, micro_batches=micro_batches)
        if role == "train" and self.spec.proximal_pass:
            seconds += inference_s(place, rows * updates, tokens, micro_batches=micro_batches * updates)
        # A row is never cut: where one pass takes one row, it may be the longest.
        held = math.ceil(max(self.spec.row_tokens, layout.micro_rows * tokens) / layout.context)
        working = model.activation_bytes(1, held, tensor_parallel=layout.tensor, recompute=layout.recompute)
        if layout.recompute == "full":  # the layer that is computed again
            working += model.activation_bytes(1, held, tensor_parallel=layout.tensor) / model.layers
        return Choice(layout, seconds, self._trained_bytes(model, layout), working + _LOGITS_BYTES)

    @staticmethod
    def _trained_bytes(model: ModelCosts, layout: Layout) -> float:
        """Weights, gradients and optimizer; experts that groups of data share are divided among those first."""
        shared, expert_share = layout.data * layout.context, model.expert_bytes / model.weight_bytes
        rest = model.training_bytes(layout.zero_stage, shared) * (1 - expert_share)
        experts = model.training_bytes(layout.zero_stage, shared // layout.experts) * expert_share / layout.experts
        return (rest + experts) / (layout.tensor * layout.pipeline)

    def _as_checked(self, choice: Choice) -> Choice:
        """With the memory that `check` counts for this learner, its critic's too."""
        parts = memory.learner(
            LearnerConfig.model_validate(self.learner_settings(choice.layout)), self.shape, self.settings, reference=0
        )
        kept = sum(size for name, size in parts.items() if name in ("weights", "gradients", "optimizer", "critic"))
        return replace(choice, kept_bytes=kept, working_bytes=sum(parts.values()) - kept)

    @property
    def settings(self) -> GenerationConfig:
        """The section of a configuration."""
        spec = self.spec
        return GenerationConfig(
            group_size=spec.batch.group_size,
            max_prompt_length=self.prompt,
            max_completion_length=spec.lengths.longest,
            max_episode_length=None if spec.environment.turns == 1 else spec.row_tokens - self.prompt,
        )

    @property
    def shape(self) -> memory.Shape:
        """Of the policy, as `check` has it."""
        model = self.policy
        return memory.Shape(
            parameters=model.parameters,
            layers=model.layers,
            width=model.hidden,
            mlp=model.mlp_width * max(model.active_experts, 1),
            heads=model.heads * model.head_dim,
            key_heads=model.kv_heads * model.head_dim,
            vocabulary=model.vocabulary,
            tied=model.tied,
        )

    def learner_settings(self, layout: Layout) -> dict[str, Any]:
        """The section `learner` of a configuration. Data-parallel ranks and tensor groups are DeepSpeed's."""
        ranks = layout.devices
        settings: dict[str, Any] = {
            "device": "cuda",
            "dtype": "bfloat16",
            "batch_size": self.rows,
            "updates_per_step": self.spec.batch.updates_per_step,
            "micro_batch_tokens": layout.micro_rows * round(self.read + self.mean),
            "gradient_checkpointing": layout.recompute == "full",
            "ranks": ranks,
        }
        if self.spec.models.critic is not None:
            settings["critic"] = {"kind": "model"}
        if self.spec.loss.needs_reference:
            settings["reference_dtype"] = "bfloat16"
        if ranks > 1:
            settings |= {"backend": "deepspeed", "zero_stage": layout.zero_stage or 1, "tensor_parallel": layout.tensor}
            if layout.context > 1:
                settings["sequence_parallel"] = layout.context
        return settings

    def generation(self, count: int, tensor: int, room: float, ahead: float) -> tuple[tuple[StageTime, int], ...]:
        """Of one batch on `count` devices, `tensor` to an engine, with so many slots; none where the longest row finds no room.

        room: bytes of a device for keys and values. ahead: batches that may be begun before the oldest is trained on. With none
        a batch has the engines for itself. Else rows of several batches share them: more slots decode more rows in a step, and
        each of them, the longest too, takes longer.
        """
        per_token = self.policy.kv_bytes_per_token / min(tensor, self.policy.kv_heads)
        if room < per_token * self.spec.row_tokens:
            return ()
        fitting = int(room / per_token / (self.read + self.alive_tokens))
        most = _rounded(min(self.spec.search.slots, max(fitting, 1)))
        if not ahead:
            span = self._generated(count // tensor, tensor, most)
            return ((StageTime(span, span), most),)
        sizes = [most, *(size for size in powers(most - 1) if size >= _LEAST_SLOTS)]
        return tuple((self._shared(count // tensor, tensor, size, ahead), size) for size in sizes)

    def _shared(self, replicas: int, tensor: int, slots: int, ahead: float) -> StageTime:
        """Of a batch among rows of others."""
        rows = self.rows / replicas
        alive = max(min(slots, ahead * rows), 1.0)
        place = self.place("generate", Layout(tensor=tensor))
        step = decode_step_s(place, math.ceil(alive), self.read + self.alive_tokens)
        prefill = self._prefill_s(tensor, math.ceil(rows))
        span = max(self.lengths) * step + prefill + self.spec.environment.waits_s
        return StageTime(rows * self.mean / alive * step + prefill, span)

    def _prefill_s(self, tensor: int, rows: int) -> float:
        """Prompts of a group are computed once, what an environment answers for each row."""
        place, environment = self.place("generate", Layout(tensor=tensor)), self.spec.environment
        groups = math.ceil(rows / self.spec.batch.group_size)
        prompts = prefill_s(place, groups, self.prompt)
        if not environment.read_tokens:
            return prompts
        return prompts + prefill_s(place, rows * (environment.turns - 1), environment.observation_tokens)

    def _generate(self, replicas: int, tensor: int, slots: int) -> float:
        """Seconds of a batch that has the engines for itself."""
        place = self.place("generate", Layout(tensor=tensor))
        seconds = replica_s(
            place,
            self.lengths,
            replicas,
            prompt_tokens=self.read,
            slots=slots,
            prefill_s=lambda rows: self._prefill_s(tensor, rows),
        )
        return seconds + self.spec.environment.waits_s

    def judged(self) -> StageTime:
        """By what is no model: a verifier, a sandbox."""
        reward = self.spec.reward
        return StageTime(
            self.rows * reward.seconds / reward.concurrency,
            math.ceil(self.rows / reward.concurrency) * reward.seconds,
            reward.seconds,
        )


def no_fit(roles: Roles) -> str:
    """Why no placement fits."""
    cluster, policy = roles.spec.cluster, roles.policy
    row = policy.kv_bytes_per_token * roles.spec.row_tokens
    return (
        f"training takes at least {policy.training_bytes(3, cluster.size) / 1e9:.3g} GB of a device where all {cluster.size} "
        f"share it, and activations of its longest row; generation {policy.weight_bytes / 1e9:.3g} GB for weights and "
        f"{row / 1e9:.3g} GB for the longest row, over the devices of an engine; a device has "
        f"{roles.device.memory_bytes / 1e9:.3g} GB, {roles.spec.search.memory_share:.0%} of it for the plan. Add nodes, take "
        "devices with more memory, shorten lengths.longest, or train a smaller model"
    )


def powers(most: int) -> list[int]:
    """Of two, up to `most`."""
    return [1 << power for power in range(most.bit_length())] if most else []


def _rounded(slots: int) -> int:
    """Down to three binary digits, so that few different ones are computed."""
    step = 1 << max(slots.bit_length() - 3, 0)
    return slots // step * step


def _front(choices: list[Choice]) -> tuple[Choice, ...]:
    """Those that no other beats in time and in both kinds of memory, the fastest first."""
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (each.seconds, each.kept_bytes + each.working_bytes)):
        if not any(other.kept_bytes <= choice.kept_bytes and other.working_bytes <= choice.working_bytes for other in found):
            found.append(choice)
    return tuple(found)
