"""Frames and the handshake: nothing is believed of a peer that does not know the key, and no wait lacks an end."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap import wire
from slurm_jap.wire import WireError

KEY = b"k" * 32
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


class Peer(threading.Thread):
    """The other side of a connection, in a thread whose error the test can look at."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self.join(20)
        assert not self.is_alive()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(20)
        theirs.settimeout(20)
        yield ours, theirs


@given(message=st.dictionaries(st.text(), json_values, max_size=4))
def test_control_frames_come_back(message: dict[str, Any]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(20)
        wire.send_json(ours, message)
        assert wire.recv_json(theirs) == message


@given(header=st.binary(max_size=50), lengths=st.lists(st.integers(0, 2**64 - 1), max_size=4))
def test_a_frame_names_its_header_and_buffers(header: bytes, lengths: list[int]) -> None:
    frame = wire.pack_frame(header, lengths)
    assert wire.unpack_prefix(frame[:8]) == (len(header), len(lengths))
    assert frame[8 : 8 + 8 * len(lengths)] == struct.pack(f"<{len(lengths)}Q", *lengths)
    assert frame[8 + 8 * len(lengths) :] == header


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak this protocol"),
        (struct.pack("<II", 2, 1) + b"{}", "carries no buffers"),
        (struct.pack("<II", 4, 0) + b"[{]}", "does not speak this protocol"),
        (struct.pack("<II", 2, 0) + b"\xff\xff", "does not speak this protocol"),
        (struct.pack("<II", 2, 0) + b"[]", "is a JSON object"),
        (struct.pack("<II", 200_000, 0) + b"[" * 200_000, "does not speak this protocol"),
        (struct.pack("<II", 10, 0) + b"{}", "closed by the peer"),
        (b"\0\0", "closed by the peer"),
        (b"", "closed by the peer"),
    ],
)
def test_what_is_no_control_frame_is_a_wire_error(
    pair: tuple[socket.socket, socket.socket], data: bytes, reason: str
) -> None:
    ours, theirs = pair

    def send() -> None:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)

    peer = Peer(send)
    with pytest.raises(WireError, match=reason):
        wire.recv_json(ours)
    peer.finish()


def test_sending_to_a_peer_that_left_is_a_wire_error(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(WireError, match="connection lost"):
        wire.send_json(ours, {"kind": "x"})


def test_handshake_joins_two_that_know_the_key(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    server = Peer(lambda: wire.server_handshake(theirs, KEY))
    wire.client_handshake(ours, KEY)
    server.finish()
    assert server.error is None
    wire.send_json(ours, {"kind": "join"})
    assert wire.recv_json(theirs) == {"kind": "join"}
    assert (ours.gettimeout(), theirs.gettimeout()) == (20, 20)


def test_server_refuses_a_client_without_the_key(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair

    def stranger() -> None:
        wire.client_handshake(theirs, b"other")

    client = Peer(stranger)
    with pytest.raises(WireError, match="does not know this attempt's key"):
        wire.server_handshake(ours, KEY)
    ours.close()
    client.finish()
    assert isinstance(client.error, WireError)


def test_client_refuses_a_server_without_the_key(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair

    def impostor() -> None:
        theirs.sendall(secrets.token_bytes(wire.NONCE_BYTES))
        wire.recv_exactly(theirs, wire.NONCE_BYTES + wire.MAC_BYTES)
        theirs.sendall(secrets.token_bytes(wire.MAC_BYTES))

    server = Peer(impostor)
    with pytest.raises(WireError, match="does not know this attempt's key"):
        wire.client_handshake(ours, KEY)
    server.finish()


def test_a_proof_cannot_be_sent_back_to_its_author(pair: tuple[socket.socket, socket.socket]) -> None:
    """A server that returns the client's own proof proves nothing: the roles are part of it."""
    ours, theirs = pair

    def mirror() -> None:
        theirs.sendall(b"n" * wire.NONCE_BYTES)
        answer = wire.recv_exactly(theirs, wire.NONCE_BYTES + wire.MAC_BYTES)
        theirs.sendall(answer[wire.NONCE_BYTES :])

    server = Peer(mirror)
    with pytest.raises(WireError, match="does not know this attempt's key"):
        wire.client_handshake(ours, KEY)
    server.finish()


@pytest.mark.parametrize("handshake", [wire.client_handshake, wire.server_handshake])
def test_a_silent_or_dripping_peer_is_given_up(
    pair: tuple[socket.socket, socket.socket],
    handshake: Callable[[socket.socket, bytes], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.5)
    ours, theirs = pair
    given_up = threading.Event()

    def drip() -> None:
        while not given_up.wait(0.1):
            theirs.sendall(b"x")

    peer = Peer(drip)
    with pytest.raises(WireError, match="no answer in time"):
        handshake(ours, KEY)
    given_up.set()
    peer.finish()


@pytest.mark.parametrize("handshake", [wire.client_handshake, wire.server_handshake])
def test_a_peer_that_hangs_up_is_a_wire_error(
    pair: tuple[socket.socket, socket.socket], handshake: Callable[[socket.socket, bytes], None]
) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(WireError, match="connection"):
        handshake(ours, KEY)


def listening(family: int, address: Any) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    server.bind(address)
    server.listen()
    server.settimeout(20)
    return server


def serve_once(server: socket.socket, key: bytes) -> Peer:
    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            wire.server_handshake(connection, key)
            wire.send_json(connection, {"kind": "hello"})

    return Peer(serve)


def test_connect_by_unix_and_tcp_address(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with listening(socket.AF_UNIX, path) as unix, listening(socket.AF_INET, ("127.0.0.1", 0)) as tcp:
        for server, address in ((unix, f"unix:{path}"), (tcp, f"tcp:127.0.0.1:{tcp.getsockname()[1]}")):
            peer = serve_once(server, KEY)
            with wire.connect(address, KEY) as connection:
                assert connection.gettimeout() is None
                assert wire.recv_json(connection) == {"kind": "hello"}
            peer.finish()
            assert peer.error is None


def test_connect_takes_the_first_address_that_answers(tmp_path: Path) -> None:
    with listening(socket.AF_INET, ("127.0.0.1", 0)) as server:
        peer = serve_once(server, KEY)
        address = f"unix:{tmp_path}/absent,tcp:127.0.0.1:{server.getsockname()[1]}"
        with wire.connect(address, KEY) as connection:
            assert wire.recv_json(connection) == {"kind": "hello"}
        peer.finish()


def test_connect_with_the_wrong_key_is_a_wire_error(tmp_path: Path) -> None:
    with listening(socket.AF_UNIX, str(tmp_path / "s")) as server:
        peer = serve_once(server, b"other")
        with pytest.raises(WireError, match="cannot connect to unix:"):
            wire.connect(f"unix:{tmp_path}/s", KEY)
        peer.finish()
        assert isinstance(peer.error, WireError)


@pytest.mark.parametrize(
    "address",
    [
        "", "unix:", "tcp:", "tcp:host", "tcp:host:", "tcp::1", "tcp:host:port", "tcp:127.0.0.1:99999", "http://x",
        "unix:/no/such", "unix:/" + "x" * 200,
    ],
)  # fmt: skip
def test_addresses_that_lead_nowhere_are_wire_errors(address: str) -> None:
    with pytest.raises(WireError, match=r"address|cannot connect"):
        wire.connect(address, KEY)


def test_versions_name_what_must_agree() -> None:
    found = wire.versions()
    assert set(found) == {"protocol", "slurm_jap", "python", "torch", "cloudpickle"}
    assert found["protocol"] == wire.PROTOCOL
    assert all(found.values())


def test_key_is_read_from_the_sweep_directory(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    assert wire.read_key(str(tmp_path)) == KEY
