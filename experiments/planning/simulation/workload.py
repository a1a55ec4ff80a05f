"""What a simulated run does: its batches, its actors, its rewards, the cores its roles share, and who comes and goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.queue.bound import Bound

Role = Literal["actor", "scoring", "learner"]
OnUpdate = Literal["keep", "interrupt", "finish"]
ENDLESS = 1 << 62  # groups: the data do not end a simulated run


@dataclass(frozen=True)
class Pool:
    """Cores that some roles share; a role in no pool has devices of its own.

    Processor sharing: a stage that is busy keeps at most `parallelism` cores of its role busy. Where all busy stages of a pool
    want more than there are, each gets the same number of cores, but none more than it wants, and what it then needs grows by
    the ratio of wanted to given. Caches, memory bandwidth and the cost of switching are not modelled.
    """

    cores: float
    roles: tuple[Role, ...]
    parallelism: tuple[float, ...] = ()
    """Of each of `roles`: of one actor's engine, of one call of a reward, of the learner's step; 1 where it is left out."""

    def __post_init__(self) -> None:
        if not 0 < self.cores < math.inf:
            raise ConfigError(f"a pool of {self.cores} cores: above 0")
        for role in self.roles:
            if role not in get_args(Role):
                raise ConfigError(f"role {role!r} of a pool: {did_you_mean(role, get_args(Role))}")
        if len(self.parallelism) > len(self.roles) or any(not each > 0 for each in self.parallelism):
            raise ConfigError(f"parallelism {self.parallelism} of the roles {self.roles}: one above 0 for each of them at most")

    def parallelism_of(self, role: Role) -> float:
        place = self.roles.index(role)
        return self.parallelism[place] if place < len(self.parallelism) else 1.0


@dataclass(frozen=True)
class ActorLost:
    """The end of an actor's process is seen `at_s` seconds after the run began: what it was making is made again."""

    at_s: float
    name: str


@dataclass(frozen=True)
class ActorJoined:
    """An actor joins at `at_s`, with no weights yet."""

    at_s: float
    name: str


Event = ActorLost | ActorJoined


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One run. Raises ConfigError for a setting that cannot be, and as `Bound.check` for one under which a run would hang.

    lengths: completion tokens (of one turn) as a histogram: each completion's are drawn from them evenly. reward_s: seconds
    that scoring a completion takes, drawn likewise. The draws of a group depend on its number and the seed alone.
    slots: of each actor; queued_groups: that it asks for beyond them (`actors.queued_groups`).
    judges: completions scored at once by each actor, or by the run where `shared_judges`; None for no limit.
    reward_cores: whether scoring takes cores of its pool; a reward that waits for another machine takes none.
    on_update: what becomes of running rows when weights are adopted (`generation.on_update`).
    turns: of each episode; between two of them its environment takes `environment_s` and returns `observation_tokens`.
    """

    groups_per_batch: int
    group_size: int
    lengths: Sequence[int]
    prompt_tokens: int
    max_staleness: int
    exact: bool = False
    window: int = 1
    publish_every: int = 1
    updates_per_step: int = 1
    actors: int = 1
    slots: int = 128
    queued_groups: int = 8
    reward_s: Sequence[float] = (0.0,)
    reward_cores: bool = True
    judges: int | None = 1
    shared_judges: bool = False
    on_update: OnUpdate = "keep"
    turns: int = 1
    environment_s: Sequence[float] = (0.0,)
    observation_tokens: int = 0
    pools: tuple[Pool, ...] = ()

    def __post_init__(self) -> None:
        for name in ("groups_per_batch", "group_size", "publish_every", "window", "updates_per_step", "slots", "turns"):
            _at_least(name, getattr(self, name), 1)
        for name in ("actors", "prompt_tokens", "max_staleness", "queued_groups", "observation_tokens"):
            _at_least(name, getattr(self, name), 0)
        if self.on_update not in get_args(OnUpdate):
            raise ConfigError(
                f"on_update = {self.on_update!r} of the workload: {did_you_mean(self.on_update, get_args(OnUpdate))}"
            )
        if self.judges is not None:
            _at_least("judges", self.judges, 1)
        for name, lowest in (("lengths", 1), ("reward_s", 0), ("environment_s", 0)):
            values = getattr(self, name)
            if not len(values):
                raise ConfigError(f"{name} of the workload is empty: at least one value to draw from")
            for value in values:
                if not lowest <= value < math.inf:
                    raise ConfigError(f"{name} of the workload holds {value}: each at least {lowest}")
        named = [role for pool in self.pools for role in pool.roles]
        if twice := next((role for role in named if named.count(role) > 1), None):
            raise ConfigError(f"role {twice!r} is in two pools of the workload: in one at most")
        self.bound.check()

    @property
    def bound(self) -> Bound:
        return Bound(
            groups_per_batch=self.groups_per_batch,
            max_staleness=self.max_staleness,
            num_groups=ENDLESS,
            publish_every=self.publish_every,
            window=self.window,
            exact=self.exact,
        )

    @property
    def samples(self) -> int:
        """Completions of a batch."""
        return self.groups_per_batch * self.group_size

    @property
    def capacity(self) -> int:
        """Groups that one actor may hold in its engine, as `Config.actor_capacity`."""
        return -(-self.slots // self.group_size) + self.queued_groups

    @property
    def names(self) -> tuple[str, ...]:
        """Of the actors that the run begins with."""
        return tuple(f"actor-{number}" for number in range(self.actors))


def check_events(workload: Workload, events: Sequence[Event]) -> list[Event]:
    """In the order of their times. Raises ConfigError for one that cannot happen then."""
    alive = set(workload.names)
    for event in (ordered := sorted(events, key=lambda event: event.at_s)):
        if not 0 <= event.at_s < math.inf:
            raise ConfigError(f"{event}: at_s is 0 or more seconds")
        if isinstance(event, ActorLost) and event.name not in alive:
            raise ConfigError(f"{event}: no such actor is in the run then; {did_you_mean(event.name, alive)}")
        if isinstance(event, ActorJoined) and event.name in alive:
            raise ConfigError(f"{event}: an actor of this name is in the run then; choose another")
        (alive.remove if isinstance(event, ActorLost) else alive.add)(event.name)
    return ordered


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} = {value} of the workload: at least {least}")
