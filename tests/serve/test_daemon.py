"""A real daemon with real runs: it drains, is killed alone and with everything, and what it was given ends all the same."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from async_rlhf.launch.run_lock import holder
from async_rlhf.serve.queue_dir import QueueDir
from tests.async_rlhf.test_faults import assert_no_orphans, assert_whole, steps
from tests.conftest import Command, wait_for


def test_two_runs_finish_in_order_though_daemon_run_and_all_of_it_are_killed(
    command: Callable[..., Command], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    place = str(tmp_path / "serve")
    for name, num_steps in (("first", 100_000), ("second", 1)):
        code, output = command("submit", place, *small_arguments(name=name, max_steps=num_steps)[1:]).finish()
        assert code == 0, output
    queue = QueueDir.existing(Path(place))
    first, second = queue.runs / "first", queue.runs / "second"

    def states() -> list[str]:
        return [entry.state for entry in queue.entries()]

    # A daemon that is killed leaves its run alive, and the next one sees it.
    daemon = command("serve", place)
    wait_for(lambda: steps(first) >= 2, "step 2")
    daemon.process.kill()
    daemon.finish()
    supervisor = holder(first / "lock")
    assert supervisor is not None and states() == ["running", "waiting"]
    daemon = command("serve", place)

    # One that is asked to end drains it, and leaves it for the next.
    wait_for(lambda: queue.daemon() and steps(first) >= 4, "step 4 under the second daemon")
    assert holder(first / "lock") == supervisor and states() == ["running", "waiting"]
    daemon.process.send_signal(signal.SIGTERM)
    code, output = daemon.finish()
    assert code == 0 and output.endswith("drains what runs\nfirst: pausing\nfirst: waiting (the daemon ended)\n"), output
    assert states() == ["waiting", "waiting"] and not queue.is_alive(queue.find("first"))

    # Nothing is left when the power fails: the first goes on from its checkpoint, before the second begins.
    drained = steps(first)
    daemon = command("serve", place)
    wait_for(lambda: steps(first) >= drained + 2, "two steps under the third daemon")
    family = daemon.family()
    daemon.process.kill()
    for process in family:
        with suppress(psutil.NoSuchProcess):  # a role ends by itself when its supervisor is gone
            process.kill()
    daemon.finish()
    assert_no_orphans(family)
    assert states() == ["running", "waiting"] and not second.exists()
    num_steps, config = steps(first) + 4, queue.folder(queue.find("first")) / "config.toml"
    config.write_text(config.read_text().replace("max_steps = 100000", f"max_steps = {num_steps}"))
    daemon = command("serve", place)
    wait_for(lambda: states() == ["finished", "finished"], "both runs to finish")
    daemon.process.send_signal(signal.SIGTERM)
    code, output = daemon.finish()
    assert code == 0 and output.endswith("first: running\nfirst: finished\nsecond: running\nsecond: finished\n"), output
    assert_whole(first, num_steps)
    assert_whole(second, 1)
    assert (queue.folder(queue.find("first")) / "log").read_text().count("drained; --resume continues") == 1
