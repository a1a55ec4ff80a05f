"""A learner, its hub or its disk fails at some call: each batch is trained once all the same, and what is kept is whole."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from making import make_group
from safetensors.torch import load_file

from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.files import Disk
from async_rlhf.learner.checkpoint import resuming
from async_rlhf.learner.checkpoint.store import CheckpointError
from tests.learner.lives import STEPS, Killed, Life, Live, ScriptedHub, assert_each_batch_was_trained_once, make_batches

FORGETS = [
    *[("take", n) for n in range(STEPS + 1)],
    *[("trained", n) for n in range(STEPS)],
    *[("publish", n) for n in range(STEPS)],
    *[("commit", n) for n in range(2)],
]


@pytest.mark.parametrize("fault", FORGETS, ids=lambda fault: f"{fault[0]} {fault[1]}")
def test_a_hub_that_was_restarted_is_sent_the_step_and_no_batch_is_trained_twice(
    live: Live, undisturbed: dict[str, bytes], fault: tuple[str, int]
) -> None:
    life = live(faults={fault: "forget"})
    hub = life.hub
    assert life.trainer.run() == "finished"
    assert not hub.faults
    assert_each_batch_was_trained_once(life, undisturbed)
    assert hub.committed == hub.step == STEPS
    _, again = [n for n, (name, _) in enumerate(hub.calls) if name == "register"]
    # A hub that has no registration is sent nothing else, but for what left before a publication under way had found it out.
    first = max(0, again - 3) if fault[0] == "publish" else again - 1
    assert fault[0] in {name for name, _ in hub.calls[first:again]}
    if again == len(hub.calls) - 1:
        assert fault == ("commit", 1)  # there is nothing more to send
        return
    step = hub.calls[again][1]
    # nothing is sent between the registration and the publication, and then the batch is taken that was next
    expected = [("take", step)] if step == STEPS else [("publish", step), ("take", step)]
    assert hub.calls[again + 1 : again + 1 + len(expected)] == expected


def test_a_hub_that_restarts_again_and_again_is_followed(live: Live, undisturbed: dict[str, bytes]) -> None:
    faults = {(method, n): "forget" for method in ("take", "trained", "publish", "commit") for n in range(0, 12, 2)}
    assert_each_batch_was_trained_once(live(faults=faults).ran(), undisturbed)


@pytest.mark.parametrize("fault", [f for f in FORGETS if f != ("take", STEPS)], ids=lambda fault: f"{fault[0]} {fault[1]}")
def test_a_dead_learner_is_succeeded_without_a_trace(live: Live, undisturbed: dict[str, bytes], fault: tuple[str, int]) -> None:
    with pytest.raises(Killed):
        live(faults={fault: "kill"}).trainer.run()
    second = live()
    assert second.trainer.step in (0, 2, 4)
    assert_each_batch_was_trained_once(second.ran(), undisturbed)


def at_checkpoint(life: Life, monkeypatch: pytest.MonkeyPatch, step: int, ends: BaseException) -> None:
    """The checkpoint of this step is begun to be written, and that ends in this way."""
    freeze = life.backend.snapshot

    def snapshot() -> Callable[[Path], None]:
        def write(directory: Path) -> None:
            (directory / "model").mkdir()
            raise ends

        return write if life.trainer.step == step else freeze()

    monkeypatch.setattr(life.backend, "snapshot", snapshot)


def test_killed_while_it_writes_a_checkpoint_it_goes_on_from_the_one_before(
    live: Live, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = live()
    at_checkpoint(first, monkeypatch, 4, Killed())
    with pytest.raises(Killed):
        first.trainer.run()
    second = live()
    assert second.trainer.step == 2
    assert_each_batch_was_trained_once(second.ran(), undisturbed)


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_on_a_full_disk_the_next_checkpoint_is_tried_and_the_last_ends_it(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    life = live()
    at_checkpoint(life, monkeypatch, 2, FULL)
    assert life.trainer.run() == "finished" and life.saved() == [4]
    assert [record["checkpoint/failed"] for record in life.metrics()] == [0, 0, 1, 1]
    last = live(name="last")
    at_checkpoint(last, monkeypatch, 4, FULL)
    with pytest.raises(CheckpointError, match=r"step 4 could not be written: .*No space left.*--resume goes on from step 2"):
        last.trainer.run()


def test_the_recorded_version_is_the_newest_begun_also_after_a_resume_between_two(live: Live) -> None:
    settings: dict[str, Any] = {"max_steps": 12, "save_every": 3, "publish_every": 5}
    batches = [[make_group(step, [2, 3], version=step)] for step in range(12)]
    first = live(batches[:3], **settings).ran()
    # the publication of 10 is lost, and made up for at the take
    second = live(batches, {("publish", 2): "forget"}, **settings).ran()
    versions = {record["step"]: record["version"] for record in second.metrics()}
    assert sorted(first.hub.weights) == [0] and sorted(second.hub.weights) == [3, 5, 10]
    assert versions == {1: 0, 2: 0, 3: 0, 4: 3, 5: 5, 6: 5, 7: 5, 8: 5, 9: 5, 10: 10, 11: 10, 12: 10}


def test_a_drained_run_ends_with_a_checkpoint_of_its_last_step_and_gives_up_nothing_that_a_kept_one_needs(live: Live) -> None:
    first = live(hub=ScriptedHub(make_batches()[:3], ends="drained"))
    assert first.trainer.run() == "drained" and (first.saved(), first.hub.committed) == ([2, 3], 2)
    resumed = live()
    assert resumed.trainer.step == 3 and resumed.weights == first.weights
    resumed.ran()


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_groups_are_given_up_when_no_kept_checkpoint_needs_them(live: Live, keep_last: int) -> None:
    life = live(make_batches(9), {("take", 9): "kill"}, max_steps=20, keep_last=keep_last)
    with pytest.raises(Killed):
        life.trainer.run()
    assert life.saved() == [2, 4, 6, 8][-keep_last:]
    assert life.hub.committed == life.saved()[0]


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_learner_goes_back_to_any_step_it_keeps_and_trains_the_same_again(live: Live, step: int) -> None:
    whole = live(make_batches(6), name="whole", max_steps=6).ran()
    first = live(make_batches(6), {("take", 5): "kill"}, max_steps=6, keep_last=3)
    with pytest.raises(Killed):
        first.trainer.run()
    assert first.saved() == [2, 4] and first.hub.committed == 0
    resuming.go_back(first.directory, step)
    second = live(make_batches(6), max_steps=6, keep_last=3)
    assert second.trainer.step == step
    assert second.ran().weights == whole.weights
    assert [record["groups"] for record in second.metrics()] == [record["groups"] for record in whole.metrics()]


def test_nothing_recorded_is_cut_off_before_the_hub_has_taken_the_learner(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    first = live(faults={("take", 3): "kill"})
    with pytest.raises(Killed):
        first.trainer.run()
    resuming.go_back(first.directory, 0)

    def refuse(step: int, committed: int) -> None:
        raise RefusedError("committed", f"a learner cannot resume from step {step}")

    second = live()
    monkeypatch.setattr(second.hub, "register", refuse)
    with pytest.raises(RefusedError, match="cannot resume from step 0"):
        second.trainer.run()
    assert [record["step"] for record in first.metrics()] == [1, 2, 3]
    assert [record["step"] for record in first.read("rollouts.jsonl")] == [1, 2, 3]


def test_in_the_background_a_checkpoint_holds_the_step_it_was_begun_at_however_long_it_takes(
    live: Live, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = live(background=True)
    freeze, record, trained, saved = life.backend.snapshot, life.trainer._record, threading.Event(), []

    def recorded(*arguments: Any) -> None:
        record(*arguments)
        if life.trainer.step == 3:
            trained.set()

    def slow() -> Callable[[Path], None]:
        weights, write = life.weights, freeze()

        def once_another_step_was_made(directory: Path) -> None:
            assert trained.wait(60)
            write(directory)
            saved.append((weights, load_file(directory / "model" / "model.safetensors")))

        return once_another_step_was_made

    monkeypatch.setattr(life.trainer, "_record", recorded)
    monkeypatch.setattr(life.backend, "snapshot", slow)
    assert life.trainer.run() == "finished"
    assert len(saved) == 2
    for weights, written in saved:
        assert {name: written[name].numpy().tobytes() for name in weights} == weights
    assert_each_batch_was_trained_once(life, undisturbed)


def test_the_record_of_its_steps_is_durable_before_a_checkpoint_is(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    life = live()
    synced: list[tuple[str, int]] = []
    sync = Disk.sync_path

    def spy(self: Disk, path: Path) -> None:
        synced.append((path.name, len(life.read("metrics.jsonl"))))
        sync(self, path)

    monkeypatch.setattr(Disk, "sync_path", spy)
    life.ran()
    for step in (2, 4):
        named = synced.index((f".tmp-step_{step:06d}", step))
        for record in ("metrics.jsonl", "rollouts.jsonl", life.directory.name):
            assert (record, step) in synced[:named], synced
