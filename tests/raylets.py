"""A Ray cluster of real raylets on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.cluster_utils import Cluster

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
# A node that has ended is known after a second instead of 13: it refuses. One that answers late is alive.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}


@contextmanager
def two_nodes(**node: Any) -> Iterator[Cluster]:
    """A head without CPUs, and two nodes of `NODE` and what is laid upon it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    found = Cluster(initialize_head=True, head_node_args={**NODE, **node, "num_cpus": 0, "_system_config": HEALTH})
    for _ in range(2):
        found.add_node(**NODE, **node)
    found.wait_for_nodes()
    try:
        yield found
    finally:
        found.shutdown()
