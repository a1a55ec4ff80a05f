"""Reports reach the hub, also one that was away or was started again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.run.supervision.hub_notifier import HubNotifier
from tests.conftest import wait_for


@pytest.fixture
def address(socket_dir: Path) -> str:
    return f"ipc://{socket_dir}/hub"


@pytest.fixture
def hub(address: str, tmp_path: Path) -> Callable[[], Any]:
    """`with hub():` one that lives so long, at the address, with the same journal each time."""

    @contextmanager
    def run() -> Iterator[None]:
        made = Hub(address, tmp_path, QueueConfig(), Bound(4, 1, 8))
        thread = threading.Thread(target=made.run)
        thread.start()
        try:
            yield
        finally:
            with control(address, timeout_s=60) as asked:
                asked.halt()
            thread.join(60)
            assert not thread.is_alive()

    return run


@pytest.fixture
def notifier(address: str) -> Iterator[HubNotifier]:
    made = HubNotifier(lambda timeout_s: control(address, timeout_s=timeout_s))
    yield made
    made.close()


def state(address: str) -> str:
    with control(address, timeout_s=60) as asked:
        return str(asked.status()["state"])


def test_an_end_is_unconfirmed_until_the_hub_answers_and_a_drain_reaches_one_that_was_away_or_started_again(
    notifier: HubNotifier, hub: Callable[[], Any], address: str
) -> None:
    notifier.gone("actor-0")
    assert "waited 2 s for the answer to 'gone'" in wait_for(notifier.last_error, "the hub's silence to be noticed")
    assert notifier.is_unconfirmed("actor-0") and not notifier.is_unconfirmed("actor-1")
    with hub():
        wait_for(lambda: not notifier.is_unconfirmed("actor-0"), "the hub to confirm")
        assert notifier.hub_goes_on
        notifier.drain()
        notifier.gone("actor-1")
        wait_for(lambda: not notifier.is_unconfirmed("actor-1"), "the hub to confirm")
        assert not notifier.hub_goes_on, "a hub that drains gives no more work"
        assert notifier.last_error() == "", "reported once"
    with hub():
        notifier.drain()
        wait_for(lambda: state(address) == "draining", "the drain of the second hub")
