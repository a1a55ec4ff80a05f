"""Whether a message that has begun still arrives; cuts a peer whose message never ends.

ZeroMQ keeps the parts of a message until the last has come; its limits are on one part (MAXMSGSIZE) and on the number of
whole messages that wait (HWM), so one peer could fill the memory with one message. Its own library does not send an
unfinished message, but whoever writes the protocol himself can.

What is known of a connection is its descriptor (from the monitor, and with every message) and the bytes that the kernel
has received on it. Once all whole messages have been handed up, what came since the last of them is unfinished. Its end
is shut down: ZeroMQ reads no more of it, and frees what it had kept when it notices. Linux only, and TCP only: the
kernel counts nothing for a unix socket, which belongs to this machine.
"""

from __future__ import annotations

import os
import socket

from async_rlhf.buffers.transport.frames import bytes_received


class UnfinishedMessageGuard:
    """Owns the bytes that each open connection had received when it was looked at after its last whole message.

    arriving: the connections over which bytes had come at the last look, since the one before.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._looked_at: set[int] = set()
        self.arriving: set[int] = set()

    def opened(self, descriptor: int) -> None:
        self._before[descriptor] = self._received[descriptor] = 0
        self._looked_at.discard(descriptor)

    def ended(self, descriptor: int) -> None:
        self._before.pop(descriptor, None)
        self._received.pop(descriptor, None)

    def heard(self, descriptor: int) -> None:
        """A whole message came over this connection."""
        self._looked_at.discard(descriptor)

    def cut(self, max_bytes: int) -> int:
        """Shut every connection down over which more has come since its last whole message; returns how many.

        Call it when every whole message has been handed up. What came before the first look at a connection is not counted,
        and between two looks anything may come.
        """
        num_cut = 0
        self.arriving.clear()
        for descriptor, before in list(self._before.items()):
            try:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    received = bytes_received(connection)
                    if received > self._received[descriptor]:
                        self._received[descriptor] = received
                        self.arriving.add(descriptor)
                    if descriptor not in self._looked_at:
                        self._before[descriptor] = received
                        self._looked_at.add(descriptor)
                    elif received - before > max_bytes:
                        connection.shutdown(socket.SHUT_RDWR)
                        self.ended(descriptor)
                        num_cut += 1
            except OSError:
                self.ended(descriptor)  # it has just been closed
        return num_cut
