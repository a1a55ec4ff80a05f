"""Runs and sweeps as they lie on disk, without anything that was run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, SMALL, toml

Lines = Sequence[Mapping[str, Any]]


def jsonl(lines: Lines) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def ended_run(
    config: Config, metrics: Lines = (), evaluations: Lines = (), ledger: Mapping[str, Any] | None = None, rollouts: Lines = ()
) -> RunDir:
    """A run of this configuration that has ended, with these lines in its files."""
    run = RunDir.create(config)
    run.retire()
    run.metrics.write_text(jsonl(metrics))
    run.evaluations.write_text(jsonl(evaluations))
    (run.path / "rollouts.jsonl").write_text(jsonl(rollouts))
    if ledger is not None:
        run.ledger.write_text(json.dumps({"ledger": ledger}))
    return run


def write_sweep(directory: Path, values: Sequence[int], seeds: Sequence[int], **overrides: Any) -> Path:
    """The file of a sweep of small runs over `max_staleness`, whose runs come into `sweeps/tiny`."""
    lines = [f'[sweep]\nname = "tiny"\nbase = "{QUICK}"\noutput_dir = "{directory / "sweeps"}"\nseeds = {seeds}']
    lines += [f"[sweep.values]\nqueue.max_staleness = {values}\n[sweep.overrides]"]
    lines += [f"{key} = {toml(value)}" for key, value in {**SMALL, **overrides}.items()]
    (directory / "tiny.toml").write_text("\n".join(lines))
    return directory / "tiny.toml"
