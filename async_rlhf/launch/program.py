"""The system as data: which processes there are, what they are given, and the seam to whatever starts them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Node:
    """One process of the run: `async_rlhf.run.roles ROLE RUN_DIR *arguments`, logging to `log`."""

    name: str
    role: str
    arguments: tuple[str, ...]
    log: Path


class Process(Protocol):
    """A started node, and the only way to its end, its beats and its last words."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Exit code, or None while it runs; negative is the signal that ended it."""
        ...

    def heard(self) -> bytes:
        """What it has sent since the last call, one byte a word (`tether.BEAT`, `tether.PROGRESS`). Never waits."""
        ...

    def last_words(self) -> str:
        """Why it ended, by its own account in this life: what it called fatal, else its log's last line, else nothing."""
        ...

    def kill(self) -> None:
        """End it now, also when it is frozen, and wait until it has ended (30 s at most: then the kernel holds it)."""
        ...


class Launcher(Protocol):
    """Starts nodes. Whatever it starts must not outlive the supervisor by more than a moment, and holds the run's lock."""

    def start(self, run_dir: Path, node: Node) -> Process:
        """Raises OSError when it cannot be started now."""
        ...


def hub_node(addresses: tuple[str, ...], log: Path) -> Node:
    """addresses: where it listens; the first is for this machine's processes."""
    return Node("hub", "hub", addresses, log)


def learner_node(address: str, log: Path) -> Node:
    return Node("learner", "learner", (address,), log)


def rank_node(rank: int, meeting: Path, log: Path) -> Node:
    """One of the learner's ranks above 0; `meeting` is the folder in which ranks find each other."""
    return Node(f"learner-rank-{rank}", "learner_rank", (str(rank), str(meeting)), log)


def scorer_node(address: str, log: Path) -> Node:
    return Node("scorer", "scorer", (address,), log)


def actor_node(address: str, index: int, log: Path, scorer: str = "") -> Node:
    """scorer: where the scorer process listens, if there is one."""
    name = f"actor-{index}"
    return Node(name, "actor", (address, name, scorer), log)


def evaluation_node(model: str, label: str, log: Path) -> Node:
    return Node(f"evaluation-{label}", "evaluation", (model, label), log)
