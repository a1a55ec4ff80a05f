"""Environments written for other systems, played as ours.

    form        what the target is                                                        settings it reads
    trl         what `GRPOTrainer` takes as `environment_factory`, or as `tools`: a list     options.rewards, .response_template
    verifiers   a `load_environment` that gives a `MultiTurnEnv` or a subclass of it         options are its arguments
    remote      the address of a server that plays one (`server`)                            options.keys

Each adapter makes a generator of ours from the foreign object, which stays unchanged. The form is named before the target:
`trl:file.py:MyEnvironment`. The tools that the model is shown are known before the run, and travel with the environment's spec.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from async_rlhf.actors.environments.settings import Declaration, EnvironmentFunction
from async_rlhf.actors.environments.tool_calls import Tool
from async_rlhf.actors.rewards.importing import found_in
from async_rlhf.actors.workers import CALLER
from async_rlhf.buffers.errors import ConfigError, EpisodeError, RewardError

MAX_TURNS = 64
"""Of an environment that sets no limit itself; the length of an episode bounds it as well."""


@dataclass(frozen=True)
class Adapted:
    """A generator of ours, called with the fields of an episode, and what its foreign object declares.

    required: columns that every row must have. tools: what the model's chat template is given. judges: whether it gives a
    score; else rewards must. fields: the fields and columns it takes, None for all.
    """

    function: EnvironmentFunction
    settings: Declaration
    required: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    judges: bool = True
    fields: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Target:
    """What an adapter works on. place: the module or file of `found`, whose last name is `name`."""

    place: str
    name: str
    found: Any

    def beside(self, name: str) -> Any:
        """What else stands at the top level there. Raises ConfigError."""
        try:
            return found_in(self.place, name, "reward", f"{self.place}:{name}")
        except RewardError as error:
            raise ConfigError(str(error)) from error


def form_of(target: str) -> tuple[str, str]:
    """The form before the first colon ("" for one of ours), and what follows."""
    form, _, rest = target.partition(":")
    return (form, rest) if form in ADAPTERS and (":" in rest or rest.startswith(CALLER)) else ("", target)


def adapted(form: str, target: str, options: Mapping[str, Any]) -> Adapted:
    """Made once in a process. Raises EpisodeError for what is not there, ConfigError for what is not of the form."""
    return _adapted(form, target, json.dumps(dict(options), sort_keys=True))


@functools.lru_cache(maxsize=16)
def _adapted(form: str, target: str, options: str) -> Adapted:
    return ADAPTERS[form](target, json.loads(options))


def _target(target: str) -> Target:
    place, _, name = target.rpartition(":")
    try:
        return Target(place, name, found_in(place, name, "environment", target))
    except RewardError as error:
        raise EpisodeError(str(error)) from error


def _from_trl(target: str, options: Mapping[str, Any]) -> Adapted:
    from async_rlhf.actors.environments.from_trl import from_trl

    return from_trl(_target(target), options)


def _from_verifiers(target: str, options: Mapping[str, Any]) -> Adapted:
    from async_rlhf.actors.environments.from_verifiers import from_verifiers

    return from_verifiers(_target(target), options)


def _from_server(address: str, options: Mapping[str, Any]) -> Adapted:
    from async_rlhf.actors.environments.remote import from_server

    return from_server(address, options)


ADAPTERS: Mapping[str, Callable[[str, Mapping[str, Any]], Adapted]] = {
    "trl": _from_trl,
    "verifiers": _from_verifiers,
    "remote": _from_server,
}
