"""Long freezes, and the bookkeeper that judges a chaos run; a short one is in `test_readme.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.inspect.chaos import Monkey, problems
from async_rlhf.preparation import prepare
from async_rlhf.run.run_dir import RunDir


@pytest.mark.rest
def test_long_freezes_on_both_sides_of_the_watchdog_cost_no_group(small: Any) -> None:
    """With a watchdog of 20 s, freezes of 15 to 25 s; every blow is one, so that none may quarantine anything."""
    config = small(**{"max_steps": 250, "watchdog_s": 20.0, "actors.count": 2, "queue.lease_s": 2.0})
    supervisor, run = prepare(config, max_deaths=20)
    # This seed strikes the learner, the hub, and only then an actor, without which the run goes on.
    with Monkey(supervisor.processes, lambda: supervisor.num_records, 3, 75, num_long=3, long_freeze_s=(15.0, 25.0)) as monkey:
        supervisor.run()
    assert [blow.kind for blow in monkey.blows] == ["long freeze"] * 3
    assert problems(run, config) == [] and run.read_ledger()["ledger"]["quarantined"] == 0


def books(path: Path, config: Any, groups: list[list[int]], **ledger: Any) -> list[str]:
    """What the bookkeeper says of a run whose steps trained these groups."""
    run = RunDir.create(config)
    records = [{"step": i, "groups": each, "staleness/violations": 0} for i, each in enumerate(groups, 1)]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    total = sum(map(len, groups))
    run.ledger.write_text(json.dumps({"ledger": {"closes": True, "trained": total, "quarantined": 0, **ledger}}))
    return problems(run, config)


def test_the_bookkeeper_sees_what_is_lost_repeated_or_left_open(small: Any, tmp_path: Path) -> None:
    good = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert books(tmp_path, small(name="good", max_steps=2), good) == []
    [lost] = books(tmp_path, small(name="lost", max_steps=2), [[0, 1, 2, 3], [4, 5, 6]])
    assert lost == "groups never trained: [7] (0 were quarantined)"
    twice = books(tmp_path, small(name="twice", max_steps=2), [[0, 1, 2, 3], [3, 5, 6, 7]])
    assert twice[0] == "groups trained more than once: [3]"
    assert "does not close" in books(tmp_path, small(name="open", max_steps=2), good, closes=False)[0]
    guilty = {"group": 7, "reasons": ["attempt 0: anna was silent for 2 s", "attempt 1: ben ended: its process is gone"]}
    run = RunDir.existing(small(name="good").run_dir)
    for reasons, num_found in ((guilty["reasons"], 0), (guilty["reasons"][:1], 1)):
        (run.path / "quarantine.jsonl").write_text(json.dumps({**guilty, "reasons": reasons}) + "\n")
        assert len(problems(run, small(name="good", max_steps=2))) == num_found
    assert "ledger has 9" in books(tmp_path, small(name="wrong", max_steps=2), good, trained=9)[0]
