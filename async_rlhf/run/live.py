"""Changes of a run without a restart, its configuration after them, and forks: new runs that begin at its checkpoint.

A request is checked by the rules of the configuration, as it is with all changes before, and written into the ledger of changes
(`learner.loop.changes`), of a live run or one that stands still; the learner decides from which step on it holds. The
configuration of a run is `config.toml` with these changes. Evaluations go on being judged by the reward weights of
`config.toml`, so that all lines of `evaluations.jsonl` can be compared.

A fork reads the model of the other run's checkpoint where it lies, whenever it is started; its manifest names run and step
(`origin`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.learner.checkpoint.evaluated import best_step
from async_rlhf.learner.checkpoint.store import complete, step_of, verified
from async_rlhf.learner.loop.changes import Applied, Change, ChangeHistory, ChangeLedger, ChangeRequest, Line, Undone, described
from async_rlhf.learner.loop.recording import Recording
from async_rlhf.learner.registry import loss_spec
from async_rlhf.run.config import Config
from async_rlhf.run.config_keys import all_settings
from async_rlhf.run.loading import changed, dotted, override
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.scoring import environment_specs, score_names

LIVE = (
    "learner.learning_rate",
    "guard.target",
    "guard.max_kl",
    "guard.min_entropy",
    "guard.min_reward",
    "checkpoint.save_every",
    "checkpoint.keep_last",
    "checkpoint.keep_every",
)
"""The keys that may change; and the weight of each reward."""
_WEIGHTS = "rewards.weights."


def effective(run: RunDir) -> Config:
    """The configuration with which a run goes on, changes that wait included. Raises ConfigError, DamagedError."""
    return changed(run.config(), ChangeLedger(run.path).read().asked())


def present(run: RunDir) -> dict[str, Any]:
    """The keys that may change in this run, with the values it goes on with. Raises ConfigError, DamagedError."""
    config = effective(run)
    names = dict.fromkeys(config.rewards.weights)
    with suppress(ConfigError):  # rewards that cannot be loaded from here
        names = dict.fromkeys(score_names(config, environment_specs(config).values()))
    return {key: _value(config, key) for key in (*LIVE, *(f"{_WEIGHTS}{name}" for name in names))}


def ask(run: RunDir, values: Mapping[str, Any]) -> Change | None:
    """Ask the run to go on with these values, by dotted key; None when it does already.

    Raises ConfigError for a key that may not change and a value that may not be, and when the run has ended for good;
    DamagedError.
    """
    given = dotted(values)
    before = run.config()
    for key in given:
        _check_key(key, before)
    end = run.end()
    if end is not None and end.finished:
        raise ConfigError(
            f"{str(run.path)!r} has ended for good ({end.reason}): no step follows that could change. Give it more first: "
            "--resume --set max_steps=N"
        )
    asked: list[ChangeRequest] = []

    def decide(history: ChangeHistory) -> list[ChangeRequest]:
        asked.extend(_request(run, changed(before, history.asked()), given, history.last_number + 1))
        return asked

    try:
        ledger = ChangeLedger(run.path).append(decide)
    except OSError as error:
        raise ConfigError(f"run directory {str(run.path)!r} cannot be written: {error}") from error
    return next((change for change in ledger.changes if asked and change.number == asked[0].number), None)


def _request(run: RunDir, config: Config, given: Mapping[str, Any], number: int) -> list[ChangeRequest]:
    """The line that asks a run of this configuration for these values; none where it has them. Raises ConfigError."""
    new = override(config, given)
    if any(key.startswith(_WEIGHTS) for key in given):
        new.rewards.composition.check(score_names(new, environment_specs(new).values()))
    pairs = {key: (_value(config, key), _value(new, key)) for key in given}
    values = {key: (old, value) for key, (old, value) in pairs.items() if old != value}
    return [ChangeRequest(number=number, values=values)] if values else []


def forked(
    source: RunDir, name: str, overrides: Mapping[str, Any], *, best: bool = False, from_step: int | None = None
) -> Config:
    """The new run's configuration: that with which the old one goes on, live changes included, and overrides.

    best: from the checkpoint that was evaluated best. from_step: from that of so many steps; else from the newest.

    Raises ConfigError for a run that lives (it replaces its checkpoints) or has no such checkpoint, DamagedError for one whose
    files are not as they were written.
    """
    if best and from_step is not None:
        raise ConfigError(f"--best and --from-step {from_step} name two checkpoints: give one of them")
    if source.is_alive():
        raise ConfigError(
            f"run {str(source.path)!r} is running and replaces its checkpoints; wait, or stop it: async-rlhf stop {source.path}"
        )
    checkpoint = _checkpoint(source, best=best, from_step=from_step)
    verified(checkpoint)
    model = {"model": str(checkpoint / "model"), "name": name, "output_dir": str(source.path.absolute().parent)}
    return override(effective(source), {**model, **overrides})


def _checkpoint(source: RunDir, *, best: bool, from_step: int | None) -> Path:
    checkpoints = {step_of(path): path.resolve() for path in complete(source.path / "checkpoints")}
    if not checkpoints:
        raise ConfigError(
            f"run {str(source.path)!r} has no checkpoint to go on from; its own model is `model` in its config.toml"
        )
    if best:
        from_step = best_step(source.read_evaluations(), checkpoints)
        if from_step is None:
            raise ConfigError(
                f"--best: no checkpoint of run {str(source.path)!r} was evaluated (evaluation.every, evaluation.at_end); leave "
                f"it out, or take one with --from-step: {', '.join(map(str, checkpoints))}"
            )
    if from_step is not None and from_step not in checkpoints:
        there = ", ".join(map(str, checkpoints))
        raise ConfigError(f"--from-step {from_step}: run {str(source.path)!r} has no checkpoint of it, but those of {there}")
    return checkpoints[from_step if from_step is not None else max(checkpoints)]


def undo(run: RunDir, after: int) -> None:
    """The run has gone back to the checkpoint of this step, and its ledger records it: what was applied to later steps is
    forgotten, what waits holds from the next step on. The records of later steps go too, for no such step counts as made.
    Raises ConfigError, DamagedError."""
    try:
        Recording(run.path).begin(after)
        ChangeLedger(run.path).append(lambda history: [Undone(step=after), *history.apply(after + 1)])
    except OSError as error:
        raise ConfigError(f"run directory {str(run.path)!r} cannot be written: {error}") from error


def inherit(run: RunDir, source: RunDir, config: Config) -> None:
    """A run that learns again from the batches of another is changed where that was, but for the keys in which `config` is
    another. Raises ConfigError, DamagedError, OSError."""
    before, lines = source.config(), list[Line]()
    for change in ChangeLedger(source.path).read().changes:
        kept = {key: pair for key, pair in change.values.items() if _value(config, key) == _value(before, key)}
        if kept and change.step is not None:
            lines += [ChangeRequest(number=change.number, values=kept), Applied(number=change.number, step=change.step)]
    if lines:
        ChangeLedger(run.path).append(lambda history: lines)


def check_resumed(run: RunDir, config: Config) -> None:
    """A key that was changed while the run went on is changed in the same way again, and a curriculum is there or not as it
    was. Raises ConfigError, DamagedError."""
    before = run.config()
    if before.data.curriculum.is_on != config.data.curriculum.is_on:
        raise ConfigError(
            f"data.curriculum.reward = {config.data.curriculum.reward!r}: the run began with "
            f"{before.data.curriculum.reward!r}, and its groups have their prompts by that; leave it as it was"
        )
    for change in ChangeLedger(run.path).read().changes:
        for key in change.values:
            if (given := _value(config, key)) != _value(before, key):
                raise ConfigError(
                    f"{key} = {given!r}: it was changed while the run went on ({described(change)}). Change it by async-rlhf "
                    f"set {run.path} {key}={given}, and resume without it"
                )


def _check_key(key: str, config: Config) -> None:
    if key in LIVE:
        return
    if not key.startswith(_WEIGHTS):
        known = {setting.key for setting in all_settings(Config)}
        what = f"{key} may not change in a run that has begun" if key in known else f"unknown key {key!r}"
        near = did_you_mean(key, [*LIVE, f"{_WEIGHTS}NAME"])
        raise ConfigError(f"{what}; {near}")
    if loss_spec(config.loss.kind).learns_from == "teacher":
        raise ConfigError(f"{key} has no effect: loss.kind = {config.loss.kind!r} learns from a teacher, and not from rewards")
    if config.advantage.constant_groups == "refill":
        raise ConfigError(
            f"{key} may not change with advantage.constant_groups = 'refill': actors say by these weights which groups are "
            "constant"
        )


def _value(config: Config, key: str) -> Any:
    """As JSON has it."""
    if key.startswith(_WEIGHTS):
        return config.rewards.weights.get(key.removeprefix(_WEIGHTS), 1.0)
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
