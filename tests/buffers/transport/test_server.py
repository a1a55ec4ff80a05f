"""The socket that every server of the system listens at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq

from async_rlhf.buffers.transport.server import ServerSocket


def make(address: str) -> ServerSocket:
    return ServerSocket(address, max_part_bytes=1000, max_message_bytes=2000, max_unread=10)


def test_a_wake_after_the_end_writes_into_nothing_that_has_the_place_of_its_pipe(socket_dir: Path) -> None:
    server = make(f"ipc://{socket_dir}/server")
    server.close()
    readable, writable = os.pipe()  # most likely the numbers that were just given back
    try:
        os.set_blocking(readable, False)
        server.wake()
        with pytest.raises(BlockingIOError):
            os.read(readable, 1)
    finally:
        os.close(readable)
        os.close(writable)


def test_an_address_that_is_taken_is_refused_and_leaves_nothing_open(socket_dir: Path) -> None:
    address = f"tcp://127.0.0.1:{make_port(first := make('tcp://127.0.0.1:*'))}"
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with pytest.raises(zmq.ZMQError):
        make(address)
    after = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    first.close()
    assert len(after) == len(before)


def make_port(server: ServerSocket) -> str:
    return server.address.rpartition(":")[2]
