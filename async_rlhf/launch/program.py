"""The system as data: its processes, their arguments, and the seam to the launchers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Node:
    """One process of the run: `async_rlhf.run.processes.roles` with ROLE RUN_DIR *arguments, logging to `log`."""

    name: str
    role: str
    arguments: tuple[str, ...]
    """On another host they may name `sockets.ON_HOST`."""
    log: Path
    host: str = ""
    """The name of its host; empty for the supervisor's own."""
    devices: tuple[int, ...] | None = None
    """The accelerators of that host that it may see, by number; None leaves them as the launcher finds them."""
    cpus: tuple[int, ...] | None = None
    """The CPUs that it may use, by number (`machine`); None: all."""
    threads: int | None = None
    """The threads of its computations; None: as the configuration says."""


_TITLE = "async-rlhf:"


def title(arguments: Sequence[str]) -> str:
    """A role's title in a list of processes: `async-rlhf: actor runs/quick ...`."""
    return " ".join((_TITLE, *arguments))


def role_of(command: Iterable[str]) -> str | None:
    """The role that has this command line; None for another program."""
    words = " ".join(command).split()
    return words[1] if words[:1] == [_TITLE] and len(words) > 1 else None


class Process(Protocol):
    """A started node, and the only way to its end, its beats and its last words."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Exit code, or None while it runs; negative is the signal that ended it."""

    def read_beats(self) -> bytes:
        """The bytes sent since the last call, one byte a word (`tether.BEAT`, `PROGRESS`, `PERCENT`). Never waits."""

    def failure_message(self) -> str:
        """Why it ended, by its log of this life: its fatal message, else the C++ exception that ended it, else the last line,
        else nothing."""

    def kill(self) -> None:
        """End it now, also when it is frozen, and wait until it has ended (30 s at most: then the kernel holds it)."""


class Launcher(ABC):
    """Starts nodes. Whatever it starts must not outlive the supervisor by more than a moment, and on its machine holds the
    run's lock."""

    @abstractmethod
    def start(self, run_dir: Path, node: Node) -> Process:
        """Raises OSError when it cannot be started now."""

    def agents(self) -> Mapping[str, Callable[[], None]]:
        """For each connected host beyond this machine, a function that ends its agent and all its processes."""
        return {}

    def close(self) -> None:  # noqa: B027  of this machine there is nothing to close
        """Let go of the hosts; processes that still run there end."""


def rank_name(rank: int) -> str:
    return f"learner-rank-{rank}" if rank else "learner"


def scorer_name(host: int) -> str:
    return f"scorer-{host}" if host else "scorer"


def actor_name(index: int) -> str:
    return f"actor-{index}"


def rank_node(rank: int, meeting: str, log: Path) -> Node:
    """One of the learner's ranks above 0. meeting: IP:PORT, where rank 0 waits for the others."""
    return Node(rank_name(rank), "learner_rank", (str(rank), meeting), log)


def actor_node(address: str, index: int, log: Path, scorer: str = "") -> Node:
    """scorer: where the scorer process listens, if there is one."""
    return Node(actor_name(index), "actor", (address, actor_name(index), scorer), log)
