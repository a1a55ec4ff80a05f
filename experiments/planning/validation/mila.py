"""V13: asynchronous RLHF of Noukhovitch et al., one device that generates and the others that train, a step apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rlhf.experiments.planning.validation import calls, data
from async_rlhf.experiments.planning.validation.rows import Figure, Row
from async_rlhf.plan.devices import device
from async_rlhf.plan.schedules import Stage, StageTime, schedule, step_time
from async_rlhf.plan.stages import Place


def _gain(case: Mapping[str, Any], samples: float, prompt: float) -> float:
    """Generation, scoring and training one after the other, against generation beside the rest, on the same devices."""
    place = Place(model=data.model(case["model"]), device=device(case["device"]), efficiency=calls.efficiency())
    rows, tokens, trainers = case["rows"], round(prompt) + case["answer"], case["devices"] - 1
    made = int(samples * rows)
    generation = calls.generation_s(place, (case["answer"],) * made, round(prompt))
    others = calls.placed(place, 1, 1, trainers)
    scoring = calls.scored_s(others, made, tokens) + calls.scored_s(others, made, tokens, head=False)
    training = calls.trained_s(others, rows, tokens, updates=1, zero_stage=2)
    times: dict[Stage, StageTime] = {
        "generate": StageTime(generation, generation),
        "score": StageTime(scoring, scoring),
        "train": StageTime(training, training),
    }
    one_after_the_other = step_time(schedule("synchronous"), times).seconds
    return one_after_the_other / step_time(schedule("one_step"), times).seconds


def row() -> Row:
    figures = []
    for case in data.published(13)["case"]:
        gains = [_gain(case, *facts) for facts in data.trials(13, "samples", "prompt")]
        figures.append(
            Figure(
                group="gain",
                label=f"{case['model']}, {case['devices'] - 1} + 1",
                unit="",
                published=case["gain"],
                predicted=gains[0],
                span=(min(gains), max(gains)),
            )
        )
    holds = all(1.2 <= figure.predicted <= 1.7 for figure in figures)
    return data.row(13, figures, holds=holds, finding="with the planner's own efficiencies, on the devices of the paper")
