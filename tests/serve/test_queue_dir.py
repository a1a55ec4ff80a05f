"""The directory of a queue: what an operator may do, what is refused by name. Real commands and files; no run is started."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.files import QUEUE
from async_rlhf.cli.commands import app
from async_rlhf.launch.depot import Depot
from async_rlhf.run.run_dir import RunDir
from async_rlhf.serve.daemon import Daemon
from async_rlhf.serve.queue_dir import QueueDir
from async_rlhf.serve.turns import QueueEntry, State
from tests.async_rlhf.test_spooled_run import fed
from tests.conftest import REPOSITORY, Hold, file_size_limit, invoke, output_of, stdout_of

Queued = Callable[..., QueueEntry]


@pytest.fixture
def queue(tmp_path: Path) -> QueueDir:
    return QueueDir.made(tmp_path / "serve")


@pytest.fixture
def queued(queue: QueueDir, small: Any, tmp_path: Path) -> Queued:
    """`queued("name", "failed")`: a run of this name in this state."""

    def put(name: str, state: State = "waiting") -> QueueEntry:
        entry = replace(queue.submit(small(name=name), tmp_path), state=state)
        queue.keep(entry)
        return entry

    return put


def states(queue: QueueDir) -> dict[str, str]:
    return {entry.name: entry.state for entry in queue.entries()}


def test_what_is_submitted_is_listed_in_order_with_its_resolved_configuration(queue: QueueDir, small_arguments: Any) -> None:
    submitted = small_arguments(name="first")[1:]
    waits = f"run 1 of {queue.path}: first; it waits for: async-rlhf queue serve {queue.path}\n"
    assert output_of(0, "queue", "submit", queue.path, *submitted) == waits
    output_of(0, "queue", "submit", queue.path, *submitted, "--set", "name=second")
    found = json.loads(stdout_of("queue", "list", queue.path, "--json"))
    assert found["daemon"] is None
    listed = [(row["number"], row["name"], row["state"], row["max_steps"]) for row in found["runs"]]
    assert listed == [(1, "first", "waiting", 4), (2, "second", "waiting", 4)]
    assert found["runs"][0]["run"] == str(queue.path / "runs" / "first") and found["runs"][0]["cwd"] == str(Path.cwd())
    assert "output_dir = " + json.dumps(str(queue.runs)) in (queue.folder(queue.find("first")) / "config.toml").read_text()
    shown = output_of(0, "queue", "list", queue.path).splitlines()
    assert shown[0].startswith("no daemon; start one: async-rlhf queue serve ")
    assert shown[1].split() == ["1", "first", "waiting", "0/4"]


def test_prompts_may_be_put_as_soon_as_the_run_for_them_is_queued(
    queue: QueueDir, small_arguments: Any, tmp_path: Path
) -> None:
    spool, rows = tmp_path / "prompts", tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "a"}\n')
    output = output_of(0, "queue", "submit", queue.path, *small_arguments(name="fed", **fed(spool))[1:])
    assert f"prompts may come from now on: async-rlhf spool put {spool} FILE" in output
    output_of(0, "spool", "put", spool, rows)


def test_what_check_refuses_is_refused_before_it_is_queued(queue: QueueDir, small_arguments: Any) -> None:
    submitted = (*small_arguments()[1:], "--set", "data.source=lost.jsonl")
    assert "lost.jsonl" in output_of(3, "queue", "submit", queue.path, *submitted)
    assert queue.entries() == []


def test_a_name_that_is_taken_is_refused_and_that_of_a_run_that_was_cancelled_before_it_began_is_free(
    queue: QueueDir, queued: Queued, small: Any, tmp_path: Path
) -> None:
    queued("one")
    with pytest.raises(ConfigError, match=r"'one' is taken: run 1 of .* is waiting; choose another with --set name=NAME"):
        queued("one")
    queue.request("cancel", "one")
    assert queued("one").number == 2
    RunDir.create(small(name="one", output_dir=str(queue.runs))).retire()
    queue.run(queue.find("one")).metrics.write_text('{"step": 3}\n')
    assert [queue.steps(entry) for entry in queue.entries()] == [0, 3], "the steps are of the run that began"
    RunDir.create(small(name="two", output_dir=str(queue.runs))).retire()
    with pytest.raises(ConfigError, match=r"'two' is taken: .*runs/two exists"):
        queue.submit(small(name="two"), tmp_path)


DONE = {
    ("cancel", "waiting"): "cancelled", ("cancel", "failed"): "cancelled", ("stop", "waiting"): "stopped",
    ("stop", "running"): "stopping", ("resume", "stopped"): "waiting", ("resume", "failed"): "waiting",
}  # fmt: skip
REFUSED = {
    ("cancel", "finished"): "it is finished, and only runs that are waiting, stopped or failed can be cancelled",
    ("cancel", "running"): "stop it first: async-rlhf queue stop {queue} run",
    ("stop", "finished"): "it is finished",
    ("resume", "running"): "it is running",
    ("resume", "finished"): "async-rlhf fork {queue}/runs/run --name NEW",
}


@pytest.mark.parametrize(("request_", "state"), [*DONE, *REFUSED])
def test_an_operator_does_what_the_state_allows_and_is_refused_the_rest_with_the_way(
    queue: QueueDir, queued: Queued, request_: str, state: Any
) -> None:
    queued("run", state)
    code, output = invoke("queue", request_, queue.path, "run")
    if (then := DONE.get((request_, state))) is not None:
        assert (code, output) == (0, f"run: {then}\n")
    else:
        assert code == 3 and REFUSED[request_, state].format(queue=queue.path) in output, output
    assert states(queue) == {"run": then or state}


def test_a_name_or_a_directory_that_is_not_there_is_named(queue: QueueDir, queued: Queued, tmp_path: Path) -> None:
    queued("speller")
    assert "has no run 'speler'; did you mean 'speller'?" in output_of(3, "queue", "cancel", queue.path, "speler")
    assert "holds no queue of runs; async-rlhf queue submit" in output_of(3, "queue", "list", tmp_path / "nowhere")


def test_the_directory_of_a_run_is_no_queue(small: Any) -> None:
    run = RunDir.create(small())
    before = sorted(run.path.rglob("*"))
    for words in (["list"], ["serve"], ["stop", "name"]):
        output = output_of(3, "queue", words[0], run.path, *words[1:])
        assert "is a run directory: a queue of runs needs one of its own" in output
    assert sorted(run.path.rglob("*")) == before


def test_a_second_daemon_is_refused_and_names_the_first(queue: QueueDir) -> None:
    lock = queue.take()
    assert f"'{queue.path}' has a daemon already (process " in output_of(3, "queue", "serve", queue.path)
    assert "daemon: process " in output_of(0, "queue", "list", queue.path)
    lock.release()
    queue.take().release()


def test_a_daemon_whose_queue_another_host_has_taken_ends_and_names_it(queue: QueueDir, queued: Queued) -> None:
    def say(line: str) -> None:
        (queue.path / "lock").write_text(json.dumps({"host": "elsewhere", "pid": 7}))

    queue.keep(replace(queued("run"), state="stopped"))
    with pytest.raises(ConfigError, match=r"process 7 on host elsewhere has taken .* and its runs go on"):
        Daemon(queue, say=say).run()
    assert states(queue) == {"run": "stopped"}


@pytest.mark.usefixtures("network_file_system")
def test_a_queue_may_lie_on_a_network_file_system(tmp_path: Path, small: Any) -> None:
    queue = QueueDir.made(tmp_path / "serve")
    assert queue.submit(small(name="run"), tmp_path / "gone").number == 1
    lock, said = queue.take(), list[str]()
    assert queue.daemon() is not None and Daemon(queue, say=said.append).look()
    lock.release()
    RunDir.create(small()).retire()
    Depot(str(tmp_path / "depot")).close()
    assert queue.find("run").state == "failed" and queue.daemon() is None, said


def test_a_full_disk_refuses_a_submission_leaves_nothing_of_it_and_starts_nothing(
    queue: QueueDir, queued: Queued, small: Any, tmp_path: Path
) -> None:
    """A real limit on the size of files stands for the disk."""
    queued("before")
    with file_size_limit(100):
        with pytest.raises(ConfigError, match=r"'after' cannot be queued in .*File too large"):
            queue.submit(small(name="after"), tmp_path)
        with pytest.raises(ConfigError, match="File too large"):
            queue.request("stop", "before")
        said: list[str] = []
        daemon = Daemon(queue, say=said.append)
        assert daemon.look() and daemon.look()
        assert len(said) == 1 and said[0].startswith("cannot go on, and tries again: ") and "File too large" in said[0]
    assert states(queue) == {"before": "waiting"}
    assert sorted(path.name for path in (queue.path / "queue").iterdir()) == [".lock", "000001-before"]


def test_an_entry_that_cannot_be_read_holds_up_no_other(queue: QueueDir, queued: Queued) -> None:
    state = queue.folder(queued("damaged")) / "state.json"
    queued("good")
    for harm in ('{"state": "asleep"}', "{}", "torn", None):
        state.unlink() if harm is None else state.write_text(harm)
        assert states(queue) == {"damaged": "failed", "good": "waiting"}
        assert "its state cannot be read: " in queue.find("damaged").reason


def test_a_run_whose_lock_is_no_file_fails_and_holds_up_no_other(queue: QueueDir, queued: Queued) -> None:
    running, waiting = queued("running", "running"), queued("waiting")
    locks = (queue.runs / running.name / "lock", queue.folder(waiting) / "lock")
    for lock in locks:
        lock.mkdir(parents=True)
    Daemon(queue, say=print).look()
    assert states(queue) == {"running": "failed", "waiting": "failed"}
    assert [entry.reason for entry in queue.entries()] == [f"{lock} is no regular file" for lock in locks]


def test_an_entry_of_a_newer_format_is_set_aside_and_left_as_it_is_and_the_others_run(queue: QueueDir, queued: Queued) -> None:
    state = queue.folder(queued("newer")) / "state.json"
    queued("good")
    state.write_text(newer := json.dumps({**json.loads(state.read_text()), "format": QUEUE.newest + 1}))
    why = "an entry of a queue of runs of format 2, this version of async-rlhf reads 1"
    assert states(queue) == {"newer": "failed", "good": "waiting"} and why in queue.find("newer").reason
    output = output_of(0, "queue", "list", queue.path)
    assert why in output and "good" in output
    assert all(why in output_of(3, "queue", verb, queue.path, "newer") for verb in ("cancel", "resume"))
    output_of(0, "queue", "cancel", queue.path, "good")
    Daemon(queue, say=print).look()
    assert queued("next").number == 3 and state.read_text() == newer


def test_a_run_with_another_name_in_its_configuration_is_not_begun_where_nobody_looks(queue: QueueDir, queued: Queued) -> None:
    config = queue.folder(queued("first")) / "config.toml"
    config.write_text(config.read_text().replace('name = "first"', 'name = "other"'))
    Daemon(queue, say=print).look()
    assert states(queue) == {"first": "failed"} and not list(queue.runs.iterdir())
    assert "config.toml has name = 'other'; '000001-first' ends with another" in queue.find("first").reason


def test_a_run_directory_of_a_newer_format_is_not_started(queue: QueueDir, queued: Queued, small: Any) -> None:
    queued("run")
    queue_run = RunDir.create(small(name="other", output_dir=str(queue.runs)))
    queue_run.retire()
    manifest = queue_run.path.rename(queue.runs / "run") / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    said: list[str] = []
    Daemon(queue, say=said.append).look()
    assert queue.find("run").state == "failed" and "a run directory of format 99" in queue.find("run").reason


def test_a_run_that_lives_on_without_a_daemon_is_asked_to_end_once_and_has_stopped_when_a_daemon_looks(
    queue: QueueDir, queued: Queued, hold: Hold
) -> None:
    entry = queued("run", "running")
    queue.run(entry).path.mkdir()
    held = hold(queue.run(entry).lock_file)
    assert queue.is_alive(entry)
    assert "stop it first" in output_of(3, "queue", "cancel", queue.path, "run")
    assert output_of(0, "queue", "stop", queue.path, "run") == "run: stopping\n"
    assert held.wait(60) == -signal.SIGTERM
    assert queue.find("run").drain_sent
    assert f"to force it to end: async-rlhf stop {queue.runs / 'run'}" in output_of(3, "queue", "stop", queue.path, "run")
    Daemon(queue, say=lambda line: None).look()
    assert states(queue) == {"run": "stopped"}


def test_unit_and_container_file_start_a_command_that_this_command_line_takes() -> None:
    unit, container = (
        dict(re.findall(rf"^(\w+){sign}(.*)$", (REPOSITORY / "docs" / name).read_text(), re.M))
        for name, sign in (("async-rlhf.service", "="), ("Containerfile", " "))
    )
    start = [*json.loads(container["ENTRYPOINT"]), *json.loads(container["CMD"])]
    for (program, *words), place in ((shlex.split(unit["ExecStart"]), "/srv/rl"), (start, container["VOLUME"])):
        assert Path(program).name == "async-rlhf" and parsed(words) == {"directory": Path(place), "at_once": 1}
    assert unit["KillMode"] == "mixed", "only the daemon is signalled"


def parsed(words: list[str]) -> dict[str, Any]:
    """The arguments of `queue serve`, as the command line understands these words."""
    from typer.main import get_command

    group: Any = get_command(app)
    assert words[:2] == ["queue", "serve"]
    values = group.commands["queue"].commands["serve"].make_context("serve", words[2:]).params
    return {"directory": Path(values["directory"]), "at_once": values["at_once"]}
