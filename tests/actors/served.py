"""Servers of users' code in threads of a test, and a client that sends what no client of ours sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from async_rlhf.actors.workers.messages import SERVED, Message, frames_of
from async_rlhf.actors.workers.service import WorkerService


@contextmanager
def running(server: WorkerService) -> Iterator[WorkerService]:
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


class Peer:
    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy(linger=0)

    def send(self, *messages: Message | bytes | list[bytes]) -> None:
        for message in messages:
            frames = [message] if isinstance(message, bytes) else message
            self._socket.send_multipart(frames if isinstance(frames, list) else frames_of(frames, SERVED))

    def receive(self) -> Message:
        assert self._socket.poll(60_000), "nothing was answered"
        return SERVED.unpack(self._socket.recv())
