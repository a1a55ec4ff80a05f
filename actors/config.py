"""Settings of the actors' wing: generation, rewards, scoring; those of the engine, prompts, environments and the reference
stand in their rooms. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator, field_validator

from async_rlhf.actors.reference import ReferenceConfig
from async_rlhf.actors.rewards import RewardSpec, check_columns, resolve
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.config import Section
from async_rlhf.buffers.errors import ConfigError, RewardError, did_you_mean
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.stages import GENERATION

REFERENCE = "reference"
"""The stage of the reference model."""


class GenerationConfig(Sampling):
    """Number and lengths of the completions of each prompt, beside the settings of `Sampling`."""

    model_config = ConfigDict(strict=False)

    group_size: int = Field(default=8, ge=1, le=65536)
    """Completions per prompt."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Longest prompt in tokens; `data.on_overlong` decides about a longer one."""
    max_completion_length: int = Field(default=256, ge=1)
    """Longest completion in tokens, the end token included; with an environment the longest turn."""
    max_episode_length: int | None = Field(default=None, ge=1)
    """With an environment: longest episode in tokens, with what is read (with `environment.render = "split"` each whole
    conversation; of an agent all of them). It ends when the next turn would exceed it. `"none"`: `max_completion_length`."""
    temperature: float = Field(default=1.0, gt=0, le=100)
    """Sampling temperature; evaluation is greedy, unless a reward receives whole groups."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token after which its text contains one of these."""
    on_update: Literal["keep", "interrupt", "finish"] = "keep"
    """When weights arrive running sequences `keep` their caches, are `interrupt`ed to compute their prefixes again, or `finish`
    before adoption."""

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if not all(stop):
            raise ValueError("a stop string is empty: it would end every completion at its first token")
        return stop

    @property
    def longest_completion(self) -> int:
        """Tokens that may stand behind a prompt."""
        return self.max_episode_length or self.max_completion_length

    @property
    def sampling(self) -> Sampling:
        """Those settings alone."""
        return Sampling(**{name: getattr(self, name) for name in Sampling.model_fields})


class RewardsConfig(Section):
    """Who judges completions, how their scores become a reward, and what happens when a judge fails."""

    functions: tuple[str, ...] = ("reasoning_gym",)
    """Built-in names, import paths (`package.module:name`) or files (`path.py:name`); before them `own_name=...`, and `FORM:`
    (trl, verl, openrlhf, gym) for another system's that cannot be recognised."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By reward name: values for those of its parameters that are no columns (`regex = { pattern = "..." }`)."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward by name; where not given, that of `@reward(weight=...)`, else 1.0."""
    combine: Literal["sum", "product"] = "sum"
    """What is made of the weighted scores."""
    gates: tuple[str, ...] = ()
    """Where one of these rewards is not above 0, the whole is 0."""
    clip: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """By reward name: lowest and highest value that counts; `reward` clips the whole."""
    normalise: tuple[str, ...] = ()
    """Rewards given in running standard deviations from their running mean."""
    by_source: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    """By `source` of a row: the rewards that judge it, with their weights there (`maths = { exact = 1.0, brief = 0.5 }`;
    `"none"`, or a list of names: their usual ones; an empty list where its environment judges alone). The others are not
    called. Rows of other sources are judged by all."""
    max_failed_ratio: float = Field(default=0.25, ge=0, le=1)
    """The run stops when more than this share of the last scores failed."""

    @field_validator("by_source", mode="before")
    @classmethod
    def _with_weights(cls, by_source: Any) -> Any:
        if not isinstance(by_source, dict):
            return by_source
        return {source: _table(rewards) for source, rewards in by_source.items()}

    def specs(self, base_dir: Path, stages: Mapping[str, StageConfig]) -> tuple[RewardSpec, ...]:
        """The rewards, proven to be loadable (`async_rlhf.actors.rewards.resolve`); raises ConfigError for one that is not.

        stages: those of `ScoringConfig`, which override `@reward(...)`.
        """
        settings = {name: stage.given for name, stage in stages.items() if name != REFERENCE}
        try:
            specs = resolve(self.functions, base_dir, self.options, settings)
        except (RewardError, ConfigError) as error:  # before the start a reward that cannot be loaded is a wrong setting
            raise ConfigError(f"{error}{self._default}") from error
        names = [spec.name for spec in specs]
        if unknown := set(stages) - {*names, REFERENCE}:
            name = min(unknown)
            hint = did_you_mean(name, [*names, REFERENCE])
            raise ConfigError(f"scoring.stages.{name}: there is no stage of this name; {hint}")
        if taken := {REFERENCE, GENERATION}.intersection(names):
            raise ConfigError(f'a reward is called {min(taken)!r}, as a stage of every run is; rename it ("other_name=...")')
        self._check_by_source(names)
        return specs

    def check_columns(self, specs: Iterable[RewardSpec], source: str | None, columns: AbstractSet[str]) -> None:
        """columns: those of every row of this source. Raises ConfigError where what judges it asks for another."""
        chosen = self.by_source.get(source or "")
        for spec in specs:
            if spec.name != REFERENCE and (chosen is None or spec.name in chosen):
                try:
                    check_columns(spec, columns)
                except ConfigError as error:
                    raise ConfigError(f"{error}{self._default}") from error

    @property
    def _default(self) -> str:
        return "" if "functions" in self.model_fields_set else f" (rewards.functions = {list(self.functions)} by default)"

    def _check_by_source(self, names: Sequence[str]) -> None:
        for source, chosen in self.by_source.items():
            if unknown := [name for name in chosen if name not in names]:
                hint = did_you_mean(unknown[0], names)
                raise ConfigError(f"rewards.by_source.{source} names {unknown[0]!r}, which is no reward of this run; {hint}")

    @property
    def composition(self) -> Composition:
        """How the scores of a rollout become its reward."""
        own = {
            source: {name: weight for name, weight in chosen.items() if weight is not None}
            for source, chosen in self.by_source.items()
        }
        return Composition(self.weights, self.combine, self.gates, self.clip, self.normalise, own)


def _table(rewards: Any) -> Any:
    """The rewards of a source with their weights there: None for those that are only named."""
    if isinstance(rewards, dict):
        return {name: None if weight == "none" else weight for name, weight in rewards.items()}
    names = [rewards] if isinstance(rewards, str) else rewards
    return {str(name): None for name in names} if isinstance(names, list | tuple) else rewards


class StageConfig(Section):
    """How one stage of scoring runs. Of a reward it overrides its own `@reward(...)`: see `actors/rewards/settings.py`."""

    placement: Literal["learner", "actor", "process"] | None = None
    """Beside each `actor`, or in one `process` for all actors of the machine; else as `scoring.placement`. `reference`:
    computed by the `learner` unless set, or teachers are named."""

    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds one call may take."""
    retries: int | None = Field(default=None, ge=0)
    """Times a call is made again after an error that may pass."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Calls at once, of one actor."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Calls in any 60 seconds, of one actor."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens in any 60 seconds, of one actor."""
    batch_size: int | None = Field(default=None, ge=1)
    """Completions given at once to a reward that takes lists."""
    workers: int | None = Field(default=None, ge=0, le=1024)
    """Processes of its own for a synchronous reward."""
    stream_tokens: int | None = Field(default=None, ge=0)
    """Score incrementally every so many tokens, where the reward can (`reward_model`); 0: at the end."""

    @property
    def given(self) -> dict[str, Any]:
        """Those that were set, as `@reward` calls them."""
        return {name: value for name, value in self.model_dump(exclude={"placement"}).items() if value is not None}


class ScoringConfig(Section):
    """How completions are scored, stage by stage."""

    placement: Literal["actor", "process"] = "actor"
    """Rewards run in worker processes of each `actor`, or of one scorer `process` for all actors of the machine, which loads a
    model once; limits of one actor then hold for the machine."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds one call may take; past it the worker is killed and the score is failed."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Worker processes of each actor for synchronous rewards."""
    worker_memory_mb: int | None = Field(default=4096, ge=256)
    """Most MB of each of them, of each program it starts, and of the process of asynchronous rewards; beyond it the score is
    failed. `"none"`: no limit; none for a process that loads a model (`prepare`). Linux."""
    max_concurrency: int = Field(default=256, ge=1)
    """Calls of asynchronous rewards in flight per actor."""
    stages: dict[str, StageConfig] = Field(default_factory=dict)
    """By name of a reward, or `reference`."""
    reference: ReferenceConfig = ReferenceConfig()

    @property
    def reference_is_stage(self) -> bool:
        """Whether actors compute the reference's log-probabilities."""
        return self.placement_of(REFERENCE) != "learner"

    def placement_of(self, name: str) -> Literal["learner", "actor", "process"]:
        """Where a stage runs."""
        own = self.stages[name].placement if name in self.stages else None
        return own or ("learner" if name == REFERENCE and not self.reference.teachers else self.placement)

    def in_process(self, name: str) -> bool:
        """Whether a stage runs in the scorer process."""
        return self.placement_of(name) == "process"


def _count(value: Any) -> int | Literal["fill"]:
    if value == "fill":
        return "fill"
    if type(value) is int and 1 <= value <= 1024:
        return value
    raise ValueError('it is a whole number from 1 to 1024, or "fill"')


class ActorsConfig(Section):
    """How many actors, and what each holds."""

    count: Annotated[int | Literal["fill"], PlainValidator(_count)] = 1
    """Actor processes, 1 to 1024; `"fill"`: as many as fit on the devices (on CPUs: beside the hub and the learner)."""
    queued_groups: int = Field(default=8, ge=0)
    """Groups an actor requests beyond what its slots hold, so that a freed slot is refilled at once."""
