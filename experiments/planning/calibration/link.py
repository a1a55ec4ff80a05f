"""The loopback link, measured with plain TCP: what processes of one machine reach between them at best."""

from __future__ import annotations

import socket
import threading
import time

_BYTES = 64 << 20
_ROUNDS, _TRANSFERS = 200, 3
_DEADLINE_S = 60.0


def measure_loopback() -> tuple[float, float]:
    """Seconds of latency, half of the median way there and back of one byte; bytes a second. Raises OSError."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        answers = threading.Thread(target=_answer, args=(server,), daemon=True)
        answers.start()
        with socket.create_connection(server.getsockname(), timeout=_DEADLINE_S) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            latencies = sorted(_round_s(client, b".") for _ in range(_ROUNDS))
            seconds = min(_round_s(client, bytes(_BYTES)) for _ in range(_TRANSFERS))
        answers.join()
    return latencies[_ROUNDS // 2] / 2, _BYTES / seconds


def _round_s(client: socket.socket, sent: bytes) -> float:
    began = time.perf_counter()
    client.sendall(sent)
    client.recv(1)
    return time.perf_counter() - began


def _answer(server: socket.socket) -> None:
    """One byte for each message: those of one byte, then the large ones. Ends when the client closes its end."""
    connection, _ = server.accept()
    buffer = bytearray(1 << 20)
    with connection:
        connection.settimeout(_DEADLINE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for size in [1] * _ROUNDS + [_BYTES] * _TRANSFERS:
            while size and (received := connection.recv_into(buffer, min(size, len(buffer)))):
                size -= received
            connection.sendall(b".")
