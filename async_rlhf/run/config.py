"""The whole configuration: nests the floors' sections, loads TOML or values from Python, applies overrides.

Everything here is checked (`config_checks`) before torch is imported and before any process starts. Relative paths in a file
are relative to that file; on the command line and in Python they are relative to the working directory; `output_dir` always is.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field, SerializeAsAny, ValidationError, model_validator

from async_rlhf.actors.config import ActorsConfig, GenerationConfig, RewardsConfig, ScoringConfig
from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.engine_config import EngineConfig
from async_rlhf.actors.environments import EnvironmentConfig
from async_rlhf.buffers.config import REVEALED, QueueConfig, Section, SecurityConfig, WeightsConfig
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.parsing import toml_table
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.launch.config import LaunchConfig, PlacementConfig
from async_rlhf.learner.config import (
    AdvantageConfig,
    CheckpointConfig,
    FunctionSection,
    GuardConfig,
    LearnerConfig,
    LossConfig,
)
from async_rlhf.learner.loop.budget import Budget
from async_rlhf.run import shipped
from async_rlhf.run.anchoring import anchor, fetch
from async_rlhf.run.config_checks import check
from async_rlhf.run.config_keys import check_parameters, explain, kind_sections, known
from async_rlhf.run.tables import lay, nested, numbered, plain
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
        """What rounding may make of the mean |log-ratio| between learner and engine, with room to spare; no limit where the
        engine samples from another distribution. The canary's probe is of the model's."""
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
    def served_engine(self) -> EngineConfig:
        """The engine's settings with what follows from others."""
        share = self.placement.actor_share if self.placement.colocates else None
        return self.engine.served(asks_for_bits=self.asks_for_bits, share=share)

    @property
    def actor_capacity(self) -> int:
        """Groups one actor may hold in its engine: what its slots take, and a few waiting."""
        return -(-self.engine.slots // self.generation.group_size) + self.actors.queued_groups


def load(source: str | Path | Mapping[str, Any] | Config, overrides: Mapping[str, Any] | None = None) -> Config:
    """A configuration with overrides, checked.

    source: a TOML file, the name of a shipped configuration (`quick`), the values themselves, or a `Config`. Values and
    overrides are nested or dotted: `{"queue": {"max_staleness": 0}}` is `{"queue.max_staleness": 0}`. A table is laid upon
    what is there, key by key; an empty one empties it.
    Raises ConfigError: the setting, its value, the limit, the nearest valid choice.
    """
    if isinstance(source, Config):
        return override(source, overrides or {})
    if isinstance(source, Mapping):
        return _overridden({}, source, overrides or {})
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"a configuration is a TOML file, the name of a shipped one, its values (a dictionary) or a Config, not {source!r}"
        )
    path = shipped.configuration_file(source)
    values = read_toml(path, "configuration", shipped.by_name(shipped.configurations()))
    if (path.parent / "manifest.json").exists():  # it is a run's
        values = known(values, Config)
    _prepare(values, path.resolve().parent)
    return _overridden(values, overrides or {})


def read_toml(path: Path, what: str, hint: str) -> dict[str, Any]:
    """The content of a `what` file; hint: where there are others. Raises ConfigError."""
    try:
        return toml_table(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark of its encoding
    except FileNotFoundError as error:
        raise ConfigError(f"{what} {str(path)!r} does not exist; {hint}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error}") from error


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """A configuration with overrides as in `load`, checked; raises ConfigError."""
    values = config.model_dump(mode="json", context=REVEALED)
    _prepare(values, Path.cwd())
    return _overridden(values, overrides)


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """A configuration that was checked with these values for dotted keys; each is checked by itself. Raises ConfigError."""
    laid = config.model_dump(mode="json", context=REVEALED)
    _lay_all(laid, [nested(key, value) for key, value in values.items()])
    return validated(laid)


def _overridden(values: dict[str, Any], *layers: Mapping[str, Any]) -> Config:
    for layer in layers:
        changes = [nested(key, plain(value)) for key, value in layer.items()]
        for change in changes:
            _prepare(change, Path.cwd())
        _lay_all(values, changes)
    check(validated(values), has_model=False)  # a wrong key is named before anything is fetched
    fetch(values)
    config = validated(values)
    check(config)
    return config


def validated(values: dict[str, Any]) -> Config:
    """The configuration these values make; raises ConfigError naming every wrong key."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(problem, Config, values) for problem in error.errors())) from error


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value` with a TOML value; what is no TOML value is taken as a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {text!r} is not key=value; for example learner.learning_rate=5e-5")
    try:
        return key.strip(), toml_table(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value
    except ValueError as error:
        raise ConfigError(f"override {key.strip()}: {str(error).rpartition(': ')[2]}") from error


def parse_settings(sections: Sequence[str], texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Overrides of some sections (`options.judge.url=...` is of the first) as the values of each, checked.

    Raises ConfigError.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in sections}
    for text in texts:
        key, value = parse_override(text)
        named = key.partition(".")[0]
        own = named if named in sections else sections[0]
        lay(values[own], nested(key.removeprefix(f"{own}."), value))
    _prepare(values, Path.cwd())
    for name, given in values.items():
        section(name, given)
    return values


def section(name: str, values: Any) -> Any:
    """The section of these values. Raises ConfigError."""
    try:
        found = Config.model_fields[name].annotation.model_validate(values)  # type: ignore[union-attr]
    except ValidationError as error:
        problems = ({**problem, "loc": (name, *problem["loc"])} for problem in error.errors())
        raise ConfigError("; ".join(explain(problem, Config, {name: values}) for problem in problems)) from error
    if isinstance(found, FunctionSection):
        check_parameters(found, Config)
    return found


def dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested or dotted values as dotted keys. Raises ConfigError."""
    tables: dict[str, Any] = {}
    for key, value in values.items():
        lay(tables, nested(key, plain(value)))
    return dict(flat(tables))


def dump(config: Config) -> str:
    """The resolved configuration as TOML, every value written out, secrets too."""
    return tomli_w.dumps(in_toml(config.model_dump(mode="json", context=REVEALED)))


def in_toml(value: Any) -> Any:
    """A copy of plain values with None as it is written there."""
    if isinstance(value, dict):
        return {key: in_toml(each) for key, each in value.items()}
    if isinstance(value, list):
        return [in_toml(each) for each in value]
    return "none" if value is None else value


def differences(old: Config, new: Config) -> list[str]:
    """Dotted keys in which two configurations differ, as `key: old -> new`; of a list of tables each by its number."""
    before, after = (dict(flat(numbered(each.model_dump()))) for each in (old, new))
    keys = [*before, *(key for key in after if key not in before)]

    def shown(values: Mapping[str, Any], key: str) -> str:
        return json.dumps(in_toml(values[key]), default=str) if key in values else "left out"

    return [f"{key}: {shown(before, key)} -> {shown(after, key)}" for key in keys if before.get(key) != after.get(key)]


def _prepare(values: dict[str, Any], base: Path) -> None:
    """Make paths absolute, seen from `base`; an environment may be given by its function alone."""
    _written_out(values, "environment")
    own = values.get("environment")
    if isinstance(own, dict) and isinstance(by_source := own.get("by_source"), dict):
        for source in by_source:
            _written_out(by_source, source)
            anchor({"environment": by_source[source]}, base)
    anchor(values, base)


def _written_out(values: dict[str, Any], name: str) -> None:
    if isinstance(function := values.get(name), str):
        values[name] = {"function": function}


def _lay_all(under: dict[str, Any], changes: Sequence[Mapping[str, Any]]) -> None:
    """Lay tables upon others, one after the other. Where they name another kind (a loss, an estimator, an engine), the keys of
    the former are left out: it begins with its own."""
    for name, section in kind_sections(Config).items():
        own, given = under.get(name), [change[name] for change in changes if isinstance(change.get(name), dict)]
        kinds = [each["kind"] for each in given if "kind" in each]
        if isinstance(own, dict) and kinds and kinds[-1] != own.get("kind", section.model_fields["kind"].default):
            under[name] = {key: value for key, value in own.items() if key in section.model_fields}
    for change in changes:
        lay(under, change)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Tables as dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
