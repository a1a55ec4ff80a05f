"""A DNS server that answers every question with one address, after a pause: `python -m tests.hosts.resolver FILE`.

FILE has the address and the pause in seconds; it is read at each question, so that the answer can change.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from pathlib import Path

A_RECORD = 1
_NAME_OF_THE_QUESTION = 0xC00C


def answer(question: bytes, address: str) -> bytes:
    """To a question of one name (RFC 1035, section 4.1); one that asks for no IPv4 address gets an answer without records."""
    end = question.index(0, 12) + 5
    kind = struct.unpack(">H", question[end - 4 : end - 2])[0]
    record = struct.pack(">HHHIH", _NAME_OF_THE_QUESTION, A_RECORD, 1, 0, 4) + socket.inet_aton(address)
    found = kind == A_RECORD
    header = question[:2] + struct.pack(">HHHHH", 0x8580, 1, int(found), 0, 0)
    return header + question[12:end] + record * found


def main(state: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 53))
        while True:
            question, asker = server.recvfrom(512)
            address, pause_s = state.read_text().split()
            time.sleep(float(pause_s))
            server.sendto(answer(question, address), asker)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
