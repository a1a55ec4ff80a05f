"""What a simulated run does: its batches, its actors, its rewards, the cores its roles share, and what its stages take.

decode_s     a decode step, one token for each row:  c0 + c1 · rows + c2 · rows · context
prefill_s    prompts that begin together:            c0 + c1 · prompts + c2 · prompts · tokens
training_s   the updates of a step:                  c0 + c1 · updates + c2 · tokens, a shared prompt counted once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from async_rlhf.buffers.queue.bound import Bound

Terms = tuple[float, float, float]
Role = Literal["actor", "scoring", "learner"]
ENDLESS = 1 << 62  # groups: the data do not end a simulated run


@dataclass(frozen=True)
class Pool:
    """Cores that some roles share; a role in no pool has devices of its own.

    Processor sharing: a stage that is busy keeps at most `parallelism` cores of its role busy. Where all busy stages of a pool
    want more than there are, each gets the same number of cores, but none more than it wants, and what it then needs grows by
    the ratio of wanted to given. Caches, memory bandwidth and the cost of switching are not modelled.

    parallelism: of each role, where it is not 1: of one actor's engine, of one call of a reward, of the learner's step.
    """

    cores: float
    roles: tuple[Role, ...]
    parallelism: tuple[float, ...] = (1.0, 1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One run. Raises ConfigError as `Bound.check` for settings under which a run would hang.

    lengths: completion tokens (of one turn) as a histogram: each completion's are drawn from them evenly. reward_s: seconds
    that scoring a completion takes, drawn likewise. The draws of a group depend on its number alone.
    slots: of each actor; queued_groups: that it holds beyond them (`actors.queued_groups`).
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
    on_update: Literal["keep", "interrupt", "finish"] = "keep"
    turns: int = 1
    environment_s: Sequence[float] = (0.0,)
    observation_tokens: int = 0
    pools: tuple[Pool, ...] = ()

    def __post_init__(self) -> None:
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


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of each stage, were its role alone on its cores or devices; the module docstring has what constants are times of.

    completion_s: of an actor's thread, for each completion that ends (its text, its scores, its record). copy_s: for which the
    learner stands still to begin a publication. travel_s: from then until the hub has the weights whole; training goes on
    meanwhile. adopt_s: for which an actor's decoding stands still.
    """

    decode: Terms = (0.0, 0.0, 0.0)
    prefill: Terms = (0.0, 0.0, 0.0)
    training: Terms = (0.0, 0.0, 0.0)
    completion_s: float = 0.0
    copy_s: float = 0.0
    travel_s: float = 0.0
    adopt_s: float = 0.0

    def decode_s(self, rows: int, context: float) -> float:
        """A decode step of `rows` rows with a mean of `context` tokens; linear in the context."""
        step, row, token = self.decode
        return step + rows * (row + token * context)

    def prefill_s(self, prompts: int, tokens: int) -> float:
        """Of prompts of `tokens` each."""
        call, prompt, token = self.prefill
        return call + prompts * (prompt + token * tokens)

    def training_s(self, prompts: int, prompt_tokens: int, completion_tokens: int, updates: int) -> float:
        """A step over `prompts` prompts of `prompt_tokens` each, and so many tokens of all their completions."""
        step, update, token = self.training
        return step + updates * update + token * (prompts * prompt_tokens + completion_tokens)
