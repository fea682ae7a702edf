"""The control server: nobody is heard before he has proved the key, and nobody holds up another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_jap import control, wire
from slurm_jap.control import ControlServer, Peer

KEY = bytes(range(32))


async def echo(peer: Peer) -> None:
    while True:
        peer.send(await peer.receive())


def serve(client: Callable[[str], object], tmp_path: Path, *, tcp: bool = False, serve_: object = echo) -> object:
    """Run a server in this thread's loop and ``client(address)`` in another thread."""

    async def main() -> object:
        server = ControlServer(KEY, serve_)  # type: ignore[arg-type]
        address = await server.listen_unix(tmp_path / "s")
        if tcp:
            address = f"tcp:localhost:{await server.listen_tcp()}"
        try:
            return await asyncio.wait_for(asyncio.to_thread(client, address), 60)
        finally:
            await server.close()

    return asyncio.run(main())


def open_socket(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(address.partition(":")[2])
    return sock


def exchange(address: str) -> None:
    with wire.connect(address, KEY) as sock:
        sock.settimeout(30)
        for number in range(3):
            wire.send_json(sock, {"kind": "x", "number": number, "name": "\udcff"})
            assert wire.recv_json(sock) == {"kind": "x", "number": number, "name": "\udcff"}


@pytest.mark.parametrize("tcp", [False, True])
def test_messages_travel_both_ways(tmp_path: Path, tcp: bool) -> None:
    serve(exchange, tmp_path, tcp=tcp)


def test_addresses_are_tried_in_turn(tmp_path: Path) -> None:
    serve(lambda address: exchange(f"unix:{tmp_path}/no,tcp:no.such.host.invalid:1,{address}"), tmp_path)
    with pytest.raises(wire.WireError, match=r"/no.*/neither"):
        wire.connect(f"unix:{tmp_path}/no,unix:{tmp_path}/neither", KEY)


def test_the_socket_belongs_to_its_owner(tmp_path: Path) -> None:
    modes = []
    serve(lambda address: modes.append(os.stat(address.partition(":")[2]).st_mode & 0o777), tmp_path)
    assert modes == [0o600]


def test_a_wrong_key_is_turned_away(tmp_path: Path) -> None:
    def client(address: str) -> None:
        with pytest.raises(wire.WireError):
            wire.connect(address, b"x" * 32)
        exchange(address)

    serve(client, tmp_path)


@pytest.mark.parametrize("first", [b"", b"x" * 10, b"x" * 64, b"GET / HTTP/1.0\r\n\r\n" * 10])
def test_silent_and_garbling_strangers_hold_up_nobody(tmp_path: Path, first: bytes) -> None:
    def client(address: str) -> None:
        strangers = [open_socket(address) for _ in range(40)]
        for stranger in strangers:
            stranger.sendall(first)
        exchange(address)
        for stranger in strangers:
            stranger.close()
        exchange(address)

    serve(client, tmp_path)


def test_a_stranger_who_says_nothing_is_dropped_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.3)

    def client(address: str) -> None:
        with open_socket(address) as stranger:
            assert len(stranger.recv(32)) == 32
            stranger.sendall(b"y")
            assert stranger.recv(1) == b""

    serve(client, tmp_path)


def test_too_many_strangers_are_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_STRANGERS", 3)

    def client(address: str) -> None:
        strangers = [open_socket(address) for _ in range(3)]
        for stranger in strangers:
            assert len(stranger.recv(32)) == 32
        with open_socket(address) as late:
            assert late.recv(32) == b""
        for stranger in strangers:
            stranger.close()

    serve(client, tmp_path)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff" * 8,
        wire.pack_frame(b"not json"),
        wire.pack_frame(b"[1]"),
        wire.pack_frame(b"{}", [3]) + b"abc",
        wire.pack_frame(b"[" * 100_000),
        wire.pack_frame(b'{"kind": "x"}')[:-3],
    ],
)
def test_what_is_no_message_ends_the_connection_alone(tmp_path: Path, frame: bytes) -> None:
    def client(address: str) -> None:
        with wire.connect(address, KEY) as sock, wire.connect(address, KEY) as other:
            sock.settimeout(30)
            sock.sendall(frame)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""
            wire.send_json(other, {"kind": "still here"})
            assert wire.recv_json(other) == {"kind": "still here"}

    serve(client, tmp_path)


def test_a_peer_that_does_not_read_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_UNSENT", 1 << 20)

    async def flood(peer: Peer) -> None:
        said = await peer.receive()
        if said["kind"] == "flood":
            for _ in range(1000):
                peer.send({"kind": "x" * 100_000})
        peer.send({"kind": "done"})
        await peer.receive()

    def client(address: str) -> None:
        with wire.connect(address, KEY) as lazy, wire.connect(address, KEY) as other:
            wire.send_json(lazy, {"kind": "flood"})
            wire.send_json(other, {"kind": "hello"})
            assert wire.recv_json(other) == {"kind": "done"}
            lazy.settimeout(30)
            kinds = []
            with contextlib.suppress(wire.WireError):
                while not kinds or kinds[-1] != "done":
                    kinds.append(wire.recv_json(lazy)["kind"])
            assert "done" not in kinds

    serve(client, tmp_path, serve_=flood)
