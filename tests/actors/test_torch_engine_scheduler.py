"""Laws of the scheduler, over random histories of submissions, turns that go on, ends, aborts, and rows sent back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.torch_engine.rows import RowProgress
from async_rlhf.actors.torch_engine.scheduler import Copy, PassPlan, PrefillChunk, Scheduler, Size
from async_rlhf.buffers.record import Span
from async_rlhf.buffers.sampling import Sampling

PROMPTS = ((0, 1, 2), (5,), (3, 1, 4, 1, 5, 9, 2, 6))


def make_request(number: int, prompt: int = 0) -> Request:
    return Request(RolloutKey(number, 0, 0), PROMPTS[prompt], 40, Sampling(), number)


class Table:
    """A model of the device: which request each row computes, what it has sampled, which tokens its cache holds, of which
    weights."""

    def __init__(self, slots: int, *, evicts: bool) -> None:
        self.slots, self.evicts = slots, evicts
        self.rows: dict[int, Request] = {}
        self.sampled: dict[int, list[int]] = {}  # by number of the request
        self.cached: dict[int, list[int]] = {}
        self.version: dict[int, int] = {}
        self.held_version: dict[tuple[int, tuple[int, ...]], int] = {}  # by number of the request and its prompt

    def known(self, row: int) -> list[int]:
        request = self.rows[row]
        return [*request.prefix_ids, *self.sampled[request.key.group]]

    def progress(self, row: int) -> RowProgress:
        ids = np.array(self.sampled[self.rows[row].key.group], np.int32)
        return RowProgress(ids, np.zeros(len(ids), np.float32), (Span(0, len(ids)),) if len(ids) else ())

    def apply(self, plan: PassPlan, version: int) -> None:
        targets, sources = {target for _, target in plan.moves}, {source for source, _ in plan.moves}
        assert not targets & sources and not targets & self.rows.keys(), "a move may not overwrite a running row"
        for source, target in plan.moves:
            for of_rows in (self.rows, self.cached, self.version):
                of_rows[target] = of_rows.pop(source)
        admitted = {admission.row: admission for admission in plan.admitted}
        for copy in plan.copies:
            assert copy.source in self.rows and copy.source not in admitted and copy.target in admitted
        assert len(admitted) == len(plan.admitted) and not admitted.keys() & self.rows.keys(), "no row is held twice"
        for row, admission in admitted.items():
            before = [] if admission.progress is None else admission.progress.token_ids.tolist()
            assert self.sampled.setdefault(admission.request.key.group, []) == before, "what was sampled is still there"
            self.rows[row], self.cached[row], self.version[row] = admission.request, [], version
        restored = {row: list(admission.cache) for row, admission in admitted.items() if admission.cache}
        assert not {copy.target for copy in plan.copies} & restored.keys()
        self.cached |= restored
        self.version |= {row: self.held_version[self.rows[row].key.group, self.rows[row].prompt_ids] for row in restored}
        assert all(admission.version == self.version[row] for row, admission in admitted.items())
        for copy in plan.copies:
            assert len(self.cached[copy.source]) >= copy.num_tokens
            assert self.version[copy.source] == self.version[copy.target], (
                "what older weights computed is copied to no other row"
            )
            assert not self.evicts or len(self.cached[copy.source]) == copy.num_tokens, "what went on has lost some of it"
            self.cached[copy.target] = self.cached[copy.source][: copy.num_tokens]
        chunked = [row for chunk in plan.chunks for row in chunk.rows]
        assert not self.evicts or len(set(chunked)) == len(chunked), "a chunk sees what its row kept before the plan"
        for chunk in plan.chunks:
            assert len({self.version[row] for row in chunk.rows}) == 1
            for row in chunk.rows:
                assert len(self.cached[row]) == chunk.start, "a chunk goes on where the row ends"
                num_prompt = len(self.rows[row].prompt_ids) - 1
                assert chunk.start >= num_prompt if chunk.sampled else chunk.start + len(chunk.ids) <= num_prompt
                self.cached[row] += chunk.ids
        assert sorted(self.rows) == list(range(len(self.rows))), "running rows are a prefix"
        assert len(self.rows) <= self.slots
        for row in self.rows:
            known = self.known(row)[:-1]
            assert self.cached[row] == known[: len(self.cached[row])]
            assert row in plan.filling or len(self.cached[row]) == len(known), "no row with a gap is decoded"

    def decode(self, filling: tuple[int, ...]) -> None:
        for row in self.rows.keys() - set(filling):
            self.cached[row].append(self.known(row)[-1])
            self.sampled[self.rows[row].key.group].append(row + 10)


class History:
    """Drawn requests, turns and aborts, as their submitter sees them; all by number of the request."""

    def __init__(self, data: st.DataObject, slots: int, prefill_tokens: int, *, evicts: bool) -> None:
        self.draw, self.slots, self.prefill_tokens = data.draw, slots, prefill_tokens
        self.scheduler, self.table = Scheduler(slots, prefill_tokens, evicts=evicts), Table(slots, evicts=evicts)
        self.requests: list[Request] = []
        self.unfinished: set[int] = set()
        self.held: dict[int, tuple[tuple[int, ...], list[int]]] = {}  # its prompt and its row
        self.begun: set[int] = set()
        self.place: dict[int, int] = {}
        self.num_places = 0

    def submit(self) -> None:
        """New requests, and turns that continue what is held, was held, or should have been."""
        prompts = self.draw(st.lists(st.integers(0, 2), max_size=4))
        new = [replace(make_request(len(self.requests) + n, prompt), hold=True) for n, prompt in enumerate(prompts)]
        self.requests += new
        over = sorted(set(range(len(self.requests) - len(new))) - self.unfinished)
        chosen = self.draw(st.sets(st.sampled_from(over), max_size=3)) if over else set()
        submitted = [*new, *(self.next_turn(number) for number in sorted(chosen))]
        for request in submitted:
            number = request.key.group
            prompt, ids = self.held.pop(number, ((), []))
            if prompt != request.prompt_ids or list(request.prefix_ids[: len(ids)]) != ids:
                self.place[number] = self.num_places
            self.num_places += 1
            self.table.sampled.pop(number, None)
            self.begun.discard(number)
        self.scheduler.submit(submitted)
        self.unfinished |= {request.key.group for request in submitted}

    def next_turn(self, number: int) -> Request:
        before = self.requests[number]
        if number in self.held and self.draw(st.booleans()):
            prompt, ids = self.held[number]
            self.requests[number] = replace(before, prompt_ids=prompt, context=(*ids[len(prompt) :], 7))
            return self.requests[number]
        context = (*before.context, *self.table.sampled.get(number, []), *self.draw(st.sampled_from(((), (7,), (7, 8, 9)))))
        if self.draw(st.integers(0, 4)) == 0:
            context = context[1:]
        before = replace(before, context=context, hold=self.draw(st.booleans()))
        if self.draw(st.integers(0, 4)) == 0:
            before = replace(before, prompt_ids=(*before.prompt_ids[:2], number, 5), context=())
        self.requests[number] = before
        return self.requests[number]

    def advance(self) -> list[int]:
        """One plan, and a token in each row that is ready; returns these."""
        version = self.draw(st.integers(0, 1))
        plan = self.scheduler.plan(version)
        self.table.apply(plan, version)
        assert sum(len(chunk.ids) for chunk in plan.chunks) <= self.prefill_tokens
        first = [each.request.key.group for each in plan.admitted if each.progress is None]
        assert not self.begun & set(first) and len(set(first)) == len(first), "a turn begins once"
        self.begun.update(first)
        waiting = self.unfinished - self.running()
        entered = [each.request.key.group for each in plan.admitted]
        assert not waiting or all(self.place[number] < min(self.place[each] for each in waiting) for number in entered)
        assert self.scheduler.num_unfinished == len(self.unfinished)
        assert self.scheduler.num_rows == min(self.slots, len(self.unfinished)), "no slot is idle while a request waits"
        self.table.decode(plan.filling)
        return [row for row in sorted(self.table.rows) if row not in plan.filling]

    def running(self) -> set[int]:
        return {request.key.group for request in self.table.rows.values()}

    def end(self, rows: list[int]) -> None:
        assert all(self.scheduler.request(row) is self.table.rows[row] for row in rows)
        for row in rows:
            if self.table.rows[row].hold:
                number = self.table.rows[row].key.group
                cache = tuple(self.table.cached[row])
                room = self.draw(st.sampled_from((0, 12, 1000)))
                self.scheduler.hold(row, self.table.sampled[number], cache, len(cache), room)
                prompt = self.table.rows[row].prompt_ids
                self.table.held_version[number, prompt] = self.table.version[row]
                self.held[number] = prompt, self.table.known(row)
            else:
                self.held.pop(self.table.rows[row].key.group, None)
        self.scheduler.finish(rows)
        self.unfinished -= {self.table.rows.pop(row).key.group for row in rows}

    def send_back(self) -> None:
        rows = sorted(self.draw(st.sets(st.sampled_from(sorted(self.table.rows)), max_size=2))) if self.table.rows else []
        self.scheduler.suspend([(row, self.table.progress(row)) for row in rows])
        numbers = [self.table.rows.pop(row).key.group for row in rows]
        self.begun -= {number for number in numbers if not self.table.sampled[number]}  # they begin once more

    def abort(self) -> None:
        aborted = self.draw(st.sets(st.integers(0, len(self.requests) + 1), max_size=2))
        rows, num_tokens = self.scheduler.abort({RolloutKey(number, 0, 0) for number in aborted})
        running = {self.table.rows.pop(row).key.group for row in rows}
        assert running <= aborted
        waiting = (aborted & self.unfinished) - running
        assert num_tokens == sum(len(self.table.sampled.get(number, [])) for number in waiting), "a held one has none"
        self.unfinished -= aborted
        for number in aborted:
            self.held.pop(number, None)


@given(data=st.data(), slots=st.integers(1, 5), prefill_tokens=st.sampled_from((1, 2, 5, 1000)), evicts=st.booleans())
def test_whatever_happens_every_turn_is_returned_once_and_what_it_sampled_is_kept(
    data: st.DataObject, slots: int, prefill_tokens: int, evicts: bool
) -> None:
    history = History(data, slots, prefill_tokens, evicts=evicts)
    for _ in range(data.draw(st.integers(1, 10))):
        history.submit()
        ready = history.advance()
        history.end(sorted(data.draw(st.sets(st.sampled_from(ready)))) if ready else [])
        history.send_back()
        history.abort()
        if data.draw(st.integers(0, 3)) == 0:
            history.scheduler.release_caches()
    for _ in range(len(history.requests) * 50):
        if not history.unfinished:
            break
        history.end(history.advance()[:1])
    assert not history.unfinished and history.scheduler.num_unfinished == 0
    assert history.scheduler.unfinished_keys() == set()


def test_a_prompt_is_computed_once_by_the_same_weights_and_copied_to_those_who_come_later() -> None:
    scheduler = Scheduler(2)
    scheduler.submit([make_request(number) for number in range(3)])
    scheduler.submit([make_request(number) for number in range(3, 5)])
    assert scheduler.plan(version=0).chunks == (PrefillChunk((0, 1), 0, (0, 1)),)
    scheduler.finish([0])
    later = scheduler.plan(version=0)
    assert later.chunks == () and later.copies == (Copy(source=1, target=0, num_tokens=2),)
    scheduler.finish([0])
    assert scheduler.plan(version=1).chunks == (PrefillChunk((0, 1), 0, (0,)),)
    scheduler.finish([1])
    assert scheduler.plan(version=1).copies == (Copy(source=0, target=1, num_tokens=2),)


def test_a_long_prompt_is_computed_in_chunks_and_whoever_joins_gets_what_is_there() -> None:
    scheduler = Scheduler(3, prefill_tokens=3)
    scheduler.submit([make_request(number, 2) for number in range(4)])
    first = scheduler.plan(version=0)
    assert first.chunks == (PrefillChunk((3, 1, 4), 0, (0, 1, 2)),) and first.filling == (0, 1, 2)
    scheduler.abort({RolloutKey(0, 0, 0)})
    second = scheduler.plan(version=0)
    assert second.copies == (Copy(source=1, target=0, num_tokens=3),)
    assert second.chunks == (PrefillChunk((1, 5, 9), 3, (1, 2, 0)),)
    third = scheduler.plan(version=0)
    assert third.chunks == (PrefillChunk((2,), 6, (1, 2, 0)),) and third.filling == ()


def test_siblings_sent_back_share_their_prompt_again_and_compute_the_rest_each_for_itself() -> None:
    scheduler = Scheduler(2)
    scheduler.submit([make_request(number) for number in range(2)])
    scheduler.plan(version=0)
    sampled = [RowProgress(np.array(ids, np.int32), np.zeros(2, np.float32), (Span(0, 2),)) for ids in ([7, 8], [9, 8])]
    scheduler.suspend(enumerate(sampled))
    assert scheduler.num_begun == 2
    again = scheduler.plan(version=1)
    assert again.chunks == (
        PrefillChunk((0, 1), 0, (0, 1)),
        PrefillChunk((2, 7), 2, (0,), True),
        PrefillChunk((2, 9), 2, (1,), True),
    )
    assert [admission.last_token for admission in again.admitted] == [8, 8] and again.filling == ()


def test_where_memory_is_counted_no_more_enter_than_fit_at_the_longest_length() -> None:
    scheduler = Scheduler(8)
    scheduler.submit([make_request(0, 0), make_request(1, 1), make_request(2, 2), make_request(3, 0)])
    assert groups(scheduler, fits=lambda size: size.num_rows * size.longest <= 20) == [0, 1], (
        "three of eight tokens are too many"
    )
    assert groups(scheduler, size=Size(0, 4), fits=lambda size: size.num_rows * size.longest <= 24)


# Turns that go on


def held(slots: int, count: int, room: int = 100) -> Scheduler:
    """So many requests have run at once, the first `slots` of them ended with the token 7, and are held."""
    scheduler = Scheduler(slots)
    scheduler.submit([turn(number) for number in range(count)])
    scheduler.plan(version=0)
    for row in range(slots):
        scheduler.hold(row, [7], ids := scheduler.request(row).prefix_ids, len(ids), room)
        scheduler.finish([row])
    return scheduler


def turn(number: int, *context: int) -> Request:
    return replace(make_request(number), context=context, hold=True)


def groups(scheduler: Scheduler, **how: Any) -> list[int]:
    return [admission.request.key.group for admission in scheduler.plan(version=0, **how).admitted]


def test_a_continuation_gets_its_cache_back_and_only_what_is_new_is_computed() -> None:
    scheduler = held(2, 2)
    assert scheduler.num_unfinished == 0
    scheduler.submit([turn(0, 7, 8, 9)])
    plan = scheduler.plan(version=0)
    assert plan.admitted[0].cache == (0, 1, 2) and plan.chunks == (PrefillChunk((7, 8), 3, (0,), True),)
    assert plan.admitted[0].last_token == 9
    scheduler.release_caches()
    scheduler.submit([turn(1, 7)])
    again = scheduler.plan(version=1)
    assert again.admitted[0].cache == () and again.chunks[0] == PrefillChunk((0, 1), 0, (1,)), "it is computed whole"


def test_where_room_runs_out_the_oldest_caches_go_and_places_in_line_stay() -> None:
    scheduler = held(3, 3, room=6)
    scheduler.submit([make_request(9)])
    scheduler.submit([turn(number, 7, 8) for number in (2, 1, 0)])
    plan = scheduler.plan(version=0)
    assert [admission.request.key.group for admission in plan.admitted] == [0, 1, 2]
    assert [bool(admission.cache) for admission in plan.admitted] == [False, True, True]
    assert plan.chunks == (
        PrefillChunk((0, 1), 0, (0,)),
        PrefillChunk((2, 7), 2, (0,), True),
        PrefillChunk((7,), 3, (1,), True),
        PrefillChunk((7,), 3, (2,), True),
    ), "the prompt as a prompt, the rest as what was sampled"


def test_another_row_of_a_rollout_begins_at_its_place_in_line_whether_the_first_is_held_waits_or_runs() -> None:
    scheduler = held(2, 2)
    others = [replace(turn(0), key=RolloutKey(0, 0, 0, row), prompt_ids=(4, 4, 4 + row)) for row in (1, 2, 3)]
    scheduler.submit([make_request(9), others[0]])
    plan = scheduler.plan(version=0)
    assert [(each.request.key, each.cache) for each in plan.admitted] == [(others[0].key, ()), ((9, 0, 0, 0), ())]
    scheduler.submit([make_request(10), others[1]])
    scheduler.hold(0, [8], (4, 4), 2, 100)
    scheduler.abort({RolloutKey(0, 0, 0)})
    scheduler.finish([0])
    scheduler.submit([make_request(11), others[2]])
    assert [admission.request.key.row for admission in scheduler.plan(version=0).admitted] == [2]
    scheduler.finish([0])
    scheduler.submit([replace(others[0], context=(8, 9))])
    assert [admission.request.key.row for admission in scheduler.plan(version=0).admitted] == [3]
    scheduler.finish([0])
    (admission,) = scheduler.plan(version=0).admitted
    assert (admission.request.key.row, admission.cache) == (1, (4, 4)), "what was held of it stayed"


def test_while_weights_wait_a_continuation_does_not_stand_in_the_way_of_what_had_begun() -> None:
    scheduler = held(1, 2)
    assert groups(scheduler) == [1]
    scheduler.suspend([(0, RowProgress(np.array([7], np.int32), np.zeros(1, np.float32), (Span(0, 1),)))])
    scheduler.submit([turn(0, 7)])
    assert scheduler.num_begun == 1
    assert groups(scheduler, only_begun=True) == [1]
