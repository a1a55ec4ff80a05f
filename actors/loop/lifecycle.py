"""The life of an episode, and when its first turn begins: which state follows on which event. Pure.

`episodes` says what has happened, and carries out what follows. An episode is one member's of a group.

    state        event                                                    state after it
    opening      observed: it has its first observation                   ready
                 begins: the turn of an agent's first call                playing
    ready        begins                                                   playing
    playing      begins, wrote: a turn                                    playing
    opening, ready, playing
                 lost: its process ended, and it begins anew              opening
                 ends: its environment, a limit, or a failure ended it    closing
    closing      wrote                                                    closing
                 at once, when nothing is being written (any more)        over, where a turn of it is trained on
                                                                          unprompted, where none is
    unprompted   begins: its one turn, behind a prompt of its group's     single
    single       wrote                                                    over

Without an environment an episode is unprompted from the start. Members whose environment is no agent begin together: they are
ready until none of their group is opening. An unprompted one waits until a member has a prompt that is trained on, or until
none will have one. So a group is always whole, and waits for nothing but its environments and what is being written.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from async_rlhf.actors.engine import NO_PROMPT, Prompt

State = Literal["opening", "ready", "playing", "closing", "unprompted", "single", "over"]
Event = Literal["observed", "begins", "wrote", "ends", "lost"]
AFTER: Mapping[State, Mapping[Event, State]] = {
    "opening": {"observed": "ready", "begins": "playing", "lost": "opening", "ends": "closing"},
    "ready": {"begins": "playing", "lost": "opening", "ends": "closing"},
    "playing": {"begins": "playing", "wrote": "playing", "lost": "opening", "ends": "closing"},
    "closing": {"wrote": "closing"},
    "unprompted": {"begins": "single"},
    "single": {"wrote": "closing"},
    "over": {},
}
PLAYED: tuple[State, ...] = ("opening", "ready", "playing")
"""Those with an environment to hear of."""
WAITING: tuple[State, ...] = ("opening", "ready", "unprompted")
"""Those before the first turn."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Member:
    """A member of a group."""

    state: State
    num_writing: int = 0
    """Turns that are being written."""
    is_trained: bool = False
    """Whether one of its turns is trained on."""

    def after(self, event: Event, trained: bool = False) -> Member:
        """trained: of a turn that begins, whether it is trained on."""
        state = AFTER[self.state].get(event)
        assert state is not None, f"{event} in state {self.state}"
        if event == "lost":
            return Member(state)
        num_writing = self.num_writing + (event == "begins") - (event == "wrote")
        is_trained = self.is_trained or trained
        if state == "closing" and not num_writing:
            return Member("over", is_trained=True) if is_trained else Member("unprompted")
        return Member(state, num_writing, is_trained)


class Members(Generic[Key]):
    """Those of one group, in order. prompt: what the first turn that is trained on stands behind, of whichever member; without
    a token until there is one."""

    def __init__(self, keys: Iterable[Key], is_played: bool) -> None:
        """is_played: whether they have an environment."""
        self._members = dict.fromkeys(keys, Member("opening" if is_played else "unprompted"))
        self._have_met = False
        self.prompt = NO_PROMPT

    def state(self, key: Key) -> State:
        return self._members[key].state

    def happened(self, key: Key, event: Event, prompt: Prompt = NO_PROMPT) -> State:
        """The state after it. prompt: of a turn that begins and is trained on, what is at the head of its row."""
        self._members[key] = self._members[key].after(event, trained=bool(prompt[0]))
        self.prompt = self.prompt if self.prompt[0] else prompt
        self._have_met = self._have_met or all(member.state != "opening" for member in self._members.values())
        return self._members[key].state

    def due(self) -> list[Key]:
        """Those whose first turn begins now, or which end without one where they cannot begin as their group does."""
        has_prompt = bool(self.prompt[0]) or all(member.state == "unprompted" for member in self._members.values())
        begins = {"ready": self._have_met, "unprompted": has_prompt}
        return [key for key, member in self._members.items() if begins.get(member.state, False)]
