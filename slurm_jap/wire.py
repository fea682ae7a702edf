"""Frames and the handshake that jap-run, members and engines speak. No torch, and nothing is unpickled here.

A frame is ``u32 header length | u32 buffer count | u64 length * count | header | buffers``. On the control connection
(to jap-run) headers are JSON and there are no buffers; on data connections (see ``transport``) headers are pickles,
which is why no frame is read before the handshake below has succeeded.

Handshake, both sides knowing the attempt's random key:

    server -> client   nonce_s
    client -> server   nonce_c | HMAC(key, "client" | nonce_s | nonce_c)
    server -> client   HMAC(key, "server" | nonce_c | nonce_s)

Addresses are strings: ``unix:/path`` or ``tcp:host:port``; where one process can be reached in several ways, several
with commas between them, which :func:`connect` tries in turn.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from slurm_jap._version import __version__
from slurm_jap.environment import ENV_CONTROL as ENV_CONTROL
from slurm_jap.environment import ENV_JOB_ID as ENV_JOB_ID
from slurm_jap.environment import ENV_MEMBER as ENV_MEMBER
from slurm_jap.environment import ENV_NODE as ENV_NODE
from slurm_jap.environment import ENV_SOCKET_DIR as ENV_SOCKET_DIR
from slurm_jap.environment import ENV_SWEEP_DIR as ENV_SWEEP_DIR
from slurm_jap.errors import EngineFault

PROTOCOL = 1
NONCE_BYTES = 32
MAC_BYTES = hashlib.sha256().digest_size
MAX_HEADER = 1 << 28
HANDSHAKE_SECONDS = 30.0
CONNECT_SECONDS = 30.0

_PREFIX = struct.Struct("<II")


class WireError(EngineFault):
    """The peer is not one of this attempt's processes, speaks another protocol, or went away."""


def mac(key: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    """The proof that ``role`` knows ``key``."""
    return hmac.new(key, role + first + second, hashlib.sha256).digest()


def fresh_nonce() -> bytes:
    """Random bytes for one handshake."""
    return secrets.token_bytes(NONCE_BYTES)


def versions() -> dict[str, Any]:
    """What must be equal on both sides of a data connection before anything is unpickled."""

    def version_of(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {
        "protocol": PROTOCOL,
        "slurm_jap": __version__,
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "cloudpickle": version_of("cloudpickle"),
    }


def pack_frame(header: bytes, lengths: Sequence[int] = ()) -> bytes:
    """The frame's bytes up to and including the header; the buffers follow as they are."""
    return _PREFIX.pack(len(header), len(lengths)) + struct.pack(f"<{len(lengths)}Q", *lengths) + header


def unpack_prefix(data: bytes) -> tuple[int, int]:
    """Header length and buffer count of the first 8 bytes."""
    length, count = _PREFIX.unpack(data)
    if length > MAX_HEADER:
        raise WireError(f"frame header of {length} bytes: the peer does not speak this protocol")
    return length, count


def pack_json(message: dict[str, Any]) -> bytes:
    """A control frame."""
    return pack_frame(json.dumps(message).encode())


def recv_exactly(sock: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Read ``count`` bytes from a blocking socket.

    Args:
        deadline: a ``time.monotonic()`` by which all of them must be there, however slowly the peer drips.

    Raises:
        WireError: the peer closed first, or the deadline or the socket's own time-out passed.
    """
    chunks = bytearray()
    while len(chunks) < count:
        if deadline is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            chunk = sock.recv(count - len(chunks))
        except TimeoutError:
            raise WireError("no answer in time") from None
        except OSError as error:
            raise WireError(f"connection lost: {error}") from None
        if not chunk:
            raise WireError("connection closed by the peer")
        chunks += chunk
    return bytes(chunks)


def send_json(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send one control frame on a blocking socket."""
    _send(sock, pack_json(message))


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError as error:
        raise WireError(f"connection lost: {error}") from None


def recv_json(sock: socket.socket) -> dict[str, Any]:
    """Receive one control frame from a blocking socket."""
    length, count = unpack_prefix(recv_exactly(sock, _PREFIX.size))
    if count:
        raise WireError("a control frame carries no buffers")
    try:
        message = json.loads(recv_exactly(sock, length))
    except (ValueError, RecursionError):
        raise WireError("a control frame is JSON: the peer does not speak this protocol") from None
    if not isinstance(message, dict):
        raise WireError("a control frame is a JSON object")
    return message


def client_handshake(sock: socket.socket, key: bytes) -> None:
    """Prove the key to the server and have it proved; blocking.

    Raises:
        WireError: the peer does not know the key, or does not answer in time.
    """
    previous, deadline = sock.gettimeout(), time.monotonic() + HANDSHAKE_SECONDS
    theirs, ours = recv_exactly(sock, NONCE_BYTES, deadline), fresh_nonce()
    _send(sock, ours + mac(key, b"client", theirs, ours))
    if not hmac.compare_digest(recv_exactly(sock, MAC_BYTES, deadline), mac(key, b"server", ours, theirs)):
        raise WireError("the peer does not know this attempt's key")
    sock.settimeout(previous)


def server_handshake(sock: socket.socket, key: bytes) -> None:
    """The server's half; blocking, same errors."""
    previous, deadline = sock.gettimeout(), time.monotonic() + HANDSHAKE_SECONDS
    sock.settimeout(HANDSHAKE_SECONDS)
    ours = fresh_nonce()
    _send(sock, ours)
    answer = recv_exactly(sock, NONCE_BYTES + MAC_BYTES, deadline)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, mac(key, b"client", ours, theirs)):
        raise WireError("the peer does not know this attempt's key")
    _send(sock, mac(key, b"server", theirs, ours))
    sock.settimeout(previous)


def connect(address: str, key: bytes) -> socket.socket:
    """Open an authenticated blocking connection to the first of the ``address``es that answers.

    Raises:
        WireError: nobody listens there, or the handshake failed; the message names every address.
    """
    failures = []
    for one in address.split(","):
        try:
            return _connect(one, key)
        except WireError as error:
            failures.append(str(error))
    raise WireError("; ".join(failures))


def _connect(address: str, key: bytes) -> socket.socket:
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if not ((scheme == "unix" and rest) or (scheme == "tcp" and host and port.isdecimal())):
        raise WireError(f"address {address!r}: expected unix:PATH or tcp:HOST:PORT")
    sock: socket.socket | None = None
    try:
        if scheme == "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(CONNECT_SECONDS)
            sock.connect(rest)
        else:
            sock = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client_handshake(sock, key)
        sock.settimeout(None)
    except (OSError, OverflowError, WireError) as error:
        if sock is not None:
            sock.close()
        raise WireError(f"cannot connect to {address}: {error}") from None
    return sock


def make_socket_folder() -> str:
    """A new node-local 0700 folder whose path leaves room for socket names (108 bytes in all on Linux).

    Raises:
        OSError: none of the usual places can be written.
    """
    places = [place for place in (tempfile.gettempdir(), "/tmp", "/dev/shm") if len(os.fsencode(place)) <= 60]
    failure = OSError("no short folder for sockets: set TMPDIR to a writable folder whose path has at most 60 bytes")
    for place in places:
        try:
            return tempfile.mkdtemp(prefix="jap-", dir=place)
        except OSError as error:
            failure = error
    raise failure


def read_key(sweep_dir: str) -> bytes:
    """The attempt's key, from its 0600 file."""
    with open(os.path.join(sweep_dir, "key"), "rb") as file:
        return file.read()


def reachable_names(node: str, node_address: str, environment: Mapping[str, str]) -> list[str]:
    """Names and addresses of this node that other nodes may try, the likeliest first."""
    if environment.get("JAP_TCP_HOST"):
        return [environment["JAP_TCP_HOST"].replace("{node}", node)]
    host = socket.gethostname()
    candidates = [node_address, node, host, socket.getfqdn(), environment.get("SLURM_LAUNCH_NODE_IPADDR", "")]
    return list(dict.fromkeys(c for c in candidates if c and "," not in c))
