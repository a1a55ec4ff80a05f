"""Rewards that only the calling process has: `train(rewards=[lambda completion: ...])`.

A lambda, a closure, a bound method or a function of a notebook cannot be imported by another process. A thread of the calling
process serves it (`actors/scoring/server.py`), and the actors use it as the reward `remote` at the address "caller", which a
variable of the run's own processes resolves: several runs of one process have one each. Nothing is pickled.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from async_rlhf.actors.rewards import CALLER, CALLER_ADDRESS, RewardSpec, adapted, settings_of, spec_in_process, spec_of
from async_rlhf.buffers.errors import ConfigError, RewardError
from async_rlhf.launch.sockets import socket_directory
from async_rlhf.run.config import Config, override

_log = logging.getLogger(__name__)
_STOP_S = 10.0
# A request waits in the caller's queue for its turn; its own time-out begins there.
_QUEUE_S = 600.0


def split(rewards: Sequence[Callable[..., Any]] | Callable[..., Any]) -> tuple[list[str], dict[str, Callable[..., Any]]]:
    """The targets of a configuration, and by name the functions that only this process has. One function is a list of one."""
    targets: list[str] = []
    own: dict[str, Callable[..., Any]] = {}
    for number, function in enumerate([rewards] if callable(rewards) else rewards):
        try:
            targets.append(spec_of(function))
        except RewardError:
            name = _name(function) or f"reward_{number}"
            if name in own:
                raise ConfigError(f'two rewards are called {name!r}; rename one with @reward(name="...")') from None
            own[name] = function
            targets.append(f"{name}=remote")
    return targets, own


@contextmanager
def served(
    own: Mapping[str, Callable[..., Any]], config: Config, columns: AbstractSet[str] | None
) -> Iterator[tuple[Config, dict[str, str]]]:
    """Serves the functions until the end of the block, for a run of the configuration, with the variables, that it gives.

    columns: those of the data, None where they are not known yet. Raises ConfigError.
    """
    if not own:
        yield config, {}
        return
    from async_rlhf.actors.scoring.server import REWARD_SERVER, ScoringServer

    try:
        functions = {name: adapted(function) for name, function in own.items()}
        specs = [_timed(spec_in_process(name, function, columns), config) for name, function in functions.items()]
    except RewardError as error:
        raise ConfigError(f"a reward of the calling process {error}") from error
    _log.warning(
        "%s: served by threads of this process, because no other can import %s. A call cannot be killed and shares the "
        "interpreter; one that times out is a failed score",
        ", ".join(own),
        "it" if len(own) == 1 else "them",
    )
    with socket_directory() as directory:
        scoring = config.scoring.model_copy(update={"placement": "actor"})
        server = ScoringServer(specs, scoring, f"ipc://{directory}/caller", REWARD_SERVER, functions=functions)
        thread = threading.Thread(target=server.run, name="caller-rewards-server", daemon=True)
        thread.start()
        try:
            yield override(config, _overrides(own, config)), {CALLER_ADDRESS: server.address}
        finally:
            server.stop()
            thread.join(_STOP_S)


def _timed(spec: RewardSpec, config: Config) -> RewardSpec:
    """With the time-out that the configuration gives it."""
    stage = config.scoring.stages.get(spec.name)
    return spec if stage is None or stage.timeout_s is None else replace(spec, timeout_s=stage.timeout_s)


def _overrides(own: Mapping[str, Callable[..., Any]], config: Config) -> dict[str, Any]:
    """What the rewards' own settings are in the configuration of a run that asks for them as `remote`."""
    changed: dict[str, Any] = {}
    for name, function in own.items():
        declared = settings_of(function)
        changed[f"rewards.options.{name}"] = {"address": CALLER, "reward_name": name, "timeout_s": _QUEUE_S}
        changed[f"scoring.stages.{name}.timeout_s"] = _QUEUE_S
        if declared.weight != 1.0 and name not in config.rewards.weights:
            changed[f"rewards.weights.{name}"] = declared.weight
        if declared.stop_when and name not in config.rewards.stop_when:
            changed[f"rewards.stop_when.{name}"] = list(declared.stop_when)
    return changed


def _name(function: Callable[..., Any]) -> str | None:
    plain = getattr(function, "func", function)  # of a functools.partial
    name = str(settings_of(function).name or getattr(plain, "__name__", type(plain).__name__))
    return name if name.isidentifier() else None
