"""Data connections: frames with a message, a tree and its tensors, over authenticated sockets.

One ``Hub`` per process owns every connection and one I/O thread. Reading never waits for the main thread and writing
never blocks it: a send goes out at once as far as the socket takes it, the rest from the I/O thread. Each connection
is a FIFO in both directions.

Between processes of one node (unix sockets) large tensors travel as a ``memfd`` whose descriptor is passed along: one
copy, no name in the file system, nothing left behind by a process that dies. Between nodes they follow in the stream.

A frame's header is the pickle of ``(message, tree bytes, tensor layouts)``; it is read only after the handshake of
``wire`` and the comparison of versions, which ``greet`` and ``welcome`` do first.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import itertools
import mmap
import os
import pickle
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slurm_jap import trees, wire
from slurm_jap.errors import UsageError
from slurm_jap.wire import WireError

SHARED_FROM = 1 << 18
"""Bytes of tensors in one frame from which a memfd is cheaper than two copies through a socket."""
_CHUNK = 1 << 16
_PIECES = 64
"""Buffers in one system call, far below IOV_MAX."""
_LENGTH = struct.Struct("<Q")


class Layout(NamedTuple):
    """How a tensor lies in its buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    offset: int
    """In the memfd; -1: the buffer follows in the stream."""


class Received(NamedTuple):
    """One frame; ``message`` None means that the connection has ended, for ``reason``."""

    connection: Connection
    message: tuple[Any, ...] | None
    body: bytes
    tensors: list[Tensor]
    reason: str = ""

    def tree(self) -> Any:
        """The tree, with its tensors in place."""
        return trees.decode(self.body, self.tensors)


def _bytes_of(tensor: Tensor) -> memoryview:
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A dense CPU tensor with the values of ``tensor`` (itself where possible)."""
    if tensor.layout is not torch.strided:
        raise UsageError("a sparse tensor cannot be sent between stages or to them; pass tensor.to_dense()")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    return tensor if trees.is_dense(tensor) else tensor.contiguous()


class Connection:
    """One authenticated peer. ``send`` may be called from any thread."""

    def __init__(self, hub: Hub, sock: socket.socket, tag: Any) -> None:
        self.tag = tag
        self._hub = hub
        self.sock = sock
        self._local = sock.family == socket.AF_UNIX
        self._lock = threading.Lock()
        self._out: deque[tuple[memoryview, Any, int | None]] = deque()
        self.closed = False
        self._staged = bytearray()
        self._fds: deque[int] = deque()
        self._frame: _Frame | None = None

    def send(self, message: tuple[Any, ...], tree: Any = None, *, copy: bool = False) -> None:
        """Queue one frame; a peer that is gone is reported by the hub, not here.

        Args:
            copy: whether the caller may change the tree's tensors right after.
        """
        body, found = trees.encode(tree)
        self.send_encoded(message, body, found, copy=copy)

    def send_encoded(
        self, message: tuple[Any, ...], body: bytes, found: Sequence[Tensor], *, copy: bool = False
    ) -> None:
        """The same with an already encoded tree."""
        dense = [_in_memory_order(t) for t in found]
        sizes = [t.numel() * t.element_size() for t in dense]
        shared = self._local and sum(sizes) >= SHARED_FROM
        layouts, offset = [], 0
        for tensor, original, size in zip(dense, found, sizes, strict=True):
            place = offset if shared else -1
            layouts.append(Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), original.requires_grad, place))
            offset += -(-size // trees.ALIGNMENT) * trees.ALIGNMENT
        header = pickle.dumps((message, body, layouts, offset if shared else 0), protocol=5)
        if len(header) > wire.MAX_HEADER:
            raise UsageError(
                f"{len(header) >> 20} MiB beside tensors cannot be sent to the engine, {wire.MAX_HEADER >> 20} MiB "
                "can; hold large arrays as tensors, in buffers or parameters"
            )
        pieces: list[tuple[memoryview, Any, int | None]] = []
        if shared:
            descriptor = _share(dense, layouts, offset)
            pieces.append((memoryview(wire.pack_frame(header)), None, descriptor))
        else:
            pieces.append((memoryview(wire.pack_frame(header, sizes)), None, None))
            for tensor, size in zip(dense, sizes, strict=True):
                if size:
                    view = _bytes_of(tensor)
                    pieces.append((memoryview(bytes(view)), None, None) if copy else (view, tensor, None))
        self._queue(pieces)

    def _queue(self, pieces: list[tuple[memoryview, Any, int | None]]) -> None:
        with self._lock:
            if self.closed:
                for _, _, descriptor in pieces:
                    if descriptor is not None:
                        os.close(descriptor)
                return
            self._out.extend(pieces)
            done = self._flush()
        if not done:
            self._hub.wants_to_write(self)

    def _flush(self) -> bool:
        """Write what the socket takes; True when nothing is left. Needs the lock."""
        while self._out:
            view, keep, descriptor = self._out[0]
            try:
                if descriptor is not None:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
                    sent = self.sock.sendmsg([view], rights)
                    os.close(descriptor)
                    descriptor = None
                elif len(self._out) > 1:
                    # What belongs together leaves together, and wakes the peer once.
                    views = [piece[0] for piece in itertools.takewhile(lambda p: p[2] is None, self._out)]
                    self._sent(self.sock.sendmsg(views[:_PIECES]))
                    continue
                else:
                    sent = self.sock.send(view)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                self._drop_output()
                self._hub.close_connection(self)  # a frame is lost: the peer must not wait for it
                return True
            if sent == len(view):
                self._out.popleft()
            else:
                self._out[0] = (view[sent:], keep, descriptor)
        return True

    def _sent(self, count: int) -> None:
        """So many bytes of what is queued have left. Needs the lock."""
        while count:
            view, keep, descriptor = self._out[0]
            if count < len(view):
                self._out[0] = (view[count:], keep, descriptor)
                return
            count -= len(view)
            self._out.popleft()

    def _drop_output(self) -> None:
        for _, _, descriptor in self._out:
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._out.clear()

    def flush_later(self) -> bool:
        """I/O thread: write on; True when nothing is left."""
        with self._lock:
            return self._flush()

    def drained(self) -> bool:
        """Whether everything sent so far has left this process."""
        with self._lock:
            return not self._out

    def close(self) -> None:
        """End the connection, from any thread; the hub reports it once."""
        self._hub.close_connection(self)

    # --- reading (I/O thread) ---------------------------------------------------------------------------------------

    def read(self, deliver: Callable[[Received], None]) -> None:
        """Take what has arrived.

        Raises:
            OSError, EOFError, WireError: the connection has ended.
        """
        frame = self._frame
        if frame is not None and frame.pending is not None and not self._staged:
            view = frame.pending
            count = self.sock.recv_into(view)
            if count == 0:
                raise EOFError
            frame.advance(count)
        else:
            if self._local:
                data, ancillary, _, _ = self.sock.recvmsg(_CHUNK, socket.CMSG_SPACE(16 * 4))
                for level, kind, payload in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        received = array.array("i")
                        received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                        self._fds.extend(received)
            else:
                data = self.sock.recv(_CHUNK)
            if not data:
                raise EOFError
            self._staged += data
        self._parse(deliver)

    def _parse(self, deliver: Callable[[Received], None]) -> None:
        while True:
            if self._frame is None:
                if len(self._staged) < 8:
                    return
                length, count = wire.unpack_prefix(bytes(self._staged[:8]))
                need = 8 + 8 * count + length
                if len(self._staged) < need:
                    return
                sizes = [_LENGTH.unpack_from(self._staged, 8 + 8 * i)[0] for i in range(count)]
                header = bytes(self._staged[8 + 8 * count : need])
                del self._staged[:need]
                self._frame = _Frame(header, sizes, self._fds)
            frame = self._frame
            while frame.pending is not None and self._staged:
                take = min(len(frame.pending), len(self._staged))
                frame.pending[:take] = self._staged[:take]
                del self._staged[:take]
                frame.advance(take)
            if frame.pending is not None:
                return
            self._frame = None
            deliver(Received(self, frame.message, frame.body, frame.tensors))

    def release(self) -> None:
        """I/O thread: close the descriptors."""
        with self._lock:
            self.closed = True
            self._drop_output()
        for descriptor in self._fds:
            os.close(descriptor)
        self._fds.clear()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # processes forked meanwhile hold the socket too
        self.sock.close()


class _Frame:
    """A frame that is being read."""

    def __init__(self, header: bytes, sizes: list[int], fds: deque[int]) -> None:
        self.message, self.body, layouts, shared = pickle.loads(header)
        self.tensors: list[Tensor] = []
        self._views: deque[memoryview] = deque()
        region = None
        if shared:
            descriptor = fds.popleft()
            try:
                region = mmap.mmap(descriptor, shared)
            finally:
                os.close(descriptor)
        for layout in layouts:
            count = 1
            for size in layout.shape:
                count *= size
            if count == 0:
                flat = torch.empty(0, dtype=layout.dtype)
            elif region is not None:
                flat = torch.frombuffer(region, dtype=layout.dtype, count=count, offset=layout.offset)
            else:
                flat = torch.empty(count, dtype=layout.dtype)
                self._views.append(_bytes_of(flat))
            tensor = flat.as_strided(layout.shape, layout.stride)
            self.tensors.append(tensor.requires_grad_(True) if layout.requires_grad else tensor)
        if [len(view) for view in self._views] != [size for size in sizes if size]:
            raise WireError("a frame's buffers do not fit its layouts")

    @property
    def pending(self) -> memoryview | None:
        """What is still to be filled."""
        return self._views[0] if self._views else None

    def advance(self, count: int) -> None:
        """``count`` bytes of ``pending`` are filled."""
        rest = self._views[0][count:]
        if rest:
            self._views[0] = rest
        else:
            self._views.popleft()


def _share(dense: list[Tensor], layouts: list[Layout], size: int) -> int:
    descriptor = os.memfd_create("jap", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as region:
            whole = torch.frombuffer(region, dtype=torch.uint8)
            for tensor, layout in zip(dense, layouts, strict=True):
                if tensor.numel():
                    count = tensor.numel() * tensor.element_size()
                    source = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                    whole[layout.offset : layout.offset + count].copy_(source)
            del whole
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Hub:
    """Owns connections and the I/O thread; ``deliver`` is called there with every frame and every end."""

    def __init__(self, deliver: Callable[[Received], None]) -> None:
        self._deliver = deliver
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._todo: deque[Callable[[], None]] = deque()
        self._stopping = self._ended = False
        self._thread = threading.Thread(target=self._loop, name="jap-io", daemon=True)
        self._thread.start()

    def add(self, sock: socket.socket, tag: Any) -> Connection:
        """Take over a connected, authenticated socket."""
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, 1 << 22)
        connection = Connection(self, sock, tag)
        self._later(lambda: self._register(connection))
        return connection

    def wants_to_write(self, connection: Connection) -> None:
        """A send was cut short: finish it when the socket takes more."""
        self._later(lambda: self._watch(connection, selectors.EVENT_READ | selectors.EVENT_WRITE))

    def close_connection(self, connection: Connection) -> None:
        """See :meth:`Connection.close`."""
        self._later(lambda: self._end(connection, "closed here"))

    def stop(self) -> None:
        """End the I/O thread and every connection."""
        self._stopping = True
        self._later(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _later(self, action: Callable[[], None]) -> None:
        self._todo.append(action)
        if not self._ended:
            with contextlib.suppress(BlockingIOError, OSError):
                os.write(self._wake_write, b"x")

    def _register(self, connection: Connection) -> None:
        self._selector.register(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _watch(self, connection: Connection, events: int) -> None:
        if not connection.closed and connection.sock in self._selector.get_map():
            self._selector.modify(connection.sock, events, connection)

    def _end(self, connection: Connection, reason: str) -> None:
        if connection.closed:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.release()
        self._deliver(Received(connection, None, b"", [], reason))

    def _loop(self) -> None:
        while not self._stopping:
            for ready, events in self._selector.select():
                connection = ready.data
                if connection is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    continue
                if connection.closed:
                    continue
                if events & selectors.EVENT_WRITE and connection.flush_later():
                    self._watch(connection, selectors.EVENT_READ)
                if events & selectors.EVENT_READ:
                    self._read(connection)
            while self._todo:
                self._todo.popleft()()
        self._ended = True
        while self._todo:
            self._todo.popleft()()
        for ready in list(self._selector.get_map().values()):
            if ready.data is not None:
                ready.data.release()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _read(self, connection: Connection) -> None:
        try:
            connection.read(self._deliver)
        except (BlockingIOError, InterruptedError):
            return
        except EOFError:
            self._end(connection, "closed by the peer")
        except Exception as error:  # a frame that cannot be read ends this connection alone
            self._end(connection, f"{type(error).__name__}: {error}")


# --- opening a data connection ---------------------------------------------------------------------------------------


def greet(sock: socket.socket, who: dict[str, Any]) -> None:
    """Client's side, after the handshake: say who one is, and compare versions.

    Raises:
        WireError: the peer refuses; its reason is the message.
    """
    wire.send_json(sock, {"kind": "hello", "versions": wire.versions(), **who})
    reply = wire.recv_json(sock)
    if reply.get("kind") != "welcome":
        raise WireError(str(reply.get("reason", reply)))


def welcome(sock: socket.socket) -> dict[str, Any]:
    """Server's side: what the peer said of itself.

    Raises:
        WireError: its versions differ; it has been told so.
    """
    hello = wire.recv_json(sock)
    theirs, ours = hello.get("versions"), wire.versions()
    if theirs != ours:
        different = {k: (theirs.get(k), v) for k, v in ours.items() if theirs.get(k) != v} if theirs else "none given"
        reason = f"versions differ (theirs, ours): {different}; use one environment for all members"
        wire.send_json(sock, {"kind": "refused", "reason": reason})
        raise WireError(reason)
    wire.send_json(sock, {"kind": "welcome"})
    return hello


def connect_to(engine: dict[str, Any], node: str, key: bytes, who: dict[str, Any]) -> socket.socket:
    """Open an authenticated, greeted data connection to an engine (see docs/design.md), by the shortest way.

    Raises:
        WireError: none of its addresses answered.
    """
    local = [a for a in engine["addresses"] if a.startswith("unix:")] if engine.get("node", "") == node else []
    candidates = local + [a for a in engine["addresses"] if not a.startswith("unix:")]
    problems = []
    for address in candidates:
        try:
            sock = wire.connect(address, key)
        except WireError as error:
            problems.append(str(error))
            continue
        greet(sock, who)
        return sock
    raise WireError(
        f"cannot reach stage {engine.get('stage')} of group {engine.get('group')} on node {engine.get('node')!r}: "
        + "; ".join(problems or ["it has no address for this node"])
    )


class Listener:
    """Accepts data connections; each newcomer is authenticated in a thread of its own, so none delays another."""

    def __init__(
        self, sockets: Sequence[socket.socket], key: bytes, accept: Callable[[socket.socket, Any], None]
    ) -> None:
        self._key, self._accept = key, accept
        for sock in sockets:
            threading.Thread(target=self._serve, args=(sock,), name="jap-accept", daemon=True).start()

    def _serve(self, server: socket.socket) -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                if server.fileno() < 0:
                    return
                time.sleep(0.1)  # out of descriptors, or the peer has gone again
                continue
            threading.Thread(target=self._admit, args=(sock,), daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.server_handshake(sock, self._key)
            sock.settimeout(wire.HANDSHAKE_SECONDS)
            hello = welcome(sock)
            sock.settimeout(None)
        except (OSError, WireError, ValueError):
            sock.close()
            return
        self._accept(sock, hello)


def bind(directory: str, name: str, node: str, *, tcp: bool) -> tuple[list[socket.socket], list[str]]:
    """Listening sockets, bound before their addresses are told: a unix one, and with ``tcp`` one on a free port.

    Returns:
        The sockets, and the addresses as peers dial them.
    """
    path = os.path.join(directory, name)
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.bind(path)
    local.listen(512)
    sockets, addresses = [local], [f"unix:{path}"]
    if tcp:
        remote = socket.create_server(("", 0), backlog=512)
        port = remote.getsockname()[1]
        sockets.append(remote)
        addresses += [f"tcp:{host}:{port}" for host in wire.reachable_names(node, "", os.environ)]
    return sockets, addresses
