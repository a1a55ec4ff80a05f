"""What whoever starts a run hands down to it is obeyed, makes no difference, or is refused by name before anything is made."""

from __future__ import annotations

import locale
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch import sockets
from async_rlhf.launch.local import role_variables
from async_rlhf.launch.sockets import hub_address, socket_directory, socket_root
from async_rlhf.run.checks.machine import check_inherited
from async_rlhf.run.checks.preflight import preflight
from tests.conftest import REPOSITORY


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """`temporary(length)`: TMPDIR is a directory whose path has so many bytes."""

    def make(length: int) -> Path:
        directory = tmp_path
        while (left := length - len(str(directory)) - 1) > 0:
            directory /= "x" * (left if left <= 100 else 100 if left != 101 else 99)
        directory.mkdir(parents=True, exist_ok=True)
        assert len(str(directory)) == length
        monkeypatch.setenv("TMPDIR", str(directory))
        monkeypatch.setattr(tempfile, "tempdir", None)
        return directory

    return make


@pytest.mark.parametrize("length", [110, 150, 219])
def test_where_tmpdir_is_long_sockets_lie_in_tmp(temporary: Callable[[int], Path], length: int) -> None:
    temporary(length)
    with socket_directory() as directory, zmq.Context() as context, context.socket(zmq.ROUTER) as hub:
        assert directory.parent == Path("/tmp")
        for address in (hub_address(directory), f"ipc://{directory}/environment"):
            hub.bind(address)
    assert role_variables()["VLLM_RPC_BASE_PATH"] == "/tmp"
    check_inherited()


def test_a_short_tmpdir_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as own:
        monkeypatch.setattr(tempfile, "tempdir", own)
        assert socket_root() == Path(own)
        with socket_directory() as directory:
            assert directory.parent == Path(own)


def test_where_no_socket_can_lie_tmpdir_and_the_limit_are_named(
    temporary: Callable[[int], Path], small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary(150)
    monkeypatch.setattr(sockets.os, "access", lambda path, mode: str(path) != "/tmp")
    with pytest.raises(
        ConfigError, match=r"TMPDIR = '.*x' has 150 bytes; sockets need a printable path of at most 67, .*shorter dir"
    ):
        preflight(small())
    assert not Path(small().run_dir).exists()


def test_what_a_run_could_not_live_with_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    umask, ignored = os.umask(0o277), signal.getsignal(signal.SIGCHLD)
    try:
        with pytest.raises(ConfigError, match=r"umask 0277 takes from you the rights.* 022, or 077"):
            check_inherited()
        os.umask(0o077)
        check_inherited()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with pytest.raises(ConfigError, match="SIGCHLD is ignored"):
            check_inherited()
    finally:
        os.umask(umask)
        signal.signal(signal.SIGCHLD, ignored)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 4096))
    with pytest.raises(ConfigError, match=r"may open 64 files \(ulimit -n\), and a run needs 256"):
        check_inherited()
    for enough in (256, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda which, most=enough: (most, most))
        check_inherited()
    monkeypatch.setattr(locale, "getpreferredencoding", lambda do_setlocale: "ISO-8859-1")
    with pytest.raises(ConfigError, match=r"files are read as ISO-8859-1 \(LC_ALL, .*: set PYTHONUTF8=1"):
        check_inherited()


def test_the_command_does_not_inherit_that_the_ends_of_children_are_ignored() -> None:
    begin = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    look = "import signal; from async_rlhf.cli import commands as c; c.app = lambda: print(int(signal.getsignal(17))); c.main()"
    command = [sys.executable, "-c", begin, sys.executable, "-c", look]
    assert subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True).stdout == "0\n"


def test_a_role_always_writes_its_log_and_reads_files_as_utf_8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "read").write_bytes("é😀".encode())
    for name, value in {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}.items():
        monkeypatch.setenv(name, value)
    program = "import pathlib; print(pathlib.Path('read').read_text() + chr(0xD800))"
    said = subprocess.run([sys.executable, "-c", program], env=role_variables(), cwd=tmp_path, capture_output=True, check=True)
    assert said.stdout.decode() == "é😀\\ud800\n"
