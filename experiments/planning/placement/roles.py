"""The cost of one batch for each pool of devices, in seconds and in memory of a device, in every layout that this system has.

Engines generate. The learner trains, holds the reference where no scorer does, and the critic, which lies as its policy does.
Scorers hold frozen models, whole on each of their devices. Rows are taken to be equally long outside of generation, at their
mean; memory has room for the longest one. Key-value caches are paged: an engine decodes so many rows as fit at the mean context
of those alive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from async_rlhf.actors.config import GenerationConfig
from async_rlhf.buffers.model_directory import ModelShape
from async_rlhf.experiments.planning.model.model_costs import ModelCosts
from async_rlhf.experiments.planning.model.stages import (
    Efficiency,
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

_MOST_RANKS = 64  # of the learner
_LONG_ROW = 16384  # tokens, from which on context parallelism is tried
_MOST_MICRO_ROWS = 16
_LEAST_SLOTS = 8
_LOGITS_BYTES = 1 << 30  # of the float32 logits of a chunk of tokens
_PASS_TOKENS = 32768  # of one forward pass of a scorer


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Generation. layout: devices of an engine (tensor) and engines (data). slots: rows that one decodes at once.

    busy_s: for which the engines are taken by a batch, where batch follows batch. span_s: from a batch's begin to its longest
    row's end. They are the same where a batch has the engines for itself.
    """

    layout: Layout
    slots: int
    busy_s: float
    span_s: float
    bytes_per_device: float


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The passes of the learner or the scorers over a batch, by name, one after the other. bytes_per_device: at the peak."""

    layout: Layout
    seconds: Mapping[str, float]
    bytes_per_device: float

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


class Roles:
    """The roles of one spec. Results are kept, so that a search computes each once."""

    def __init__(self, spec: Spec) -> None:
        """Raises ConfigError for models and files that are not there."""
        self.spec = spec
        self.device = spec.cluster.own or catalogue()[spec.cluster.device]
        self.policy = costs_of(spec.models.policy)
        self.reward = None if spec.models.reward is None else costs_of(spec.models.reward)
        self.lengths = spec.lengths.batch(spec.batch.rows)
        self.rows, self.prompt = spec.batch.rows, spec.lengths.prompt
        self.read = self.prompt + spec.environment.read_tokens
        """Tokens of a row that are not sampled; those of an environment are counted from the row's begin on."""
        self.mean = sum(self.lengths) / self.rows
        self.alive_tokens = sum(length * length for length in self.lengths) / sum(self.lengths) / 2
        """Mean tokens of the completion of a row that decodes: long ones decode for longer."""
        self.engines, self.learners = cache(self._engines), cache(self._learners)
        self._alone_s = cache(self._generation_alone_s)

    @property
    def room_bytes(self) -> float:
        """Bytes of a device that a plan may fill."""
        return self.spec.search.memory_share * self.device.memory_bytes - memory.CONTEXT

    @property
    def row_tokens(self) -> int:
        """Tokens of a row in the mean."""
        return round(self.read + self.mean)

    def place(self, layout: Layout, efficiency: Efficiency, model: ModelCosts | None = None) -> Place:
        """model: None for the policy."""
        spread = layout.devices > self.spec.cluster.devices_per_node
        return Place(model=model or self.policy, device=self.device, layout=layout, spread=spread, efficiency=efficiency)

    def engine(self, tensor: int) -> Place:
        return self.place(Layout(tensor=tensor), self.spec.efficiency.of_inference)

    def _tensors(self, count: int) -> list[int]:
        """Powers of two within a node that divide heads and devices."""
        sizes = powers(min(count, self.spec.cluster.devices_per_node))
        return [size for size in sizes if count % size == 0 and self.policy.heads % size == 0]

    # -- generation --------------------------------------------------------------------------------------------------

    def _engines(self, count: int, room: float, ahead: int) -> Engines | None:
        """The fastest on `count` devices: also by its longest row, which `ahead` batches have time for. None where that row
        finds no room. room: bytes of a device for weights and cache."""
        found = [each for tensor in self._tensors(count) for each in self._of_tensor(count, tensor, room, ahead)]
        return min(found, key=lambda each: max(each.busy_s, each.span_s / (ahead + 1)), default=None)

    def _of_tensor(self, count: int, tensor: int, room: float, ahead: int) -> Iterator[Engines]:
        """With no batch ahead one has the engines for itself. Else rows of several share them: more slots decode more rows in a
        step, and each of them, the longest too, takes longer."""
        weights = self.policy.weight_bytes / tensor
        token_bytes = self.policy.kv_bytes_per_token / min(tensor, self.policy.kv_heads)
        if room - weights < token_bytes * self.spec.row_tokens:
            return
        row_bytes = token_bytes * (self.read + self.alive_tokens)
        most = _rounded(min(self.spec.search.slots, max(int((room - weights) / row_bytes), 1)))
        fewer = [size for size in powers(most - 1) if size >= _LEAST_SLOTS] if ahead else []
        layout = Layout(tensor=tensor, data=count // tensor)
        for slots in (most, *fewer):
            busy_s, span_s = self._shared_s(layout, slots, ahead) if ahead else (self._alone_s(layout, slots),) * 2
            yield Engines(
                layout=layout, slots=slots, busy_s=busy_s, span_s=span_s, bytes_per_device=weights + slots * row_bytes
            )

    def _shared_s(self, layout: Layout, slots: int, ahead: int) -> tuple[float, float]:
        """Busy and span of a batch among rows of others."""
        rows = self.rows / layout.data
        alive = max(min(slots, ahead * rows), 1.0)
        step = decode_step_s(self.engine(layout.tensor), math.ceil(alive), self.read + self.alive_tokens)
        prefill = self._prefill_s(layout.tensor, math.ceil(rows))
        span = max(self.lengths) * step + prefill + self.spec.environment.waits_s
        return rows * self.mean / alive * step + prefill, span

    def _generation_alone_s(self, layout: Layout, slots: int) -> float:
        seconds = replica_s(
            self.engine(layout.tensor),
            self.lengths,
            layout.data,
            prompt_tokens=self.read,
            slots=slots,
            prefill_s=lambda rows: self._prefill_s(layout.tensor, rows),
        )
        return seconds + self.spec.environment.waits_s

    def _prefill_s(self, tensor: int, rows: int) -> float:
        """Prompts of a group are computed once, what an environment answers for each row."""
        place, environment = self.engine(tensor), self.spec.environment
        prompts = prefill_s(place, math.ceil(rows / self.spec.batch.group_size), self.prompt)
        if not environment.read_tokens:
            return prompts
        return prompts + prefill_s(place, rows * (environment.turns - 1), environment.observation_tokens)

    def queued_groups(self, engines: Engines, ahead: int) -> int:
        """Groups beyond its slots that an actor holds, so that the slots stay full: rows of a group end one by one, and it
        counts until its longest has ended. By Little's law slots · (longest of a group + waits) / mean rows are then begun, as
        far as `ahead` batches have so many."""
        size, rows = self.spec.batch.group_size, self.rows
        # The longest of n draws lies below a quantile q with the probability q^n.
        shares = [((rows - row) / rows) ** size - ((rows - row - 1) / rows) ** size for row in range(rows)]
        longest = sum(length * share for length, share in zip(self.lengths, shares, strict=True))
        step = decode_step_s(self.engine(engines.layout.tensor), engines.slots, self.read + self.alive_tokens)
        own = math.ceil(engines.slots / size)
        wanted = math.ceil(own * (longest + self.spec.environment.waits_s / step) / self.mean)
        there = math.ceil((ahead + 1) * self.spec.batch.groups / engines.layout.data)
        return max(0, min(wanted, there) - own)

    # -- passes over a batch -----------------------------------------------------------------------------------------

    def _learners(self, count: int, holds_reference: bool) -> tuple[Passes, ...]:
        """Those that no other beats in time and memory, the fastest first."""
        found = [self._learner(layout, holds_reference) for layout in self._learner_layouts(count)]
        front: list[Passes] = []
        for each in sorted(found, key=lambda passes: (passes.total_s, passes.bytes_per_device)):
            if not front or each.bytes_per_device < front[-1].bytes_per_device:
                front.append(each)
        return tuple(front)

    def _learner_layouts(self, count: int) -> Iterator[Layout]:
        """Data parallelism by ZeRO, or all devices one tensor or one sequence group."""
        groups = self.spec.batch.groups // self.spec.batch.updates_per_step
        contexts = powers(min(count, self.spec.cluster.devices_per_node)) if self.spec.row_tokens >= _LONG_ROW else [1]
        for tensor, context in product(self._tensors(count), contexts):
            data = count // (tensor * context)
            alone = tensor in (1, count) and context in (1, count) and data * tensor * context == count
            if not alone or count > _MOST_RANKS or data > groups:  # a rank trains on whole groups
                continue
            stages = (1, 2, 3) if data * context > 1 else (0,)
            micro = powers(min(math.ceil(groups * self.spec.batch.group_size / data), _MOST_MICRO_ROWS))
            for zero_stage, recompute, micro_rows in product(stages, (False, True), micro):
                yield Layout(
                    tensor=tensor, context=context, data=data, zero_stage=zero_stage, micro_rows=micro_rows, recompute=recompute
                )

    def _learner(self, layout: Layout, holds_reference: bool) -> Passes:
        batch, tokens, efficiency = self.spec.batch, self.row_tokens, self.spec.efficiency
        updates, place = batch.updates_per_step, self.place(layout, efficiency.of_training)
        # Of an update: the rank with the most groups sets the pace.
        rows = math.ceil(batch.groups // updates / layout.data) * layout.data * batch.group_size
        micro = layout.micro_batches(rows)
        seconds = {"train": updates * training_s(place, rows, tokens, micro_batches=micro)}
        if self.spec.proximal_pass:
            seconds["proximal"] = inference_s(place, rows * updates, tokens, micro_batches=micro * updates)
        if self.spec.models.critic:
            values = self.place(layout, efficiency.of_inference)
            seconds |= {"critic": seconds["train"], "values": inference_s(values, rows * updates, tokens, head=False)}
        if holds_reference:
            # Whole on each rank, tensor groups too; with ZeRO-3 divided over all, and gathered for each pass.
            held = self.place(Layout(context=layout.context, data=layout.data), efficiency.of_inference)
            gathers = micro * updates if layout.zero_stage == 3 else 0
            gathered = gathers * held.far.gather_s(self.policy.weight_bytes, layout.devices)
            seconds["reference"] = inference_s(held, rows * updates, tokens) + gathered
        settings = LearnerConfig.model_validate(self.learner_settings(layout))
        reference = self.policy.parameters if holds_reference else 0
        parts = memory.learner(settings, self.shape, self.generation_settings, reference=reference)
        return Passes(layout=layout, seconds=seconds, bytes_per_device=sum(parts.values()))

    def scorers(self, count: int) -> Passes:
        """A reference and a reward model, where there are; whole on each of `count` devices."""
        layout, seconds, held = Layout(data=count), dict[str, float](), 0.0
        for name, model in (("reference", self.policy if self.spec.loss.needs_reference else None), ("reward", self.reward)):
            if model is not None:
                place = self.place(layout, self.spec.efficiency.of_inference, model)
                seconds[name] = inference_s(place, self.rows, self.row_tokens, head=name == "reference")
                held += model.weight_bytes + 2 * 8 * _PASS_TOKENS * model.hidden
        return Passes(layout=layout, seconds=seconds, bytes_per_device=held + _LOGITS_BYTES)

    # -- as sections of a configuration ------------------------------------------------------------------------------

    @property
    def generation_settings(self) -> GenerationConfig:
        spec = self.spec
        return GenerationConfig(
            group_size=spec.batch.group_size,
            max_prompt_length=self.prompt,
            max_completion_length=spec.lengths.longest,
            max_episode_length=None if spec.environment.turns == 1 else spec.row_tokens - self.prompt,
        )

    @property
    def shape(self) -> ModelShape:
        """The policy's sizes, as `check` has them."""
        model = self.policy
        return ModelShape(
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
        """Data-parallel ranks and tensor groups are DeepSpeed's."""
        settings: dict[str, Any] = {
            "device": "cuda",
            "dtype": "bfloat16",
            "batch_size": self.rows,
            "updates_per_step": self.spec.batch.updates_per_step,
            "micro_batch_tokens": layout.micro_rows * self.row_tokens,
            "gradient_checkpointing": layout.recompute,
            "ranks": layout.devices,
        }
        if self.spec.models.critic:
            settings["critic"] = {"kind": "model"}
        if self.spec.loss.needs_reference:
            settings["reference_dtype"] = "bfloat16"
        if layout.devices > 1:
            settings |= {"backend": "deepspeed", "zero_stage": layout.zero_stage or 1, "tensor_parallel": layout.tensor}
            if layout.context > 1:
                settings["sequence_parallel"] = layout.context
        return settings


def powers(most: int) -> list[int]:
    """Powers of two, up to `most`."""
    return [1 << power for power in range(most.bit_length())] if most else []


def _rounded(slots: int) -> int:
    """Down to three binary digits, so that few different ones are computed."""
    step = 1 << max(slots.bit_length() - 3, 0)
    return slots // step * step
