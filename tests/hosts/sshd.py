"""sshd on hosts. Its user's home, whose `.ssh` both ends read, is another on each host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil

from tests.conftest import wait_for
from tests.hosts.machines import ROOT, Host, Hosts, obstacle

PROGRAMS = ("sshd", "ssh", "ssh-keygen")
PROGRAM = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "sshd"
CONFIGURATION = """
HostKey {host_key}
AuthorizedKeysFile {authorized}
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
Banner {banner}
SetEnv PYTHONPATH={python_path} OMP_NUM_THREADS=1
"""
LISTENS = "Server listening on 0.0.0.0 port 22."


def ssh_obstacle() -> str | None:
    """Why there can be no sshd here."""
    return obstacle(*PROGRAMS) or (None if ROOT else "sshd has users of its own, which only root may have")


class Sshd:
    """sshd on one host; not started yet. On the host `/opt/venv` is this interpreter's environment."""

    def __init__(self, host: Host, shared: Path, authorized: Path) -> None:
        self.host, self.home, self._log = host, home_of(host, shared), shared / f"{host.name}.sshd.log"
        self._configuration, self.public_key = shared / f"{host.name}.sshd", new_key(shared / f"{host.name}.host_key")
        self._listener: subprocess.Popen[bytes] | None = None
        banner = shared / "banner"
        banner.write_text("Authorized access only.\n")
        self._configuration.write_text(
            CONFIGURATION.format(
                host_key=shared / f"{host.name}.host_key",
                authorized=authorized,
                banner=banner,
                python_path=os.environ.get("PYTHONPATH", ""),
            )
        )
        host.run("mount -t tmpfs none /run && mkdir -m 755 /run/sshd")
        host.run(f"mount -t tmpfs none /opt && ln -s {sys.prefix} /opt/venv")

    def start(self) -> None:
        with self._log.open("wb") as log:
            words = self.host.command([PROGRAM, "-D", "-e", "-f", str(self._configuration)])
            self._listener = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(lambda: LISTENS in self._log.read_text(), "sshd")

    def processes(self) -> list[psutil.Process]:
        """The listener and those of its sessions."""
        return self._found(lambda process: process.name() == "sshd")

    def sessions(self) -> list[psutil.Process]:
        return [process for process in self.processes() if self._listener is not None and process.pid != self._listener.pid]

    def agents(self) -> list[psutil.Process]:
        return self._found(lambda process: "async_rlhf.launch.agent" in process.cmdline())

    def kill(self) -> None:
        for process in self.processes():
            process.kill()
        if self._listener is not None:
            self._listener.wait()

    def _found(self, belongs: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        found = []
        for process in self.host.processes():
            with suppress(psutil.NoSuchProcess):
                found += [process] if belongs(process) else []
        return found


class Ssh:
    """sshd on each host but the first, whose user it lets in; made and started at once. shared: a folder that all hosts see.

    `known_hosts` and `authorized` are the files of the first host and of the others.
    """

    @classmethod
    @contextmanager
    def to(cls, names: Sequence[str], shared: Path) -> Iterator[Ssh]:
        """Hosts of these names, of which each has the folder `shared / "own"` for itself, until the end of the block."""
        (shared / "own").mkdir()
        with closing(Hosts(shared / "own", names)) as hosts, closing(cls(hosts, shared)) as ssh:
            yield ssh

    def __init__(self, hosts: Hosts, shared: Path) -> None:
        self.hosts = hosts
        home, self.authorized = home_of(hosts.all[0], shared), shared / "authorized_keys"
        self.known_hosts = home / ".ssh" / "known_hosts"
        self.authorized.write_text(new_key(home / ".ssh" / "id_ed25519"))
        self.of = {host.name: Sshd(host, shared, self.authorized) for host in hosts.all[1:]}
        self.known_hosts.write_text("".join(f"{name} {sshd.public_key}" for name, sshd in self.of.items()))
        for sshd in self.of.values():
            sshd.start()

    def close(self) -> None:
        for sshd in self.of.values():
            sshd.kill()


def home_of(host: Host, shared: Path) -> Path:
    """The new home of this process's user on a host."""
    home, users = shared / f"{host.name}.home", shared / f"{host.name}.passwd"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    lines = Path("/etc/passwd").read_text().splitlines()
    fields = [line.split(":") for line in lines]
    users.write_text(
        "".join(":".join([*of[:5], str(home) if of[2] == str(os.getuid()) else of[5], "/bin/bash"]) + "\n" for of in fields)
    )
    host.run(f"mount --bind {users} /etc/passwd")
    return home


def new_key(path: Path) -> str:
    """A pair of keys; returns the line of the public one."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, stdin=subprocess.DEVNULL)
    return Path(f"{path}.pub").read_text()
