"""Minimum processor time for the transfer of a shard from a peer: each part of the transfer alone, in memory.

python benchmarks/checkpoint_floor.py [--mebibytes 1016] [--runs N] [--json FILE]

The unit is processor seconds, because other load on the machine affects them less than elapsed seconds. Of several
runs, use the one with the least processor time. If both ends of a transfer share two cores, it takes at least half of
the sum of all parts.
"""

import argparse
import base64
import contextlib
import os
import socket
import ssl
import tempfile
import threading
import time
import zlib
from pathlib import Path

import report

from concertina.agents.authority import Authority
from concertina_agent.net import tls

UID, PIECE = "bench", 1 << 18


class Secure:
    """Both ends of a TLS connection with the agents' settings, connected in memory without a socket."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in Authority(b"k" * 32, UID, time.time()).secret_data().items():
                (Path(folder) / name).write_bytes(base64.b64decode(content))
            client, server = tls.client_context(Path(folder)), tls.server_context(Path(folder))
        self.there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.leaving = ssl.MemoryBIO()
        self.holder = server.wrap_bio(back, self.leaving, server_side=True)
        self.receiver = client.wrap_bio(self.there, back, server_hostname=f"{UID}.agent")
        for end in (self.receiver, self.holder, self.receiver, self.holder):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
            self.there.write(self.leaving.read())

    def encrypt(self, piece: memoryview) -> bytes:
        self.holder.write(piece)
        return self.leaving.read()

    def decrypt(self, data: bytes, into: memoryview) -> None:
        self.there.write(data)
        while into:
            into = into[self.receiver.read(len(into), into) :]  # type: ignore[index]  # given a buffer it is how many


def parts(pieces: int, folder: Path) -> dict[str, float]:
    """Return the processor seconds of each part of a transfer, such as encryption, for `pieces` pieces of data."""
    piece, into, target = memoryview(os.urandom(PIECE)), memoryview(bytearray(PIECE)), bytearray(pieces * PIECE)
    seconds: dict[str, float] = {}
    last = time.process_time()

    def took(part: str) -> None:
        nonlocal last
        now = time.process_time()
        seconds[part] = seconds.get(part, 0.0) + now - last
        last = now

    with (folder / "shard").open("w+b", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, pieces * PIECE)
        took("receiver: room for the file")
        for _ in range(pieces):
            file.write(piece)
        took("receiver: write")
        file.seek(0)
        while file.readinto(into):
            pass
        took("holder: read")
    secure = Secure()
    took("(handshake)")
    for _ in range(pieces):
        data = secure.encrypt(piece)
        took("holder: TLS")
        secure.decrypt(data, into)
        took("receiver: TLS")
    for _ in range(pieces):
        zlib.crc32(piece)
    took("receiver: crc32")
    for at in range(0, len(target), PIECE):
        target[at : at + PIECE] = piece
    took("(pages)")
    for at in range(0, len(target), PIECE):
        target[at : at + PIECE] = piece
    took("(memcpy)")
    plain_tcp(pieces, piece, into)
    took("both: plain TCP")
    return seconds


def plain_tcp(pieces: int, piece: memoryview, into: memoryview) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as out:

        def send() -> None:
            for _ in range(pieces):
                out.sendall(piece)

        sender = threading.Thread(target=send)
        sender.start()
        with listening.accept()[0] as connection:
            left = pieces * PIECE
            while left:
                left -= connection.recv_into(into)
        sender.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--mebibytes", type=int, default=1016)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, list[float]] = {}
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            for part, seconds in parts(options.mebibytes * 2**20 // PIECE, Path(folder)).items():
                rows.setdefault(part, []).append(seconds)
    rows["sum"] = [
        sum(run) for run in zip(*(part_runs for part, part_runs in rows.items() if part[0] != "("), strict=True)
    ]
    report.show(f"{options.mebibytes} MiB from a peer, parts, processor seconds; {ssl.OPENSSL_VERSION}", rows)
    report.write(options.json, "checkpoint_floor", rows)


if __name__ == "__main__":
    main()
