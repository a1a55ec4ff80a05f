"""Laws of the book of episodes: every episode has one fate, and a step is blamed for the end of a process, or what has waited
after a step at the end of many."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from async_rlhf.actors.workers.book import SessionBook


class Books(RuleBasedStateMachine):
    """A model of a few processes and keys, with the deaths that each key was in a step at without a known cause."""

    def __init__(self) -> None:
        super().__init__()
        self.book = SessionBook()
        self.open: set[int] = set()
        self.retired: set[int] = set()
        self.next_id = 0
        self.phase: dict[int, str] = {}
        self.worker: dict[int, int] = {}
        self.key: dict[int, str] = {}
        self.suspected: dict[str, int] = {}
        self.has_stepped: set[int] = set()
        self.waited: Counter[str] = Counter()

    @rule(worker=st.integers(0, 3))
    def start(self, worker: int) -> None:
        if worker not in self.open:
            self.open.add(worker)
            self.book.open(worker)

    @rule(key=st.sampled_from("abcdef"))
    def begin(self, key: str) -> None:
        if key in {self.key[id] for id, phase in self.phase.items() if phase != "closing"}:
            return
        self.next_id += 1
        sizes = {each: sum(at == each for at in self.worker.values()) for each in self.open - self.retired}
        worker = self.book.place(self.next_id, key)
        assert (worker is None) == (not sizes)
        if worker is not None:
            assert sizes[worker] == min(sizes.values())
            self.phase[self.next_id], self.worker[self.next_id], self.key[self.next_id] = "waiting", worker, key

    @precondition(lambda self: self.phase)
    @rule(data=st.data(), ends=st.booleans())
    def goes_on(self, data: st.DataObject, ends: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.phase)))
        if self.phase[id] == "closing":
            self.book.closed(id)
            self.drop(id)
            return
        if ends:
            self.phase[id] = "closing"
            self.book.enter(id, "closing")
            self.clear(self.key[id])
        elif self.phase[id] == "stepping":
            self.phase[id] = "waiting"
            self.book.enter(id, "waiting")
        elif self.book.step(id):
            self.phase[id] = "stepping"
            self.has_stepped.add(id)
        else:
            assert self.suspected.get(self.key[id]) and self.suspects_in(self.worker[id])

    def suspects_in(self, worker: int) -> int:
        """Suspects that step in a process."""
        return sum(
            self.worker[id] == worker and phase == "stepping" and bool(self.suspected.get(self.key[id]))
            for id, phase in self.phase.items()
        )

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.open)))
        self.retired.add(worker)
        self.book.retire(worker)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), known=st.booleans())
    def dies(self, data: st.DataObject, known: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.open)))
        inside = {id for id, at in self.worker.items() if at == worker}
        stepping = {id for id in inside if self.phase[id] == "stepping"}
        causes = data.draw(st.sets(st.sampled_from(sorted(inside)))) if known and inside else set() if known else None
        failed, lost, over = self.book.died(worker, causes)
        assert sorted((*failed, *lost, *over)) == sorted(inside)
        assert all((self.phase[id] == "closing") == (id in over) for id in inside)
        again = {id for id in stepping if self.suspected.get(self.key[id])}
        waiting = {id for id in inside & self.has_stepped if self.phase[id] == "waiting"}
        self.waited.update(self.key[id] for id in waiting)
        tenth = {id for id in waiting if self.waited[self.key[id]] == 10}
        assert set(failed) == (again if causes is None else causes & stepping) | tenth
        for id in failed:
            self.clear(self.key[id])
        if causes is None:
            self.suspected |= {self.key[id]: 1 for id in stepping - again}
        for id in inside:
            self.drop(id)
        self.open.discard(worker)
        self.retired.discard(worker)

    @rule(key=st.sampled_from("abcdef"))
    def is_not_begun_again(self, key: str) -> None:
        self.book.forget([key])
        self.clear(key)

    def clear(self, key: str) -> None:
        self.suspected.pop(key, None)
        del self.waited[key]

    def drop(self, id: int) -> None:
        del self.phase[id], self.worker[id], self.key[id]

    @invariant()
    def agrees(self) -> None:
        for id in range(1, self.next_id + 1):
            assert self.book.worker_of(id) == self.worker.get(id) and self.book.phase(id) == self.phase.get(id)
        for worker in self.open:
            inside = sum(at == worker for at in self.worker.values())
            assert len(self.book.sessions(worker)) == inside
            assert self.suspects_in(worker) <= 1
            assert self.book.has_drained(worker) == (worker in self.retired and not inside)


def test_what_waits_after_a_step_at_the_end_of_ten_processes_has_failed() -> None:
    """An agent may end its process beside its own calls; one that has not stepped cannot."""
    book = SessionBook()
    for life in range(1, 21):
        book.open(life)
        first, second = 2 * life, 2 * life + 1
        book.place(first, "a")
        book.place(second, "b")
        assert book.step(first)
        book.enter(first, "waiting")
        failed, lost, _ = book.died(life, None)
        assert (failed, lost) == (((first,), (second,)) if life % 10 == 0 else ((), (first, second)))


TestEveryEpisodeHasOneFate = Books.TestCase
