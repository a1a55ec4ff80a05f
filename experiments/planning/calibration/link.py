"""The loopback link, measured with plain TCP: what processes of one machine reach between them at best."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

_BYTES = 64 << 20
_ROUNDS = 200


@dataclass(frozen=True)
class Loopback:
    """latency_s: half of the median way there and back of one byte."""

    latency_s: float
    bytes_per_s: float


def measure_loopback() -> Loopback:
    with socket.create_server(("127.0.0.1", 0)) as server:
        echo = threading.Thread(target=_answer, args=(server,), daemon=True)
        echo.start()
        with socket.create_connection(server.getsockname()) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rounds = sorted(_round_s(client, b".", 1) for _ in range(_ROUNDS))
            seconds = min(_round_s(client, bytes(_BYTES), 1) for _ in range(3))
        echo.join()
    return Loopback(rounds[_ROUNDS // 2] / 2, _BYTES / seconds)


def _round_s(client: socket.socket, sent: bytes, answer: int) -> float:
    began = time.perf_counter()
    client.sendall(sent)
    client.recv(answer)
    return time.perf_counter() - began


def _answer(server: socket.socket) -> None:
    """One byte for each message: those of one byte, then the large ones."""
    connection, _ = server.accept()
    buffer = bytearray(1 << 20)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_ROUNDS):
            connection.recv(1)
            connection.sendall(b".")
        received = 0
        while count := connection.recv_into(buffer):
            received += count
            if received == _BYTES:
                received = 0
                connection.sendall(b".")
