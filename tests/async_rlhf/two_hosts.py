"""Two hosts on one machine: network namespaces A and B on a bridge in a third, whose cable to B can be pulled.

B has a file system of its own for its files, of a few MiB. Needs user namespaces, `ip`, `unshare` and `nsenter`; no rights.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import wait_for

AHEAD_S = 300.0
A, B = "10.77.0.1", "10.77.0.2"


def obstacle() -> str | None:
    """Why there can be no namespaces here."""
    if missing := [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]:
        return f"{missing[0]} is not installed"
    tried = subprocess.run(
        ["unshare", "-rnm", "ip", "link", "add", "br0", "type", "bridge"], capture_output=True, text=True, check=False
    )
    return f"network namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


def clock_ahead(folder: Path, seconds: float) -> str:
    """A value of PYTHONPATH with which the clock of a Python process, and of all that it starts, is so far ahead."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"import time\n_time = time.time\ntime.time = lambda: _time() + {seconds}\n")
    return ":".join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


class TwoHosts:
    """Made at once; `b_files` is B's own disk."""

    def __init__(self, b_files: Path, size: str) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self._bridge = self._hold(["unshare", "-rnm"])
        self._run(self._bridge, "ip link add br0 type bridge && ip link set br0 up")
        self.a, self.b = (self._attach(name, address) for name, address in (("a", A), ("b", B)))
        self._run(self.b, f"mount -t tmpfs -o size={size} none {b_files}")

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """These words, to be run on a host."""
        return ["nsenter", "-t", str(host), "-U", "-n", "-m", "--preserve-credentials", f"--wd={os.getcwd()}", "--", *words]

    def command_from_another(self, host: int, words: Sequence[str]) -> list[str]:
        """These words, to be run on a host by a process of another: it has the rights already."""
        return ["nsenter", "-t", str(host), "-n", "-m", f"--wd={os.getcwd()}", "--", *words]

    def cut(self) -> None:
        """B's cable is out: both ends see a link that is up, and nothing arrives."""
        self._run(self._bridge, "ip link set pb nomaster")

    def heal(self) -> None:
        self._run(self._bridge, "ip link set pb master br0")

    def fill_disk(self, b_files: Path) -> None:
        """B's disk takes no further byte."""
        self._run(self.b, f"dd if=/dev/zero of={b_files}/filler bs=4k 2>/dev/null || true")

    def close(self) -> None:
        for holder in reversed(self._holders):
            holder.kill()
            holder.wait()

    def _attach(self, name: str, address: str) -> int:
        host = self._hold([*self.command(self._bridge, ["unshare", "-nm"])])
        self._run(
            self._bridge,
            f"ip link add p{name} type veth peer name e{name} && ip link set e{name} netns {host}"
            f" && ip link set p{name} master br0 && ip link set p{name} up",
        )
        self._run(host, f"ip link set lo up && ip addr add {address}/24 dev e{name} && ip link set e{name} up")
        return host

    def _hold(self, enter: list[str]) -> int:
        """A process that keeps new namespaces; they exist when it has become `sleep`."""
        holder = subprocess.Popen([*enter, "sleep", "infinity"], stdin=subprocess.DEVNULL)
        self._holders.append(holder)
        command = Path(f"/proc/{holder.pid}/comm")
        wait_for(lambda: command.read_text().strip() == "sleep", "a network namespace")
        return holder.pid

    def _run(self, host: int, script: str) -> None:
        done = subprocess.run(self.command(host, ["sh", "-c", script]), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script}: {done.stderr}"
