"""What a simulated run does: its batches, its actors, its rewards; and what its stages take.

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
ENDLESS = 1 << 62  # groups: the data do not end a simulated run


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One run. Raises ConfigError as `Bound.check` for settings under which a run would hang.

    lengths: completion tokens (of one turn) as a histogram: each completion's are drawn from them evenly. reward_s: seconds
    that scoring a completion takes, drawn likewise. The draws of a group depend on its number alone.
    slots: of each actor; queued_groups: that it holds beyond them (`actors.queued_groups`).
    judges: completions scored at once by each actor, or by the run where `shared_judges`; None for no limit.
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
    judges: int | None = 1
    shared_judges: bool = False
    on_update: Literal["keep", "interrupt", "finish"] = "keep"
    turns: int = 1
    environment_s: Sequence[float] = (0.0,)
    observation_tokens: int = 0

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
    """Seconds of each stage; the module docstring has what constants are times of.

    copy_s: for which the learner stands still to begin a publication. travel_s: from then until the hub has the weights whole;
    training goes on meanwhile. adopt_s: for which an actor's decoding stands still.
    """

    decode: Terms = (0.0, 0.0, 0.0)
    prefill: Terms = (0.0, 0.0, 0.0)
    training: Terms = (0.0, 0.0, 0.0)
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
