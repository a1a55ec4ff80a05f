"""The whole configuration: nests the floors' sections, loads TOML, applies overrides, refuses what cannot work.

Everything here is checked before torch is imported and before any process starts. Relative paths in a file are relative to
that file; on the command line and in Python they are relative to the working directory; `output_dir` always is.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli_w
from pydantic import BaseModel, Field, ValidationError

from async_rlhf.actors.config import ActorsConfig, DataConfig, EngineConfig, GenerationConfig, RewardsConfig, ScoringConfig
from async_rlhf.actors.rewards import absolute
from async_rlhf.buffers.attention import angle_limit, attention, unknown
from async_rlhf.buffers.config import QueueConfig, Section, SecurityConfig, WeightsConfig
from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.model_directory import check_own_code
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.learner.check import RunContext, check_division, check_machine
from async_rlhf.learner.check import check as check_learning
from async_rlhf.learner.config import AdvantageConfig, CheckpointConfig, GuardConfig, LearnerConfig, LossConfig

# Filtered groups use up numbers: where the data have no end, there are more than any run reaches.
_ENDLESS = 1 << 62


class EvaluationConfig(Section):
    """Greedy evaluation of held-out prompts by a pinned version."""

    at_start: bool = True
    """Evaluate the initial model while training starts."""
    at_end: bool = True
    """Evaluate the last checkpoint when all steps are done."""
    solved_at: float = 1.0
    """Reward from which on a prompt counts as solved; `accuracy` is the share of those."""


class Config(Section):
    """One run. Sections belong to the floor that reads them."""

    name: str = Field(default="run", min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run directory under `output_dir`."""
    output_dir: str = "runs"
    """Where run directories are made."""
    model: str
    """A Hugging Face causal language model: a local directory, or a GGUF file (converted once, see `launch/gguf`)."""
    seed: int = Field(default=0, ge=0, lt=1 << 62)
    """Decides prompts' order and every random number of generation."""
    max_steps: int = Field(ge=1)
    """Learner steps of the run (fewer when the data ends first)."""
    address: str = ""
    """Where the hub listens beside its private ipc socket: nowhere, at `tcp://127.0.0.1:PORT`, or with keys any `tcp://IP:PORT`."""
    sampled_groups: int = Field(default=1, ge=0)
    """Groups of every step written to `rollouts.jsonl`."""
    stall_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds without a finished step after which the run ends with a stall report."""
    watchdog_s: float = Field(default=120.0, gt=0)
    """Seconds a process of the run may be frozen; then it is killed and started again (before `stall_timeout_s`, or never)."""
    data: DataConfig
    generation: GenerationConfig = GenerationConfig()
    engine: EngineConfig = EngineConfig()
    rewards: RewardsConfig = RewardsConfig()
    scoring: ScoringConfig = ScoringConfig()
    actors: ActorsConfig = ActorsConfig()
    queue: QueueConfig = QueueConfig()
    weights: WeightsConfig = WeightsConfig()
    security: SecurityConfig = SecurityConfig()
    learner: LearnerConfig = LearnerConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def groups_per_batch(self) -> int:
        return self.learner.batch_size // self.generation.group_size

    @property
    def usual_mismatch(self) -> float:
        """What rounding may make of the mean |log-ratio| between learner and engine, with room to spare."""
        return 0.01 if self.engine.dtype == self.learner.dtype == "float32" else 0.1

    def bound(self, num_prompts: int) -> Bound:
        """The arithmetic of admission for a data set of `num_prompts` training prompts."""
        groups = self.max_steps * self.groups_per_batch
        refills = self.advantage.max_refills if self.advantage.constant_groups == "refill" else 0
        numbers = _ENDLESS if refills else groups
        if self.data.epochs is not None:
            numbers = min(numbers, self.data.epochs * num_prompts)
        return Bound(
            groups_per_batch=self.groups_per_batch,
            max_staleness=self.queue.max_staleness,
            num_groups=min(groups, numbers),
            publish_every=self.learner.publish_every,
            window=self.queue.window,
            exact=self.queue.exact,
            refills=refills,
            numbers=numbers,
        )

    @property
    def served_engine(self) -> EngineConfig:
        """The engine's settings with `batch_invariant` decided as far as it can be without the model."""
        promised = self.queue.exact or self.queue.max_staleness == 0
        if self.engine.batch_invariant is None and (not promised or self.engine.cannot_be_invariant):
            return self.engine.model_copy(update={"batch_invariant": False})
        return self.engine

    @property
    def actor_capacity(self) -> int:
        """Groups one actor may hold in its engine: what its slots take, and a few waiting."""
        return -(-self.engine.slots // self.generation.group_size) + self.actors.queued_groups


def load(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration in a TOML file with dotted overrides (`{"queue.max_staleness": 0}`), checked.

    Raises ConfigError: the setting, its value, the limit, the nearest valid choice.
    """
    path = Path(path)
    values = read_toml(path, "configuration", "configs/")
    _anchor(values, path.resolve().parent)
    return _overridden(values, overrides or {})


def read_toml(path: Path, what: str, shipped_in: str) -> dict[str, Any]:
    """The content of a `what` file. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{what} {str(path)!r} does not exist; shipped ones are in {shipped_in}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error}") from error


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """A configuration with dotted overrides, checked; raises ConfigError."""
    return _overridden(config.model_dump(mode="json"), overrides)


def _overridden(values: dict[str, Any], overrides: Mapping[str, Any]) -> Config:
    for key, value in overrides.items():
        changed: dict[str, Any] = {}
        _set(changed, key, value)
        _anchor(changed, Path.cwd())
        _set(values, key, _get(changed, key))
    config = validated(values)
    check(config)
    return config


def validated(values: dict[str, Any]) -> Config:
    """The configuration these values make; raises ConfigError naming every wrong key."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(problem) for problem in error.errors())) from error


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value` with a TOML value; what is no TOML value is taken as a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {text!r} is not key=value; for example --set queue.max_staleness=0")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def parse_settings(sections: Sequence[str], texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Overrides of some sections (`options.judge.url=...` is of the first) as the values of each, checked.

    Raises ConfigError.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in sections}
    for text in texts:
        key, value = parse_override(text)
        named = key.partition(".")[0]
        section = named if named in sections else sections[0]
        _set(values[section], key.removeprefix(f"{section}."), value)
    _anchor(values, Path.cwd())
    for section, given in values.items():
        try:
            Config.model_fields[section].annotation.model_validate(given)  # type: ignore[union-attr]
        except ValidationError as error:
            raise ConfigError(
                "; ".join(_explain({**problem, "loc": (section, *problem["loc"])}) for problem in error.errors())
            ) from error
    return values


def dump(config: Config) -> str:
    """The resolved configuration as TOML, every value written out."""

    def written(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: written(each) for key, each in value.items()}
        return "none" if value is None else value

    return tomli_w.dumps(written(config.model_dump(mode="json")))


def differences(old: Config, new: Config) -> list[str]:
    """Dotted keys in which two configurations differ, as `key: old -> new`."""
    before, after = dict(_flat(old.model_dump())), dict(_flat(new.model_dump()))
    keys = [*before, *(key for key in after if key not in before)]
    return [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in keys if before.get(key) != after.get(key)]


def check(config: Config) -> None:
    """What no single section can see. Raises ConfigError."""
    size, group = config.learner.batch_size, config.generation.group_size
    if size % group:
        low = size - size % group
        near = f"{low} or {low + group}" if low else f"{group}"
        raise ConfigError(f"learner.batch_size = {size} is not a multiple of generation.group_size = {group}; nearest: {near}")
    if config.learner.updates_per_step > config.groups_per_batch:
        raise ConfigError(
            f"learner.updates_per_step = {config.learner.updates_per_step} needs as many groups in a batch, "
            f"there are {config.groups_per_batch}; highest: {config.groups_per_batch}"
        )
    bound = config.bound(num_prompts=config.data.size)
    bound.check()
    if config.queue.exact and config.queue.fsync != "group":
        raise ConfigError(
            f'queue.exact = true with queue.fsync = "{config.queue.fsync}": a group that a power failure takes must be made '
            'again by weights that are gone by then. Set queue.fsync = "group", or queue.exact = false.'
        )
    if config.engine.batch_invariant and (obstacle := config.engine.cannot_be_invariant):
        raise ConfigError(f'engine.batch_invariant = true with {obstacle}. Set that, or engine.batch_invariant = "none".')
    truncation = config.generation.truncation
    data = RunContext(
        group_size=config.generation.group_size,
        max_staleness=config.queue.max_staleness,
        lowest_staleness=bound.lowest_staleness,
        exact=config.queue.exact,
        truncated=f"generation.{truncation}" if truncation else None,
        support_recorded=config.engine.kind == "torch"
        or config.generation.top_k > 0
        or bool(config.engine.vllm.arguments.get("return_sampling_mask")),
        normalised=config.rewards.normalise,
    )
    check_machine(config.learner, config.groups_per_batch, config.max_steps)
    check_learning(config.learner, config.advantage, config.loss, config.guard, data)
    _check_security(config.security)
    if config.address:
        _check_address(config.address, keyed=config.security.keys is not None)
    _check_model(config)


def _check_address(address: str, *, keyed: bool) -> None:
    if not keyed and not address.startswith(("ipc://", "tcp://127.0.0.1:", "tcp://localhost:")):
        raise ConfigError(
            f"address = {address!r}: without keys the hub listens only on this machine. Use tcp://127.0.0.1:PORT, an "
            "ipc:// path, leave it empty, or make keys (async-rlhf keys new DIR) and name them in security.keys."
        )
    if not re.fullmatch(r"ipc://.+|tcp://(\*|localhost|\d+\.\d+\.\d+\.\d+):[1-9]\d{0,4}", address):
        raise ConfigError(f"address = {address!r} is no tcp://IP:PORT; IP is an IPv4 address of this machine, or * for all")


def _check_security(security: SecurityConfig) -> None:
    """The hub's machine needs its keys and its own processes' before anything starts. Raises ConfigError."""
    if security.directory is not None:
        from async_rlhf.buffers.transport import keys, link  # needs zmq, which most runs of `check` do not

        link.check_curve()
        keys.load_hub(security.directory)
        keys.load_peer(security.directory)


def _check_model(config: Config) -> None:
    directory = Path(config.model)
    if directory.suffix == ".gguf" and directory.is_file():
        return
    if not directory.is_dir():
        raise ConfigError(f"model = {config.model!r} is no directory; give a local Hugging Face model directory or GGUF file")
    if not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
        raise ConfigError(f"model = {config.model!r} is no Hugging Face model: it needs config.json and *.safetensors")
    try:
        model = json.loads((directory / "config.json").read_text())
        text: dict[str, Any] = {**model, **model.get("text_config", {})}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"model = {config.model!r}: config.json cannot be read: {error}") from error
    check_own_code(directory, "model")
    check_division(config.learner, text.get)
    if config.engine.kind == "torch" and attention(text) is None:
        raise ConfigError(unknown(str(text.get("model_type"))))
    longest = config.generation.max_prompt_length + config.generation.max_completion_length
    if (limit := angle_limit(text)) is not None and longest > limit:
        raise ConfigError(
            f"generation.max_prompt_length + max_completion_length = {longest}: beyond {limit} tokens the positions of this "
            "model depend on how long the other texts of a batch are, and so would its log-probabilities. Highest: "
            f"{limit} together"
        )


def _anchor(values: dict[str, Any], base: Path) -> None:
    """Make the paths in these raw values absolute, seen from `base`."""
    if isinstance(values.get("model"), str):
        values["model"] = str(base / Path(values["model"]).expanduser())
    learner = values.get("learner")
    if isinstance(learner, dict) and isinstance(own := learner.get("deepspeed_config"), str) and own != "none":
        learner["deepspeed_config"] = str(base / own)
    security = values.get("security")
    if isinstance(security, dict) and isinstance(keys := security.get("keys"), str) and keys != "none":
        security["keys"] = str(base / keys)
    data = values.get("data")
    if isinstance(data, dict) and isinstance(source := data.get("source"), str) and not source.startswith("reasoning_gym:"):
        data["source"] = str(base / source)
    for section in ("loss", "advantage"):
        own = values.get(section)
        if isinstance(own, dict) and isinstance(kind := own.get("kind"), str):
            own["kind"] = absolute(kind, base)
    rewards = values.get("rewards")
    if isinstance(rewards, dict) and isinstance(functions := rewards.get("functions"), list | tuple):
        rewards["functions"] = [absolute(str(function), base) for function in functions]
    if isinstance(rewards, dict) and isinstance(options := rewards.get("options"), dict):
        for chosen in options.values():
            if isinstance(chosen, dict) and isinstance(path := chosen.get("path"), str):
                chosen["path"] = str(base / path)


def _set(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override {dotted!r}: {section!r} is a value, not a section")
    values[key] = value


def _get(values: dict[str, Any], dotted: str) -> Any:
    for key in dotted.split("."):
        values = values[key]
    return values


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        *sections, key = (str(part) for part in problem["loc"])
        known = _fields(sections)
        return f"unknown key {where!r}: {did_you_mean(key, known)}"
    if problem["type"] == "missing":
        return f"key {where!r} is missing and has no default"
    return f"{where} = {problem['input']!r}: {problem['msg']}"


def _fields(sections: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    named: Any = None
    for section in sections:
        known = model.model_fields.get(section)
        annotation = named or (None if known is None else known.annotation)
        named = get_args(annotation)[-1] if get_origin(annotation) is dict else None  # whose keys are names
        if named is not None:
            continue
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return list(model.model_fields)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
