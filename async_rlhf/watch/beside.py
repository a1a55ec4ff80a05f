"""The page in a process of its own, beside a daemon: what its viewers take, descriptors first, they take from no run.

It ends with this process, however that ends (its standard input closes), and is started again when it ends before.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from async_rlhf.launch.tether import Tether
from async_rlhf.watch import address as addresses

_PAUSE_S = 1.0


@contextmanager
def beside(path: Path, address: str, token_file: Path | None, say: Callable[[str], object]) -> Iterator[None]:
    """Serve the page of the runs in a directory, which may be none yet, until the block ends. Raises ConfigError before it
    listens."""
    token, ended = addresses.read_token(token_file), threading.Event()
    with closing(addresses.listen(address, token)) as bound:
        say(addresses.announcement(path, bound, token))
        command = [sys.executable, "-P", "-m", __name__, str(path), str(bound.fileno()), *map(str, filter(None, [token_file]))]
        reads, tether = os.pipe()

        def keep() -> None:
            while not ended.is_set():
                subprocess.run(command, stdin=reads, pass_fds=[bound.fileno()], start_new_session=True, check=False)
                ended.wait(_PAUSE_S)
            os.close(reads)

        keeper = threading.Thread(target=keep, name="page", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            ended.set()
            os.close(tether)
            keeper.join()


def main(path: str, descriptor: str, token_file: str | None = None) -> None:
    """The process."""
    from async_rlhf.watch.runs import Runs
    from async_rlhf.watch.server import show

    threading.Thread(target=Tether.end_with_supervisor, name="follow-daemon", daemon=True).start()
    token = addresses.read_token(Path(token_file) if token_file else None)
    show(Runs(Path(path), may_be_empty=True), socket.socket(fileno=int(descriptor)), token)


if __name__ == "__main__":
    main(*sys.argv[1:])
