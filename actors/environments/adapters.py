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
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_rlhf.actors.environments.settings import Declaration, EnvironmentFunction
from async_rlhf.actors.environments.tool_calls import Tool
from async_rlhf.actors.rewards.loading import found_in
from async_rlhf.actors.workers import CALLER
from async_rlhf.buffers.errors import ConfigError, EpisodeError

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

    @classmethod
    def of(cls, target: str) -> Target:
        """Raises EpisodeError for what is not there."""
        place, _, name = target.rpartition(":")
        return cls(place, name, found_in(place, name, "environment", target, EpisodeError))

    def beside(self, name: str) -> Any:
        """What else stands at the top level there. Raises ConfigError."""
        return found_in(self.place, name, "reward", f"{self.place}:{name}", ConfigError)


def form_of(target: str) -> tuple[str, str]:
    """The form before the first colon ("" for one of ours), and what follows."""
    form, _, rest = target.partition(":")
    return (form, rest) if form in ADAPTERS and (":" in rest or rest.startswith(CALLER)) else ("", target)


def adapted(form: str, target: str, options: Mapping[str, Any]) -> Adapted:
    """Made once in a process. Raises EpisodeError for what is not there, ConfigError for what is not of the form."""
    return _adapted(form, target, json.dumps(dict(options), sort_keys=True))


@functools.lru_cache(maxsize=16)
def _adapted(form: str, target: str, options: str) -> Adapted:
    module, _, name = ADAPTERS[form].partition(":")
    found: Adapted = getattr(importlib.import_module(f"{__package__}.{module}"), name)(target, json.loads(options))
    return found


ADAPTERS: Mapping[str, str] = {
    "trl": "from_trl:from_trl",
    "verifiers": "from_verifiers:from_verifiers",
    "remote": "remote:from_server",
}
"""By form the module here and its function, which makes of target and options what is `Adapted`: imported where it is used."""
