"""What each role takes on so many devices: time for one batch, memory of a device, in each layout that could be best.

Roles are the passes of a step: `generate`, the frozen `reference` and `reward` models, the critic's `values`, `train` of the
policy and `train_critic`. Rows of training and inference are taken to be equally long, at their mean; memory has room for the
longest one. Key-value caches are paged: an engine decodes so many rows as fit at the mean context of those alive.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from async_rlhf.actors.config import GenerationConfig
from async_rlhf.experiments.planning.model import calibration, devices
from async_rlhf.experiments.planning.model.devices import Device
from async_rlhf.experiments.planning.model.generation import generation_ends_s
from async_rlhf.experiments.planning.model.model_costs import ModelCosts
from async_rlhf.experiments.planning.model.schedules import StageTime
from async_rlhf.experiments.planning.model.stages import Place, decode_step_s, inference_s, optimizer_s, prefill_s, training_s
from async_rlhf.experiments.planning.placement import layouts
from async_rlhf.experiments.planning.placement.layouts import Kind, Layout, powers
from async_rlhf.experiments.planning.placement.spec import Spec, costs_of
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.run.checks import memory

Role = Literal["generate", "reference", "reward", "values", "train", "train_critic"]
_LOGITS_BYTES = 1 << 30  # of the float32 logits of a chunk of tokens, as this learner computes them
_CONTEXT_BYTES = 512 << 20  # a CUDA process before its first tensor
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
    """The roles of a spec. Answers are kept, so that a search asks each question once."""

    def __init__(self, spec: Spec, device: Device) -> None:
        self.spec, self.device = spec, device
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

    @classmethod
    def of(cls, spec: Spec) -> Roles:
        """Raises ConfigError for models and files that are not there."""
        cluster = spec.cluster
        if cluster.calibration is not None:
            return cls(spec, calibration.load(Path(cluster.calibration)).device)
        return cls(spec, cluster.own if cluster.own is not None else devices.device(cluster.device))

    @property
    def room_bytes(self) -> float:
        """Of a device that a plan may fill."""
        return self.spec.search.memory_share * self.device.memory_bytes - _CONTEXT_BYTES

    def place(self, role: Role, layout: Layout) -> Place:
        efficiency = self.spec.efficiency
        return Place(
            model=self.models[role],
            device=self.device,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            data=layout.data,
            context=layout.context,
            experts=layout.experts,
            spread=layout.devices > self.spec.cluster.devices_per_node,
            efficiency=efficiency.of_training if role.startswith("train") else efficiency.of_inference,
        )

    def tensors(self, role: Role, count: int) -> list[int]:
        return layouts.tensor_sizes(self.models[role], count, self.spec.cluster.devices_per_node)

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
        batch = self.spec.batch
        tried = layouts.training(
            self.models[role],
            count,
            self.spec.cluster.devices_per_node,
            kind,
            update_rows=self.rows // batch.updates_per_step,
            update_groups=batch.groups // batch.updates_per_step,
            longest_row=self.spec.row_tokens,
        )
        found = [self._trained(role, layout, whole_groups=kind == "here") for layout in tried]
        return _front([self._as_checked(choice) for choice in found] if kind == "here" else found)

    def critic_beside(self, layout: Layout) -> Choice:
        """This learner's critic lies as its policy does, whose memory counts it."""
        return replace(self._trained("train_critic", layout, whole_groups=True), kept_bytes=0.0, working_bytes=0.0)

    def _trained(self, role: Role, layout: Layout, *, whole_groups: bool) -> Choice:
        """whole_groups: a group stays on one rank, as here; the rank with the most sets the pace."""
        place, model, updates = self.place(role, layout), self.models[role], self.spec.batch.updates_per_step
        tokens, rows = round(self.read + self.mean), self.rows // updates
        if whole_groups:
            rows = math.ceil(self.spec.batch.groups // updates / layout.data) * layout.data * self.spec.batch.group_size
        micro_batches = math.ceil(rows / layout.data / layout.micro_rows)
        update = training_s(
            place, rows, tokens, micro_batches=micro_batches, zero_stage=layout.zero_stage, recompute=layout.recompute
        ) + optimizer_s(place, zero_stage=layout.zero_stage)
        proximal = 0.0
        if role == "train" and self.spec.proximal_pass:
            proximal = inference_s(place, rows * updates, tokens, micro_batches=micro_batches * updates)
        # A row is never cut: where one pass takes one row, it may be the longest.
        held = math.ceil(max(self.spec.row_tokens, layout.micro_rows * tokens) / layout.context)
        working = model.activation_bytes(1, held, tensor_parallel=layout.tensor, recompute=layout.recompute)
        if layout.recompute == "full":  # the layer that is computed again
            working += model.activation_bytes(1, held, tensor_parallel=layout.tensor) / model.layers
        return Choice(layout, updates * update + proximal, self._trained_bytes(model, layout), working + _LOGITS_BYTES)

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
            LearnerConfig.model_validate(self.learner_settings(choice.layout)), self.shape, self.settings, reference=False
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
        """Of the policy, as `check` knows it."""
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
        """Seconds from the first prompt to the last row's end: of the engine with the longest row, and its even share of the
        others in no particular order."""
        place = self.place("generate", Layout(tensor=tensor))
        lengths = list(self.lengths[::replicas])
        random.Random(0).shuffle(lengths)
        longest = max(lengths)
        ends = generation_ends_s(
            lengths,
            prompt_tokens=self.read,
            slots=slots,
            room_tokens=slots * (self.read + longest),
            longest=longest,
            step_s=lambda rows, context: decode_step_s(place, rows, context),
            prefill_s=lambda rows: self._prefill_s(tensor, rows),
        )
        return max(ends) + self.spec.environment.waits_s

    def judged(self) -> StageTime:
        """By what is no model: a verifier, a sandbox."""
        reward = self.spec.reward
        return StageTime(
            self.rows * reward.seconds / reward.concurrency,
            math.ceil(self.rows / reward.concurrency) * reward.seconds,
            reward.seconds,
        )

    def least_bytes(self, kind: Kind = "any") -> dict[Role, float]:
        """Of a device, by role, where all devices do nothing else; generation with room for one longest row."""
        count = self.spec.cluster.size
        counts = [*powers(count), count] if kind == "here" else [count]  # a batch may have too few groups for all of them
        row = self.policy.kv_bytes_per_token * self.spec.row_tokens
        found: dict[Role, float] = {}
        for role, model in self.models.items():
            if role == "generate":
                engines = [(t, min(t, model.kv_heads)) for t in self.tensors(role, count)]
                found[role] = min(model.weight_bytes / tensor + row / split for tensor, split in engines)
            elif role.startswith("train"):
                choices = [choice for number in counts for choice in self.training(role, number, kind)]
                found[role] = min((each.kept_bytes + each.working_bytes for each in choices), default=math.inf)
            else:
                found[role] = min(each.kept_bytes + each.working_bytes for each in self.inference(role, count))
        return found


def no_fit(roles: Roles, kind: Kind = "any") -> str:
    """Why no placement fits."""
    least = ", ".join(f"{role} {size / 1e9:.3g} GB" for role, size in roles.least_bytes(kind).items())
    return (
        f"shared out over all {roles.spec.cluster.size} devices, each takes at least: {least}; a device has "
        f"{roles.device.memory_bytes / 1e9:.3g} GB, "
        f"{roles.spec.search.memory_share:.0%} of it for the plan. Add nodes, take devices with more memory, shorten "
        "lengths.longest, or train a smaller model"
    )


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
