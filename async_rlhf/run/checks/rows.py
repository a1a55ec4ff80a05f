"""Rules about rows: what judges and plays those of each source, which columns that asks for, and whether there are enough."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from async_rlhf.actors.config import REFERENCE
from async_rlhf.actors.environments.loading import form_of
from async_rlhf.actors.prompts import Row
from async_rlhf.actors.scoring.remote import is_elsewhere
from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.record import SOURCE, source_of
from async_rlhf.run.checks.subject import Subject
from async_rlhf.run.config import Config
from async_rlhf.run.scoring import check_columns, check_judged, common_columns, played_by, stage_specs


def load_environments(subject: Subject) -> None:
    """Raises ConfigError for one that cannot be used."""
    _ = subject.environments


def check_stages(subject: Subject) -> None:
    """Raises ConfigError for a reward that cannot be used, and for a stage that cannot be where it is placed."""
    stage_specs(subject.config)


def load(subject: Subject) -> None:
    """Raises ConfigError for rows that cannot be read."""
    _ = subject.rows


def check_bound(subject: Subject) -> None:
    """Raises ConfigError for a bound that a run of so many prompts cannot keep."""
    subject.config.bound(subject.num_prompts).check()


def check_sources_judged(subject: Subject) -> None:
    """Whether something gives the rows of each source a score; of a spool those of the sources that are named. Raises
    ConfigError."""
    named = {*subject.config.environment.by_source, *subject.config.rewards.by_source}
    for source in sorted({source_of(row.columns) for row in subject.rows[0]} or named or {None}, key=str):
        check_judged(subject.config, subject.environments, source)


def check_all_columns(subject: Subject) -> None:
    """Whether the rows of each source have what their rewards and environments ask for. Raises ConfigError."""
    of: dict[str | None, list[Row]] = {}
    for row in subject.all_rows:
        of.setdefault(source_of(row.columns), []).append(row)
    judges = stage_specs(subject.config)
    for source, rows in of.items():
        columns = common_columns(rows)
        try:
            check_columns(subject.config, judges, subject.environments, source, columns)
        except ConfigError as error:
            lacking = sorted({name for row in rows for name in row.columns if name not in columns and repr(name) in str(error)})
            if not lacking:
                raise
            number = next(
                number
                for number, row in enumerate(subject.all_rows)
                if source_of(row.columns) == source and lacking[0] not in row.columns
            )
            raise ConfigError(f"prompt {number} has no column {lacking[0]!r}, and others have: {error}") from error


def check_images(subject: Subject) -> Iterator[str]:
    """Whether what plays and judges rows with images can. Remarks on rewards that do not get them. Raises ConfigError."""
    config, numbers = subject.config, dict[str | None, int]()
    for number, row in enumerate(subject.all_rows):
        if row.images:
            numbers.setdefault(source_of(row.columns), number)
    elsewhere = list[str]()
    for source, number in numbers.items():
        where = f"prompt {number} has images"
        if (played := played_by(config, source)) is not None:
            spec = subject.environments[played]
            if form_of(spec.target)[0] == "remote":
                raise ConfigError(
                    f"{where}, and environment {spec.name!r}, which is served, plays it: a server has no images of a run. Name "
                    "its file in environment.function"
                )
        elsewhere += _judges(config, where, config.rewards.by_source.get(source or ""))
    if config.data.images:
        elsewhere += _judges(config, "data.images = true")
    for name in dict.fromkeys(elsewhere):
        yield f"reward {name} is served on another machine: it gets no images."


def _judges(config: Config, where: str, chosen: Collection[str] | None = None) -> Iterator[str]:
    """Rewards on other machines that judge what has images. chosen: the rewards of a source. Raises ConfigError for a model
    that reads text only."""
    for spec in stage_specs(config):
        if spec.name == REFERENCE or spec.target == "reward_model":
            if chosen is None or spec.name in chosen or spec.name == REFERENCE:
                raise ConfigError(
                    f"{where}, and the model of stage {spec.name!r} reads text only; "
                    + ('set scoring.stages.reference.placement = "learner"' if spec.name == REFERENCE else "leave it out")
                )
        elif is_elsewhere(spec):
            yield spec.name


def check_named_sources(subject: Subject) -> None:
    """Raises ConfigError where a setting names a source that no row has; rows of a spool are looked at when they come."""
    config = subject.config
    if config.data.spool is not None:
        return
    named: dict[str, Iterable[str]] = {
        "rewards.by_source": config.rewards.by_source,
        "environment.by_source": config.environment.by_source,
        "scoring.reference.by_source": config.scoring.reference.by_source,
    }
    sources = {source_of(row.columns) for row in subject.rows[0]} - {None} if any(named.values()) else set()
    found = sorted(map(str, sources))
    for setting, given in named.items():
        if (unknown := next((source for source in given if source not in found), None)) is not None:
            hint = did_you_mean(unknown, found) if found else f"the data have no column {SOURCE!r}"
            raise ConfigError(f"{setting} names {unknown!r}, which is the source of no row; {hint}")


def check_taught(subject: Subject) -> None:
    """Raises ConfigError for a row that no teacher is named for."""
    subject.config.scoring.reference.check_taught([row.columns for row in subject.rows[0]])


def check_names(subject: Subject) -> None:
    """Raises ConfigError where a setting names a reward that the run does not have."""
    config = subject.config
    config.rewards.composition.check(subject.names)
    judges = {"data.curriculum.reward": config.data.curriculum.reward, "evaluation.solved_by": config.evaluation.solved_by}
    for setting, judge in judges.items():
        if judge and judge not in subject.names:
            raise ConfigError(f"{setting} = {judge!r} is no reward of this run; {did_you_mean(judge, subject.names)}")
