"""Everything about a run that can be found wrong before it begins: one list of rules, in the order of their cost.

Without torch, but where a setting asks for a device other than the CPU or for episodes of chat messages. Nothing is written
and no process is started. Before them come the rules about settings alone (`config_checks.check`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from async_rlhf.actors.environments import EnvironmentSpec
from async_rlhf.run import learner_checks
from async_rlhf.run.checks import evaluation, machine, prompts, rows
from async_rlhf.run.checks.effects import without_effect
from async_rlhf.run.checks.images import ImageLoad, image_load
from async_rlhf.run.checks.model import check_teachers
from async_rlhf.run.checks.servers import unanswered
from async_rlhf.run.checks.spool import check_spool
from async_rlhf.run.checks.subject import Stage, Subject, of_config
from async_rlhf.run.config import Config
from async_rlhf.run.run_data import Rows

_RULES = (
    Stage(
        "this machine", lambda _: machine.check_inherited(), of_config(machine.check_packages), of_config(machine.check_devices)
    ),
    Stage(
        "settings",
        rows.load_environments,
        rows.check_stages,
        of_config(machine.check_trackers),
        of_config(machine.check_hooks),
        of_config(check_teachers),
    ),
    Stage("this machine", of_config(check_spool)),
    Stage("settings", rows.load),  # alone: the rules below would load rows that cannot be had once each
    Stage("settings", rows.check_sources_judged, rows.check_all_columns, rows.check_named_sources, rows.check_taught),
    Stage("settings", rows.check_images),
    Stage("settings", rows.check_names, of_config(learner_checks.remarks)),
    *prompts.RULES,
    Stage(
        "settings",
        prompts.check_stop,
        evaluation.check_prompts,
        rows.check_bound,
    ),
    # A server may come up while a run goes on, which then asks it again.
    Stage("this machine", of_config(unanswered)),
    Stage("settings", evaluation.check_solved, of_config(without_effect)),
)


@dataclass(frozen=True)
class Prepared:
    """The checked inputs of training and evaluation."""

    rows: Rows
    """Each once, without the `dropped` ones."""
    num_prompts: int
    """Number of prompts of one epoch."""
    environments: Mapping[str, EnvironmentSpec] = field(default_factory=dict)
    """By source, the environment that answers the model."""
    dropped: int = 0
    images: ImageLoad | None = None
    """None where no row has any."""
    remarks: list[str] = field(default_factory=list)
    """For a person to know; they stop nothing."""


def preflight(config: Config, rows: Rows | None = None, *, is_here: bool = True) -> Prepared:
    """rows: where they are loaded already, by `load_rows` or from a run. is_here: whether the run will be on this machine; else
    it needs none of its packages and devices. Raises ConfigError."""
    subject = Subject(config, rows, is_here=is_here)
    return _prepared(subject, [remark for stage in _RULES for remark in stage.check(subject)])


def check_converted(config: Config, prepared: Prepared) -> Prepared:
    """Prepares a run from a model file again, with the directory of the converted model. Raises ConfigError."""
    subject = Subject(config, prepared.rows, prepared.environments)
    remarks = [remark for stage in prompts.RULES for remark in stage.check(subject)]
    return _prepared(subject, [*prepared.remarks, *remarks])


def _prepared(subject: Subject, remarks: list[str]) -> Prepared:
    dropped = sum(map(len, subject.rows)) - sum(map(len, subject.kept))
    load = image_load(subject.config, subject.all_rows, subject.images)
    return Prepared(subject.kept, subject.num_prompts, subject.environments, dropped, load, remarks)
