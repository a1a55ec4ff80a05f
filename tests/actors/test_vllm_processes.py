"""vLLM's processes: a run trains with them, and nothing of them outlives its actor."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rlhf.run.run_dir import RunDir
from tests.actors.vllm_model import SHIPPED
from tests.conftest import has_ended, wait_for

pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ACTOR = """
import sys
from async_rlhf.actors.vllm_engine.settings import VLLMEngineConfig
from async_rlhf.actors.vllm_engine.loading import load_engine
if __name__ == "__main__":
    load_engine(sys.argv[1], VLLMEngineConfig(kind="vllm"))
"""


def test_an_actor_that_is_killed_while_vllm_starts_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "actor.py"
    script.write_text(ACTOR)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with (tmp_path / "log").open("wb") as log:
        actor = subprocess.Popen([sys.executable, str(script), str(SHIPPED)], env=environment, stdout=log, stderr=log)
    try:
        core, worker = wait_for(lambda: core_and_worker(actor.pid), "vLLM's worker process")
    finally:
        actor.kill()
        actor.wait(timeout=300)
    wait_for(lambda: all(map(has_ended, (core, worker))), "the end of vLLM's processes")


def core_and_worker(pid: int) -> tuple[psutil.Process, psutil.Process] | None:
    """vLLM's core and its first worker, as soon as there is one."""
    for core in spawned(psutil.Process(pid)):
        for worker in spawned(core):
            return core, worker
    return None


def spawned(process: psutil.Process) -> list[psutil.Process]:
    """Children started by multiprocessing, whether they have given themselves a title yet or not."""
    try:
        return [child for child in process.children() if "spawn_main" in line(child) or "VLLM::" in line(child)]
    except psutil.NoSuchProcess:
        return []


def line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie
        return ""


def test_a_run_trains_with_vllm_and_leaves_no_process(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    started = command(*small_arguments(**{"engine.kind": "vllm", "max_steps": 5, "queue.max_staleness": 2}))
    family = wait_for(lambda: with_worker(started.family()), "vLLM's worker process")
    code, output = started.finish()
    assert code == 0, output
    metrics = RunDir(tmp_path / "runs" / "quick").read_metrics()
    assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5]
    assert all(record["staleness/violations"] == 0 for record in metrics)
    assert "ended with code" not in output, output
    wait_for(lambda: all(map(has_ended, family)), "the end of the run's processes")


def with_worker(family: list[psutil.Process]) -> list[psutil.Process] | None:
    return family if any("VLLM::Worker" in line(process) for process in family) else None
