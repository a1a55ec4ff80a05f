"""From the configuration to the launcher: the hosts, the hub's and the learner's address for them, their keys."""

from __future__ import annotations

import os
import re
from functools import partial

from async_rlhf.actors.workers import CALLER
from async_rlhf.buffers.config import check_installed
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.transport import keys, link
from async_rlhf.launch.cluster import RayCluster
from async_rlhf.launch.connection import Connections, Hosts
from async_rlhf.launch.hosts import CommandHosts
from async_rlhf.launch.orders import OpenAgent
from async_rlhf.launch.placement import Inventory, Placement
from async_rlhf.launch.program import Launcher
from async_rlhf.launch.sockets import LOOPBACK, free_port, own_address
from async_rlhf.run.config import Config
from async_rlhf.run.hosts.node_files import large_files, pack
from async_rlhf.run.hosts.placement import on_cuda
from async_rlhf.run.run_dir import RunDir


def connect(config: Config) -> tuple[Config, Connections | None]:
    """The configuration as hosts need it, and connections to all of them; none where all runs on this machine.

    Raises ConfigError when they cannot be had, or a host is not fit.
    """
    if config.launch.kind == "local":
        return config, None
    _check_rewards(config)
    link.check_curve()
    hosts = _hosts(config)
    try:
        config = _networked(config, hosts)
        launch = config.launch
        opening = OpenAgent(directory=launch.directory, lost_after_s=launch.lost_after_s, accelerators=on_cuda(config))
        connections = Connections(hosts, opening, partial(pack, config), large_files(config))
    except ConfigError:
        hosts.close()
        raise
    try:
        connections.check()
    except ConfigError:
        connections.close()
        raise
    return config, connections


def found_by(connections: Connections | None) -> tuple[Inventory, list[str]]:
    """The resources of the launcher's hosts, and remarks about them."""
    if connections is None:
        return (), []
    return connections.inventory(), [f"hosts that answer: {', '.join(connections.names)}"]


def launcher_of(config: Config, run: RunDir, connections: Connections | None, placement: Placement) -> Launcher:
    """The launcher of a run whose directory exists; makes missing keys. Raises ConfigError.

    A relay has one that lets it be a relay; the actors behind it need none.
    """
    if connections is None:
        return run.launcher
    assert config.security.directory is not None
    relays = {slot.host: name for name, slot in placement.slots.items() if name.startswith("relay-")}
    alone = [name for name, slot in placement.slots.items() if name.startswith("actor-") and slot.host not in ("", *relays)]
    try:
        keys.provide(config.security.directory, [*alone, *(f"{name}:relay" for name in relays.values())], link.new_pair)
    except ConfigError:
        run.retire()
        raise
    connections.local = run.launcher
    return connections


def meeting_address(config: Config, placement: Placement) -> str:
    """The address of this machine at which the learner's ranks meet. Raises ConfigError.

    Ranks send without encryption and without keys, so they use only a network that the configuration names.
    """
    ranks = [name for name in placement.slots if name.startswith("learner")]
    if host := placement.slots["learner"].host:
        raise ConfigError(
            f"the learner's rank 0 is placed on {host}: it runs where the command does, which has the run directory; let "
            "placement.learner_hosts begin with the first host, on CUDA with a device of it"
        )
    away = next((name for name in ranks if placement.slots[name].host), None)
    if away is None:
        return LOOPBACK
    if config.launch.interface is None:
        raise ConfigError(
            f"{away} is placed on {placement.slots[away].host}, and launch.interface names no network: what ranks send "
            "(weights, gradients, rollouts) has no keys, so name the interface of this machine in a network that you trust"
        )
    return own_address((), config.launch.interface)


def _hosts(config: Config) -> Hosts:
    launch = config.launch
    if launch.kind == "hosts":
        return CommandHosts(launch.hosts, launch.command)
    check_ray("launch.kind", "ray", "'local' or 'hosts'")
    of_ranks = [int(name[4:]) + 1 for name in config.placement.learner_hosts if re.fullmatch(r"ray-\d{1,6}", name)]
    on_gpus = not config.engine.device.startswith("cpu") or (bool(of_ranks) and config.learner.device == "cuda")
    most = None if config.actors.count == "fill" else max(config.actors.count, *of_ranks, 1)
    return RayCluster(launch.address, most, on_gpus=on_gpus)


def check_ray(key: str, value: str, without: str) -> None:
    """Call this before importing a module that imports Ray. Raises ConfigError where Ray is not installed."""
    # Ray would print the death of a node among the run's own lines, which say it too.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "has been marked dead|Raylet is terminated")
    check_installed("ray", key, value, "ray", without)


def _networked(config: Config, hosts: Hosts) -> Config:
    """The configuration with an address that the hosts reach, and a directory for keys."""
    if not config.address:
        address = own_address(hosts.addresses, config.launch.interface)
        config = config.model_copy(update={"address": f"tcp://{address}:{free_port(address)}"})
    elif not config.address.startswith("tcp://") or config.address.startswith(("tcp://*:", "tcp://0.0.0.0:")):
        raise ConfigError(f"address = {config.address!r}: hosts need one they can connect to, tcp://IP:PORT; or leave it empty")
    if config.security.keys is None:
        security = config.security.model_copy(update={"keys": str(config.run_dir.absolute() / "keys")})
        config = config.model_copy(update={"security": security})
    return config


def _check_rewards(config: Config) -> None:
    """Raises ConfigError for a reward, or an environment, that only processes of this machine can ask."""
    if f"remote:{CALLER}" in config.environment.function:
        raise ConfigError(
            f"environment.function = {config.environment.function!r} with launch.kind = {config.launch.kind!r}: it is served "
            "on this machine only. Write the environment into a file"
        )
    for name, options in config.rewards.options.items():
        address = options.get("address")
        if str(address).startswith((CALLER, "ipc://")):
            raise ConfigError(
                f"rewards.options.{name}.address = {address!r} with launch.kind = {config.launch.kind!r}: it is served on this "
                "machine only. Write the reward into a file, or serve it over the network (async-rlhf serve reward)"
            )
