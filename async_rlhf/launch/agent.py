"""An agent: starts roles on its host as its own children, at the orders of a supervisor elsewhere, and reports on them.

    owns        the processes of its nodes (`LocalLauncher`), a directory of its own and one for their sockets (`depot`)
    waits for   orders, 0.1 s at a time
    woken by    orders, the clock
    on close    every process is killed and its directories removed; when it is killed itself its processes end too, for the
                pipes to their standard input close (`tether`)

`python -m async_rlhf.launch.agent [NAME DEVICES]` takes orders from standard input and gives events to standard output;
whatever starts it on the host (ssh, srun, Ray) only passes bytes on. It ends when its input ends, and when it has received
nothing, or its output was not read, for `lost_after_s`. It ignores the signals that a job's processes all receive.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from async_rlhf.buffers.errors import ConfigError, WireError
from async_rlhf.launch import orders
from async_rlhf.launch.depot import Depot
from async_rlhf.launch.exit_codes import FAILED, HOST_LOST
from async_rlhf.launch.hosts import Pipe
from async_rlhf.launch.local import LocalLauncher, LocalProcess, warm
from async_rlhf.launch.machine import installed, this_machine
from async_rlhf.launch.program import Node
from async_rlhf.launch.sockets import ON_HOST

_LOOK_S = 0.1
_ALIVE_S = 1.0
_FIRST_ORDER_S = 60.0
# Bytes of one file sent in one poll, and bytes that a late supervisor skips; the file itself stays whole.
_READ_BYTES, _BEHIND_BYTES = 1 << 16, 4 << 20


@dataclass
class _Life:
    """A started node, and how much of each file that it returns has been sent."""

    process: LocalProcess
    returns: list[Path]
    sent: list[int] = field(default_factory=list)

    def written(self) -> Iterator[tuple[int, bytes]]:
        """(number of the file, bytes) for each file that has grown since the last call."""
        for number, path in enumerate(self.returns):
            try:
                with path.open("rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    begin = max(self.sent[number], size - _BEHIND_BYTES)
                    file.seek(begin)
                    data = file.read(_READ_BYTES)
            except OSError:  # it is not there yet
                continue
            self.sent[number] = begin + len(data)
            if data:
                yield number, data


class Agent:
    """See the module docstring. One thread at a time calls it; it sends nothing itself, and reads no clock.

    name: what it calls its host; without, the machine's name. devices: how many the host has; None: what its driver lists.
    Owns a thread for what may last: queries of the driver, large files, starts, which wait for the fork server's imports. So
    the agent is alive to its supervisor meanwhile.
    """

    def __init__(self, name: str = "", devices: int | None = None) -> None:
        self._name, self._devices = name or socket.gethostname(), devices
        self._depot: Depot | None = None
        self._thread = ThreadPoolExecutor(1, "agent")
        self._answers: deque[Future[orders.Event]] = deque()
        self._starts: dict[int, Future[_Life | orders.Event]] = {}
        self._unwanted: set[int] = set()
        self._launcher = LocalLauncher()
        self._lives: dict[int, _Life] = {}

    def take(self, message: orders.Order) -> list[orders.Event]:
        """Carry out an order. Raises WireError for an invalid one, OSError for errors of the disk."""
        if isinstance(message, orders.OpenAgent) and self._depot is None:
            self._depot = Depot(message.directory)
            self._answers.append(self._thread.submit(self._opened, str(self._depot.own), message.accelerators))
            return []
        if self._depot is None or isinstance(message, orders.OpenAgent):
            raise WireError(f"the order {message.type!r} in the wrong place: 'open' comes first, and once", "order")
        if isinstance(message, orders.Want):
            self._answers.append(self._thread.submit(_missing, self._depot, message))
        elif isinstance(message, orders.ContentPiece):
            self._depot.add(message.digest, message.data, last=message.last)
        elif isinstance(message, orders.Start):
            self._starts[message.life] = self._thread.submit(self._start, self._depot, message)
        elif isinstance(message, orders.Kill) and message.life in self._starts:
            self._unwanted.add(message.life)
        elif isinstance(message, orders.Kill) and (life := self._lives.get(message.life)) is not None:
            life.process.kill()
            return self.look()
        return []

    def look(self) -> list[orders.Event]:
        """The events since the last call."""
        events: list[orders.Event] = []
        while self._answers and self._answers[0].done():
            events.append(self._answers.popleft().result())
        for number in [each for each, start in self._starts.items() if start.done()]:
            events.append(self._started(number, self._starts.pop(number).result()))
        for number, life in list(self._lives.items()):
            code = life.process.poll()
            if words := life.process.read_beats():
                events.append(orders.Beats(life=number, words=words))
            while wrote := [orders.Wrote(life=number, number=which, data=data) for which, data in life.written()]:
                events += wrote
                if code is None:
                    break  # the rest in the next poll
            if code is not None:
                del self._lives[number]
                events.append(orders.NodeEnded(life=number, code=code, words=life.process.failure_message()[:1000]))
        return events

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)  # processes being started end with this one
        for life in self._lives.values():
            life.process.kill()
        if self._depot is not None:
            self._depot.close()

    def _opened(self, directory: str, accelerators: bool) -> orders.Event:
        host = this_machine(look_for_devices=accelerators)
        host = host if self._devices is None else host.model_copy(update={"devices": self._devices})
        return orders.Opened(version=installed(), name=self._name, directory=directory, has=dict(host))

    def _started(self, number: int, started: _Life | orders.Event) -> orders.Event:
        if not isinstance(started, _Life):
            return started
        self._lives[number] = started
        if number in self._unwanted:
            self._unwanted.remove(number)
            started.process.kill()
        return orders.Started(life=number, pid=started.process.pid)

    def _start(self, depot: Depot, message: orders.Start) -> _Life | orders.Event:
        try:
            directory = depot.lay_out(message.name, message.files, message.inline)
            returns = [directory / name for name in message.returns]
            for path in returns:
                path.parent.mkdir(parents=True, exist_ok=True)
            fields = {name: getattr(message, name) for name in orders.OF_NODE}
            arguments = tuple(each.replace(str(ON_HOST), str(depot.sockets)) for each in message.arguments)
            process = self._launcher.start(directory, Node(**fields | {"arguments": arguments, "log": returns[0]}))
        except OSError as error:
            return orders.NodeEnded(life=message.life, code=FAILED, words=f"it cannot be started: {error}")
        except ConfigError as error:  # another host with fewer devices has come in the place of one
            return orders.NodeEnded(life=message.life, code=HOST_LOST, words=str(error))
        return _Life(process, returns, [0] * len(returns))


def _missing(depot: Depot, message: orders.Want) -> orders.Event:
    return orders.MissingContents(digests=depot.missing(message.places))


def serve(agent: Agent, pipe: Pipe) -> NoReturn:
    """Serve until the supervisor has gone. Raises ConnectionError then, WireError for an unknown order, OSError.

    Silence is counted in looks, not by a clock: an agent that was frozen does not take its own absence for the supervisor's.
    """
    silent_s, sent_at, lost_after_s = 0.0, time.monotonic(), _FIRST_ORDER_S
    while silent_s < lost_after_s:
        events: list[orders.Event] = []
        if (frame := pipe.receive(_LOOK_S)) is not None:
            silent_s, message = 0.0, orders.ORDERS.unpack(frame)
            lost_after_s = message.lost_after_s if isinstance(message, orders.OpenAgent) else lost_after_s
            events += agent.take(message)
        else:
            silent_s += _LOOK_S
        events += agent.look()
        if not events and time.monotonic() - sent_at >= _ALIVE_S:
            events.append(orders.Alive())
        for event in events:
            pipe.send(orders.EVENTS.pack(event), max(lost_after_s - silent_s, 0.0))  # what passes it on may be frozen
            sent_at = time.monotonic()
    raise ConnectionAbortedError(f"no order for {lost_after_s:.0f} s")


def main() -> int:
    """Orders come from standard input, events go to standard output, and all printed text to standard error.

    Its arguments are those of `Agent`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    writes = os.dup(sys.stdout.fileno())
    os.set_blocking(writes, False)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    agent = Agent(sys.argv[1], int(sys.argv[2])) if sys.argv[2:] else Agent()
    warm()
    try:
        serve(agent, Pipe(os.dup(sys.stdin.fileno()), writes))
    except ConnectionError as error:
        sys.stderr.write(f"the agent ends with its supervisor: {error}\n")
        return 0
    except (OSError, WireError, ConfigError) as error:
        sys.stderr.write(f"fatal: {error}\n")
        return FAILED
    finally:
        agent.close()


if __name__ == "__main__":
    sys.exit(main())
