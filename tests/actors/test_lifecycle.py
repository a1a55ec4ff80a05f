"""The life of episodes: whatever happens in whichever order, every member ends once and its group waits for nothing."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.engine import NO_PROMPT, Prompt
from async_rlhf.actors.loop.lifecycle import AFTER, PLAYED, WAITING, Event, Member, Members, State

OWN, OTHER = ((7, 1), ()), ((7, 2), ("ab",))
"""Prompts of members."""


def test_every_state_is_reached_and_only_what_is_over_takes_no_event() -> None:
    assert set(AFTER) == set(get_args(State))
    assert {event for events in AFTER.values() for event in events} == set(get_args(Event))
    after = {state for events in AFTER.values() for state in events.values()}
    assert after | {"over", "unprompted"} == set(AFTER), "these two are what closing comes to"
    assert [state for state, events in AFTER.items() if not events] == ["over"]
    assert {state for state, events in AFTER.items() if "lost" in events} == set(PLAYED)
    assert {state for state, events in AFTER.items() if "begins" in events} - {"playing"} == set(WAITING)


@given(st.lists(st.tuples(st.sampled_from(get_args(Event)), st.booleans()), max_size=30))
def test_a_member_is_closing_while_a_turn_is_written_and_over_only_with_one_that_is_trained_on(
    drawn: list[tuple[Event, bool]],
) -> None:
    """Against counts kept by hand; what a state does not take is refused."""
    member, writing, trained = Member("opening"), 0, False
    for event, is_trained in drawn:
        if event == "wrote" and not writing:
            continue  # no turn is being written that could end
        if event not in AFTER[member.state]:
            with pytest.raises(AssertionError, match=f"{event} in state {member.state}"):
                member.after(event)
            continue
        has_no_environment = member.state == "unprompted"
        member = member.after(event, event == "begins" and (is_trained or has_no_environment))
        writing = 0 if event == "lost" else writing + (event == "begins") - (event == "wrote")
        trained = event != "lost" and (trained or (event == "begins" and (is_trained or has_no_environment)))
        assert (member.state in ("over", "unprompted")) <= (not writing)
        assert (member.state == "closing") <= (writing > 0)
        assert (member.state == "over") <= trained and (member.state == "unprompted") <= (not trained)
        assert (member.state in ("opening", "ready")) <= (writing == 0 and not trained)


@given(st.data())
def test_every_member_ends_once_whatever_happens_and_none_begins_before_it_may(data: st.DataObject) -> None:
    """Environments, agents and rows without one. What is due begins at once, or fails to."""
    kind = data.draw(st.sampled_from(["together", "agents", "alone"]))
    keys = list(range(data.draw(st.integers(1, 4))))
    members = Members(keys, is_played=kind != "alone")
    over, begun, writing, num_lost = list[int](), set[int](), dict.fromkeys(keys, 0), 0
    refused = {key: data.draw(st.booleans()) for key in keys} if kind == "together" else {}

    def happened(key: int, event: Event, prompt: Prompt = NO_PROMPT) -> None:
        writing[key] = 0 if event == "lost" else writing[key] + (event == "begins") - (event == "wrote")
        if members.happened(key, event, prompt) == "over":
            over.append(key)

    while True:
        while due := members.due():
            for key in due:
                if members.state(key) == "ready" and refused[key]:  # its observation is not that of its group
                    happened(key, "ends")
                    continue
                if members.state(key) == "ready":
                    assert len(begun) or not any(members.state(other) == "opening" for other in keys), "all begin together"
                else:
                    waiting = {members.state(other) for other in keys} - {"single", "over"}
                    assert members.prompt[0] or waiting == {"unprompted"}, "it has a prompt, or none has"
                begun.add(key)
                happened(key, "begins", members.prompt if members.prompt[0] else OWN)
        able: list[tuple[int, Event]] = []
        for key in keys:
            state = members.state(key)
            able += [(key, "wrote")] * (writing[key] > 0)
            able += [(key, "ends")] * (state in PLAYED)
            able += [(key, "lost")] * (state in PLAYED and num_lost < 5)
            able += [(key, "observed")] * (state == "opening" and kind == "together")
            able += [(key, "begins")] * (kind == "agents" and state in ("opening", "playing") and writing[key] < 3)
        if not able:
            break  # nothing more can come: neither an environment nor the engine has anything
        key, event = data.draw(st.sampled_from(able))
        num_lost += event == "lost"
        had_prompt = members.prompt
        prompt = data.draw(st.sampled_from([NO_PROMPT, OWN, OTHER])) if event == "begins" else NO_PROMPT
        happened(key, event, prompt)
        assert members.prompt == (had_prompt if had_prompt[0] else prompt), "the prompt of a group stays"
    assert sorted(over) == keys and all(members.state(key) == "over" for key in keys)
