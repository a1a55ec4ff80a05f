"""What ends a `poll` from another thread or a signal handler: a pipe beside the sockets."""

from __future__ import annotations

import os
from contextlib import suppress


class Waker:
    """Owns a pipe. Register `descriptor` for reading with a poller; `ring` from anywhere, `clear` when the poller saw it."""

    def __init__(self) -> None:
        self.descriptor, self._ringer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._ringer, False)

    def ring(self) -> None:
        """End a waiting poll, or the next one."""
        with suppress(BlockingIOError):  # a full pipe rings already
            os.write(self._ringer, b"w")

    def clear(self) -> None:
        """Forget that it rang; call it only when it did."""
        os.read(self.descriptor, 4096)

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._ringer)
