"""The endpoint of this process ends with the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from async_rlhf.actors.agents.endpoint import endpoint


@pytest.fixture(autouse=True, scope="module")
def ended_endpoint() -> Iterator[None]:
    yield
    if endpoint.cache_info().currsize:
        endpoint().close()
        endpoint.cache_clear()
