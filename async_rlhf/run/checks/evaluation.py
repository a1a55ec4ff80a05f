"""Rules about evaluations: whether there is something to evaluate on, and it can be."""

from __future__ import annotations

import re

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.checks import prompts, rows
from async_rlhf.run.checks.subject import Subject
from async_rlhf.run.scoring import check_judging

_OF_SOURCE = re.compile(r"\bdata\.(?=(source|columns|options|size|template)\b)")


def check_prompts(subject: Subject) -> None:
    """Raises ConfigError where there are none, or they cannot be used."""
    config, evaluation = subject.config, subject.config.evaluation
    if (data := evaluation.data(config.data)) is not None:
        try:
            if data.spool is not None:
                raise ConfigError("an evaluation has the same prompts every time, and a spool's are used up; name a file")
            evaluated = Subject(config.model_copy(update={"data": data}), environments=subject.environments)
            rows.check_all_columns(evaluated)
            rows.check_sources_judged(evaluated)
            list(rows.check_images(evaluated))
            if evaluated.has_model_directory:  # the rules of the model itself were checked with the run's prompts
                prompts.check_lengths(evaluated)
                list(prompts.check_kept(evaluated))
        except ConfigError as error:
            message = _OF_SOURCE.sub("evaluation.", str(error))  # which speaks of the settings of a run's own prompts
            raise ConfigError(f"evaluation.source: {message}") from error
    elif evaluation.every and config.data.spool is not None:
        raise ConfigError(
            f"evaluation.every = {evaluation.every} with data.source = {config.data.source!r}, of which none are held out; "
            "set evaluation.source"
        )
    elif evaluation.every and subject.rows[1] and not subject.kept[1]:
        raise ConfigError(
            f"evaluation.every = {evaluation.every}, and all {len(subject.rows[1])} held-out prompts are left out: they are "
            "too long (data.on_overlong = 'drop'); hold out more (data.held_out), or set evaluation.source"
        )
    elif evaluation.every and not subject.rows[1]:
        raise ConfigError(
            f"evaluation.every = {evaluation.every} with data.held_out = 0: there are no prompts to evaluate on; "
            "set data.held_out, or evaluation.source"
        )


def check_solved(subject: Subject) -> list[str]:
    """A remark on how completions are judged. Raises ConfigError as `check_judging` does."""
    is_evaluated = subject.rows[1] or subject.config.evaluation.source is not None
    return check_judging(subject.config, subject.names) if is_evaluated else []
