"""Hosts of a cluster on one machine: each has its own address, hostname, and files that no other host sees.

Made of namespaces; `Network` is the process between them. Needs Linux, `ip`, `unshare`, `nsenter` and /dev/net/tun; without
root also user namespaces, and then each host has one user.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import wait_for
from tests.hosts.link import Conditions
from tests.hosts.switch import DEVICE, mac

NETWORK = "10.77.0."
ROOT = os.geteuid() == 0
# As root no user namespace is needed, and daemons that change their user work.
UNSHARE = ["unshare", "-nmu"] if ROOT else ["unshare", "-rnmu"]
ENTER_USER = [] if ROOT else ["-U", "--preserve-credentials"]


def in_users_of(process: int) -> list[str]:
    """Before the words of a command, which then runs in the user namespace of this process."""
    return ["nsenter", "-t", str(process), *ENTER_USER, "--"] if ENTER_USER else []


def obstacle(*tools: str) -> str | None:
    """Why there can be no hosts here, or none with these programs."""
    needed = ("ip", "unshare", "nsenter", *tools)
    if missing := [tool for tool in needed if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]:
        return f"{missing[0]} is not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened here"
    return _refusal()


@cache
def _refusal() -> str | None:
    """Of the kernel, to make namespaces; it is asked once."""
    words = [*UNSHARE, "ip", "tuntap", "add", "tap0", "mode", "tap"]
    tried = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return f"network namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    pid: int

    def command(self, words: Sequence[str]) -> list[str]:
        """These words, to be run on this host by a process of the machine."""
        return self._entered(words, *ENTER_USER)

    def command_from_another(self, words: Sequence[str]) -> list[str]:
        """These words, to be run on this host by a process of another: it is in the user namespace already."""
        return self._entered(words)

    def _entered(self, words: Sequence[str], *user: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), *user, "-n", "-m", "-u", f"--wd={os.getcwd()}", "--", *words]

    @contextmanager
    def running(self, words: Sequence[str], **streams: Any) -> Iterator[subprocess.Popen[Any]]:
        """A process on this host, until the end of the block at most."""
        with subprocess.Popen(self.command(words), **{"stdin": subprocess.DEVNULL, **streams}) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, script: str) -> str:
        """Output of a shell script, which has to end with 0 within a minute."""
        done = subprocess.run(self.command(["sh", "-c", script]), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{self.name}: {script}: {done.stderr}"
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """All that run on it."""
        own = os.readlink(f"/proc/{self.pid}/ns/net")
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if process.pid != self.pid and os.readlink(f"/proc/{process.pid}/ns/net") == own:
                    found.append(process)
        return found

    def die(self) -> None:
        """All its processes end at once; nothing of what they had in memory was sent."""
        for _ in range(3):  # what was just being started
            for process in self.processes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def fill_disk(self, folder: Path) -> None:
        """Its disk, which is mounted there, takes no further byte."""
        self.run(f"dd if=/dev/zero of={folder}/filler bs=4k 2>/dev/null || true")


class Network:
    """The links between hosts; all are perfect until they are set."""

    def __init__(self, hosts: Sequence[Host], seed: int) -> None:
        self._numbers = {host.name: number for number, host in enumerate(hosts)}
        words = [
            *in_users_of(hosts[0].pid),
            sys.executable,
            "-m",
            "tests.hosts.switch",
            str(seed),
            *(str(host.pid) for host in hosts),
        ]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def set(self, pairs: Iterable[tuple[Host, Host]], conditions: Conditions) -> None:
        """Each pair is one direction."""
        links = [[self._numbers[a.name], self._numbers[b.name]] for a, b in pairs]
        self._order({"links": links, "conditions": asdict(conditions)})

    def forget(self, idle_s: float) -> None:
        """A stateful router is in the way, which forgets TCP connections that were idle; 0: there is none."""
        self._order({"forgets_s": idle_s})

    def sent(self, a: Host, b: Host) -> int:
        """Bytes in frames, of one direction, so far."""
        counts = {(x, y): count for x, y, count in self._order({})["sent"]}
        return int(counts[self._numbers[a.name], self._numbers[b.name]])

    def close(self) -> None:
        self._process.communicate(timeout=30)

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the network between the hosts has ended"
        return dict(json.loads(line))


class Hosts:
    """Made at once. `folder` is the first host's; each other host has an empty disk of `size` in its place. What lies elsewhere
    all hosts share. `close` ends all that runs on the other hosts.

    Frames have `mtu` bytes at most: large ones carry more with less work of this machine.
    """

    def __init__(
        self, folder: Path, names: Sequence[str] = ("a", "b", "c"), size: str = "64m", mtu: int = 1500, seed: int = 0
    ) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self.all = [self._make(name, f"{NETWORK}{number + 1}") for number, name in enumerate(names)]
        self.network = Network(self.all, seed)
        known = "".join(f"{host.address} {host.name}\n" for host in self.all)
        for number, host in enumerate(self.all):
            (folder / f"{host.name}.hosts").write_text(f"127.0.0.1 localhost\n{known}")
            host.run(
                f"ip link set lo up && ip link set {DEVICE} address {mac(number).hex(':')} mtu {mtu} txqueuelen 10000"
                f" && ip addr add {host.address}/24 dev {DEVICE} && ip link set {DEVICE} up"
                f" && mount --bind {folder / host.name}.hosts /etc/hosts"
            )
        for host in self.all[1:]:
            host.run(f"mount -t tmpfs -o size={size} none {folder}")

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.all if host.name == name)

    def between(self, *hosts: Host) -> list[tuple[Host, Host]]:
        """Both directions between all of these hosts; without any, of all."""
        return list(permutations(hosts or self.all, 2))

    def around(self, host: Host) -> list[tuple[Host, Host]]:
        """All links to and from it."""
        return [pair for pair in self.between() if host in pair]

    def close(self) -> None:
        for host in self.all[1:]:
            host.die()
        self.network.close()
        for holder in reversed(self._holders):
            holder.kill()
            holder.wait()

    def _make(self, name: str, address: str) -> Host:
        """A process keeps the namespaces; they exist when it has become `sleep`."""
        first = self._holders[0].pid if self._holders and not ROOT else None
        enter = in_users_of(first) if first else []
        unshare = ["unshare", "-nmu"] if first else UNSHARE
        holder = subprocess.Popen([*enter, *unshare, "sleep", "infinity"], stdin=subprocess.DEVNULL)
        self._holders.append(holder)
        command = Path(f"/proc/{holder.pid}/comm")
        wait_for(lambda: command.read_text().strip() == "sleep", "a host's namespaces")
        host = Host(name, address, holder.pid)
        host.run(f"hostname {name}")
        return host
