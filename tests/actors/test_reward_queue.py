"""One reward's queue in virtual time: limits that hold in every window, batches, and trying again."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.rewards import Answer, RewardSpec
from async_rlhf.actors.scoring.reward_queue import RewardQueue, ScoringTask, WindowLimit
from async_rlhf.buffers.failures import Failure, FailureKind

RIGHT = (Answer(1.0),)


def failing(reason: str, retry_after_s: float | None = None) -> tuple[Answer]:
    return (Answer(None, Failure(FailureKind.RAISED, reason, retry_after_s=retry_after_s)),)


BUSY = failing("busy", 0.0)


def queue_of(**settings: object) -> RewardQueue:
    return RewardQueue(RewardSpec("judge", "judge", "async", **settings))  # type: ignore[arg-type]


def task(number: int, tokens: int = 0) -> ScoringTask:
    return ScoringTask(number, ({},), tokens)


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.floats(0, 40), st.integers(1, 9)), min_size=1, max_size=60),
    st.integers(9, 20),
    st.integers(1, 4),
)
def test_no_window_ever_holds_more_requests_or_tokens_than_allowed_and_nothing_waits_for_ever(
    requests: int, offers: list[tuple[float, int]], tokens: int, batch_size: int
) -> None:
    limited = queue_of(requests_per_minute=requests, tokens_per_minute=tokens, batch_size=batch_size)
    now, calls, called = 0.0, list[tuple[float, int]](), list[int]()

    def call() -> None:
        for batch in limited.due(now):
            calls.append((now, sum(each.tokens for each in batch)))
            called.extend(each.id for each in batch)

    for number, (pause, cost) in enumerate(offers):
        limited.offer(task(number, cost), now)
        call()
        now += pause
    while (when := limited.next_due(now)) < math.inf:
        assert when >= now
        now = when
        call()
    assert called == list(range(len(offers)))
    for start, _ in calls:
        window = [cost for at, cost in calls if start <= at < start + 60.0]
        assert len(window) <= requests and sum(window) <= tokens


def test_a_limit_lets_through_again_exactly_when_the_window_has_passed() -> None:
    limit = WindowLimit(2)
    limit.take(0.0)
    limit.take(10.0)
    assert limit.free_at(10.0) == 60.0 and limit.free_at(65.0) == 65.0 and limit.free_at(65.0, 2) == 70.0


def test_what_costs_more_than_a_minute_holds_fails_with_the_numbers_and_holds_up_nobody() -> None:
    limited = queue_of(tokens_per_minute=100)
    refused = limited.offer(task(0, 101), 0.0)
    assert refused is not None and refused.score().failure == "needs 101 tokens, tokens_per_minute allows 100"
    assert limited.offer(task(1, 100), 0.0) is None
    assert [[t.id for t in batch] for batch in limited.due(0.0)] == [[1]]


def test_a_call_that_reports_more_tokens_than_expected_pays_for_them() -> None:
    limited = queue_of(tokens_per_minute=100)
    limited.offer(task(0, 10), 0.0)
    (batch,) = limited.due(0.0)
    limited.ended(batch, (Answer(1.0, metrics={"tokens": 95.0}),), 1.0)
    limited.offer(task(1, 10), 1.0)
    assert limited.due(1.0) == [] and limited.next_due(1.0) == 60.0


def test_no_more_run_at_once_than_allowed() -> None:
    narrow = queue_of(max_concurrency=2)
    for number in range(5):
        narrow.offer(task(number), 0.0)
    first = narrow.due(0.0)
    assert len(first) == 2 and narrow.next_due(0.0) == math.inf
    assert narrow.ended(first[0], RIGHT, 1.0) == [(first[0][0], RIGHT)]
    assert [batch[0].id for batch in narrow.due(1.0)] == [2]


def test_a_batch_is_called_when_it_is_full_or_its_first_has_waited_long_enough() -> None:
    batched = queue_of(batch_size=3, batch_wait_s=0.5)
    for number in range(4):
        batched.offer(task(number), 0.1 * number)
    assert [[t.id for t in batch] for batch in batched.due(0.3)] == [[0, 1, 2]]
    assert math.isclose(batched.next_due(0.3), 0.8) and batched.due(0.7) == []
    assert [[t.id for t in batch] for batch in batched.due(0.8)] == [[3]]


def test_each_of_a_batch_gets_its_own_answer() -> None:
    batched = queue_of(batch_size=2)
    tasks = [task(0), task(1)]
    for each in tasks:
        batched.offer(each, 0.0)
    (batch,) = batched.due(0.0)
    answers = (Answer(0.0), Answer(1.0))
    assert batched.ended(batch, answers, 1.0) == [(tasks[0], (answers[0],)), (tasks[1], (answers[1],))]


def test_what_may_pass_is_tried_again_after_growing_pauses_and_then_answered() -> None:
    patient = queue_of(retries=2)
    patient.offer(task(0), 0.0)
    now, pauses = 0.0, []
    (batch,) = patient.due(now)
    while not (ended := patient.ended(batch, BUSY, now)):
        pauses.append(patient.next_due(now) - now)
        assert patient.due(now) == []
        now += pauses[-1]
        (batch,) = patient.due(now)
    assert pauses == [0.5, 1.0] and ended[0][1] == BUSY and batch[0].tries == 3


def test_a_judge_that_names_a_pause_gets_it_and_a_defect_is_not_tried_again() -> None:
    patient = queue_of(retries=5)
    patient.offer(task(0), 0.0)
    (batch,) = patient.due(0.0)
    assert patient.ended(batch, failing("429", 20.0), 1.0) == [] and patient.next_due(1.0) == 21.0
    (batch,) = patient.due(21.0)
    wrong = failing("KeyError: 'x'")
    assert patient.ended(batch, wrong, 22.0) == [(batch[0], wrong)]


def test_a_forgotten_task_is_not_called() -> None:
    patient = queue_of(retries=1)
    patient.offer(task(0), 0.0)
    patient.offer(task(1), 0.0)
    first, _ = patient.due(0.0)
    patient.ended(first, BUSY, 0.0)
    patient.discard({0})
    assert patient.next_due(0.0) == math.inf
