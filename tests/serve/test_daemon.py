"""A real daemon with a real run: it is killed alone, and is asked to end. test_daemon_walk.py kills it with everything."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from async_rlhf.launch.run_lock import holder
from async_rlhf.serve.queue_dir import QueueDir
from tests.conftest import Command, Start, steps, wait_for


def test_a_run_outlives_a_daemon_that_is_killed_and_is_drained_by_one_that_ends(
    command: Start, small_arguments: Callable[..., list[str]], place: Path
) -> None:
    folder = place.parent / "submitted from"
    folder.mkdir()
    for name, num_steps in (("first", 100_000), ("second", 1)):
        words = ["queue", "submit", str(place), *small_arguments(name=name, max_steps=num_steps)[1:]]
        Command(words, folder).ends_with(0)
    (folder / "random.py").write_text("raise ImportError('of the user')\n")  # no module of a run that `train` begins either
    queue = QueueDir.existing(place)
    first = queue.runs / "first"

    def states() -> list[str]:
        return [entry.state for entry in queue.entries()]

    # A daemon that is killed leaves its run alive, and the next one sees it.
    daemon = command("queue", "serve", str(place))
    wait_for(lambda: steps(first) >= 2, "step 2")
    daemon.process.kill()
    daemon.finish()
    supervisor = holder(first / "lock")
    assert supervisor is not None and states() == ["running", "waiting"]
    daemon = command("queue", "serve", str(place))

    # One that is asked to end drains it, and leaves it for the next.
    wait_for(lambda: queue.daemon() and steps(first) >= 4, "step 4 under the second daemon")
    assert holder(first / "lock") == supervisor and states() == ["running", "waiting"]
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.ends_with(0).endswith("drains what runs\nfirst: pausing\nfirst: waiting (the daemon ended)\n")
    assert states() == ["waiting", "waiting"] and not queue.is_alive(queue.find("first"))
