"""The dials of the actors' wing: data, generation, engine, rewards. No torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, Field

from buffers.composition import Composition
from buffers.config import Section


class DataConfig(Section):
    """Where prompts come from."""

    source: str
    """`reasoning_gym:<task>`, or the path of a JSONL file with one object a line."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning-gym task (`min_word_len = 3`)."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Renames: our name = the file's name (`prompt = "question"`)."""
    template: str = "{prompt}"
    """Text given to the model; `{prompt}` and any other column may appear."""
    size: int = Field(default=4096, ge=1)
    """Number of training prompts to draw from a procedural task; a file gives what it holds."""
    held_out: int = Field(default=200, ge=0)
    """Number of prompts kept out of training for evaluation (drawn first, never trained on)."""
    held_out_seed: int = 1_000_003
    """Seed of a procedural task's held-out prompts: fixed, so that runs with different seeds share the test set."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training prompts; without it the stream goes on until `max_steps`."""


class GenerationConfig(Section):
    """What is sampled for each prompt."""

    group_size: int = Field(default=8, ge=1, validation_alias=AliasChoices("group_size", "num_generations"))
    """Completions per prompt (alias `num_generations`)."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Longest prompt in tokens; a longer one is refused before the run starts."""
    max_completion_length: int = Field(default=256, ge=1)
    """Longest completion in tokens, the end token included."""
    temperature: float = Field(default=1.0, gt=0, le=100)
    """Sampling temperature; evaluation is greedy."""


class EngineConfig(Section):
    """The machine that turns prompts into tokens."""

    kind: Literal["torch"] = "torch"
    """`torch`: the built-in engine."""
    slots: int = Field(default=128, ge=1)
    """Sequences decoded together."""
    device: str = "cpu"
    """Torch device of the engine."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights and activations; log-probabilities are float32 always."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of one actor's engine."""
    canary_limit: float | None = Field(default=None, gt=0)
    """Largest difference, in nats a token, between what the learner and the engine say of the same probe under the same
    weights; above it the actor refuses to generate. `"none"`: 0.001 in float32, 0.5 in 16 bits."""

    @property
    def canary_tolerance(self) -> float:
        """The limit in force."""
        return self.canary_limit or (1e-3 if self.dtype == "float32" else 0.5)


class RewardsConfig(Section):
    """Who judges completions, how their scores become a reward, and what happens when a judge fails."""

    functions: tuple[str, ...] = ("reasoning_gym",)
    """Built-in names, import paths (`package.module:name`) or files (`path.py:name`); `own_name=...` before any of them,
    and `FORM:` (trl, verl, openrlhf, gym, verifiers) before one that was written for another system and does not show it."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By reward name: values for those of its parameters that are no columns (`regex = { pattern = "..." }`)."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward by name; where not given, what `@reward(weight=...)` says, else 1.0."""
    combine: Literal["sum", "product"] = "sum"
    """What is made of the weighted scores."""
    gates: tuple[str, ...] = ()
    """Rewards that only open or close: where one of them is not above 0, the whole is 0."""
    clip: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """By reward name: lowest and highest value that counts; `reward` clips the whole."""
    normalise: tuple[str, ...] = ()
    """Rewards that are measured in running standard deviations from their running mean (a reward model's, for example)."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds one call may take; past it the worker is killed and the score is failed."""
    workers: int = Field(default=1, ge=1)
    """Worker processes of each actor for synchronous rewards."""
    max_concurrency: int = Field(default=256, ge=1)
    """Calls of asynchronous rewards in flight per actor."""
    max_failed_ratio: float = Field(default=0.25, ge=0, le=1)
    """The run stops when more than this share of the last scores failed."""

    @property
    def composition(self) -> Composition:
        """How the scores of a rollout become its reward."""
        return Composition(self.weights, self.combine, self.gates, self.clip, self.normalise)


class ActorsConfig(Section):
    """How many actors, and what each holds."""

    count: int = Field(default=1, ge=1, le=1024)
    """Actor processes."""
    queued_groups: int = Field(default=8, ge=0)
    """Groups an actor asks for beyond what its slots hold, so that a freed slot is refilled at once."""
    restart_backoff_s: float = Field(default=0.5, ge=0)
    """First pause before a dead actor is started again; doubles up to 30 s."""
