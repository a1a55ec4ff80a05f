"""From a configuration to its processes and their places: what the run wants, the hosts it lists or this machine. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from async_rlhf.actors.config import REFERENCE
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch.machine import machine_cpus, this_machine, visible
from async_rlhf.launch.placement import Devices, Host, Inventory, Placement, WantedNodes, as_ranges, place
from async_rlhf.launch.program import Node, actor_name, actor_node
from async_rlhf.launch.sockets import ON_HOST, hub_address, scorer_address
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.scoring import stage_specs


def inventory_of(config: Config, found: Inventory = ()) -> Inventory:
    """The hosts that the configuration lists, or this machine and the hosts that a launcher has found."""
    if config.placement.hosts:
        return tuple(Host(**dict(host)) for host in config.placement.hosts)
    return (this_machine(look_for_devices=on_cuda(config)), *found)


def on_cuda(config: Config) -> bool:
    needs = wanted(config)
    return any((needs.rank_devices, needs.actor_devices, needs.scorer_devices))


def placement_of(config: Config, inventory: Inventory | None = None) -> Placement:
    """inventory: where it is known already; where a launcher has found its hosts, actors are on those. Raises ConfigError."""
    inventory = inventory or inventory_of(config)
    placement = place(replace(wanted(config), away=len(inventory) > 1 and not config.placement.hosts), inventory)
    for slot in placement.slots.values():
        if not slot.host:
            visible(slot.devices, os.environ)  # refuses what CUDA_VISIBLE_DEVICES does not show
            machine_cpus(slot.cpus or ())  # and CPUs that this process may not use
    return placement


def nodes_of(config: Config, placement: Placement, run: RunDir, sockets: Path) -> list[Node]:
    """The processes that a run begins with, at their places; relays last, for what they carry must end before them.

    sockets: of this machine. Elsewhere an actor finds the scorer and the relay of its host at sockets of that host; where there
    is no relay, it reaches the hub over the network.
    """
    hub, network = hub_address(sockets), config.address
    hosts = {name: slot.host for name, slot in placement.slots.items()}
    scorers = {name: scorer_address(ON_HOST if host else sockets) for name, host in hosts.items() if name.startswith("scorer")}
    relays = {name: f"ipc://{ON_HOST}/relay" for name in hosts if name.startswith("relay-")}
    scorer_on = {hosts[name]: address for name, address in scorers.items()}
    relay_on = {hosts[name]: address for name, address in relays.items()}
    # Shared memory is for peers that connect by ipc, as those on the hub's own machine do.
    nodes = [Node("hub", "hub", (hub, network) if network else (hub,), run.log("hub"))]
    nodes.append(Node("learner", "learner", (hub,), run.log("learner")))
    nodes += [Node(name, "scorer", (address,), run.log(name)) for name, address in scorers.items()]
    for index in range(placement.num_actors):
        host = hosts[actor_name(index)]
        address = relay_on.get(host, network) if host else hub
        nodes.append(actor_node(address, index, run.log(actor_name(index)), scorer_on.get(host, "")))
    nodes += [Node(name, "relay", (network, address), run.log(name)) for name, address in relays.items()]
    return [placement.placed(node) for node in nodes]


def wanted(config: Config) -> WantedNodes:
    """The nodes that this configuration needs, without looking at any host. Raises ConfigError for a device chosen twice."""
    engine, learner, placement = config.engine, config.learner, config.placement
    models = dict(model_devices(config))
    beside = [_devices(f"device of {name!r}", models[name]) for name in models if not config.scoring.in_process(name)]
    in_process = [_devices(f"device of {name!r}", models[name]) for name in models if config.scoring.in_process(name)]
    of_engine = _devices("engine.device", engine.device, engine.num_devices)
    return WantedNodes(
        ranks=learner.ranks,
        rank_devices=_devices("learner.device", learner.device),
        rank_threads=learner.threads,
        actors=config.actors.count,
        actor_devices=_most(of_engine, *beside),
        actor_threads=engine.threads,
        scorer=any(config.scoring.in_process(spec.name) for spec in stage_specs(config)),
        scorer_devices=_most(*in_process),
        evaluation_devices=_most(of_engine, *beside, *in_process) if evaluates(config) else 0,
        evaluates_beside=bool(config.evaluation.every),
        learner_hosts=placement.learner_hosts,
        colocate=placement.colocate,
        actor_share=placement.actor_share,
        strategy=placement.strategy,
    )


def with_threads(config: Config, threads: int | None) -> Config:
    """The configuration for a process with `threads` threads; None: unchanged.

    An engine whose completions are to be batch invariant keeps its one thread: only with one it can be.
    """
    if threads is None:
        return config
    engine, learner, scoring = config.engine, config.learner.model_copy(update={"threads": threads}), config.scoring
    if config.served_engine.bits_obstacle:
        engine = engine.model_copy(update={"threads": threads})
    if scoring.reference_is_stage:
        reference = scoring.reference.model_copy(update={"threads": threads})
        scoring = scoring.model_copy(update={"reference": reference})
    return config.model_copy(update={"engine": engine, "learner": learner, "scoring": scoring})


def evaluates(config: Config) -> bool:
    return bool(config.evaluation.at_start or config.evaluation.at_end or config.evaluation.every)


def model_devices(config: Config) -> Iterator[tuple[str, str]]:
    """(name, device) of each stage that holds a model: a reward with an option `device`, the reference."""
    for name, options in config.rewards.options.items():
        if isinstance(device := options.get("device"), str):
            yield name, device
    if config.scoring.reference_is_stage:
        yield REFERENCE, config.scoring.reference.device


def _devices(setting: str, device: str, count: int = 1) -> Devices:
    kind, colon, _ = device.partition(":")
    if kind == "cuda" and colon:
        raise ConfigError(
            f"{setting} = {device!r}: the placement decides the device of each process (docs/machines.md); set 'cuda', and "
            "choose the run's devices with CUDA_VISIBLE_DEVICES or [[placement.hosts]]"
        )
    return {"cpu": 0, "cuda": count}.get(kind)


def _most(*needs: Devices) -> Devices:
    """The devices for several roles in one process; None where none of them uses CUDA and one takes devices as found."""
    return max((need for need in needs if need), default=None if None in needs else 0)


def table(config: Config, inventory: Inventory, placement: Placement) -> list[str]:
    """The place of every process, a line each, for a person."""
    names = {"": str(inventory[0])}
    rows = [("process", "host", "devices", *(["CPUs"] if config.placement.strategy else []))]
    for name, slot in placement.slots.items():
        if name == "evaluation" and not evaluates(config):
            continue
        devices = "as found" if slot.devices is None else ", ".join(map(str, slot.devices)) or "none"
        waits = " (when the run's processes have ended)" if name == "evaluation" and placement.evaluation_waits else ""
        cpus = [f"{as_ranges(slot.cpus)}{waits}"] if config.placement.strategy else []
        rows.append((name, names.get(slot.host, slot.host), devices if cpus else devices + waits, *cpus))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]
