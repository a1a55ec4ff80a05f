"""`async-rlhf loss try`: hold a loss to its laws before a run depends on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from async_rlhf.config import parse_settings
from async_rlhf.learner.config import LossConfig


def run_trial(kind: str, overrides: Sequence[str], echo: Callable[[str], object], *, as_json: bool) -> int:
    """Print the table of `kind` under these settings of `[loss]`. Returns 1 when a law fails. Raises ConfigError."""
    from async_rlhf.learner.objective.trial import lines, try_loss

    given = parse_settings(("loss",), [f"loss.kind='{kind}'", *overrides])
    trial = try_loss(LossConfig.model_validate(given["loss"]))
    echo(json.dumps(trial.plain()) if as_json else "\n".join(lines(trial)))
    return 0 if trial.holds else 1
