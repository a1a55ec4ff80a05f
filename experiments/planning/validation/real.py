"""V3 and V4: weak scaling of ReaL, of its own heuristic, of DeepSpeed-Chat and of OpenRLHF on H100.

Each system has two constants, fitted to its three figures on 8 devices (7B): the share of the arithmetic peak, and the time
that a decode step takes for each layer besides reading weights and caches, which bounds the decoding of few rows. All other
cells, and V3's step times on 128 devices, are predicted with them.

The published PFLOP/s count twelve forward passes for the four calls of inference and the two of training (generation 1, three
times inference, twice 4 of training with recomputation), each as Megatron counts one: attention with as many key-value heads
as heads. V3 gives seconds for three cells of V4, and they agree with that count within 1 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from async_rlhf.experiments.planning.model.devices import device
from async_rlhf.experiments.planning.model.stages import Place
from async_rlhf.experiments.planning.validation import calls
from async_rlhf.experiments.planning.validation.rows import (
    Figure,
    Row,
    edges,
    model,
    published,
    rank_correlation,
    row,
    within,
)
from async_rlhf.experiments.planning.validation.zero import Batch, groups_s, one_group_s

Sizes = tuple[str, str]
"""Actor and reference; critic and reward model."""
_FIRST = 8


def _place(name: str, constants: Sequence[float]) -> Place:
    efficiency = calls.efficiency(constants[0], launch_s=constants[1] * model(name).layers)
    return Place(model=model(name), device=device("H100"), efficiency=efficiency)


@cache
def _batch(answer: int) -> Batch:
    table = published(4)
    rows = table["batch_tokens"] // (table["prompt"] + answer)
    return Batch(rows=rows, prompt=table["prompt"], answer=answer, updates=table["updates"])


def _step_s(system: str, sizes: Sizes, devices: int, answer: int, constants: Sequence[float], share: float = 0.25) -> float:
    """share: of OpenRLHF's devices that generate; actor, critic, and frozen models divide the rest evenly."""
    actor, critic = (_place(name, constants) for name in sizes)
    takes: dict[str, Callable[[Place, Place, int, Batch], float]] = {
        "dschat": one_group_s,
        "openrlhf": partial(groups_s, share=share),
        "heuristic": _one_layout_s,
        "real": _best_layouts_s,
    }
    return takes[system](actor, critic, devices, _batch(answer))


def _best_layouts_s(actor: Place, critic: Place, devices: int, batch: Batch) -> float:
    """ReaL: each call on all devices in its own best layout."""
    kept = sum(calls.device_bytes(each.model, devices, trained=True) for each in (actor, critic))
    return (
        calls.best_generation_s(actor, devices, batch.answers, batch.prompt, kept_bytes=kept)
        + calls.best_scoring_s(actor, devices, batch.rows, batch.tokens)
        + 2 * calls.best_scoring_s(critic, devices, batch.rows, batch.tokens, head=False)
        + calls.best_training_s(actor, devices, batch.rows, batch.tokens, updates=batch.updates, share=0.6)
        + calls.best_training_s(critic, devices, batch.rows, batch.tokens, updates=batch.updates, share=0.6)
    )


def _one_layout_s(actor: Place, critic: Place, devices: int, batch: Batch) -> float:
    """The heuristic: tensor groups of a node, the shortest pipeline that fits, one layout for all calls of a model."""
    own, other = _node_layout(actor, devices), _node_layout(critic, devices)
    return (
        calls.generation_s(own, batch.answers, batch.prompt)
        + calls.scored_s(own, batch.rows, batch.tokens)
        + 2 * calls.scored_s(other, batch.rows, batch.tokens, head=False)
        + calls.trained_s(own, batch.rows, batch.tokens, updates=batch.updates)
        + calls.trained_s(other, batch.rows, batch.tokens, updates=batch.updates)
    )


def _node_layout(place: Place, devices: int) -> Place:
    for pipeline in (1, 2, 4, 8, 16):
        data = devices // (calls.NODE * pipeline)
        if data and place.model.training_bytes(1, data) / (calls.NODE * pipeline) < 0.4 * 80e9:
            return calls.placed(place, calls.NODE, pipeline, data)
    return calls.placed(place, calls.NODE, devices // calls.NODE, 1)


def _pflops(system: str, sizes: Sizes, devices: int, answer: int, constants: Sequence[float], share: float = 0.25) -> float:
    """By the published count of FLOPs: of the actor generation, reference, training with recomputation; of the critic values,
    the reward model, training."""
    every_head = [replace(model(name), kv_heads=model(name).heads) for name in sizes]
    flops = 6 * _batch(answer).rows * sum(each.sequence_flops(_batch(answer).tokens) for each in every_head)
    return flops / _step_s(system, sizes, devices, answer, constants, share) / 1e15


@cache
def constants(system: str) -> tuple[float, ...]:
    """Fitted to the cells of 8 devices."""
    table = published(4)
    column, first = table["systems"].index(system), ("llama-7b", "llama-7b")

    def ratios(trial: Sequence[float]) -> list[float]:
        return [
            _pflops(system, first, _FIRST, answer, trial) / cells[0][column]
            for answer, cells in zip(table["answers"], table["actor"]["pflops"], strict=True)
        ]

    return calls.fit(ratios, [(0.01, 1.0), (1e-5, 2e-2)])


def weak_scaling() -> Row:
    """V4."""
    names: dict[str, str] = published(4)["names"]
    by_name = {names[system]: sorted(_cells(system), key=lambda figure: figure.how) for system in published(4)["systems"]}
    held = {
        name: [(each.published or 0.0, each.predicted) for each in found if each.how == "held out"]
        for name, found in by_name.items()
    }
    figures = [each for found in by_name.values() for each in found]
    pairs = [pair for found in held.values() for pair in found]
    overall, falls = rank_correlation(pairs), _falls(figures)
    finding = (
        f"rank correlation {overall:.2f} over {len(pairs)} cells ("
        + ", ".join(f"{name} {rank_correlation(found):.2f}" for name, found in held.items())
        + f"); longer generation gives less in {'all' if falls else 'not all'} predicted cells"
    )
    stated = ", ".join(f"{names[each]} {constants(each)[0]:.2g}, {constants(each)[1]:.1e}" for each in published(4)["systems"])
    fitted = f"arithmetic, seconds of a layer: {stated}"
    return row(4, figures, holds=overall >= 0.9 and falls, finding=finding, fitted=fitted)


def _cells(system: str) -> Iterator[Figure]:
    table = published(4)
    column, group, trial = table["systems"].index(system), table["names"][system], constants(system)
    shares = edges(4, "generator_share") if system == "openrlhf" else ()
    for scaled in ("actor", "critic", "all"):
        part = table[scaled]
        for answer, cells in zip(table["answers"], part["pflops"], strict=True):
            for devices, name, values in zip(part["devices"], table["models"], cells, strict=True):
                if not values[column] or (scaled == "critic" and devices == _FIRST):
                    continue
                sizes = (name if scaled != "critic" else "llama-7b", name if scaled != "actor" else "llama-7b")
                yield Figure(
                    group,
                    f"{scaled} {name.removeprefix('llama-')}, {devices} devices, answer {answer}",
                    "PFLOP/s",
                    values[column],
                    _pflops(system, sizes, devices, answer, trial),
                    "fitted" if devices == _FIRST else "held out",
                    tuple(_pflops(system, sizes, devices, answer, trial, share) for share in shares),
                )


def _falls(figures: Sequence[Figure]) -> bool:
    """Among cells that differ in the length of the answer only."""
    families: dict[str, list[float]] = {}
    for figure in figures:
        families.setdefault(f"{figure.group} {figure.label.rpartition(',')[0]}", []).append(figure.predicted)
    return all(sorted(values, reverse=True) == values for values in families.values())


def seventy_billion() -> Row:
    """V3."""
    given: dict[str, float] = published(3)["step_s"]
    sizes = ("llama-70b", "llama-70b")
    steps = {system: _step_s(system, sizes, 128, 128, constants(system)) for system in given}
    figures = {name: Figure("step", published(4)["names"][name], "s", given[name], step) for name, step in steps.items()}
    published_lead, predicted_lead = (each["dschat"] / each["real"] for each in (given, steps))
    lead = Figure("lead of ReaL", "over DeepSpeed-Chat", "", published_lead, predicted_lead)
    order = sorted(given, key=given.__getitem__) == sorted(steps, key=steps.__getitem__)
    finding = f"the order is {'as' if order else 'not as'} published; ReaL leads by {lead.predicted:.1f} times (8.3 published)"
    holds = order and within([figures["real"]], 0.3) and within([lead], 0.4)
    return row(3, [*figures.values(), lead], holds=holds, finding=finding, fitted="as V4: on 8 devices with 7B")
