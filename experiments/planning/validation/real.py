"""V3 and V4: weak scaling of ReaL, of its own heuristic, of DeepSpeed-Chat and of OpenRLHF on H100.

Each system has two constants, fitted to its three figures on 8 devices (7B): the share of the arithmetic peak, and the time
that a decode step takes for each layer besides reading weights and caches, which bounds the decoding of few rows. All other
cells, and V3's step times on 128 devices, are predicted with them.

The published PFLOP/s count twelve forward passes for the four calls of inference and the two of training (generation 1, three
times inference, twice 4 of training with recomputation), each as Megatron counts one: attention with as many key-value heads
as heads. V3 gives seconds for three cells of V4, and they agree with that count within 1 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from async_rlhf.experiments.planning.validation import calls, data
from async_rlhf.experiments.planning.validation.fitting import fit
from async_rlhf.experiments.planning.validation.rows import Figure, How, Row, rank_correlation, within
from async_rlhf.experiments.planning.validation.zero import Batch, groups_s, one_group_s
from async_rlhf.plan.devices import device
from async_rlhf.plan.model_costs import ModelCosts
from async_rlhf.plan.stages import Place

Sizes = tuple[str, str]
"""Actor and reference; critic and reward model."""
_FIRST = 8


def _named(system: str) -> str:
    name: str = data.published(4)["names"][system]
    return name


def _place(name: str, constants: Sequence[float]) -> Place:
    model = data.model(name)
    efficiency = calls.efficiency(constants[0], launch_s=constants[1] * model.layers)
    return Place(model=model, device=device("H100"), efficiency=efficiency)


@cache
def _batch(answer: int) -> Batch:
    table = data.published(4)
    rows = table["batch_tokens"] // (table["prompt"] + answer)
    return Batch(rows=rows, prompt=table["prompt"], answer=answer, updates=table["updates"])


def step_s(system: str, sizes: Sizes, devices: int, answer: int, constants: Sequence[float], share: float = 0.25) -> float:
    """share: of OpenRLHF's devices that generate; actor, critic, and frozen models divide the rest evenly."""
    actor, critic, batch = _place(sizes[0], constants), _place(sizes[1], constants), _batch(answer)
    if system == "dschat":
        return one_group_s(actor, critic, devices, batch)
    if system == "openrlhf":
        return groups_s(actor, critic, devices, batch, share)
    return {"heuristic": _one_layout, "real": _best_layouts}[system](actor, critic, devices, batch)


def _best_layouts(actor: Place, critic: Place, devices: int, batch: Batch) -> float:
    """ReaL: each call on all devices in its own best layout."""
    kept = calls.device_bytes(actor.model, devices, trained=True) + calls.device_bytes(critic.model, devices, trained=True)
    return (
        calls.best_generation_s(actor, devices, batch.answers, batch.prompt, kept_bytes=kept)
        + calls.best_scoring_s(actor, devices, batch.rows, batch.tokens)
        + 2 * calls.best_scoring_s(critic, devices, batch.rows, batch.tokens, head=False)
        + calls.best_training_s(actor, devices, batch.rows, batch.tokens, updates=batch.updates, share=0.6)
        + calls.best_training_s(critic, devices, batch.rows, batch.tokens, updates=batch.updates, share=0.6)
    )


def _one_layout(actor: Place, critic: Place, devices: int, batch: Batch) -> float:
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
        data_parallel = devices // (calls.NODE * pipeline)
        if data_parallel and place.model.training_bytes(1, data_parallel) / (calls.NODE * pipeline) < 0.4 * 80e9:
            return calls.placed(place, calls.NODE, pipeline, data_parallel)
    return calls.placed(place, calls.NODE, devices // calls.NODE, 1)


def counted_flops(sizes: Sizes, answer: int) -> float:
    """Of one step, as the published throughput counts them."""
    batch = _batch(answer)
    # Of the actor: generation, reference, training with recomputation; of the critic: values, the reward model, training.
    return 6 * batch.rows * sum(_every_head(data.model(name)).sequence_flops(batch.tokens) for name in sizes)


def _every_head(model: ModelCosts) -> ModelCosts:
    return replace(model, kv_heads=model.heads)


@cache
def constants(system: str) -> tuple[float, ...]:
    """Fitted to the cells of 8 devices."""
    table = data.published(4)
    column = table["systems"].index(system)
    first = ("llama-7b", "llama-7b")

    def ratios(trial: Sequence[float]) -> list[float]:
        return [
            counted_flops(first, answer) / step_s(system, first, _FIRST, answer, trial) / (cells[0][column] * 1e15)
            for answer, cells in zip(table["answers"], table["actor"]["pflops"], strict=True)
        ]

    return fit(ratios, [(0.01, 1.0), (1e-5, 2e-2)])


def weak_scaling() -> Row:
    """V4."""
    figures = [figure for system in data.published(4)["systems"] for figure in _cells(system)]
    held = [figure for figure in figures if figure.how == "held out"]
    overall = rank_correlation([(figure.published or 0.0, figure.predicted) for figure in held])
    each = {
        system: rank_correlation([(f.published or 0.0, f.predicted) for f in held if f.group == _named(system)])
        for system in data.published(4)["systems"]
    }
    falls = _falls(figures)
    finding = (
        f"rank correlation {overall:.2f} over {len(held)} cells ("
        + ", ".join(f"{_named(system)} {value:.2f}" for system, value in each.items())
        + f"); longer generation gives less in {'all' if falls else 'not all'} predicted cells"
    )
    return data.row(4, figures, holds=overall >= 0.9 and falls, finding=finding, fitted=_stated())


def _stated() -> str:
    each = ((system, constants(system)) for system in data.published(4)["systems"])
    return "arithmetic, seconds of a layer: " + ", ".join(
        f"{_named(system)} {flops:.2g}, {layer:.1e}" for system, (flops, layer) in each
    )


def _cells(system: str) -> list[Figure]:
    table, found = data.published(4), []
    column, trial = table["systems"].index(system), constants(system)
    for scaled in ("actor", "critic", "all"):
        part: Mapping[str, Any] = table[scaled]
        for answer, cells in zip(table["answers"], part["pflops"], strict=True):
            for devices, name, values in zip(part["devices"], table["models"], cells, strict=True):
                if values[column] and not (scaled == "critic" and devices == _FIRST):
                    sizes = (name if scaled != "critic" else "llama-7b", name if scaled != "actor" else "llama-7b")
                    predicted = _pflops(system, sizes, devices, answer, trial)
                    how: How = "fitted" if devices == _FIRST else "held out"
                    label = f"{scaled} {name.removeprefix('llama-')}, {devices} devices, answer {answer}"
                    span = _pflops_span(system, sizes, devices, answer, trial)
                    found.append(
                        Figure(
                            group=_named(system),
                            label=label,
                            unit="PFLOP/s",
                            published=values[column],
                            predicted=predicted,
                            how=how,
                            span=span,
                        )
                    )
    return sorted(found, key=lambda figure: figure.how)


def _pflops(system: str, sizes: Sizes, devices: int, answer: int, trial: Sequence[float], share: float = 0.25) -> float:
    return counted_flops(sizes, answer) / step_s(system, sizes, devices, answer, trial, share) / 1e15


def _pflops_span(system: str, sizes: Sizes, devices: int, answer: int, trial: Sequence[float]) -> tuple[float, ...]:
    if system != "openrlhf":
        return ()
    return tuple(_pflops(system, sizes, devices, answer, trial, share) for share in data.assumed(4, "generator_share").range)


def _falls(figures: Sequence[Figure]) -> bool:
    """Among cells that differ in the length of the answer only."""
    families: dict[str, list[float]] = {}
    for figure in figures:
        families.setdefault(f"{figure.group} {figure.label.rpartition(',')[0]}", []).append(figure.predicted)
    return all(sorted(values, reverse=True) == values for values in families.values())


def seventy_billion() -> Row:
    """V3."""
    published: Mapping[str, float] = data.published(3)["step_s"]
    sizes = ("llama-70b", "llama-70b")
    figures = [
        Figure(
            group="step",
            label=_named(system),
            unit="s",
            published=seconds,
            predicted=step_s(system, sizes, 128, 128, constants(system)),
        )
        for system, seconds in published.items()
    ]
    named = dict(zip(published, figures, strict=True))
    lead = Figure(
        group="lead of ReaL",
        label="over DeepSpeed-Chat",
        unit="",
        published=published["dschat"] / published["real"],
        predicted=named["dschat"].predicted / named["real"].predicted,
    )
    order = sorted(published, key=published.__getitem__) == sorted(named, key=lambda name: named[name].predicted)
    holds = order and within([named["real"]], 0.3) and within([lead], 0.4)
    finding = f"the order is {'as' if order else 'not as'} published; ReaL leads by {lead.predicted:.1f} times (8.3 published)"
    return data.row(3, [*figures, lead], holds=holds, finding=finding, fitted="as V4: on 8 devices with 7B")
