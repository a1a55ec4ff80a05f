"""The state of an actor's adoption of the version that it should serve: a decision, without a clock and without I/O.

`docs/weights.md` has the table of these states for an operator. Each is tried in the order below, and the first that holds is
the actor's; `DUE` is the one in which the hub sends it an `Adopt`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol

from async_rlhf.buffers.queue.admission import Actor, Admission

Version = tuple[int, int]
"""(the learner's fence, the number) of a weight set."""


class Adoption(StrEnum):
    SERVES = "serves it"
    NONE_YET = "no version is published"
    NOT_STORED = "its bytes are not at the hub yet"
    IN_BROADCAST = "the device channel brings it"
    FETCHES = "it fetches and loads what was announced"
    ANNOUNCED = "it was announced, and is loaded when the actor can take it"
    DUE = "it is announced now"


class Stored(Protocol):
    """The weights that the hub has."""

    def has(self, version: Version) -> bool: ...

    def was_broadcast(self, actor: Actor, version: Version) -> bool:
        """Whether the actor's engine has it whole from the device channel."""

    def is_in_broadcast(self, name: str, actor: Actor, version: Version) -> bool: ...


class AdoptionStep(NamedTuple):
    state: Adoption
    target: Version | None
    """The version that the actor should serve; None while no version is published."""


def adoption_of(name: str, actor: Actor, admission: Admission, stored: Stored) -> AdoptionStep:
    """An actor's state on its way to the version that it should serve."""
    serving = (actor.fence, actor.version)
    newest = None if admission.bound.exact else (admission.fence, admission.published)
    if serving == newest and actor.announced in (None, newest):
        return AdoptionStep(Adoption.SERVES, serving)  # so it is with nearly all, nearly always
    if (number := admission.target(name)) is None:
        return AdoptionStep(Adoption.NONE_YET, None)
    target = (admission.fence, number)
    if not (stored.has(target) or stored.was_broadcast(actor, target)):
        return AdoptionStep(Adoption.NOT_STORED, target)
    if stored.is_in_broadcast(name, actor, target):
        return AdoptionStep(Adoption.IN_BROADCAST, target)
    # A fetch that is under way is finished as long as it can still earn a credit: else a link that is slower than a step would
    # fetch for ever and adopt nothing.
    if fetched_for_credit(actor, admission, stored) is not None:
        return AdoptionStep(Adoption.FETCHES, target)
    # Announce also the version that it serves, if another was announced before: else it would still switch to that one.
    if target != (actor.announced or serving):
        return AdoptionStep(Adoption.DUE, target)
    return AdoptionStep(Adoption.SERVES if target == serving else Adoption.ANNOUNCED, target)


def fetched_for_credit(actor: Actor, admission: Admission, stored: Stored) -> int | None:
    """The announced version, if the actor does not serve it yet and could still get a credit with it; else None."""
    if actor.announced is None or actor.announced == (actor.fence, actor.version):
        return None
    fence, number = actor.announced
    is_worth_it = fence == admission.fence and stored.has(actor.announced) and admission.may_begin(number)
    return number if is_worth_it else None
