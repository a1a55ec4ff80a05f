"""The order in which tests are given to pytest-xdist's workers.

Long ones first: the end is then made of many short ones, and no worker waits long for the other. Tests that share something
which is slow to start have the mark `xdist_group`, and one worker runs them all. Those that start vLLM are one such group also
because each start takes gigabytes of memory.
"""

from __future__ import annotations

import pytest

_LONG = ("tests/async_rlhf/", "tests/experiments/", "tests/learner/test_ranks", "tests/simulation/", "tests/fuzz/")


def long_ones_first(items: list[pytest.Item]) -> None:
    """Sorts in place; the order within a group and within a file stays."""
    items.sort(key=_place)


def starts_vllm(item: pytest.Item) -> bool:
    """Whether the test belongs to the group of those."""
    group = item.get_closest_marker("xdist_group")
    return group is not None and group.args == ("vllm",)


def _place(item: pytest.Item) -> int:
    if starts_vllm(item):
        return 0
    path = item.nodeid.split("::")[0]
    return next((number for number, start in enumerate(_LONG, 1) if path.startswith(start)), len(_LONG) + 1)
