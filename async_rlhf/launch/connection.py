"""The hosts of a run as its supervisor sees them: of each the channel to its agent, and the processes that the agent has.

    owns        one life of a channel, a thread that sends orders and one that receives events
    waits for   the first answer of the agent, for `START_S`; what takes long there goes on as long as it beats
    woken by    orders of the supervisor, events of the agent
    on close    the channel is closed, which ends the agent and all it runs

A channel that breaks, and one that is silent for `lost_after_s`, ends the processes with `HOST_LOST`; the next start on that
host makes another. Connecting, and sending what a node needs, is done by the threads, so that no caller waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from async_rlhf.buffers.errors import ConfigError, WireError
from async_rlhf.launch import orders
from async_rlhf.launch.depot import known_digest, place_elsewhere
from async_rlhf.launch.exit_codes import FAILED, HOST_LOST
from async_rlhf.launch.machine import installed
from async_rlhf.launch.placement import Host, Inventory
from async_rlhf.launch.program import Launcher, Node, Process
from async_rlhf.launch.tether import BEAT

START_S = 120.0
"""An agent's time to answer: its command may have to pull an image, or to wait for a node."""
_ALIVE_S = 1.0
_KILL_S = 30.0
_CLOSE_S = 5.0
# Bytes that a node's returned files may take on this machine's disk in one life.
_MAX_RETURNED_BYTES = 256 << 20
E = TypeVar("E", bound=orders.Event)


class Channel(Protocol):
    """Frames to and from one agent. One thread sends, another receives; both raise OSError when the agent is gone."""

    def send(self, frame: bytes) -> None: ...

    def receive(self, timeout_s: float) -> bytes | None:
        """The next frame; None after `timeout_s`."""

    def close(self) -> None:
        """End the agent."""


class Hosts(Protocol):
    """The places of agents."""

    names: tuple[str, ...]
    """Names of this run's hosts."""
    here: str
    """The name that an agent on the supervisor's own machine gives its host."""
    addresses: tuple[str, ...]
    """The hosts' addresses in the network."""

    def connect(self, name: str) -> Channel:
        """An agent on this host. Raises OSError with the reason when there is none now."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class NodeFiles:
    """The files that a node needs (see `orders.Start`)."""

    files: Mapping[str, Path]
    inline: Mapping[str, bytes] = field(repr=False)
    returns: Mapping[str, Path]
    """Name there -> file here to which it is appended."""


Pack = Callable[[Node, str], NodeFiles]
"""(node, its directory there) -> its files."""


class RemoteProcess:
    """See `program.Process`. pid: on its host; 0 until it is known. A node beats while its host prepares it."""

    def __init__(self, life: int, node: Node, kill: Callable[[int], None]) -> None:
        self.life, self.node, self._kill = life, node, kill
        self.pid = 0
        self.returns: list[Path] = []
        self._returned = 0
        self._words: deque[bytes] = deque()
        self._ended = threading.Event()
        self._code: int | None = None
        self._failure_message = ""

    def poll(self) -> int | None:
        return self._code

    def read_beats(self) -> bytes:
        return b"".join(self._words.popleft() for _ in range(len(self._words)))

    def failure_message(self) -> str:
        return self._failure_message

    def kill(self) -> None:
        if self._code is None:
            self._kill(self.life)
        if self.pid:
            self._ended.wait(_KILL_S)
        self.ends(HOST_LOST, "its host has not confirmed that it has ended")

    # By the connection's threads:

    def beaten(self, words: bytes) -> None:
        self._words.append(words)

    def ends(self, code: int, words: str) -> None:
        if self._code is None:
            self._failure_message = words  # first, because a reader of the code may read them
            self._code = code
            self._ended.set()

    def wrote(self, number: int, data: bytes) -> None:
        """Append to the file here; beyond the bound, and on a full disk, it is dropped."""
        self._returned += len(data)
        if number < len(self.returns) and self._returned <= _MAX_RETURNED_BYTES:
            with suppress(OSError):
                self.returns[number].parent.mkdir(parents=True, exist_ok=True)
                with self.returns[number].open("ab") as file:
                    file.write(data)


class HostConnection:
    """One life of a channel to a host. `lost` is the reason when it is over."""

    def __init__(self, name: str, hosts: Hosts, opening: orders.OpenAgent, pack: Pack) -> None:
        self.lost = ""
        self._name, self._hosts, self._opening, self._pack = name, hosts, opening, pack
        self._channel: Channel | None = None
        self._directory = ""
        self.host = Host()
        """The host's resources, once it is ready."""
        self._processes: dict[int, RemoteProcess] = {}
        self._orders: SimpleQueue[RemoteProcess | orders.Kill | None] = SimpleQueue()
        self._answers: SimpleQueue[orders.Event | None] = SimpleQueue()
        self._guard = threading.Lock()
        self.ready = threading.Event()
        """Set when the agent has answered, or is lost."""
        self._sender = threading.Thread(target=self._send_all, name=f"to-{name}", daemon=True)
        self._receiver: threading.Thread | None = None
        self._sender.start()

    def start(self, process: RemoteProcess) -> None:
        with self._guard:
            self._processes[process.life] = process
            if self.lost:
                process.ends(HOST_LOST, self.lost)
        self._orders.put(process)

    def kill(self, life: int) -> None:
        self._orders.put(orders.Kill(life=life))

    def close(self, reason: str = "the run has ended") -> None:
        self._lose(reason)
        for thread in (self._sender, self._receiver):
            if thread is not None:
                thread.join(_CLOSE_S)

    # -- the thread that sends ---------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        try:
            self._open()
            self.ready.set()
            while not self.lost:
                try:
                    wanted = self._orders.get(timeout=_ALIVE_S)
                except Empty:
                    self._send(orders.Alive())
                    continue
                if isinstance(wanted, RemoteProcess):
                    self._start(wanted)
                elif wanted is not None:
                    self._send(wanted)
        except (OSError, WireError, ValueError) as error:
            self._lose(str(error))
        finally:
            self._lose("internal error: see the error of its thread")
            self.ready.set()

    def _open(self) -> None:
        channel = self._hosts.connect(self._name)
        with self._guard:
            self._channel = channel
        if self.lost:  # meanwhile
            channel.close()
            return
        self._receiver = threading.Thread(target=self._receive_all, args=(channel,), name=f"from-{self._name}", daemon=True)
        self._receiver.start()
        self._send(self._opening)
        opened = self._answer(orders.Opened, START_S)
        if (ours := installed()) != opened.version:
            raise ConnectionRefusedError(f"async-rlhf {opened.version} is installed there, and {ours} here; install the same")
        self._directory = opened.directory
        facts = {"name": self._name, "own": opened.name == self._hosts.here}
        self.host = Host.model_validate(opened.has).model_copy(update=facts)

    def _start(self, process: RemoteProcess) -> None:
        node = process.node
        if process.poll() is not None:
            del self._processes[process.life]
            return
        try:
            given = self._pack(node, f"{self._directory}/{node.name}")
            digests = {name: known_digest(path) for name, path in given.files.items()}
            fields: dict[str, Any] = {name: getattr(node, name) for name in orders.OF_NODE}
            fields |= {"files": digests, "inline": dict(given.inline), "returns": list(given.returns)}
            start = orders.Start(life=process.life, **fields)
        except (OSError, SyntaxError, ValueError) as error:
            del self._processes[process.life]
            process.ends(FAILED, f"what it needs cannot be sent: {error}")
            return
        self._send(orders.Want(places={digests[name]: place_elsewhere(path) for name, path in given.files.items()}))
        missing = set(self._answer(orders.MissingContents).digests)  # it may read gigabytes, and beats
        for name, path in given.files.items():
            if digests[name] in missing:
                missing.remove(digests[name])
                self._send_file(digests[name], path)
        process.returns = list(given.returns.values())
        self._send(start)

    def _send_file(self, name: str, path: Path) -> None:
        left = path.stat().st_size
        with path.open("rb") as file:
            while True:
                data = file.read(orders.PIECE_BYTES)
                left -= len(data)
                self._send(orders.ContentPiece(digest=name, data=data, last=left <= 0))
                if left <= 0 or not data:
                    return

    def _send(self, message: orders.Order) -> None:
        assert self._channel is not None and self._receiver is not None
        try:
            self._channel.send(orders.ORDERS.pack(message))
        except OSError:
            self._receiver.join(_CLOSE_S)  # events from before the end say more than the end itself
            raise

    def _answer(self, kind: type[E], timeout_s: float | None = None) -> E:
        """The next answer, which must be of this kind; without a time for as long as the agent lives, which is kept alive.

        Raises OSError, WireError.
        """
        while True:
            try:
                answer = self._answers.get(timeout=timeout_s or _ALIVE_S)
                break
            except Empty:
                if timeout_s is not None:
                    raise TimeoutError(f"no answer within {timeout_s:g} s") from None
                self._send(orders.Alive())
        if answer is None:
            raise ConnectionAbortedError(self.lost)
        if not isinstance(answer, kind):
            raise WireError(f"the agent answers {answer.type!r}, and {kind.__name__} is due")
        return answer

    # -- the thread that receives ------------------------------------------------------------------------------------

    def _receive_all(self, channel: Channel) -> None:
        silent_s = 0.0  # by looks: a supervisor that was frozen does not take its own absence for the agent's
        try:
            while not self.lost and silent_s < self._opening.lost_after_s:
                if (frame := channel.receive(_ALIVE_S)) is None:
                    silent_s += _ALIVE_S * self.ready.is_set()  # before, `_open` waits for the first answer
                else:
                    silent_s = 0.0
                    self._handle(orders.EVENTS.unpack(frame))
            self._lose(f"it has sent nothing for {self._opening.lost_after_s:.0f} s (launch.lost_after_s)")
        except (OSError, WireError) as error:
            self._lose(str(error))
        finally:
            self._lose("internal error: see the error of its thread")

    def _handle(self, event: orders.Event) -> None:
        for waiting in list(self._processes.values()):
            if not waiting.pid:
                waiting.beaten(BEAT)
        if isinstance(event, orders.Opened | orders.MissingContents):
            self._answers.put(event)
        elif not isinstance(event, orders.Alive) and (process := self._processes.get(event.life)) is not None:
            if isinstance(event, orders.Started):
                process.pid = event.pid
            elif isinstance(event, orders.Beats):
                process.beaten(event.words)
            elif isinstance(event, orders.Wrote):
                process.wrote(event.number, event.data)
            else:
                del self._processes[event.life]
                process.ends(event.code, event.words and f"host {self._name!r}: {event.words}")

    def _lose(self, reason: str) -> None:
        with self._guard:
            if self.lost:
                return
            self.lost = f"host {self._name!r}: {reason}"
            for process in list(self._processes.values()):
                process.ends(HOST_LOST, self.lost)
            channel = self._channel
        self._answers.put(None)
        self._orders.put(None)
        if channel is not None:
            channel.close()


class Connections(Launcher):
    """The connections to a run's hosts; its launcher, once `local` is set, which starts the nodes of this machine.

    opening: the first order to each agent. pack: what a node is given. large: files of it that take long to read.
    """

    local: Launcher

    def __init__(self, hosts: Hosts, opening: orders.OpenAgent, pack: Pack, large: Iterable[Path] = ()) -> None:
        self._hosts, self._large, self.names = hosts, large, hosts.names
        self._new = partial(HostConnection, hosts=hosts, opening=opening, pack=pack)
        self._connections: dict[str, HostConnection] = {}
        self._lives = count(1)

    def check(self) -> None:
        """Connect to every host at once. Raises ConfigError naming the first that cannot be used."""
        for path in self._large:  # now: while gigabytes are read no host is sent anything
            known_digest(path)
        for connection in [self._to(name) for name in self.names]:
            connection.ready.wait()  # each of its steps has a deadline
            if connection.lost:
                raise ConfigError(f"the run cannot be started: {connection.lost}")

    def inventory(self) -> Inventory:
        """The hosts' resources, after `check`."""
        return tuple(self._connections[name].host for name in self.names)

    def start(self, run_dir: Path, node: Node) -> Process:
        if not node.host:
            return self.local.start(run_dir, node)
        connection = self._to(node.host)
        process = RemoteProcess(next(self._lives), node, connection.kill)
        connection.start(process)
        return process

    def agents(self) -> dict[str, Callable[[], None]]:
        there = {name: each for name, each in self._connections.items() if each.ready.is_set() and not each.lost}
        return {name: partial(each.close, "its agent was ended") for name, each in there.items()}

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._hosts.close()

    def _to(self, name: str) -> HostConnection:
        """The connection to a host; another when the last one is lost."""
        found = self._connections.get(name)
        if found is None or found.lost:
            found = self._connections[name] = self._new(name)
        return found
