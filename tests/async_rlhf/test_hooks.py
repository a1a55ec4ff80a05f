"""Events reach real commands and a real webhook; what those do, fail at or take never touches the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.lines import earlier
from async_rlhf.learner.checkpoint.store import lead
from async_rlhf.run.checks.machine import check_hooks
from async_rlhf.run.run_dir import RunDir, RunEnd
from async_rlhf.run.run_files import read_lines
from async_rlhf.run.supervision.hooks import Events, Hooks
from async_rlhf.run.watching import HooksConfig
from tests.conftest import gone, kept_port, wait_for
from tests.hub_server import Answering, serving

KEEP = ("/bin/sh", "-c", 'cat > "$ASYNC_RLHF_RUN_DIR/$ASYNC_RLHF_EVENT"')


def event(kind: str = "best", **more: Any) -> dict[str, Any]:
    return {"event": kind, "text": "a sentence", **more}


@contextmanager
def webhook(answer: int | threading.Event) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers so, or only after that; its address, and what was posted to it."""
    posted: list[Any] = []

    class Handler(Answering):
        def do_POST(self) -> None:
            posted.append(json.loads(self.body()))
            if isinstance(answer, threading.Event):
                answer.wait(60)
            else:
                self.answer(answer)

    with serving(Handler) as address:
        yield f"{address}/token", posted
        if isinstance(answer, threading.Event):
            answer.set()


def hooks(run: Path, **settings: Any) -> Hooks:
    return Hooks(HooksConfig(**settings), run, run / "hooks.log")


def last_error(hooks: Hooks) -> str:
    return wait_for(hooks.failures, "a last_error")[0]


def test_a_command_reads_the_event_and_a_webhook_is_posted_the_same(tmp_path: Path) -> None:
    with webhook(204) as (url, posted):
        both = hooks(tmp_path, command=KEEP, url=url, events=("best",))
        both.deliver(event(step=7))
        both.deliver(event("finished"))
        both.close()
    assert json.loads((tmp_path / "best").read_text()) == event(step=7)
    assert posted == [event(step=7)] and both.failures() == [] and not (tmp_path / "finished").exists()


def test_a_command_that_hangs_is_killed_at_its_deadline_with_all_it_started(tmp_path: Path) -> None:
    for timeout_s in (0.5, 5.0, 50.0):  # until the shell has come to its second word
        pid = tmp_path / f"pid-{timeout_s:g}"
        hanging = hooks(tmp_path, command=("/bin/sh", "-c", f"sleep 600 & echo $! > {pid}; wait"), timeout_s=timeout_s)
        hanging.deliver(event())
        killed = f"the hook for 'best' failed (1 so far): the command was killed after {timeout_s:g} s (hooks.timeout_s)"
        assert last_error(hanging) == killed
        if pid.exists() and pid.read_text():
            break
    started = int(pid.read_text())
    wait_for(lambda: gone(started), "the end of what it started")


def test_what_fails_is_counted_and_the_next_event_is_delivered_all_the_same(tmp_path: Path) -> None:
    failing = hooks(tmp_path, command=f"/bin/sh -c 'cat > {tmp_path}/$ASYNC_RLHF_EVENT; echo no >&2; exit 3'")
    failing.deliver(event())
    failing.deliver(event("failed"))
    failing.close()
    assert failing.failed == 2 and "failed (2 so far): the command ended with code 3; see" in failing.failures()[1]
    assert (tmp_path / "hooks.log").read_text() == "no\nno\n"
    assert json.loads((tmp_path / "failed").read_text())["event"] == "failed"

    missing = hooks(tmp_path, command=("/no/such/program",))
    missing.deliver(event())
    assert "the command cannot be started" in last_error(missing)


def test_a_webhook_that_refuses_hangs_or_is_not_there_is_named_without_its_address(tmp_path: Path) -> None:
    with webhook(500) as (url, _):
        refusing = hooks(tmp_path, url=url)
        refusing.deliver(event())
        assert last_error(refusing).endswith("the webhook answered 500")
    with webhook(threading.Event()) as (url, posted):
        hanging = hooks(tmp_path, url=url, timeout_s=5.0)
        hanging.deliver(event())
        assert last_error(hanging).endswith("the webhook gave no answer within 5 s (hooks.timeout_s)") and posted
    with kept_port() as port:
        gone = hooks(tmp_path, url=f"http://127.0.0.1:{port}/token")
        gone.deliver(event())
        found = last_error(gone)
    assert "the webhook cannot be reached: ConnectError" in found and "127.0.0.1" not in found


def test_at_the_end_what_is_under_way_is_killed_and_what_waits_is_dropped(tmp_path: Path) -> None:
    running = hooks(tmp_path, command=("/bin/sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 600"), timeout_s=600)
    for kind in ("best", "guard"):
        running.deliver(event(kind))
    own = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the command"))
    running.close(at_once=True)
    wait_for(lambda: gone(own), "its end")


def test_a_hook_that_cannot_work_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, small: Any) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.command: its first word is no program"):
        check_hooks(small(**{"hooks.command": "no-such-program --loud"}))
    with pytest.raises(ConfigError, match=r"hooks\.url = '\$NOWHERE': there is no such environment variable"):
        check_hooks(small(**{"hooks.url": "$NOWHERE"}))
    monkeypatch.setenv("SOMEWHERE", "https://example.org/token")
    there = small(**{"hooks.url": "$SOMEWHERE", "hooks.command": "sh -c 'exit 0'"})
    check_hooks(there)
    assert there.hooks.address == "https://example.org/token" and there.hooks.argv == ["sh", "-c", "exit 0"]
    for key, value in {"hooks.url": "example.org", "hooks.command": "sh 'x", "hooks.events": ["beste"]}.items():
        with pytest.raises(ConfigError, match=key):
            small(**{key: value})


@pytest.fixture
def watched(small: Any) -> Iterator[tuple[Events, RunDir]]:
    config = small(**{"rewards.max_failed_ratio": 0.5, "hooks.command": KEEP})
    run = RunDir.create(config)
    found = Events(config, run, print)
    yield found, run
    found.close(at_once=True)
    run.retire()


def kinds(run: RunDir) -> list[str]:
    return [record["event"] for record in read_lines(run.events)]


def step(number: int, target: int = 4, failed: float = 0.0) -> dict[str, Any]:
    return {"step": number, "staleness/target": target, "rewards/failed_ratio": failed}


def test_a_target_that_moves_and_scores_that_fail_are_told_once_each_time(watched: tuple[Events, RunDir]) -> None:
    events, run = watched
    failed = [0.0, 0.3, 0.4, 0.45, 0.3, 0.4, 0.1, 0.4]  # the limit is 0.5
    for number, ratio in enumerate(failed, 1):
        events.step(step(number, target=4 if number < 6 else 3, failed=ratio))
    assert kinds(run) == ["failing_rewards", "guard", "failing_rewards"]
    first, moved, second = read_lines(run.events)
    assert (first["step"], second["step"]) == (3, 8) and (moved["before"], moved["target"]) == (4, 3)
    assert first["text"] == "40% of the scores of step 3 failed; above 50% (rewards.max_failed_ratio) the run ends"


def test_a_new_best_checkpoint_is_told_once_the_link_leads_to_it(watched: tuple[Events, RunDir]) -> None:
    events, run = watched
    (run.path / "checkpoints").mkdir()
    for number in (2, 2, 4):
        lead(run.path / "checkpoints" / "best", f"step_{number:06d}")
        events.evaluation({"label": "step", "step": number, "mean_reward": number / 10})
    found = read_lines(run.events)
    assert [(record["event"], record["step"]) for record in found] == [("best", 2), ("best", 4)]
    assert found[1]["checkpoint"] == str(run.path / "checkpoints" / "step_000004")
    assert wait_for(lambda: (run.path / "best").exists(), "the hook")


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (RunEnd(code=0, reason="all steps done", finished=True), ["finished"]),
        (RunEnd(code=0, reason="drained", finished=False), []),
        (RunEnd(code=130, reason="forced", finished=False), []),
        (RunEnd(code=4, reason="no step", finished=False), ["stalled"]),
        (RunEnd(code=7, reason="kl", finished=False), ["diverged"]),
        (RunEnd(code=5, reason="actor-0", finished=False), ["failed"]),
    ],
)
def test_every_end_but_that_which_an_operator_asked_for_is_told(watched: Any, end: RunEnd, kind: list[str]) -> None:
    events, run = watched
    events.ended(end)
    assert kinds(run) == kind


def test_little_room_is_told_as_an_event_and_the_file_of_events_begins_anew_when_it_has_grown(small: Any) -> None:
    config = small(max_log_bytes=1 << 16)
    run = RunDir.create(config)
    told = Events(config, run, print)
    for _ in range(600):
        told.disk_low("the disk has 1 GiB left")
    told.close(at_once=True)
    run.retire()
    assert set(kinds(run)) == {"disk_low"} and earlier(run.events).exists()
    assert run.events.stat().st_size + earlier(run.events).stat().st_size < 3 << 16
