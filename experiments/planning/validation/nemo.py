"""V16: strong scaling of NeMo-Aligner: one job with actor and reference, another with critic and reward model.

Its engine generates a micro-batch of rows whole, then the next: data-parallel ranks take them from a shared iterator.
"""

from __future__ import annotations

from functools import cache

from async_rlhf.experiments.planning.validation import calls, data
from async_rlhf.experiments.planning.validation.rows import Figure, Row
from async_rlhf.plan.balance import most_loaded
from async_rlhf.plan.devices import device
from async_rlhf.plan.stages import Place

Facts = tuple[float, ...]
"""Spread of the lengths; rows of one call of the engine; where generation is cut, in tokens."""


def _step_s(nodes: tuple[int, int], facts: Facts, launch_s: float) -> float:
    """Generation in tensor groups of a node, then log-probabilities of policy and reference, then training.

    The critic's job answers with values and rewards while generation goes on, and trains beside the actor; a step waits for
    the slower of both.
    """
    table, (actor_nodes, critic_nodes) = data.published(16), nodes
    rows, tokens, updates = table["rows"], round(table["prompt"] + table["mean"]), table["updates"]
    place = Place(model=data.model("llama-70b"), device=device("H100"), efficiency=calls.efficiency(launch_s=launch_s))
    one = calls.placed(place, calls.NODE, 1, 1)
    completions = calls.lengths(rows, table["mean"], facts[0], int(facts[2]))
    size = int(facts[1])
    calls_of_engine = [completions[at : at + size] for at in range(0, rows, size)]
    generation = most_loaded((calls.generation_s(one, each, table["prompt"]) for each in calls_of_engine), actor_nodes)
    devices, others = actor_nodes * calls.NODE, critic_nodes * calls.NODE
    scoring = 2 * calls.best_scoring_s(place, devices, rows, tokens)
    answering = 2 * calls.best_scoring_s(place, others, rows, tokens, head=False)
    training = calls.best_training_s(place, devices, rows, tokens, updates=updates)
    beside = calls.best_training_s(place, others, rows, tokens, updates=updates)
    return max(generation + scoring, answering) + max(training, beside)


@cache
def _launch_s(facts: Facts) -> float:
    """Of a decode step besides weights and caches, from the smallest run."""
    table = data.published(16)
    nodes, target = table["nodes"][0], table["step"][0]
    # The step is linear in it, as long as the actor's job is the slower one.
    without, second = (_step_s(nodes, facts, each) for each in (0.0, 1.0))
    return float((target - without) / (second - without))


def row() -> Row:
    table, trials = data.published(16), data.trials(16, "spread", "micro_batch", "longest")
    steps = {each: [_step_s(nodes, each, _launch_s(each)) for nodes in table["nodes"]] for each in trials}
    figures = []
    for number, (nodes, published) in enumerate(zip(table["nodes"], table["step"], strict=True)):
        label = f"{nodes[0]} + {nodes[1]} nodes"
        found = [steps[each][number] for each in trials]
        gains = [steps[each][0] / steps[each][number] for each in trials]
        figures.append(
            Figure(
                group="step",
                label=label,
                unit="s",
                published=published,
                predicted=found[0],
                how="held out" if number else "fitted",
                span=(min(found), max(found)),
            )
        )
        if number:
            figures.append(
                Figure(
                    group="speed-up",
                    label=label,
                    unit="",
                    published=table["step"][0] / published,
                    predicted=gains[0],
                    span=(min(gains), max(gains)),
                )
            )
    figures.sort(key=lambda each: (each.group != "step", each.how))
    gains_found = [figure for figure in figures if figure.group == "speed-up"]
    return data.row(
        16,
        figures,
        holds=all(abs(figure.ratio - 1) <= 0.15 for figure in gains_found),
        finding="speed-ups " + ", ".join(f"{figure.predicted:.2f}" for figure in gains_found),
        fitted=f"on 8 + 4 nodes: a decode step + {_launch_s(trials[0]) * 1e3:.0f} ms",
    )
