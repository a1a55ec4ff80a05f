"""An actor on virtual time: continuous batching, scoring as each completion ends, weights adopted between two decode steps.

It follows `actors.loop.worker` and the torch engine: rows begin in the order of their groups as slots become free, a group's
prompt is computed once, and the one thread of the actor decodes and adopts in turns. New weights are
adopted at the next step; with `interrupt` the prefixes of running rows are computed again, with `finish` those rows end first
and no other begins. Time goes from one row's end to the next: in between the same rows are alive. What arrives meanwhile
(weights, credits, rows that fill free slots) takes effect at the next step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from async_rlhf.buffers.queue.admission import Credit
from async_rlhf.experiments.planning.simulation.virtual_time import Account, Task

if TYPE_CHECKING:
    from async_rlhf.experiments.planning.simulation.run import Simulation


@dataclass(frozen=True)
class Draws:
    """Of one group, by member and turn: tokens, seconds of its environment; by member: seconds of scoring."""

    lengths: tuple[tuple[int, ...], ...]
    rewards_s: tuple[float, ...]
    environments_s: tuple[tuple[float, ...], ...]


@dataclass
class OpenGroup:
    """versions: tokens by the version that sampled them."""

    credit: Credit
    draws: Draws
    unplayed: int
    unscored: int
    computed: bool = False  # its prompt
    versions: dict[int, int] = field(default_factory=dict)


class Row:
    """One completion. prefix: tokens before this turn's; begun: the actor's step behind which the turn begins."""

    __slots__ = ("begun", "group", "member", "prefix", "turn")

    def __init__(self, group: OpenGroup, member: int, prefix: int) -> None:
        self.group, self.member, self.prefix, self.turn, self.begun = group, member, prefix, 0, 0


class SimulatedActor:
    """version: that it serves; -1 before any. Owns the groups it has begun. judges: the owner of those that score for it."""

    def __init__(self, name: str, run: Simulation, judges: int) -> None:
        self.name, self.account = name, Account(run.clock, "weights")
        self.version = -1
        self._run, self._workload, self._costs, self._clock = run, run.workload, run.costs, run.clock
        self._judges = judges
        self._open: dict[int, OpenGroup] = {}
        self._waiting = deque[Row]()
        self._ends: list[int] = []  # heap of the steps behind which rows end
        self._ending: dict[int, list[Row]] = {}
        self._alive = self._prefixes = self._begun = 0  # rows; sums over them of prefixes and of the steps they began behind
        self._step = 0
        self._served: tuple[list[int], list[int]] = ([], [])  # from behind which step on, which version
        self._task: Task | None = None
        self._stretch = 0  # steps of the task; 0: it adopts
        self._before_s = self._total_s = 0.0  # of the task: before its first step, and in all
        self._coming: int | None = None
        self._outside = 0  # groups of which nothing is to be decoded any more
        self._is_between = False  # two tasks: what arrives is taken in by the next one

    @property
    def capacity(self) -> int:
        return self._workload.capacity + self._outside

    @property
    def waits_within(self) -> str:
        """Why it decodes nothing, as far as its own groups are the reason; "" where it has none."""
        if not self._open:
            return ""
        return "scores" if self._outside == len(self._open) else "environment"

    @property
    def is_idle(self) -> bool:
        return self._task is None

    def adopt(self, version: int) -> None:
        """There are weights that it should serve."""
        if version not in (self.version, self._coming):
            self._coming = version
            self._look()

    def begin(self, credits: Iterable[Credit]) -> None:
        for credit in credits:
            size = self._workload.group_size
            group = self._open[credit.number] = OpenGroup(credit, self._run.draws(credit.number), size, size)
            self._waiting.extend(Row(group, member, self._workload.prompt_tokens) for member in range(size))
        self._look()

    # -- the engine --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Something has arrived: it takes effect at once in an engine that stands still, else at the next step."""
        if self._is_between:
            return
        if self._task is None:
            self._go_on()
        elif self._stretch and (self._adopts_now if self._coming is not None else self._has_place):
            spent = self._total_s - self._clock.left(self._task)
            steps = bisect_left(range(self._stretch), spent, key=self._until)
            if steps < self._stretch:
                self._stretch, self._total_s = steps, self._until(steps)
                self._clock.shorten(self._task, max(0.0, self._total_s - spent))

    @property
    def _has_place(self) -> bool:
        """For a row that waits."""
        return bool(self._waiting) and self._alive < self._workload.slots

    @property
    def _adopts_now(self) -> bool:
        return self._coming is not None and not (self._workload.on_update == "finish" and self._alive)

    @property
    def _context(self) -> float:
        """Mean tokens of the alive rows."""
        return (self._prefixes + self._alive * self._step - self._begun) / self._alive

    def _until(self, steps: int) -> float:
        """Seconds of the task when it has done so many of its steps."""
        return self._before_s + steps * self._costs.decode_s(self._alive, self._context + (steps + 1) / 2)

    def _go_on(self) -> None:
        """Between two steps: adopt, let rows in, decode until the next one ends."""
        if self._adopts_now:
            again = self._workload.on_update == "interrupt" and self._alive
            seconds = self._costs.adopt_s + (self._costs.prefill_s(self._alive, round(self._context)) if again else 0.0)
            self._stretch = 0
            self.account.turn_to("adopt")
            self._task = self._clock.begin(seconds, self._adopted)
            return
        self._before_s = self._admit() if self._coming is None else 0.0
        if not self._alive:
            self._task = None
            self.account.turn_to(self._run.waits_for(self))
            return
        self.account.turn_to("decode")
        self._stretch = self._ends[0] - self._step
        self._total_s = self._until(self._stretch)
        self._task = self._clock.begin(self._total_s, self._decoded)

    def _admit(self) -> float:
        """Seconds to compute what the rows that begin now continue."""
        prompts = turns = 0
        while self._has_place:
            row = self._waiting.popleft()
            if row.turn:
                turns += 1
            elif not row.group.computed:
                prompts, row.group.computed = prompts + 1, True
            row.begun = self._step
            self._alive, self._prefixes, self._begun = self._alive + 1, self._prefixes + row.prefix, self._begun + row.begun
            end = self._step + row.group.draws.lengths[row.member][row.turn]
            if (same := self._ending.get(end)) is None:
                self._ending[end] = [row]
                heappush(self._ends, end)
            else:
                same.append(row)
        seconds = self._costs.prefill_s(prompts, self._workload.prompt_tokens) if prompts else 0.0
        return seconds + (self._costs.prefill_s(turns, self._workload.observation_tokens) if turns else 0.0)

    def _adopted(self) -> None:
        assert self._coming is not None
        self.version, self._coming, self._task = self._coming, None, None
        self._served[0].append(self._step)
        self._served[1].append(self.version)
        self._is_between = True
        self._run.reported(self)
        self._is_between = False
        self._go_on()

    def _decoded(self) -> None:
        self._step, self._task = self._step + self._stretch, None
        self._is_between = True
        if self._ends[0] == self._step:
            rows = self._ending.pop(heappop(self._ends))
            self._alive -= len(rows)
            for row in rows:
                self._prefixes -= row.prefix
                self._begun -= row.begun
                self._end_turn(row)
        self._is_between = False
        self._go_on()

    def _end_turn(self, row: Row) -> None:
        group, draws = row.group, row.group.draws
        end = row.begun + draws.lengths[row.member][row.turn]
        self._count(group, row.begun, end)
        row.prefix += end - row.begun
        row.turn += 1
        if row.turn < self._workload.turns:
            self._clock.begin(draws.environments_s[row.member][row.turn - 1], lambda: self._continue(row))
            return
        group.unplayed -= 1
        if not group.unplayed:  # it takes no room in the engine any more, so it makes room for another
            self._outside += 1
            self._run.reported(self)
        self._run.judges.submit(self._judges, draws.rewards_s[row.member], lambda: self._scored(group))

    def _count(self, group: OpenGroup, begun: int, end: int) -> None:
        """Tokens of the steps from `begun` to `end` by version."""
        steps, versions = self._served
        place = bisect_right(steps, begun) - 1
        while begun < end:
            until = min(end, steps[place + 1]) if place + 1 < len(steps) else end
            if until > begun:
                group.versions[versions[place]] = group.versions.get(versions[place], 0) + until - begun
            begun, place = max(begun, until), place + 1

    def _continue(self, row: Row) -> None:
        """The environment has answered."""
        row.prefix += self._workload.observation_tokens
        self._waiting.append(row)
        self._look()

    def _scored(self, group: OpenGroup) -> None:
        group.unscored -= 1
        if not group.unscored:
            del self._open[group.credit.number]
            self._outside -= 1
            self._run.made(self, group)
