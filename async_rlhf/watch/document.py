"""The page as one document: markup, style, program and the plotting library in one text that loads nothing else.

It asks its server for what is new. Only the programs and styles whose digests its policy names are run (Content Security
Policy, Level 3), so no text of a run can become one.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from async_rlhf.inspect.plot import PANELS as DRAWN
from async_rlhf.inspect.plot import MetricPanel
from async_rlhf.watch.runs import Runs, as_json

PANELS = (
    *DRAWN,
    MetricPanel("Tokens a second", {"tokens": "tokens_per_second"}, noisy=True, floor=0.0),
    MetricPanel("Queue [groups]", {"ready and not taken": "queue/depth"}, floor=0.0),
    MetricPanel("Gradient norm", {"before it is cut": "grad_norm"}, noisy=True, floor=0.0),
    MetricPanel("Log-ratio", {"second moment": "is/second_moment", "above the cap, A < 0": "is/tail_negative"}, floor=0.0),
    MetricPanel("Engine against learner [nats a token]", {"mismatch": "mismatch/abs_log_ratio", "by staleness": "drift/kl"}),
    MetricPanel(
        "Shares", {"constant groups": "frac_reward_zero_std", "cut completions": "completions/clipped_ratio"}, floor=0.0
    ),
    MetricPanel("Seconds a step", {"step": "step_time", "publishing": "broadcast/seconds"}, floor=0.0),
)
"""The curves of the page: those of the picture (`inspect.plot`), and those of a live run."""
METRICS = tuple(dict.fromkeys(metric for panel in PANELS for metric in panel.metrics.values()))

_PAGE = Path(__file__).parent / "page"
_STYLES = ("vendor/uplot/uPlot.min.css", "page.css")
_LICENCE = "vendor/uplot/LICENSE"
_PROGRAMS = ("vendor/uplot/uPlot.iife.min.js", "parts.js", "charts.js", "drawings.js", "run.js", "runs.js", "page.js")


@cache
def policy() -> str:
    """The Content-Security-Policy: the page may ask the server it came from."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(_digest(text) for text in _texts(_PROGRAMS))}",
            f"style-src {' '.join(_digest(text) for text in _texts(_STYLES))}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


@cache
def page() -> str:
    data = {"panels": [asdict(panel) for panel in PANELS]}
    parts = {
        "licence": f"<!-- uPlot draws the curves.\n{_texts((_LICENCE,))[0]}-->",
        "styles": "\n".join(f"<style>{text}</style>" for text in _texts(_STYLES)),
        "data": as_json(data),
        "programs": "\n".join(f"<script>{text}</script>" for text in _texts(_PROGRAMS)),
    }
    text = (_PAGE / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        before, mark, after = text.partition(f"<!-- {name} -->")
        assert mark, name
        text = before + part + after
    return text


def listing(runs: Runs) -> dict[str, Any]:
    """The runs in a line each, ready for JSON. more: how many older ones are left out."""
    found = runs.summaries()
    return {"one": runs.is_one, "more": runs.more, "runs": [short(name, summary) for name, summary in found.items()]}


def short(name: str, summary: dict[str, Any]) -> dict[str, Any]:
    last, evaluations = summary["last"] or {}, [e for e in summary["evaluations"] if "missing" not in e]
    shown = {
        metric: last.get(metric) for metric in ("reward", "tokens_per_second", "staleness/mean", "idle/learner", "idle/actor")
    }
    kept = {key: summary.get(key) for key in ("state", "alive", "step", "max_steps", "ended", "config")}
    newest = {key: evaluations[-1].get(key) for key in ("step", "mean_reward", "accuracy")} if evaluations else None
    return {"name": name, **kept, "last": shown, "time": last.get("time"), "evaluation": newest}


@cache
def _texts(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple((_PAGE / name).read_text(encoding="utf-8") for name in names)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
