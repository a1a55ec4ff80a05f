"""The supervisor's and the operator's end of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.transport.link import Connect, Connection, SocketLink


@contextmanager
def control(address: str, timeout_s: float = 5.0, connect: Connect = SocketLink) -> Iterator[Control]:
    """A short-lived connection for an operator's questions."""
    connection = Connection(connect(address, "control"))
    try:
        yield Control(connection, timeout_s)
    finally:
        connection.close()


class Control:
    """The supervisor's and the operator's end. Every method raises DeadlineError when no hub answers."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s

    def status(self) -> dict[str, Any]:
        """The hub's status. Raises WireError when another program answers."""
        answer, _ = self._connection.ask(wire.GetStatus(), timeout_s=self._timeout_s)
        if not isinstance(answer, wire.Status):
            raise WireError(f"the hub answered {answer.type!r} to a request for its status")
        return answer.status

    def drain(self) -> None:
        """Stop credits; the learner's next Take ends when no further batch can be completed."""
        self._connection.ask(wire.Drain(), timeout_s=self._timeout_s)

    def gone(self, actor: str) -> None:
        """This actor's process has ended."""
        self._connection.ask(wire.Gone(actor=actor), timeout_s=self._timeout_s)

    def quarantine(self, group: int, reason: str) -> None:
        """Take this group back. Raises RefusedError when it was, or is being, trained on."""
        self._connection.ask(wire.Quarantine(number=group, reason=reason), timeout_s=self._timeout_s)

    def halt(self) -> None:
        """The hub writes its ledger and exits."""
        self._connection.ask(wire.Halt(), timeout_s=self._timeout_s)
