"""The sections of the configuration about which process runs where, and how it is started there."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from async_rlhf.buffers.config import Section


class LaunchConfig(Section):
    """The launcher of other machines. Actors and learner ranks run there; everything else runs on the command's machine."""

    kind: Literal["local", "hosts", "ray"] = "local"
    """`local`: this machine. `hosts`: those that `command` reaches. `ray`: nodes of a Ray cluster (extra `ray`)."""
    hosts: tuple[str, ...] = ()
    """With `kind = "hosts"`: their names, as `command` takes them. Actors are distributed over them in turn."""
    command: tuple[str, ...] = (
        "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "{host}", "python", "-P", "-m", "async_rlhf.launch.agent",
    )  # fmt: skip
    """With `kind = "hosts"`: starts an agent on `{host}`, passes on its standard input and output and nothing else."""
    directory: str = "~/.cache/async-rlhf"
    """Folder on each host for sent files; it may be deleted at any time. Files without code are not sent when the host has them
    with the same digest, at the same path or in its Hub cache."""
    interface: str | None = None
    """Network interface of this machine that the hosts reach (`eth0`), for the hub without an `address` and for the learner's
    ranks, which have no keys: with ranks on other hosts a trusted network must be named. `"none"`: found."""
    address: str = "auto"
    """With `kind = "ray"`: `IP:PORT` of the head; `auto`: this machine's cluster, else a local Ray."""
    lost_after_s: float = Field(default=30.0, ge=2)
    """Seconds of silence after which a host counts as lost; its agent then ends its processes."""

    @model_validator(mode="after")
    def _of_its_kind(self) -> LaunchConfig:
        if self.kind == "hosts" and not self.hosts:
            raise ValueError('kind = "hosts" needs launch.hosts, for example ["gpu1", "gpu2"]')
        if not self.command or not self.command[0]:
            raise ValueError("command = []: it names no program")
        if len(set(self.hosts)) < len(self.hosts) or not all(self.hosts):
            raise ValueError(f"hosts = {list(self.hosts)}: each once, none empty; several actors of one host are actors.count")
        if bad := [host for host in self.hosts if host.startswith("-")]:
            raise ValueError(f"hosts: {bad[0]!r} begins with '-', which a command takes for an option")
        return self


Strategy = Literal["flattening", "interleaving", "separation"]


class HostConfig(Section):
    """A host of the run."""

    name: str = Field(default="", max_length=100, pattern=r"^([A-Za-z0-9._:@][A-Za-z0-9._:@-]*)?$")
    """The launchers' name of the host; the first host is the supervisor's own and may have none."""
    devices: int = Field(default=0, ge=0, le=64)
    """CUDA devices of the host that the run may use, numbered from 0."""
    device_memory: int | None = Field(default=None, ge=1)
    """Bytes of each of them; `"none"`: not known, and then nothing is refused for its size."""
    cpus: int = Field(default=1, ge=1)
    """CPUs that `actors.count = "fill"` may fill, and that a `strategy` divides, numbered from 0."""


class PlacementConfig(Section):
    """The hosts and devices of each process."""

    hosts: tuple[HostConfig, ...] = ()
    """Hosts, the supervisor's own first (`[[placement.hosts]]`). None: this machine, and those that a launcher reaches, as they
    are found (`nvidia-smi`)."""
    learner_hosts: tuple[str, ...] = ()
    """Hosts that the learner's ranks fill in this order, the supervisor's own first; none: on CUDA all, on CPUs the first."""
    colocate: bool = False
    """Learner rank, actor, scorer and evaluation may share a device, once each."""
    actor_share: float = Field(default=0.5, gt=0, le=1)
    """`colocate`: an engine's share of a device's memory (vLLM's `gpu_memory_utilization`); the rest is for learner and
    scorer."""
    strategy: Strategy | None = None
    """CPUs and devices of generation, scoring and learning. `flattening`: all share all. `interleaving`: the scorer shares the
    learner's. `separation`: each its own. CPUs are divided 2 : 1 : 1, and threads follow them. `"none"`: any CPU, devices as
    `colocate` says."""

    @property
    def colocates(self) -> bool:
        """Whether a device may be given to a process of each kind."""
        return self.colocate or self.strategy == "flattening"

    @model_validator(mode="after")
    def _one_rule_for_devices(self) -> PlacementConfig:
        if self.colocate and self.strategy in ("interleaving", "separation"):
            raise ValueError(
                f"colocate = true lets all share devices, and strategy = {self.strategy!r} does not; set one of them"
            )
        return self

    @field_validator("hosts")
    @classmethod
    def _named_once(cls, hosts: tuple[HostConfig, ...]) -> tuple[HostConfig, ...]:
        names = [host.name for host in hosts]
        if twice := next((name for number, name in enumerate(names) if name in names[:number]), None):
            raise ValueError(f"two hosts are called {twice!r}")
        if "" in names[1:]:
            raise ValueError(f"host {names.index('', 1) + 1} has no name; only the first may go without")
        return hosts
