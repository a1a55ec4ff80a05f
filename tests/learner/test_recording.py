"""The record of a run: no step is missing, nothing is half written, whatever was killed and however full the disk is."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rlhf.learner.loop.recording import Recording


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def begun(directory: Path, steps_done: int = 0) -> Recording:
    recording = Recording(directory)
    recording.begin(steps_done)
    return recording


@pytest.fixture
def limit() -> Iterator[Any]:
    """`limit(n)`: no file grows beyond n bytes; `limit(None)`: as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def to(num_bytes: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if num_bytes is None else num_bytes, hard))

    yield to
    to(None)


def test_a_resumed_run_cuts_off_what_was_lost_and_goes_on(tmp_path: Path) -> None:
    first = begun(tmp_path)
    for step in (1, 2, 3, 4):
        first.step({"step": step, "life": 1})
        for group in (0, 1):
            first.sample({"step": step, "group": group})
    first.close()
    Recording(tmp_path).close()  # nothing is cut off before it begins
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    second = begun(tmp_path, 2)
    second.step({"step": 3, "life": 2})
    second.begin(0)  # the hub was restarted, and the learner registers again
    second.close()
    assert [(line["step"], line["life"]) for line in read(tmp_path / "metrics.jsonl")] == [(1, 1), (2, 1), (3, 2)]
    assert [(line["step"], line["group"]) for line in read(tmp_path / "rollouts.jsonl")] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert first.lost_lines == second.lost_lines == 0


@pytest.mark.parametrize("torn", [b'{"step": 2, "rew', b'{"step": 2}', b"\0" * 4096])
def test_a_half_written_last_line_is_removed(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    recording = begun(tmp_path, 1)
    recording.step({"step": 2, "whole": True})
    recording.close()
    assert read(path) == [{"step": 1}, {"step": 2, "whole": True}]
    assert f"metrics.jsonl ended with {len(torn)} bytes that were no whole lines" in caplog.text


def test_steps_that_a_checkpoint_holds_and_the_record_does_not_are_named_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n' + b"\0" * 4096 + b'{"step": 6}\n')
    recording = begun(tmp_path, 5)
    assert recording.lost_lines == 3
    assert "metrics.jsonl is damaged: it has no lines of the steps from 3 to 5" in caplog.text
    recording.step({"step": 6, "again": True})
    recording.close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 6]


def test_a_line_is_on_disk_when_it_is_written_and_is_json_for_everyone(tmp_path: Path) -> None:
    recording = begun(tmp_path)
    recording.step({"step": 1, "loss": math.nan, "nested": {"a": [math.inf, 1.5]}, "numpy": np.float32(0.5)})

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "loss": None, "nested": {"a": [None, 1.5]}, "numpy": 0.5}
    recording.close()


def test_on_a_full_disk_a_step_waits_for_room_and_samples_are_counted_and_each_is_said_once(
    tmp_path: Path, limit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    waited: list[float] = []
    recording = Recording(tmp_path, sleep=lambda seconds: (waited.append(seconds), limit(None) if len(waited) == 3 else None))
    recording.begin(0)
    for number in range(1, 5):
        limit(20 if number in (2, 3) else None)
        recording.sample({"step": number} | ({"text": "more than there is room for"} if number in (2, 3) else {}))
        if number == 3:
            recording.step({"step": 1, "text": "more than there is room for"})
    recording.close()
    assert waited == [1.0, 1.0, 1.0] and recording.lost_lines == 2
    assert read(tmp_path / "rollouts.jsonl") == [{"step": 1}, {"step": 4}] and len(read(tmp_path / "metrics.jsonl")) == 1
    lost, full, room = caplog.messages
    assert "rollouts.jsonl loses lines" in lost and "the disk is full: step 1 waits until metrics.jsonl has room" in full
    assert room == "there is room on the disk again: step 1 is recorded"
