"""In which order tests are given to pytest-xdist's workers, and which of them go to one worker together.

Long ones first: the end is then made of many short ones, and no worker waits long for the other. Together go tests that share
something which is slow to start, and those that start vLLM, of which each takes gigabytes of memory; small ones of two families
of images may run at a time.
"""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

_VLLM = re.compile(r"/test_vllm_|[\[-]vllm[\]-]")
_FAMILY = re.compile(r"/test_vllm_images\.py::\w+\[([^]-]+)")
_TOGETHER = (
    "tests/async_rlhf/test_going_back.py", "tests/async_rlhf/test_ray.py", "tests/experiments/test_counterfactual.py",
    "tests/experiments/test_sweep_on_ray.py", "tests/learner/test_ranks.py", "tests/planning/test_plan_search.py",
    "tests/simulation/test_simulation.py::test_the_schedules",
)  # fmt: skip
_LONG = (
    "tests/async_rlhf/",
    "tests/experiments/",
    "tests/hosts/",
    "tests/learner/test_ranks.py",
    "tests/simulation/",
    "tests/fuzz/",
)


class Scheduling(LoadScopeScheduling):
    """Gives a worker the next group when it has nearly done its last."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def group(nodeid: str) -> str:
    """Tests of one group are run by one worker, one after the other; most are a group of their own."""
    if starts_vllm(nodeid):
        family = _FAMILY.search(nodeid)
        return f"vllm {family[1]}" if family else "vllm"
    return next((start for start in _TOGETHER if nodeid.startswith(start)), nodeid)


def place(nodeid: str) -> int:
    """A test of a lower place begins earlier."""
    if starts_vllm(nodeid):
        return 0
    return next((number for number, start in enumerate(_LONG, 1) if nodeid.startswith(start)), len(_LONG) + 1)


def starts_vllm(nodeid: str) -> bool:
    return _VLLM.search(nodeid) is not None
