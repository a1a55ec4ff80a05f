"""Which curves the page draws: those of the picture (`inspect.plot`), and what one watches while a run lives."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from async_rlhf.inspect.plot import PANELS as DRAWN
from async_rlhf.inspect.plot import Panel

PANELS = (
    *DRAWN,
    Panel("Tokens a second", {"tokens": "tokens_per_second"}, noisy=True, floor=0.0),
    Panel("Queue [groups]", {"ready and not taken": "queue/depth"}, floor=0.0),
    Panel("Gradient norm", {"before it is cut": "grad_norm"}, noisy=True, floor=0.0),
    Panel("Log-ratio", {"second moment": "is/second_moment", "above the cap, A < 0": "is/tail_negative"}, floor=0.0),
    Panel("Engine against learner [nats a token]", {"mismatch": "mismatch/abs_log_ratio", "by staleness": "drift/kl"}),
    Panel("Shares", {"constant groups": "frac_reward_zero_std", "cut completions": "completions/clipped_ratio"}, floor=0.0),
    Panel("Seconds a step", {"step": "step_time", "publishing": "broadcast/seconds"}, floor=0.0),
)

METRICS = tuple(dict.fromkeys(metric for panel in PANELS for metric in panel.metrics.values()))


def as_values() -> list[dict[str, Any]]:
    """Ready for JSON."""
    return [asdict(panel) for panel in PANELS]
