"""The system as data: which processes there are, what they are given, and the seam to whatever starts them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Node:
    """One process of the run: `async_rlhf.roles ROLE RUN_DIR *arguments`, logging to `log`."""

    name: str
    role: str
    arguments: tuple[str, ...]
    log: Path


class Process(Protocol):
    """A started node."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Exit code, or None while it runs; negative is the signal that ended it."""
        ...

    def kill(self) -> None:
        """End it now, and wait until it has."""
        ...


class Launcher(Protocol):
    """Starts nodes. Whatever it starts must not outlive the supervisor."""

    def start(self, run_dir: Path, node: Node) -> Process: ...


def hub_node(address: str, log: Path) -> Node:
    return Node("hub", "hub", (address,), log)


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
