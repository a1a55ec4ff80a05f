"""What a plan depends on: the shipped example with one of its assumptions changed at a time."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.experiments import page
from async_rlhf.experiments.planning.placement.evaluation import Plan
from async_rlhf.experiments.planning.placement.search import search
from async_rlhf.experiments.planning.placement.spec import parse

SPEC = Path(__file__).resolve().parents[2] / "configs" / "plans" / "qwen3-8b.toml"
CHANGES: Sequence[tuple[str, Mapping[str, Mapping[str, Any]]]] = (
    ("as it is", {}),
    ("training reaches 30 % of the arithmetic peak, in place of 40 %", {"efficiency": {"training": 0.3}}),
    ("50 %", {"efficiency": {"training": 0.5}}),
    ("decoding reaches 40 % of the memory bandwidth, in place of 60 %", {"efficiency": {"decode": 0.4}}),
    ("80 %", {"efficiency": {"decode": 0.8}}),
    ("a decode step takes 10 ms besides, in place of 4", {"efficiency": {"launch_s": 0.01}}),
    ("completions of 1,500 tokens in the mean, in place of 2,500", {"lengths": {"mean": 1500}}),
    ("4,000", {"lengths": {"mean": 4000}}),
    ("lengths spread by 1.1 (of their logarithm), in place of 0.7", {"lengths": {"spread": 1.1}}),
    ("a verdict of 3 s, in place of 0.3", {"reward": {"seconds": 3.0}}),
    ("a reference (kl_coef above 0)", {"loss": {"kl_coef": 0.05}}),
    ("weights travel at 5 GB/s, in place of 0.57", {"efficiency": {"weights_bytes_per_s": 5e9}}),
)


def part() -> dict[str, str]:
    """The table, by the name of its place in the document."""
    columns = ["assumption", "best plan that runs here", "faster than without staleness"]
    return {"sensitivity": page.raw_table(columns, [row(*change) for change in CHANGES])}


def row(label: str, changes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of the table: the example with these keys of its sections changed."""
    given = tomllib.loads(SPEC.read_text())
    values = {**given, **{section: {**given.get(section, {}), **table} for section, table in changes.items()}}
    found = search(parse(values, SPEC.parent))
    assert found.best is not None
    ratio = found.here_by_bound[0].step.seconds / found.best.step.seconds
    return [label, _described(found.best), f"{ratio:.1f} times"]


def _described(plan: Plan) -> str:
    parts = ", ".join(f"{filled.set.devices} {filled.set.name}" for filled in plan.filled)
    bound, step = plan.candidate.max_staleness, plan.step
    return f"{step.seconds:.3g} s: {parts}; max_staleness {bound:g}; bound by {step.bound_by.name}"
