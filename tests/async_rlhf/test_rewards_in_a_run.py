"""A user's reward inside a real run: hanging, failing, reading along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.api import train
from async_rlhf.buffers.errors import RewardError
from tests.conftest import QUICK, SMALL

SCRIPT = """
import json
import sys
import threading
import time
from async_rlhf import reward, train

@reward
def exact(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)

def lengths(prompts, completions, **columns):          # TRL's form, unchanged
    return [None if not c else len(c) / 12 for c in completions]

@reward(name="slowly")
async def slowly(completion: str) -> float:
    import asyncio
    await asyncio.sleep(0.01)
    return 0.5

seen = []
first_call = threading.Lock()

def of_this_process():
    @reward(weight=0.5, timeout_s=1.0)
    def closure(completion: str, answer: str) -> float:
        seen.append(completion)
        if first_call.acquire(blocking=False):
            time.sleep(4.0)
        return 0.25

    class Judge:
        def bound(self, completions, prompts):
            return [float(len(each) > 0) for each in completions]

    return [lambda completion: 1.0, closure, Judge().bound]

if __name__ == "__main__":
    config, overrides = sys.argv[1], json.loads(sys.argv[2])
    result = train(config, rewards=[exact, lengths, slowly], overrides=overrides)
    last = result.metrics[-1]
    assert {"rewards/exact/mean", "rewards/lengths/mean", "rewards/slowly/mean"} <= set(last)
    assert last["rewards/slowly/mean"] == 0.5 and last["rewards/failed_ratio"] == 0.0
    assert (result.checkpoint / "model.safetensors").exists() and result.finished
    served = of_this_process()
    result = train(config, rewards=served, overrides={**overrides, "name": "served", "rewards.max_failed_ratio": 1.0})
    first = result.metrics[0]
    assert result.finished and seen and first["rewards/reward_0/mean"] == 1.0, first
    assert first["rewards/closure/mean"] == 0.25 and "rewards/bound/mean" in first
    assert any(each["rewards/failed_ratio"] > 0 for each in result.metrics), "the call that timed out"
    print("all good", last["reward"])
"""


@pytest.mark.rest
def test_functions_of_a_script_are_rewards(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    overrides = {**SMALL, "max_steps": 2, "output_dir": str(tmp_path / "runs")}
    done = subprocess.run(
        [sys.executable, str(script), str(QUICK), json.dumps(overrides)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert "all good" in done.stdout, done.stdout + done.stderr


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
        "scoring.stages": {"reward_model": {"stream_tokens": 1}},
    }
    (step,) = train(small(max_steps=1, **overrides), quiet=True).metrics
    assert step["rewards/failed_ratio"] == 0.0 and step["reported/reward_model/given_up"] == 0.0
    assert 0 <= step["reported/reward_model/prefetched"] < 1, "the last token is never read before the end"
    assert step["stages/reward_model/exposed_s"] >= 0
