"""Slurm on hosts: munged and slurmd on each, slurmctld on the first."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

from tests.conftest import wait_for
from tests.hosts.machines import ROOT, Host, Hosts, obstacle

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
# What a job waits for is as short as it can be set: how long a site lets it wait is not what is tested.
CONFIGURATION = """
ClusterName=tested
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={own}/munge.socket
StateSaveLocation={shared}/state
SlurmdSpoolDir={own}/spool
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=120
SchedulerParameters=batch_sched_delay=0,sched_interval=1
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def slurm_obstacle() -> str | None:
    """Why there can be no Slurm here."""
    return obstacle(*PROGRAMS) or (None if ROOT else "Slurm starts jobs as their users, which only root may")


class Slurm:
    """Made at once; at its end nothing runs on the hosts. own: a folder that each host has for itself. shared: one that all
    see."""

    def __init__(self, hosts: Hosts, own: Path, shared: Path) -> None:
        self._hosts, self._first, self._shared = hosts, hosts.all[0], shared
        self._daemons: list[subprocess.Popen[bytes]] = []
        key = shared / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        (shared / "state").mkdir()
        nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} CPUs=2" for host in hosts.all)
        configuration = shared / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(first=self._first, own=own, shared=shared, nodes=nodes))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"  # jobs call async-rlhf by its name
        self._environment = {**os.environ, "PATH": path, "SLURM_CONF": str(configuration)}
        for host in hosts.all:
            files = [f"--{name}={own}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
            self._start(host, "munged", "--foreground", "--force", f"--key-file={key}", *files)
        self._start(self._first, "slurmctld", "-D")
        for host in hosts.all:
            self._start(host, "slurmd", "-D", "-N", host.name)
        wait_for(lambda: self.control("sinfo", "-ho", "%T") == "idle", "every node of Slurm")

    def control(self, *words: str) -> str:
        """Output of a command of Slurm on the first host; nothing as long as Slurm does not answer."""
        command = self._first.command(words)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=self._environment, stdin=subprocess.DEVNULL
        )
        return done.stdout.strip()

    def submit(self, script: Path, *options: str) -> str:
        """The number of the job, which runs in the script's folder and writes its output there."""
        return self.control("sbatch", "--parsable", f"--chdir={script.parent}", *options, str(script))

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of it: `JobState`, `NodeList`, `Restarts`."""
        return dict(word.split("=", 1) for word in self.control("scontrol", "-o", "show", "job", number).split() if "=" in word)

    def update(self, *settings: str) -> None:
        """Of a job or a node, as its operator does."""
        self.control("scontrol", "update", *settings)

    def close(self) -> None:
        for host in self._hosts.all:
            host.die()
        for daemon in self._daemons:
            daemon.wait()

    def _start(self, host: Host, *words: str) -> None:
        with (self._shared / f"{words[0]}.{host.name}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(host.command(words), env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
