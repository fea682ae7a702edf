"""jap-run's control server: authenticated JSON frames with members, engine agents and engines. Torch-free.

The asyncio counterpart of ``wire``. Every peer has a task of its own; sending never waits, so that a slow or silent
peer cannot hold up another. A peer that does not prove the key in time, floods, or does not read is dropped.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from slurm_jap import wire

MAX_MESSAGE = 16 << 20
"""Bytes of one control message: the largest is a member's ``join``, which holds its environment."""
MAX_UNSENT = 16 << 20
"""A peer that leaves this many bytes unread is dropped."""
MAX_STRANGERS = 512
"""Connections whose handshake is not finished; more are turned away at once."""

_PREFIX_BYTES = 8


class Peer:
    """One authenticated connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; never waits. A peer that is gone or does not read is dropped in silence."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            self._writer.transport.abort()
            return
        self._writer.write(wire.pack_json(message))

    async def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
            WireError: the peer closed the connection, or sent something else than a JSON object.
        """
        try:
            length, count = wire.unpack_prefix(await self._reader.readexactly(_PREFIX_BYTES))
            if count or length > MAX_MESSAGE:
                raise wire.WireError(f"control frame with a header of {length} bytes and {count} buffers")
            message = json.loads(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError:
            raise wire.WireError("connection closed by the peer") from None
        except OSError as error:
            raise wire.WireError(f"connection lost: {error}") from None
        except (ValueError, RecursionError):
            raise wire.WireError("a control frame is a JSON object") from None
        if not isinstance(message, dict):
            raise wire.WireError("a control frame is a JSON object")
        return message

    def close(self) -> None:
        """Close after what is queued has been sent."""
        self._writer.close()

    def abort(self) -> None:
        """Close now."""
        self._writer.transport.abort()


class ControlServer:
    """Accepts peers on a unix socket and, on request, on TCP; hands each to ``serve`` once it has proved the key."""

    def __init__(self, key: bytes, serve: Callable[[Peer], Awaitable[None]]) -> None:
        """``serve(peer)`` runs as the peer's own task; the connection closes when it returns or raises WireError."""
        self._key, self._serve = key, serve
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = 0

    async def listen_unix(self, path: Path) -> str:
        """Listen on a socket file, which its owner alone may use; return the address."""
        server = await asyncio.start_unix_server(self._accept, path=str(path), backlog=MAX_STRANGERS)
        os.chmod(path, 0o600)
        self._servers.append(server)
        return f"unix:{path}"

    async def listen_tcp(self) -> int:
        """Listen on all interfaces, on a port that the system chooses; return the port."""
        if socket.has_dualstack_ipv6():
            sock = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=MAX_STRANGERS)
        else:
            sock = socket.create_server(("", 0), backlog=MAX_STRANGERS)
        self._servers.append(await asyncio.start_server(self._accept, sock=sock))
        return int(sock.getsockname()[1])

    async def close(self) -> None:
        """Stop listening, let queued messages out for a moment, drop every peer."""
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            if self._strangers >= MAX_STRANGERS:
                return
            self._strangers += 1
            try:
                await asyncio.wait_for(self._handshake(reader, writer), wire.HANDSHAKE_SECONDS)
            finally:
                self._strangers -= 1
            if writer.transport.get_extra_info("socket").family != socket.AF_UNIX:
                writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._serve(Peer(reader, writer))
        except (wire.WireError, asyncio.IncompleteReadError, TimeoutError, asyncio.TimeoutError, OSError):
            pass
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours = wire.fresh_nonce()
        writer.write(ours)
        answer = await reader.readexactly(wire.NONCE_BYTES + wire.MAC_BYTES)
        theirs, proof = answer[: wire.NONCE_BYTES], answer[wire.NONCE_BYTES :]
        if not hmac.compare_digest(proof, wire.mac(self._key, b"client", ours, theirs)):
            raise wire.WireError("the peer does not know this attempt's key")
        writer.write(wire.mac(self._key, b"server", theirs, ours))
