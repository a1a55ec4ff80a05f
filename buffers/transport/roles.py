"""What the holder of an allowed key may send. Pure: `authenticator` has a message's holder, `exchange` and `relay` check.

    actor      makes groups, under its machine's name: NAME or NAME-anything
    relay      the same for others, so under any name
    learner    registers, takes batches, publishes weights
    control    requests the status, drains, halts, takes groups back

A stolen key is worth its role and nothing more. Without keys only this machine connects, and roles are not checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from async_rlhf.buffers.errors import ConfigError, RefusedError
from async_rlhf.buffers.protocol import wire

Role = Literal["actor", "relay", "learner", "control"]
ROLES: tuple[Role, ...] = get_args(Role)
_OF_ACTORS = (wire.Hello, wire.Beat, wire.Put, wire.Release, wire.Bye, wire.Fetch, wire.FetchChunk)
_OF_THE_LEARNER = (wire.Register, wire.Take, wire.Tried, wire.Trained, wire.Commit, wire.Publish, wire.Chunk, wire.Check)
_OF_CONTROL = (wire.GetStatus, wire.Drain, wire.Gone, wire.Quarantine, wire.Halt)
_SENDERS: dict[type[wire.Message], tuple[Role, ...]] = {
    **dict.fromkeys(_OF_ACTORS, ("actor", "relay")),
    **dict.fromkeys(_OF_THE_LEARNER, ("learner",)),
    **dict.fromkeys(_OF_CONTROL, ("control",)),
}


@dataclass(frozen=True)
class Holder:
    """Whose key it is, and what it may be."""

    name: str
    roles: frozenset[Role]


def roles_of(words: Iterable[str], where: str) -> frozenset[Role]:
    """The roles of these words; raises ConfigError, beginning with `where`, for none or another."""
    wanted = set(words)
    found = frozenset(role for role in ROLES if role in wanted)
    if not found or len(found) != len(wanted):
        given = " ".join(sorted(wanted)) or "none"
        raise ConfigError(f"{where}: roles = {given}; give one or more of {', '.join(ROLES)}")
    return found


def check(holder: Holder | None, message: wire.Message) -> None:
    """Raises RefusedError with the reason `role` for what this holder may not send."""
    if holder is None:
        return
    needed = _SENDERS.get(type(message))
    if needed is not None and holder.roles.isdisjoint(needed):
        raise RefusedError(
            "role",
            f"{message.type!r} is for {' or '.join(needed)}, and the key of {holder.name!r} is allowed as "
            f"{', '.join(sorted(holder.roles))} (second line of allowed/{holder.name}.public)",
        )
    if isinstance(message, wire.Hello) and "relay" not in holder.roles and not is_actor_of(holder.name, message.actor):
        raise RefusedError(
            "role", f"an actor of {holder.name!r} is called {holder.name} or {holder.name}-..., not {message.actor[:40]!r}"
        )


def is_actor_of(machine: str, actor: str) -> bool:
    """Whether an actor of this machine may have this name."""
    return actor == machine or actor.startswith(f"{machine}-")
