"""V1: the search for fused schedules beside the instances that RLHFuse's solver reports.

A search of all instances takes minutes, so its orders are kept (`fused_orders.json`, by `validate --search`) and judged anew
by the recurrence each time the table is made.
"""

from __future__ import annotations

import json
from pathlib import Path

from async_rlhf.experiments.planning.validation import data
from async_rlhf.experiments.planning.validation.rows import Figure, Row
from async_rlhf.plan.flexfusion import PUBLISHED, searched
from async_rlhf.plan.fused_schedule import Orders, makespan_s

KEPT = Path(__file__).with_name("fused_orders.json")


def kept_orders() -> list[Orders]:
    """Of each instance: for each stage the kinds of its tasks."""
    return [tuple(tuple(map(int, stage)) for stage in orders) for orders in json.loads(KEPT.read_text())]


def search_again() -> None:
    """Write the orders that the search finds now; minutes on one core."""
    found = [["".join(map(str, stage)) for stage in searched(number).orders] for number in range(len(PUBLISHED))]
    KEPT.write_text(json.dumps(found, indent=0) + "\n")


def row() -> Row:
    figures: list[Figure] = []
    for kind in ("serial 1F1B", "lower bound", "makespan found"):
        for number, (instance, orders) in enumerate(zip(PUBLISHED, kept_orders(), strict=True)):
            published, predicted = {
                "serial 1F1B": (instance.serial_s, instance.fusion.serial_s),
                "lower bound": (instance.bound_s, instance.fusion.bound_s),
                "makespan found": (instance.annealed_s, makespan_s(instance.fusion, orders)),
            }[kind]
            figures.append(
                Figure(group=kind, label=f"instance {number}", unit="", published=published, predicted=predicted, how="exact")
            )
    fixed, found = figures[: 2 * len(PUBLISHED)], figures[2 * len(PUBLISHED) :]
    pairs = [(each.predicted, instance) for each, instance in zip(found, PUBLISHED, strict=True)]
    equal = all(figure.published == figure.predicted for figure in fixed)
    bounded = all(instance.bound_s <= makespan <= instance.annealed_s for makespan, instance in pairs)
    at_bound = sum(makespan == instance.bound_s for makespan, instance in pairs)
    shorter = sum(makespan < instance.annealed_s for makespan, instance in pairs)
    finding = f"{at_bound} of {len(found)} searches end at the bound, {shorter} below the published annealing"
    return data.row(1, figures, holds=equal and bounded, finding=finding)
