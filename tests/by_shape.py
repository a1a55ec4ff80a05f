"""`pytest -p tests.by_shape`: the products of torch round by their whole shape, in tests and what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.actors.strange_products import RULES, Products


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[Any]:
    with Products(RULES["whole shape"]):
        return (yield)
