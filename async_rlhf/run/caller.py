"""Rewards and environments that only the calling process has: `train(rewards=[lambda completion: ...], environment=play)`.

A lambda, a closure, a bound method or a function of a notebook cannot be imported by another process. Threads of the calling
process run it behind the servers that also serve others (`actors/scoring/server.py`, `actors/environments/server.py`), and the
actors use it as `remote` at an address that begins with "caller/"; a variable of the run's own processes has the rest of the
way, so that several runs of one process have one each.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from async_rlhf.actors.config import RewardsConfig, StageConfig
from async_rlhf.actors.environments import EnvironmentSpec
from async_rlhf.actors.environments import settings_of as environment_settings
from async_rlhf.actors.environments.loading import spec_in_process as environment_in_process
from async_rlhf.actors.prompts import Row
from async_rlhf.actors.rewards import RewardSpec, adapted, settings_of, spec_in_process, spec_of
from async_rlhf.actors.workers import CALLER, CALLER_VARIABLE
from async_rlhf.buffers.errors import ConfigError, RewardError
from async_rlhf.buffers.record import source_of
from async_rlhf.launch.sockets import socket_directory
from async_rlhf.run.config import Config
from async_rlhf.run.loading import override
from async_rlhf.run.scoring import common_columns

Function = Callable[..., Any]
_REWARDS, _ENVIRONMENT = f"{CALLER}rewards", f"{CALLER}environment"

_log = logging.getLogger(__name__)
_STOP_S = 10.0
# A request waits in the caller's queue for its turn; its own time-out begins there.
_QUEUE_S = 600.0
_FILE = "give it a file (begin its cell with '%%writefile my_environment.py')"


def split(rewards: Sequence[Function] | Function) -> tuple[list[str], dict[str, Function]]:
    """The targets of a configuration, and by name the functions that only this process has. One function is a list of one.

    Raises ConfigError for what is no function."""
    several = [rewards] if callable(rewards) else rewards
    if not (isinstance(several, Sequence) and all(map(callable, several))):
        raise ConfigError(
            f"rewards: functions were expected, got {rewards!r:.80}; what goes by a name is given as "
            "overrides={'rewards.functions': ['exact', 'judges.py:has_answer']}"
        )
    targets: list[str] = []
    functions: dict[str, Function] = {}
    for number, function in enumerate(several):
        try:
            targets.append(spec_of(function))
        except RewardError:
            name = _name(function, settings_of(function).name, f"reward_{number}")
            if name in functions:
                raise ConfigError(f'two rewards are called {name!r}; rename one with @reward(name="...")') from None
            functions[name] = function
            targets.append(f"{name}=remote")
    return targets, functions


def target_of(environment: Function) -> tuple[str, Function | None]:
    """The target of a configuration, and the function where only this process has it. Raises ConfigError for what is no
    generator of ours."""
    if inspect.isclass(environment) or not callable(environment):
        what = f"{environment.__name__} is a class" if inspect.isclass(environment) else f"it is a {type(environment).__name__}"
        name = getattr(environment, "__name__", "TOOLS")
        raise ConfigError(
            f"environment must be a generator function, but {what}. One that is written for TRL is played from a file: "
            f"overrides={{'environment.function': 'trl:my_environment.py:{name}'}}; in a notebook, begin its cell with "
            "'%%writefile my_environment.py'"
        )
    try:
        return spec_of(environment), None
    except RewardError:
        return f"{_environment_name(environment)}=remote:{_ENVIRONMENT}", environment


@contextmanager
def served(
    rewards: Mapping[str, Function], environment: Function | None, config: Config, rows: Sequence[Row] | None
) -> Iterator[tuple[Config, dict[str, str]]]:
    """Serves these until the end of the block, for a run of the configuration, with the variables, that it gives.

    rows: the data, None where they are not known yet. Raises ConfigError.
    """
    if not rewards and environment is None:
        yield config, {}
        return
    changed: dict[str, Any] = {}
    with ExitStack() as made:
        directory = made.enter_context(socket_directory())
        if rewards:
            from async_rlhf.actors.scoring.server import ScoringServer

            functions, specs = specs_of(rewards, config.rewards, config.scoring.stages, rows)
            scoring = config.scoring.model_copy(update={"placement": "actor"})
            _start(made, ScoringServer(specs, scoring, f"ipc://{directory}/rewards", functions=functions))
            changed |= _reward_overrides(rewards, config)
        if environment is not None:
            from async_rlhf.actors.environments.server import EnvironmentServer

            spec = _environment_spec(environment, config, rows)
            address = f"ipc://{directory}/environment"
            _start(made, EnvironmentServer(spec, config.environment, address, function=environment))
            limits = {key: getattr(spec, key) for key in ("max_turns", "timeout_s", "episode_timeout_s")}
            changed |= {f"environment.{key}": value for key, value in limits.items() if value is not None}
        _log.warning(
            "%s: served by threads of this process, because no other can import what is defined here only. A call cannot be "
            "killed and shares the interpreter; one that times out has failed",
            ", ".join([*rewards, *([] if environment is None else [_environment_name(environment)])]),
        )
        yield override(config, changed), {CALLER_VARIABLE: f"ipc://{directory}"}


def _start(made: ExitStack, server: Any) -> None:
    """Its loop, in a thread, until the stack is closed."""
    thread = threading.Thread(target=server.run, name="caller", daemon=True)
    thread.start()
    made.callback(thread.join, _STOP_S)
    made.callback(server.stop)


def specs_of(
    rewards: Mapping[str, Function], config: RewardsConfig, stages: Mapping[str, StageConfig], rows: Sequence[Row] | None
) -> tuple[dict[str, Function], list[RewardSpec]]:
    """The functions as ours, and their specs with the time-outs of their stages. Raises ConfigError."""

    def asked(name: str) -> set[str] | None:
        return _columns(rows, lambda source: name in config.by_source.get(source, (name,)))

    try:
        functions = {name: adapted(function) for name, function in rewards.items()}
        specs = [spec_in_process(name, function, asked(name)) for name, function in functions.items()]
    except RewardError as error:
        raise ConfigError(f"a reward of the calling process {error}") from error
    timeouts = {spec.name: stages[spec.name].timeout_s for spec in specs if spec.name in stages}
    return functions, [replace(spec, timeout_s=timeouts.get(spec.name) or spec.timeout_s) for spec in specs]


def _reward_overrides(rewards: Mapping[str, Function], config: Config) -> dict[str, Any]:
    """The rewards' own settings, as overrides of a configuration that names them as `remote`."""
    changed: dict[str, Any] = {}
    for name, function in rewards.items():
        declared = settings_of(function)
        changed[f"rewards.options.{name}"] = {"address": _REWARDS, "reward_name": name}
        changed[f"scoring.stages.{name}.timeout_s"] = _QUEUE_S
        if declared.weight != 1.0 and name not in config.rewards.weights:
            changed[f"rewards.weights.{name}"] = declared.weight
        if declared.stop_when:
            stop = changed.get("generation.stop", config.generation.stop)
            changed["generation.stop"] = list(dict.fromkeys([*stop, *declared.stop_when]))
    return changed


def _environment_spec(environment: Function, config: Config, rows: Sequence[Row] | None) -> EnvironmentSpec:
    settings, name = environment_settings(environment), _environment_name(environment)
    why = f"{name!r} cannot be imported by another process"
    if settings.at_limit != 0.0:
        raise ConfigError(
            f"@environment(at_limit={settings.at_limit}): {why}, and such a one has 0 at its limits; {_FILE}, or leave it out"
        )
    if settings.tools:
        raise ConfigError(f"@environment(tools=...): {why}, and the model would not be shown its tools; {_FILE}")
    spec = environment_in_process(name, environment, config.environment.options, config.environment.given)
    columns = _columns(rows, lambda source: source not in config.environment.by_source)
    if columns is not None:
        spec.check(columns)
    if spec.calls:
        raise ConfigError(f"environment: {why}, and an agent is played in one; {_FILE}")
    return spec


def _columns(rows: Sequence[Row] | None, is_asked: Callable[[str], bool]) -> set[str] | None:
    """Those of every row whose source is asked about; None where there is none, or they are not known."""
    own = [row for row in rows or () if is_asked(source_of(row.columns) or "")]
    return common_columns(own) if own else None


def _environment_name(environment: Function) -> str:
    return _name(environment, environment_settings(environment).name, "environment")


def _name(function: Function, declared: str | None, otherwise: str) -> str:
    plain = getattr(function, "func", function)  # a functools.partial has `func`
    name = str(declared or getattr(plain, "__name__", type(plain).__name__))
    return name if name.isidentifier() else otherwise
