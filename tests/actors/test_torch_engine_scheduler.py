"""Laws of the scheduler, over random histories of submissions, ends and aborts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.engine import Request, RolloutKey
from actors.torch_engine.scheduler import Copy, Plan, Prefill, Scheduler


def make_request(number: int, prompt: int = 0) -> Request:
    return Request(RolloutKey(number, 0, 0), (prompt, 1, 2), 4, 1.0, number)


class Table:
    """A model of the device: which request each row computes, and whose prompt it holds."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.rows: dict[int, Request] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}

    def apply(self, plan: Plan) -> None:
        targets, sources = {target for _, target in plan.moves}, {source for source, _ in plan.moves}
        assert not targets & sources and not targets & self.rows.keys(), "a move may not overwrite a running row"
        for source, target in plan.moves:
            self.rows[target] = self.rows.pop(source)
            self.prompts[target] = self.prompts[source]
        admitted = dict(plan.admitted)
        for copy in plan.copies:
            assert copy.source in self.rows and copy.source not in admitted and copy.target in admitted
            self.prompts[copy.target] = self.prompts[copy.source]
        for prefill in plan.prefills:
            for row in prefill.rows:
                assert row in admitted, "only admitted rows are filled"
                self.prompts[row] = prefill.prompt_ids
        assert len(admitted) == len(plan.admitted) and not admitted.keys() & self.rows.keys(), "no row is held twice"
        self.rows.update(admitted)
        assert sorted(self.rows) == list(range(len(self.rows))), "running rows are a prefix"
        assert len(self.rows) <= self.slots
        assert all(self.prompts[row] == request.prompt_ids for row, request in self.rows.items())


@given(data=st.data(), slots=st.integers(1, 5))
def test_whatever_happens_every_request_is_returned_once_and_admitted_in_order(data: st.DataObject, slots: int) -> None:
    scheduler, table = Scheduler(slots), Table(slots)
    submitted = 0
    gone: list[int] = []
    admitted: list[int] = []

    def advance() -> None:
        plan = scheduler.plan(version=data.draw(st.integers(0, 1)))
        table.apply(plan)
        admitted.extend(request.key.group for _, request in plan.admitted)
        assert scheduler.num_rows == len(table.rows)
        assert scheduler.num_unfinished == submitted - len(gone)
        assert scheduler.num_rows == min(slots, scheduler.num_unfinished), "no slot is idle while a request waits"
        ends = data.draw(st.sets(st.sampled_from(sorted(table.rows)))) if table.rows else set()
        assert all(scheduler.request(row) is table.rows[row] for row in ends)
        scheduler.finish(sorted(ends))
        gone.extend(table.rows.pop(row).key.group for row in ends)

    for _ in range(data.draw(st.integers(1, 12))):
        prompts = data.draw(st.lists(st.integers(0, 1), max_size=4))
        scheduler.submit([make_request(submitted + index, prompt) for index, prompt in enumerate(prompts)])
        submitted += len(prompts)
        advance()
        aborted = data.draw(st.sets(st.integers(0, submitted + 1), max_size=2))
        alive = {key.group for key in scheduler.unfinished_keys()}
        rows = scheduler.abort({RolloutKey(number, 0, 0) for number in aborted})
        assert {table.rows.pop(row).key.group for row in rows} <= aborted
        gone.extend(aborted & alive)
    for _ in range(submitted * 50):
        if not scheduler.num_unfinished:
            break
        advance()
        scheduler.finish(sorted(table.rows)[:1])
        gone.extend(table.rows.pop(row).key.group for row in sorted(table.rows)[:1])
    assert sorted(gone) == list(range(submitted)), "every request leaves exactly once"
    assert admitted == sorted(admitted), "requests enter in the order of submission"


def test_a_prompt_submitted_together_is_computed_once_and_copied_to_those_who_come_later() -> None:
    scheduler = Scheduler(2)
    scheduler.submit([make_request(number) for number in range(4)])
    assert scheduler.plan(version=0).prefills == (Prefill((0, 1, 2), (0, 1)),)
    scheduler.finish([0])
    later = scheduler.plan(version=0)
    assert later.prefills == () and later.copies == (Copy(source=1, target=0, num_tokens=2),)


def test_a_prompt_is_computed_again_after_an_update_and_for_another_submission() -> None:
    scheduler = Scheduler(2)
    scheduler.submit([make_request(number) for number in range(3)])
    scheduler.submit([make_request(3)])
    scheduler.plan(version=0)
    scheduler.finish([0])
    assert scheduler.plan(version=1).prefills == (Prefill((0, 1, 2), (0,)),)
    scheduler.finish([1])
    assert scheduler.plan(version=1).prefills == (Prefill((0, 1, 2), (1,)),)


def test_a_batch_that_runs_empty_becomes_smaller() -> None:
    scheduler = Scheduler(4)
    scheduler.submit([make_request(number) for number in range(4)])
    scheduler.plan(version=0)
    scheduler.finish([0, 2])
    assert scheduler.plan(version=0).moves == ((3, 0),)
    assert scheduler.num_rows == 2
    assert [scheduler.request(row).key.group for row in range(2)] == [3, 1]
