"""How many bytes may wait in the queue, and why that never deadlocks. Arithmetic only; `admission` owns one.

Rule
    Let Q be the bytes of the queued groups (in the journal, in no batch yet) and m those of the largest group seen so far.
    A credit is given only while  Q + (leases + 1) m <= max_bytes,  and a finished group enters only while
    Q + its own bytes <= max_bytes. Groups that are due are excepted from both: those among the B lowest live numbers that
    no batch has, B being the groups of a batch.

Claim: Q <= max_bytes + B m, whatever actors do.
    What takes Q over max_bytes is due, and at most B groups are due at a time. A group that is due stays so until a batch
    has it, and then it is no longer in Q.

Claim: it never deadlocks.
    Credits are given lowest number first, so the B lowest are leased or queued before any other is begun, and neither rule
    stops them. So the next batch comes together exactly as without a limit; the learner takes it, and Q falls by its bytes.
    A finished group that must wait stays with its actor, whose lease lives on; it takes no place in the engine. It enters
    when there is room, or at the latest when it is due.

On disk lie, beside Q, the groups trained on since the oldest checkpoint that is kept.
"""

from __future__ import annotations


class ByteBudget:
    """`queued`: Q. `largest`: m. `max_bytes`: None for no limit."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.queued = self.largest = 0

    def enter(self, num_bytes: int) -> None:
        self.queued += num_bytes
        self.largest = max(self.largest, num_bytes)

    def leave(self, num_bytes: int) -> None:
        self.queued -= num_bytes

    def fits(self, num_bytes: int) -> bool:
        """Whether a finished group may enter that is not due."""
        return self.max_bytes is None or self.queued + num_bytes <= self.max_bytes

    def has_credit(self, leases: int) -> bool:
        """Whether one more group may be begun that is not due, when `leases` are being made."""
        return self.max_bytes is None or self.queued + (leases + 1) * self.largest <= self.max_bytes
