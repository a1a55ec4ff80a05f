"""Dynamic sampling inside real runs: batches are full of groups that say something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rlhf.api import train

REFILL: dict[str, Any] = {"advantage.constant_groups": "refill"}


def test_every_batch_is_full_of_groups_that_say_something(small: Any, tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text("def half(prompt, completion):\n    return (sum(map(ord, completion)) % 5) * (len(prompt) % 2)\n")
    config = small(**REFILL, **{"rewards.functions": [f"{file}:half"], "advantage.max_refills": 50, "queue.max_staleness": 2})
    result = train(config, quiet=True)
    assert result.finished and len(result.metrics) == 4
    for record in result.metrics:
        assert len(record["groups"]) == 4 and record["frac_reward_zero_std"] == 0 and record["groups/zero_advantage"] == 0
        assert record["staleness/violations"] == 0 and record["staleness/max"] <= 2
    ledger = json.loads((result.run_dir / "ledger.json").read_text())["ledger"]
    assert ledger["closes"] and ledger["trained"] == 16 and ledger["filtered"] > 0 and ledger["tokens_filtered"] > 0
    filtered = [record["groups/filtered_total"] for record in result.metrics]
    assert filtered == sorted(filtered) and 0 < filtered[-1] <= ledger["filtered"]
    trained = {number for record in result.metrics for number in record["groups"]}
    assert len(trained) == 16 and max(trained) > 15
