"""Which group numbers there are, and what each one's prompt is, where the hub decides that: prompts that come while the run
goes on (`spool`), prompts chosen by how often they were solved (`curriculum`), or both.

    owns        nothing: the spool's stream and the order keep what was decided
    waits for   the disk, when an order is appended to
    called by   `exchange`, before it gives credits and when a batch is durable

A curriculum chooses as far ahead as admission may give credits: when the learner has been given s batches it has published
version s at most, which begins groups n < (s + S + 1) B + q (`queue.bound`; a window only lowers that). So many numbers have
their place, and no more, so what was learned matters as soon as it may; a credit never waits for one.

What was learned counts when its batch is durable, before the learner is given it: with W = 1 and prompts that are all there,
the place of every number is a function of the batches before it, however fast actors are and whatever dies. `queue.exact` and
S = 0 keep their promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from async_rlhf.buffers.config import CurriculumConfig
from async_rlhf.buffers.curriculum import Order, pass_rate
from async_rlhf.buffers.protocol import packing
from async_rlhf.buffers.protocol.wire import GroupHeader
from async_rlhf.buffers.queue.admission import Admission
from async_rlhf.buffers.spool.claims import Spool


class Prompts:
    """spool: where prompts come while the run goes on; None: all of `num_rows` are there. order: None without a curriculum.
    Without both the hub decides nothing."""

    def __init__(
        self,
        spool: Spool | None = None,
        order: Order | None = None,
        config: CurriculumConfig | None = None,
        num_rows: int = 0,
    ) -> None:
        self.spool, self._order, self._num_rows = spool, order, num_rows
        self._config = config or CurriculumConfig()
        self._filtered: list[tuple[int, float | None]] = []

    def filtered(self, group: GroupHeader) -> None:
        """Another group must take the place of this filtered one."""
        if self._order is not None:
            self._filtered.append((group.number, self._pass_rate(group)))

    def extend(self, admission: Admission) -> None:
        """Admission learns which numbers there are now. Raises OSError; there are no more of them then."""
        order = self._order
        if order is not None:
            ended = order.append(self._target(admission), self._num_known, self._filtered)
            self._filtered.clear()
            admission.order.extend(order.num_numbers, coming=not (ended and self._is_final))
        elif self.spool is not None:
            admission.order.extend(self.spool.stream.num_numbers, coming=not self.spool.stream.ended)

    def learn(self, admission: Admission, read: Callable[[int], memoryview]) -> None:
        """Count the outcomes of a batch that has become durable, if there is one. read: the journal's. Raises OSError."""
        order = self._order
        if order is None or (batch := admission.batch(order.num_steps)) is None:
            return
        # Those below that are in no batch were quarantined.
        others = set(order.not_judged_below(admission.order.head)).difference(batch)
        headers = (packing.put_header(packing.from_bytes(read(number))) for number in batch)
        outcomes = [(group.number, self._pass_rate(group)) for group in headers]
        outcomes += [(number, None) for number in others]
        order.append(self._target(admission, further=1), self._num_known, outcomes, order.num_steps)

    def of(self, number: int) -> dict[str, Any]:
        """Fields of this number's credit: its `row` where actors have no rows, or the `place` of the chosen row."""
        if self._order is None:
            return {} if self.spool is None else {"row": self.spool.stream.row(number)}
        place = self._order.place(number)
        return {"place": place} if self.spool is None else {"row": self.spool.stream.row_at(place)}

    def status(self) -> dict[str, Any]:
        """State of spool and curriculum, for an operator."""
        return {
            "spool": None if self.spool is None else self.spool.status(),
            "curriculum": None if self._order is None else self._order.describe(),
        }

    def telemetry(self, step: int) -> dict[str, float]:
        """The curriculum's numbers for the record of a step: its state before the step's batch, however often that is given."""
        if self._order is None:
            return {}
        found = self._order.describe(step)
        return {f"curriculum/{name}": float(found[name]) for name in ("new", "retired", "hard", "pass_rate")}

    def close(self) -> None:
        if self.spool is not None:
            self.spool.stream.close()
        if self._order is not None:
            self._order.close()

    def _pass_rate(self, group: GroupHeader) -> float | None:
        return pass_rate(group.scores.get(self._config.reward, ()), self._config.passes_at)

    @property
    def _num_known(self) -> int:
        return self._num_rows if self.spool is None else self.spool.stream.num_rows

    @property
    def _is_final(self) -> bool:
        return self.spool is None or self.spool.stream.ended

    def _target(self, admission: Admission, further: int = 0) -> int:
        """How many numbers need a place after `further` more batches: see the module docstring."""
        assert self._order is not None
        bound, dead = admission.bound, len(admission.order.quarantined) + admission.num_filtered
        return (self._order.num_steps + further + bound.max_staleness + 1) * bound.groups_per_batch + dead
