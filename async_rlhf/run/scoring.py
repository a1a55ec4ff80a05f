"""The scores that a run computes: its rewards, and the reference where an actor's stage computes that. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from async_rlhf.actors.config import REFERENCE, StageConfig
from async_rlhf.actors.environments import EnvironmentSpec
from async_rlhf.actors.prompts import Row
from async_rlhf.actors.reference import is_address
from async_rlhf.actors.rewards import RewardSpec, resolve
from async_rlhf.actors.scoring.model_stages import check_incremental
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.images import IMAGE, IMAGES
from async_rlhf.buffers.record import SOURCE
from async_rlhf.buffers.stages import GENERATION
from async_rlhf.learner.registry import loss_spec
from async_rlhf.run.config import Config

if TYPE_CHECKING:
    from async_rlhf.actors.loop.context import Environment

_OF_ENVIRONMENT = re.compile(r"\benvironment\.(?=(function|options|timeout_s|render)\b)")
OF_EPISODES = frozenset({"messages", "completion_messages", "turns", "sampled"})
"""Fields that rewards get beside the others where there is an environment: the conversation, what of it stands behind the
prompt, what the model wrote in it, and which of `completion_ids` were sampled."""


def reward_specs(config: Config) -> tuple[RewardSpec, ...]:
    """The rewards, as `RewardsConfig.specs` proves them; none where an environment is to judge alone, or a teacher."""
    has_others = config.environment.all or loss_spec(config.loss.kind).learns_from == "teacher"
    if has_others and not config.rewards.functions:
        return ()
    return config.rewards.specs(Path.cwd(), config.scoring.stages)


def environment_specs(config: Config) -> dict[str, EnvironmentSpec]:
    """The environments by source, as `EnvironmentConfig.all` has them and `spec` proves them. Raises ConfigError."""
    specs = dict[str, EnvironmentSpec]()
    names = [each.name for each in reward_specs(config)] + [REFERENCE, GENERATION] if config.environment.all else []
    for source, own in config.environment.all.items():
        with of_source(source):
            specs[source] = own.spec(Path.cwd())
            _check_environment(config, specs[source], names)
    return specs


@contextmanager
def of_source(source: str) -> Iterator[None]:
    """Errors of the environment of a source name its own settings."""
    try:
        yield
    except ConfigError as error:
        where = f"environment.by_source.{source}." if source else "environment."
        raise ConfigError(_OF_ENVIRONMENT.sub(where, str(error))) from error


def _check_environment(config: Config, spec: EnvironmentSpec, names: Sequence[str]) -> None:
    """names: which others have. Raises ConfigError."""
    if spec.name in names:
        what = "a stage of every run" if spec.name in (REFERENCE, GENERATION) else "a reward"
        raise ConfigError(
            f'the environment and {what} are both called {spec.name!r}; rename one (environment.function = "other_name=...")'
        )
    limit = config.queue.progress_timeout_s
    if spec.timeout_s >= limit:
        raise ConfigError(
            f"environment {spec.name!r} may take {spec.timeout_s:g} s a step (timeout_s), and a group without progress for "
            f"{limit:g} s is given to another actor; raise queue.progress_timeout_s above it, or lower environment.timeout_s"
        )


def played_by(config: Config, source: str | None) -> str | None:
    """Which of the environments, by source, plays rows of this source; None: they have one turn."""
    return source if source in config.environment.by_source else "" if config.environment.function else None


def common_columns(rows: Iterable[Row]) -> set[str]:
    """The columns that every row has; where some have images `images`, where none has several `image`: of others these are
    empty."""
    kinds, most = set[frozenset[str]](), 0
    for row in rows:
        kinds.add(frozenset(row.columns))
        most = max(most, len(row.images))
    of_images = {IMAGES} | ({IMAGE} if most == 1 else set()) if most else set()
    return (set(frozenset.intersection(*kinds)) if kinds else set()) | of_images


def check_columns(
    config: Config,
    judges: Iterable[RewardSpec],
    environments: Mapping[str, EnvironmentSpec],
    source: str | None,
    columns: AbstractSet[str],
) -> None:
    """columns: those of every row of this source. Raises ConfigError where what judges or plays them asks for another."""
    played = played_by(config, source)
    of_episodes = OF_EPISODES | ({IMAGES} if config.data.images else set())
    config.rewards.check_columns(judges, source, columns if played is None else columns | of_episodes)
    if played is not None:
        with of_source(played):
            environments[played].check(columns)


def check_judged(config: Config, environments: Mapping[str, EnvironmentSpec], source: str | None) -> None:
    """Raises ConfigError where nothing gives rows of this source a score, and nothing else is learned from."""
    played = played_by(config, source)
    spec = None if played is None else environments[played]
    is_judged = config.rewards.by_source.get(source or "", config.rewards.functions) or (spec is not None and spec.judges)
    if is_judged or loss_spec(config.loss.kind).learns_from == "teacher":
        return
    if spec is not None:
        raise ConfigError(
            f"environment {spec.name!r} gives no score, and no reward is named: set rewards.functions, or give it a "
            "get_reward method"
        )
    raise ConfigError(
        f"rows whose {SOURCE} is {source!r} have no environment, and no reward judges them: name one in rewards.functions, "
        "and where rewards.by_source has this source there too"
    )


def score_names(config: Config, environments: Iterable[EnvironmentSpec | Environment]) -> tuple[str, ...]:
    """The names of all scores of the reward. environments: the run's; several may share a name."""
    return (*(spec.name for spec in reward_specs(config)), *dict.fromkeys(each.name for each in environments))


def group_rewards(config: Config) -> list[str]:
    """The rewards that receive whole groups: its score of a completion depends on the others."""
    return [spec.name for spec in reward_specs(config) if spec.scope == "group"]


def solved_by(config: Config, names: Sequence[str]) -> str:
    """The score that decides which held-out prompts are solved: the one that is named, or the only one of these; empty where
    several could, and where the only one compares the completions of a group."""
    return config.evaluation.solved_by or (names[0] if len(names) == 1 and not group_rewards(config) else "")


def check_judging(config: Config, names: Sequence[str]) -> list[str]:
    """Remarks on how evaluations are judged. names: of all scores. Raises ConfigError for a setting about solved prompts where
    no score decides them, and for completions that fill no groups."""
    asked, size, compared = config.evaluation, config.generation.group_size, group_rewards(config)
    given = [
        f"{key} = {getattr(asked, key)}" for key, none in (("samples", 0), ("solved_at", 1.0)) if getattr(asked, key) != none
    ]
    if given and not solved_by(config, names):
        raise ConfigError(
            f"evaluation.{given[0]} is about prompts that are solved, and no score decides which are: of several, or where the "
            f"only one compares completions, name one: evaluation.solved_by = {' or '.join(map(repr, names))}"
        )
    if compared and (over := asked.samples % size):
        raise ConfigError(
            f"evaluation.samples = {asked.samples}, and reward {compared[0]!r} receives groups of generation.group_size = "
            f"{size}; nearest: {asked.samples - over} or {asked.samples - over + size}"
        )
    what = f"evaluations judge {size} completions of each held-out prompt, sampled as in training, instead of a greedy one."
    return [f"{', '.join(compared)}: receives whole groups; {what}"] if compared else []


def stop_strings(config: Config) -> tuple[str, ...]:
    """Those of `generation.stop`, and what the rewards say of themselves."""
    specs = reward_specs(config)
    return tuple(dict.fromkeys((*config.generation.stop, *(text for spec in specs for text in spec.stop_when))))


def stage_specs(config: Config) -> tuple[RewardSpec, ...]:
    """The rewards, and behind them the reference where it is a stage. Raises ConfigError."""
    judges = reward_specs(config)
    _check(config)
    return (*judges, _reference(config)) if config.scoring.reference_is_stage else judges


def _reference(config: Config) -> RewardSpec:
    reference = config.scoring.reference
    options = {
        **reference.model_dump(),
        "path": reference.path or ("" if reference.teachers else config.model),
        "temperature": config.generation.temperature,
        "restricted": loss_spec(config.loss.kind).takes_ratios,
    }
    settings = config.scoring.stages.get(REFERENCE, StageConfig()).given
    if reference.directories != reference.teachers:
        settings = {"retries": 3, **settings}
    (spec,) = resolve(
        [f"{REFERENCE}=async_rlhf.actors.scoring.model_stages:{REFERENCE}"],
        Path.cwd(),
        options={REFERENCE: options},
        settings={REFERENCE: settings},
    )
    return spec


def _check(config: Config) -> None:
    """Raises ConfigError for a stage that is placed where it cannot be."""
    for name, stage in config.scoring.stages.items():
        if name != REFERENCE and stage.placement == "learner":
            raise ConfigError(
                f'scoring.stages.{name}.placement = "learner" is for {REFERENCE!r} only; a reward has "actor" or "process"'
            )
    where = f"scoring.stages.{REFERENCE}"
    stage, reference = config.scoring.stages.get(REFERENCE, StageConfig()), config.scoring.reference
    is_stage, reads_top_k = config.scoring.reference_is_stage, "top_k" in loss_spec(config.loss.kind).needs
    if is_stage and reads_top_k:
        raise ConfigError(
            f"loss.kind = {config.loss.kind!r} asks policy and reference about the likeliest tokens of each place, which the "
            f'learner alone can: set {where}.placement = "learner"'
        )
    if not is_stage:
        given = [f"{where}.{name}" for name in stage.given]
        given += [f"scoring.reference.{name}" for name in reference.model_dump(exclude={"path"}, exclude_defaults=True)]
        given += [f"scoring.reference.path = {reference.path!r}"] if is_address(reference.path) else []
        if given:
            way = "name one model directory, and leave this out" if reads_top_k else f'set {where}.placement = "actor"'
            raise ConfigError(f"{min(given)} is about a stage, and the learner computes this; {way}")
    if (is_stage or reference.path) and not config.loss.needs_reference:
        asked = f'{where}.placement = "{stage.placement}"' if stage.placement else "scoring.reference names teachers"
        raise ConfigError(f"{asked}, and nothing asks for a reference; set loss.kl_coef above 0, or leave it out")
    if is_stage and stage.stream_tokens:
        _check_incremental(config, where, stage.stream_tokens)


def _check_incremental(config: Config, where: str, stream_tokens: int) -> None:
    truncation, own = config.generation.truncation, config.scoring.reference
    if own.by_source or is_address(own.path):
        raise ConfigError(f"{where}.stream_tokens = {stream_tokens} is for one model read here; set stream_tokens = 0")
    if truncation and loss_spec(config.loss.kind).takes_ratios:
        raise ConfigError(
            f"{where}.stream_tokens = {stream_tokens}: with generation.{truncation} it is known only at a completion's end "
            "what each token was chosen among; set stream_tokens = 0, or sample from all tokens"
        )
    if Path(own.path or config.model).is_dir():
        check_incremental(own.path or config.model, where)
