"""The whole configuration: the sections of all floors, and what follows from several of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import Field, SerializeAsAny, model_validator

from async_rlhf.actors.config import ActorsConfig, GenerationConfig, RewardsConfig, ScoringConfig
from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.engine_config import EngineConfig
from async_rlhf.actors.environments import EnvironmentConfig
from async_rlhf.buffers.config import QueueConfig, Section, SecurityConfig, WeightsConfig
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.launch.config import LaunchConfig, PlacementConfig
from async_rlhf.learner.config import (
    AdvantageConfig,
    CheckpointConfig,
    GuardConfig,
    LearnerConfig,
    LossConfig,
)
from async_rlhf.learner.loop.budget import Budget
from async_rlhf.run.watching import EvaluationConfig, HooksConfig, TrackingConfig

# More than any run reaches: groups of a run without `max_steps`, and numbers where the data have no end, for filtered groups
# use them up.
_ENDLESS = 1 << 62


class Config(Section):
    """One run. Sections belong to the floor that reads them."""

    name: str = Field(default="run", min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """Name of the run directory under `output_dir`; it begins with a letter, a digit or `_`."""
    output_dir: str = "runs"
    """Where run directories are made."""
    model: str
    """A Hugging Face causal language model: a directory, a GGUF file (converted once), a Hub name (`owner/name`,
    `owner/name@revision`: cached, or fetched once), or the shipped `tiny-speller`."""
    seed: int = Field(default=0, ge=0, lt=1 << 62)
    """Decides prompts' order and every random number of generation."""
    max_steps: int | None = Field(default=None, ge=1)
    """Learner steps of the run, unless data or a budget end first. `"none"`: until those do, or it is stopped."""
    max_trained_tokens: int | None = Field(default=None, ge=1)
    """The run ends with the step that reaches so many completion tokens trained on; untrained ones do not count."""
    max_seconds: float | None = Field(default=None, ge=1)
    """The run ends with the step at which the sum of `step_time` over all its starts reaches this."""
    address: str = ""
    """Where the hub listens beside its private ipc socket: nowhere, at `tcp://127.0.0.1:PORT`, or with keys any `tcp://IP:PORT`."""
    sampled_groups: int = Field(default=1, ge=0)
    """Groups of every step written to `rollouts.jsonl`."""
    max_log_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """Bytes after which `rollouts.jsonl`, an actor's `spans` or a process's log begin anew; what was in them lies beside them
    (`NAME.1`) until they do again. `metrics.jsonl` is kept whole: two kilobytes a step."""
    disk_pause_bytes: int = Field(default=256 << 20, ge=0)
    """Bytes of free disk below which no further group is begun: what is being made is finished and trained on, then the run
    waits, and goes on by itself when there is room. Below four times as many the run reports it, and calls its hooks. 0: it
    goes on until the disk is full, and waits then."""
    stall_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds without a finished step after which the run ends with a stall report; those in which nothing is missing but
    prompts in the spool do not count."""
    watchdog_s: float = Field(default=120.0, gt=0)
    """Seconds a process of the run may be frozen; then it is killed and started again (before `stall_timeout_s`, or never)."""
    data: DataConfig
    generation: GenerationConfig = GenerationConfig()
    engine: SerializeAsAny[EngineConfig] = EngineConfig.model_validate({})
    environment: EnvironmentConfig = EnvironmentConfig()
    rewards: RewardsConfig = RewardsConfig()
    scoring: ScoringConfig = ScoringConfig()
    actors: ActorsConfig = ActorsConfig()
    placement: PlacementConfig = PlacementConfig()
    queue: QueueConfig = QueueConfig()
    weights: WeightsConfig = WeightsConfig()
    security: SecurityConfig = SecurityConfig()
    launch: LaunchConfig = LaunchConfig()
    learner: LearnerConfig = LearnerConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    hooks: HooksConfig = HooksConfig()

    @model_validator(mode="before")
    @classmethod
    def _judged_by_its_environment(cls, values: Any) -> Any:
        """With an environment there are no rewards but those that are named."""
        own = values.get("environment") if isinstance(values, dict) else None
        if isinstance(own, dict) and (own.get("function") or own.get("by_source")):
            rewards = values.get("rewards", {})
            if isinstance(rewards, dict) and "functions" not in rewards:
                return {**values, "rewards": {**rewards, "functions": []}}
        return values

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def groups_per_batch(self) -> int:
        return self.learner.batch_size // self.generation.group_size

    @property
    def usual_mismatch(self) -> float:
        """Limit of the mean |log-ratio| that rounding causes between learner and engine, with a margin; infinite where the
        engine samples from another distribution. The canary probes the model's."""
        if self.engine.off_policy:
            return math.inf
        return 0.01 if self.engine.dtype == self.learner.dtype == "float32" else 0.1

    @property
    def budget(self) -> Budget:
        return Budget(self.max_steps, self.max_trained_tokens, self.max_seconds)

    def bound(self, num_prompts: int) -> Bound:
        """The arithmetic of admission for a data set of `num_prompts` training prompts, or so many that have come so far.
        With a curriculum it has no numbers: they are those of the run's order."""
        groups = _ENDLESS if self.max_steps is None else self.max_steps * self.groups_per_batch
        refills = self.advantage.max_refills if self.advantage.constant_groups == "refill" else 0
        numbers = _ENDLESS if refills else groups
        coming = self.data.spool is not None or self.data.curriculum.is_on
        if self.data.spool is not None:
            numbers = num_prompts * self.data.repeat
        elif self.data.epochs is not None:
            numbers = min(numbers, self.data.epochs * num_prompts)
            groups = min(groups, numbers)
        if self.data.curriculum.is_on:
            numbers = 0
        return Bound(
            groups_per_batch=self.groups_per_batch,
            max_staleness=self.queue.max_staleness,
            num_groups=groups if coming else min(groups, numbers),
            publish_every=self.learner.publish_every,
            window=self.queue.window,
            exact=self.queue.exact,
            refills=refills,
            numbers=numbers,
            coming=coming,
        )

    def is_endless(self, bound: Bound) -> bool:
        """Whether neither `max_steps` nor the data end a run with this bound."""
        return bound.num_groups == _ENDLESS

    @property
    def held_reference(self) -> str | None:
        """The reference that the learner holds, the initial model or a teacher's directory; None where it holds none."""
        if not self.loss.needs_reference or self.scoring.reference_is_stage:
            return None
        return self.scoring.reference.path or self.model

    @property
    def asks_for_bits(self) -> bool:
        """Whether completions are to have the same bits, made again or not."""
        return self.queue.exact or self.queue.max_staleness == 0

    @property
    def bits_obstacle(self) -> str:
        """The setting for which that is not promised; empty where there is none."""
        if self.learner.device != "cpu":
            return f"learner.device = {self.learner.device!r}; only 'cpu' can"
        return self.engine.bits_obstacle

    @property
    def broadcasts(self) -> bool:
        """Whether weights are broadcast; where learner and engines share devices, `weights.transport = "device"` is `auto`."""
        return self.weights.transport == "device" and not self.no_broadcasts

    @property
    def no_broadcasts(self) -> str:
        """Why weights cannot be broadcast as they are asked to be; empty where nothing speaks against it."""
        shared = self.weights.transport == "device" and self.engine.device == "cuda" and self.placement.colocates
        return "learner and engines share devices, and nccl takes one process a device" if shared else ""

    @property
    def served_engine(self) -> EngineConfig:
        """The engine's settings with what follows from others."""
        share = self.placement.actor_share if self.placement.colocates else None
        return self.engine.served(asks_for_bits=self.asks_for_bits, share=share)

    @property
    def actor_capacity(self) -> int:
        """Groups one actor may hold in its engine: what its slots take, and a few waiting."""
        return -(-self.engine.slots // self.generation.group_size) + self.actors.queued_groups
