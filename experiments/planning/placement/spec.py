"""The question of a plan: models, cluster, lengths, batch, loss, reward, and what the search may choose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from async_rlhf.buffers.config import Section
from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.parsing import json_value
from async_rlhf.experiments.planning.model import model_costs
from async_rlhf.experiments.planning.model.model_costs import ModelCosts
from async_rlhf.experiments.planning.model.stages import Device, Efficiency, catalogue
from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.registry import loss_spec
from async_rlhf.run.config_keys import explain
from async_rlhf.run.loading import read_toml
from async_rlhf.run.run_files import read_lines
from async_rlhf.run.shipped import by_name, plans

ModelName = str | dict[str, Any]
_STEPS_OF_WIDTH = 60
_MOST_ROWS = 1 << 17  # each of them is followed; so many take a minute


class ModelsConfig(Section):
    """A model is a directory with a `config.json`, such a file, or its content as a table. Files are found beside the spec."""

    policy: ModelName
    """The model that is trained and generates."""
    critic: bool = False
    """Whether a model of values is trained beside the policy (PPO); it begins as a copy of it."""
    reward: ModelName | None = None
    """A reward model, which judges every completion."""


class ClusterConfig(Section):
    """Equal devices in equal nodes."""

    device: str = "H100"
    """A name of the catalogue (`async-rlhf plan --devices`), or `own`."""
    devices_per_node: int = Field(default=8, ge=1, le=72)
    nodes: int = Field(default=1, ge=1, le=1024)
    own: Device | None = None
    """With `device = "own"`: its peaks and links, by the keys of the catalogue; `async-rlhf try machine` measures them."""

    @model_validator(mode="after")
    def _of_one_kind(self) -> ClusterConfig:
        known = catalogue()
        if self.device != "own" and self.device not in known:
            raise ValueError(f"device {self.device!r} is not in the catalogue; {did_you_mean(self.device, known)}")
        if (self.own is not None) != (self.device == "own"):
            raise ValueError('device = "own" needs cluster.own, and only it takes it')
        return self

    @property
    def size(self) -> int:
        return self.nodes * self.devices_per_node


class LengthsConfig(Section):
    """Tokens of prompts and completions. Completions: `mean` and `spread` of a log-normal, or a run's file."""

    prompt: int = Field(default=512, ge=1)
    """Tokens of each prompt."""
    longest: int = Field(ge=1)
    """Tokens of a completion, where generation is cut: `generation.max_completion_length`."""
    mean: float | None = Field(default=None, ge=1)
    """Mean of the completions, those that are cut among them; below `longest`."""
    spread: float = Field(default=0.7, ge=0, le=3)
    """Standard deviation of the logarithm of a length before it is cut; 0: all are equally long."""
    rollouts: str | None = None
    """`rollouts.jsonl` of a run: the lengths of its completions."""

    @model_validator(mode="after")
    def _one_source(self) -> LengthsConfig:
        if (self.mean is None) == (self.rollouts is None):
            raise ValueError(f"{'neither' if self.mean is None else 'each'} of mean and rollouts is given; give exactly one")
        if self.mean is not None and self.mean >= self.longest and self.spread:
            raise ValueError(f"mean = {self.mean:g} must be below longest = {self.longest}, where completions are cut")
        return self

    def batch(self, rows: int) -> tuple[int, ...]:
        """The lengths of `rows` completions, descending: the quantiles (i + 1/2) / rows. Raises ConfigError for a file without
        completions."""
        shares = [(row + 0.5) / rows for row in range(rows)]
        if self.mean is not None:
            found = _log_normal(self.mean, self.spread, self.longest, shares)
        else:
            lengths = _lengths_of(Path(self.rollouts or ""))
            found = [min(lengths[math.ceil(share * len(lengths)) - 1], self.longest) for share in shares]
        return tuple(sorted(found, reverse=True))


class BatchConfig(Section):
    """The batch of one step: 131,072 completions at most."""

    groups: int = Field(default=64, ge=1)
    group_size: int = Field(default=8, ge=1)
    updates_per_step: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _whole_updates(self) -> BatchConfig:
        if self.rows > _MOST_ROWS:
            raise ValueError(
                f"groups = {self.groups} of group_size = {self.group_size} are more than the {_MOST_ROWS} completions a step "
                f"that can be planned; nearest: groups = {max(1, _MOST_ROWS // self.group_size)}"
            )
        if self.groups % self.updates_per_step:
            most = min(self.groups, self.updates_per_step)
            near = max(number for number in range(1, most + 1) if self.groups % number == 0)
            raise ValueError(
                f"updates_per_step = {self.updates_per_step} must divide groups = {self.groups}: an update takes whole "
                f"groups; nearest: {near}"
            )
        return self

    @property
    def rows(self) -> int:
        return self.groups * self.group_size


class RewardCostConfig(Section):
    """The time of a reward beside models."""

    seconds: float = Field(default=0.0, ge=0)
    """Seconds of one completion, from its end to its score: a verifier, a sandbox, a judge over the network."""
    concurrency: int = Field(default=256, ge=1)
    """Completions judged at once."""


class EnvironmentCostConfig(Section):
    """The waits between the turns of an episode: tools, a sandbox, a game."""

    turns: int = Field(default=1, ge=1)
    """Turns of an episode, in the mean; the completion tokens of `lengths` are those of all its turns."""
    seconds: float = Field(default=0.0, ge=0)
    """From the end of a turn to the answer of the environment. The engine's slot serves other rows meanwhile."""
    observation_tokens: int = Field(default=0, ge=0)
    """Tokens of each answer: they are read, and not trained on."""

    @property
    def read_tokens(self) -> int:
        """Tokens of a whole episode's answers."""
        return (self.turns - 1) * self.observation_tokens

    @property
    def waits_s(self) -> float:
        """Seconds of a whole episode's waits."""
        return (self.turns - 1) * self.seconds


class EfficiencyConfig(Section):
    """Shares of the device's peaks that are reached. Measured ones are better: `async-rlhf plan SPEC.toml --from-run RUN`."""

    training: float = Field(default=0.4, gt=0, le=1)
    """Share of the arithmetic peak, in training."""
    inference: float = Field(default=0.5, gt=0, le=1)
    """The same in prefill and in passes of reference, reward and value models."""
    decode: float = Field(default=0.6, gt=0, le=1)
    """Share of the memory bandwidth, in decoding."""
    links: float = Field(default=0.7, gt=0, le=1)
    """Share of the links."""
    launch_s: float = Field(default=0.004, ge=0)
    """Seconds that a decode step takes besides."""
    weights_bytes_per_s: float = Field(default=0.73e9, gt=0)
    """Speed of the weight channel, from the host's memory until an actor can adopt: measured on two cores, over loopback
    (docs/weights.md)."""

    @property
    def of_training(self) -> Efficiency:
        return Efficiency(flops=self.training, memory=self.decode, links=self.links)

    @property
    def of_inference(self) -> Efficiency:
        return Efficiency(flops=self.inference, memory=self.decode, links=self.links, launch_s=self.launch_s)


class SearchConfig(Section):
    """The choices of the search."""

    max_staleness: tuple[int, ...] = (0, 1, 2, 4, 8)
    """Bounds that may be used, in steps."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of a device's memory that a plan may fill."""
    slots: int = Field(default=256, ge=1)
    """Most completions that one engine decodes at once."""

    @field_validator("max_staleness")
    @classmethod
    def _bounds(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if not values or any(not 0 <= value <= 1024 for value in values):
            raise ValueError(f"max_staleness = {list(values)}: one or more of 0 to 1024")
        return tuple(sorted(set(values)))


class Spec(Section):
    """A file for `async-rlhf plan`."""

    models: ModelsConfig
    cluster: ClusterConfig = ClusterConfig()
    lengths: LengthsConfig
    batch: BatchConfig = BatchConfig()
    loss: LossConfig = LossConfig()
    """As in a configuration: it decides whether a reference is wanted, and whether the policy at the start of a step."""
    reward: RewardCostConfig = RewardCostConfig()
    environment: EnvironmentCostConfig = EnvironmentCostConfig()
    efficiency: EfficiencyConfig = EfficiencyConfig()
    search: SearchConfig = SearchConfig()

    @property
    def row_tokens(self) -> int:
        """The most that a row may have."""
        return self.lengths.prompt + self.environment.read_tokens + self.lengths.longest

    @property
    def proximal_pass(self) -> bool:
        """Whether a step computes log-probabilities before its first update in a pass of its own."""
        needs = "proximal" in loss_spec(self.loss.kind).needs
        return needs and self.loss.proximal == "recompute" and self.batch.updates_per_step > 1


def read(path: Path) -> Spec:
    """Raises ConfigError: the file, the key, its value, the limit and the nearest valid choice."""
    return parse(read_toml(path, "spec", by_name(plans())), path.resolve().parent)


def parse(values: Mapping[str, Any], directory: Path) -> Spec:
    """directory: where relative paths begin. Raises ConfigError."""
    found = {name: dict(table) if isinstance(table, Mapping) else table for name, table in values.items()}
    files = {"models": ("policy", "reward"), "lengths": ("rollouts",)}
    for section, key in ((section, key) for section, keys in files.items() for key in keys):
        table = found.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = str(directory / table[key])
    try:
        return Spec.model_validate(found)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(problem, Spec) for problem in error.errors())) from None


def costs_of(model: ModelName) -> ModelCosts:
    """Raises ConfigError for a file that is missing or no configuration of a known family."""
    if not isinstance(model, str):
        return model_costs.read(model)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        return model_costs.read(dict(json_value(path.read_text())))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"no model configuration at {str(path)!r} ({error}): name a directory with a config.json, or give its content as a "
            "table"
        ) from None


def _log_normal(mean: float, spread: float, longest: int, shares: Sequence[float]) -> list[int]:
    """The logarithm's mean by bisection, so that the cut lengths have this mean."""

    def cut(log_mean: float) -> list[float]:
        return [min(max(math.exp(log_mean + spread * point), 1.0), longest) for point in points]

    points = [NormalDist().inv_cdf(share) for share in shares]
    low, high = math.log(mean) - 10 * spread - 1, math.log(longest) + 10 * spread + 1
    for _ in range(_STEPS_OF_WIDTH):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle)) < mean * len(points) else (low, middle)
    return [round(length) for length in cut(high)]


def _lengths_of(path: Path) -> list[int]:
    """Ascending."""
    found = [length for line in read_lines(path) for length in _of_group(line)]
    if not found:
        raise ConfigError(f"lengths.rollouts = {str(path)!r}: no completions in it; name the rollouts.jsonl of a run")
    return sorted(found)


def _of_group(line: dict[str, Any]) -> list[int]:
    rollouts = line.get("rollouts")
    tokens = [each.get("tokens") for each in rollouts if isinstance(each, dict)] if isinstance(rollouts, list) else []
    return [len(each) for each in tokens if isinstance(each, list) and each]
