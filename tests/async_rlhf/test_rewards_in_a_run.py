"""A user's reward inside a real run: hanging, failing, reading along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rlhf.api import train
from async_rlhf.buffers.errors import RewardError
from tests.conftest import QUICK


@pytest.mark.rest
def test_a_reward_that_loops_forever_is_timed_out_and_the_run_finishes(small: Any, tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    file.write_text(
        "def hangs(completion):\n    while len(completion) % 4 == 3:\n        pass\n    return len(completion) / 10\n"
    )
    overrides = {"rewards.functions": [f"{file}:hangs"], "scoring.timeout_s": 0.5, "rewards.max_failed_ratio": 1.0}
    result = train(small(max_steps=1, **overrides), quiet=True)
    assert result.finished and 0 < result.metrics[0]["rewards/failed_ratio"] < 1
    assert result.metrics[0]["reward"] > 0  # failures are left out, not counted as 0


def test_a_reward_that_raises_stops_the_run_with_a_clear_message(small: Any, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def broken(completion):\n    return {}['missing']\n")
    config = small(**{"rewards.functions": [f"{file}:broken"]})
    with pytest.raises(RewardError, match=r"16 of 16 scores failed \(100%\).*'broken'.*KeyError: 'missing'"):
        train(config, quiet=True)
    log = (config.run_dir / "logs" / "actor-0.log").read_text()
    assert "Traceback" in log and "broken.py" in log


@pytest.mark.rest
def test_a_reward_model_that_reads_along_says_in_the_metrics_what_it_had_read(small: Any) -> None:
    overrides = {
        "rewards.functions": ["reward_model"],
        "rewards.options": {"reward_model": {"path": str(QUICK.parent / "models" / "tiny-judge")}},
        "scoring.stages": {"reward_model": {"stream_tokens": 1, "batch_wait_s": 0.0}},
    }
    (step,) = train(small(max_steps=1, **overrides), quiet=True).metrics
    assert step["rewards/failed_ratio"] == 0.0 and step["rewards/reward_model/given_up"] == 0.0
    assert 0 <= step["rewards/reward_model/prefetched"] < 1, "the last token is never read before the end"
    assert step["stages/reward_model/exposed_s"] >= 0
