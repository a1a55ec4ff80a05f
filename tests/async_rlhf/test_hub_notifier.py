"""Reports reach the hub, also one that was away or was started again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.run.supervision.hub_notifier import HubNotifier
from tests.buffers.hub.place import Place
from tests.conftest import wait_for


@pytest.fixture
def hub(socket_dir: Path, tmp_path: Path) -> Iterator[Place]:
    with closing(Place(tmp_path, f"ipc://{socket_dir}/hub", Bound(4, 1, 8))) as place:
        yield place


def test_an_end_is_unconfirmed_until_the_hub_answers_and_a_drain_reaches_one_that_was_away_or_started_again(hub: Place) -> None:
    notifier = hub.keep(HubNotifier(lambda timeout_s: control(hub.address, timeout_s=timeout_s)))
    notifier.gone("actor-0")
    assert "waited 2 s for the answer to 'gone'" in wait_for(notifier.last_error, "the hub's silence to be noticed")
    assert notifier.is_unconfirmed("actor-0") and not notifier.is_unconfirmed("actor-1")
    hub.begin()
    wait_for(lambda: not notifier.is_unconfirmed("actor-0"), "the hub to confirm")
    assert notifier.hub_goes_on
    notifier.drain()
    notifier.gone("actor-1")
    wait_for(lambda: not notifier.is_unconfirmed("actor-1"), "the hub to confirm")
    assert not notifier.hub_goes_on, "a hub that drains gives no more work"
    assert notifier.last_error() == "", "reported once"
    hub.restart()
    notifier.drain()
    wait_for(lambda: hub.status()["state"] == "draining", "the drain of the second hub")
