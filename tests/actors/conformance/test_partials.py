"""What an engine tells of a completion before it ends, for incremental scoring."""

from __future__ import annotations

from dataclasses import replace

from async_rlhf.actors.engine import Completion, Engine, Request, RolloutKey
from async_rlhf.buffers.sampling import Sampling

EVERY = 5


def asked(count: int) -> list[Request]:
    """So long that an engine in other processes still writes when this one comes back from being kept from the processor."""
    return [
        Request(RolloutKey(n, 0, 0), (10, 11, 12), 110 + n, Sampling(), 31 * n + 20, partial_every=EVERY) for n in range(count)
    ]


def test_what_is_told_is_how_the_completion_begins_and_comes_in_steps(any_engine: Engine) -> None:
    quiet = replace(asked(1)[0], key=RolloutKey(99, 0, 0), partial_every=0)
    any_engine.submit([*asked(6), quiet])
    known: dict[RolloutKey, int] = {}
    told: dict[RolloutKey, list[list[int]]] = {}
    done: dict[RolloutKey, Completion] = {}
    while any_engine.num_unfinished:
        done |= {completion.key: completion for completion in any_engine.step()}
        for partial in any_engine.partials(known):
            assert partial.key not in done and len(partial.token_ids) >= known.get(partial.key, 0) + EVERY
            known[partial.key] = len(partial.token_ids)
            told.setdefault(partial.key, []).append(partial.token_ids.tolist())
    assert any(len(done[key].token_ids) > 2 * EVERY for key in done) and told and quiet.key not in told
    for key, beginnings in told.items():
        whole = done[key].token_ids.tolist()
        assert all(whole[: len(each)] == each for each in beginnings)


def test_nothing_is_told_of_who_was_aborted(any_engine: Engine) -> None:
    any_engine.submit(asked(4))
    seen: set[RolloutKey] = set()
    while not seen and any_engine.num_unfinished:
        any_engine.step()
        seen = {partial.key for partial in any_engine.partials({})}
    any_engine.abort(seen)
    assert seen and not seen.intersection(partial.key for partial in any_engine.partials({}))
    any_engine.abort([request.key for request in asked(4)])
