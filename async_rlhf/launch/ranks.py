"""The learner's ranks as one process of the run: started together, they end together, and the first that failed is named.

    owns        the processes of all ranks of one life
    waits for   nothing but in `kill`
    woken by    the supervisor, as with any process
    on close    no rank is left

A learner that lost a rank is not mended: the supervisor starts it again, with all ranks, from its last checkpoint. Each life
meets at a port of its own, so that nothing of an earlier one is met there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from async_rlhf.launch.exit_codes import FAILED, FATAL, HOST_LOST, ending
from async_rlhf.launch.program import Launcher, Node, Process, rank_name, rank_node
from async_rlhf.launch.sockets import free_port
from async_rlhf.launch.tether import BEAT

# How long the end of rank 0 waits for news of a host that is lost.
_CAUSE_S = 2.0


class RankProcesses:
    """See `program.Process`. It ends well when rank 0 does, and else with the first rank that ends.

    An end of rank 0 is as it was. Another rank's has code FAILED, or its own where starting again would not help or its host is
    lost, and is named in `failure_message`.
    """

    def __init__(self, hosts: Sequence[str], processes: Sequence[Process]) -> None:
        """hosts, processes: by rank; hosts as in `Node`."""
        self._hosts, self._processes = hosts, processes
        self._beaten: set[int] = set()
        self._code: int | None = None
        self._words = ""
        self._cause_by = 0.0

    @property
    def pid(self) -> int:
        return self._processes[0].pid

    def poll(self) -> int | None:
        if self._code is None:
            codes = {rank: code for rank, process in enumerate(self._processes) if (code := process.poll()) is not None}
            if codes.get(0) == 0:
                self._end(0, "")  # all is done; the others only wait for no more commands
            elif ended := [rank for rank, code in codes.items() if code]:
                rank = min(ended, key=lambda rank: _rank_of_end(codes[rank]))
                if not self._may_follow(rank, codes[rank]):
                    self._end_by(rank, codes)
        return self._code

    def _may_follow(self, rank: int, code: int) -> bool:
        """Whether the cause may be reported later: rank 0 ends where a host is lost, and may be seen to before the host is."""
        if rank > 0 or code in FATAL or not any(self._hosts[1:]):
            return False
        now = time.monotonic()
        self._cause_by = self._cause_by or now + _CAUSE_S
        return now < self._cause_by

    def read_beats(self) -> bytes:
        """A beat when every rank has beaten since the last one: it is as silent as its most silent rank."""
        self._beaten |= {rank for rank, process in enumerate(self._processes) if process.read_beats()}
        if len(self._beaten) < len(self._processes):
            return b""
        self._beaten.clear()
        return BEAT

    def failure_message(self) -> str:
        return self._words

    def kill(self) -> None:
        if self._code is None:
            silent = [self._name(rank) for rank in range(len(self._processes)) if rank not in self._beaten]
            self._end(FAILED, f"{' and '.join(silent)} sent no beats" if silent else "")

    def _end_by(self, rank: int, codes: dict[int, int]) -> None:
        code, words = codes[rank], self._processes[rank].failure_message()
        if rank == 0:
            self._end(code, words)
        elif code == HOST_LOST:
            self._end(code, f"rank {rank}: {words}")
        else:
            self._end(code if code in FATAL else FAILED, f"{self._name(rank)} ended {ending(code, words)}")

    def _end(self, code: int, words: str) -> None:
        self._code, self._words = code, words
        for process in self._processes:
            process.kill()

    def _name(self, rank: int) -> str:
        host = self._hosts[rank]
        return f"rank {rank}" + (f" on host {host!r}" if host else "")


def _rank_of_end(code: int) -> int:
    """Sort key of ends that are seen at once, the cause first: a rank that lost another ends too, by its own code."""
    if code in FATAL:
        return 0
    return 1 if code == HOST_LOST else 2 if code < 0 else 3


def start_all(launcher: Launcher, run_dir: Path, nodes: Sequence[Node]) -> list[Process]:
    """Raises OSError when one cannot be started; none is left then."""
    started: list[Process] = []
    try:
        for node in nodes:
            started.append(launcher.start(run_dir, node))
    except OSError:
        for process in started:
            process.kill()
        raise
    return started


def rank_nodes(size: int, meeting: str, log: Callable[[str], Path]) -> list[Node]:
    """The ranks above 0. meeting: IP:PORT, where they meet. log: of a node, by its name."""
    return [rank_node(rank, meeting, log(rank_name(rank))) for rank in range(1, size)]


def start_ranks(
    launcher: Launcher,
    run_dir: Path,
    node: Node,
    size: int,
    address: str,
    placed: Callable[[Node], Node],
    log: Callable[[str], Path],
) -> Process:
    """A learner of several ranks as one process. node: rank 0. address: of this machine, where they meet. placed: gives a node
    its host and devices. log: see `rank_nodes`. Raises OSError."""
    meeting = f"{address}:{free_port(address)}"
    leader = replace(node, arguments=(*node.arguments, meeting))
    nodes = [leader, *map(placed, rank_nodes(size, meeting, log))]
    return RankProcesses([each.host for each in nodes], start_all(launcher, run_dir, nodes))
