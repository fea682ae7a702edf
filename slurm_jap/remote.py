"""The engine as a Trainer's backend: what a member process says to jap-run and to the engines of its group.

One connection to jap-run (join, faults), one to each stage of the group. Answers arrive on the hub's thread and
complete a ``Pending``; a fault fails everything that is still awaited with the one cause.

An engine that dies takes the members' states with it. So the backend keeps what it takes to make them again: the last
snapshot (at first, what was shipped) and a log of what was asked since. When jap-run has a new engine set, the
snapshot is shipped and the log is sent again; steps are the same to the bit, so nobody can tell. A snapshot is taken,
behind a step, when the log has grown long; it replaces the one before it once every stage has answered.
``JAP_RECOVERY=0`` keeps neither, which saves the host memory of one copy of model and optimizer; the engine's end is
then the member's.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from slurm_jap import membership, shipping, transport, trees, wire
from slurm_jap.backend import EvaluateOrder, Pending, merge_tensors
from slurm_jap.errors import EngineFault, RemoteError, UsageError
from slurm_jap.measure import Collector
from slurm_jap.membership import Membership
from slurm_jap.profile import WORTH_A_CUT, Profile, drift
from slurm_jap.shipment import Shipment, StageShipment
from slurm_jap.stage import StepOrder
from slurm_jap.switches import Switches
from slurm_jap.transport import Connection, Hub, Received

CAUSE_SECONDS = 10.0
"""How long the end of an engine's connection may wait for jap-run to tell what follows."""
GOODBYE_SECONDS = 5.0
"""How long leaving may take."""
SNAPSHOT_SECONDS = 30.0
"""At least this long between snapshots, and at least 20 times what the last one took ..."""
SNAPSHOT_STEPS = int(os.environ.get("JAP_SNAPSHOT_STEPS") or 50)
"""... and at least this many steps,"""
SNAPSHOT_BYTES = 256 << 20
"""unless the log holds this many bytes of batches."""


@dataclasses.dataclass(slots=True, eq=False)
class _Logged:
    """One command, as it was sent."""

    serial: int
    message: tuple[Any, ...]
    trees: list[Any]
    """Per stage; None: the stage gets the bare message. Tensors in it are nobody else's."""
    stages: range | list[int]
    bytes: int


class RemoteBackend:
    """See ``backend.Backend``."""

    def __init__(self, member: Membership, *, block_count: int) -> None:
        """Join the sweep; returns once the engine is ready.

        Raises:
            UsageError: jap-run refuses this member; its reason says what to type.
            EngineFault: the engine cannot start, or jap-run is gone.
        """
        self._member = member
        self._process = os.getpid()
        self._key = wire.read_key(member.sweep_dir)
        self._trimmed = False
        self._shipped = False
        """Every stage has the model."""
        self._lock = threading.RLock()
        self._pending: dict[int, Pending] = {}
        self._serial = 0
        self._answered = 0
        self._error: BaseException | None = None
        self._closing = False
        self._clips = False
        self._collector: Collector | None = None
        self._recovers = os.environ.get("JAP_RECOVERY") != "0"
        self._base: list[StageShipment] | None = None
        self._log: list[_Logged] = []
        self._steps_logged = 0
        self._snapshot_begun: float | None = None
        self._snapshot_ended = time.monotonic()
        self._snapshot_took = 0.0
        self._hub = Hub(self._take_in)
        self._connections: list[Connection] = []
        """Empty while there is no engine."""
        self._cause = ""
        """Why the last engine ended, in jap-run's words."""
        self._news = threading.Event()
        """jap-run has said something since the engine was lost."""
        self._control = wire.connect(member.control, self._key)
        wire.send_json(
            self._control,
            {
                "kind": "join",
                "member": member.index,
                "pid": os.getpid(),
                "versions": wire.versions(),
                "executable": sys.executable,
                "path": [entry for entry in sys.path if isinstance(entry, str)],
                "cwd": os.getcwd(),
                "environment": dict(os.environ),
                "blocks": block_count,
            },
        )
        try:
            news = self._first_group()
        except BaseException:
            self._hub.stop()
            self._control.close()
            raise
        self._stages = int(news["stages"])
        self._device = str(news["engines"][0].get("device", ""))
        self._watcher = threading.Thread(target=self._watch_control, name="jap-control", daemon=True)
        self._watcher.start()
        membership.joined(int(news["group"]), self._stages)

    def _first_group(self) -> dict[str, Any]:
        """Wait for an engine and connect to it; the group's message."""
        unreachable = ""
        while True:
            news = self._next_news(unreachable)
            if news["kind"] == "refused":
                raise UsageError(str(news["reason"]))
            if news["kind"] == "fault":
                raise EngineFault(str(news["reason"]))
            if news["kind"] == "group":
                try:
                    self._connections = self._connect(news)
                except wire.WireError as error:
                    unreachable = str(error)
                else:
                    return news

    def _next_news(self, unreachable: str) -> dict[str, Any]:
        """jap-run's next word that matters.

        Its silence before the engine is ready is bounded by jap-run itself. An engine that could not be reached may
        just have died, of which jap-run tells soon; else ``unreachable`` is the cause.
        """
        self._control.settimeout(CAUSE_SECONDS if unreachable else None)
        while True:
            try:
                message = wire.recv_json(self._control)
            except (wire.WireError, ValueError):
                return {"kind": "fault", "reason": unreachable or "jap-run is gone; see the job's own output"}
            if message.get("kind") in ("group", "refused", "fault", "restart"):
                return message

    def _connect(self, group: dict[str, Any]) -> list[Connection]:
        sockets: list[tuple[int, socket.socket]] = []
        try:
            for engine in group["engines"]:
                sock = transport.connect_to(engine, self._member.node, self._key, {"member": self._member.index})
                sockets.append((int(engine["stage"]), sock))
        except BaseException:
            for _, sock in sockets:
                sock.close()
            raise
        return [self._hub.add(sock, ("engine", stage)) for stage, sock in sockets]

    # --- what arrives (other threads) -------------------------------------------------------------------------------

    def _watch_control(self) -> None:
        unreachable = ""
        while True:
            message = self._next_news(unreachable)
            unreachable = ""
            self._news.set()
            if message["kind"] == "group":
                try:
                    self._start_over(message)
                except wire.WireError as error:
                    unreachable = str(error)
                except Exception as error:
                    self._fail(EngineFault(f"cannot send the model to the new engine: {error}"))
                    return
            elif message["kind"] == "restart":
                self._cause = str(message.get("reason", ""))
                self._lose(self._cause)
                self._news.set()
            else:
                self._fail(EngineFault(str(message["reason"])))
                return

    def _take_in(self, received: Received) -> None:
        message = received.message
        stage = received.connection.tag[1]
        if message is None:
            with self._lock:
                current = received.connection in self._connections
            if current and not self._closing:
                self._lose(f"lost stage {stage} of the engine ({received.reason})")
        elif message[0] == "print":
            stream = sys.stdout if message[1] == "stdout" else sys.stderr
            stream.write(message[2])
            stream.flush()
        elif message[0] == "profile":
            with self._lock:
                profile = self._collector.add(message[1]) if self._collector is not None else None
            if profile is not None:
                self._tell_profile(profile)
        elif message[0] == "error":
            self._fail(_revive(*message[1:]))
        else:
            serial, name = (0, str(stage)) if message[0] == "joined" else message[1:3]
            with self._lock:
                pending = self._pending.get(serial)
                if pending is None or pending.done or received.connection not in self._connections:
                    return
                # What the script keeps must not hold the descriptor of a mapped frame.
                pending.put(name, trees.cloned(received.tree()) if name == "outputs" else received.tree())
                if pending.done:
                    self._pending.pop(serial, None)
                    if serial and not self._trimmed:  # what was shipped is nobody's any more
                        self._trimmed = True
                        _give_memory_back()
                    self._answered = max(self._answered, serial)
                    self._forget_if_passive(serial)
                    if serial == 0:
                        self._shipped = True
                        self._base = self._base if self._recovers else None

    def _tell_profile(self, profile: Profile) -> None:
        """jap-run keeps it for the next run; nothing depends on its getting there."""
        with self._lock, contextlib.suppress(wire.WireError):
            wire.send_json(self._control, {"kind": "profile", "profile": profile.to_json()})

    def _forget_if_passive(self, serial: int) -> None:
        """What changed no state need not be asked again. Needs the lock."""
        entry = next((e for e in self._log if e.serial == serial), None)
        if entry is None:
            return
        kind = entry.message[0]
        if kind in ("pull", "snapshot") or (kind == "evaluate" and not any(entry.message[2].modes)):
            self._log.remove(entry)

    def _lose(self, reason: str) -> None:
        """There is no engine for now: jap-run will tell what follows, or its silence is the cause."""
        with self._lock:
            lost, self._connections = self._connections, []
            if not lost:
                return
            self._snapshot_begun = None
            self._news.clear()
        for connection in lost:
            connection.close()

        def explain() -> None:
            if not self._news.wait(CAUSE_SECONDS) or (self._shipped and not self._recovers):
                self._fail(EngineFault(self._cause or reason))

        threading.Thread(target=explain, daemon=True).start()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            waiting, self._pending = list(self._pending.values()), {}
            self._log, self._base = [], None
        for pending in waiting:
            pending.fail(self._error)

    def _start_over(self, group: dict[str, Any]) -> None:
        """A new engine set: ship the last snapshot, then send the log again."""
        connections = self._connect(group)
        with self._lock:
            self._connections = connections
            if self._base is None:
                return
            self._pending.setdefault(0, Pending(self._stages))  # whoever waits for the first one goes on waiting
            self._ship(self._base)
            self._steps_logged = 0
            for entry in self._log:
                self._send(entry)
                self._steps_logged += entry.message[0] == "step"

    # --- what is asked ----------------------------------------------------------------------------------------------

    def _ask(
        self, parts: int, kind: str, arguments: Sequence[Any], trees_by_stage: Sequence[Any], stages: Sequence[int]
    ) -> Pending:
        """Log a command, send it where there is an engine, and promise its answer."""
        size = sum(t.numel() * t.element_size() for tree in trees_by_stage for t in trees.tensors(tree))
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._closing:
                raise EngineFault("the trainer is closed; call prepare again")
            self._serial += 1
            pending = Pending(parts)
            if parts:
                self._pending[self._serial] = pending
            entry = _Logged(self._serial, (kind, self._serial, *arguments), list(trees_by_stage), list(stages), size)
            if self._recovers:
                self._log.append(entry)
            self._send(entry)
        return pending

    def _send(self, entry: _Logged) -> None:
        """Needs the lock."""
        if self._connections:
            for stage in entry.stages:
                self._connections[stage].send(entry.message, entry.trees[stage])

    def _ship(self, parts: Sequence[StageShipment]) -> None:
        """Needs the lock."""
        token = secrets.randbits(62)
        for connection, part in zip(self._connections, parts, strict=True):
            connection.send(("join", token, Switches.current(), self._answered), part)

    def start(self, shipment: Shipment, profile: Profile) -> None:
        """See ``backend.Backend``."""
        profile = dataclasses.replace(profile, device=self._device)
        known = membership.known_profile(profile.signature, self._device)
        recut = known is not None and drift(known.costs, profile.costs) > WORTH_A_CUT
        parts = shipment.for_stages(self._stages, known.costs if known is not None and recut else None)
        self._collector = Collector(profile, self._stages)
        self._tell_profile(profile)
        self._clips = shipment.settings.clip_norm is not None
        with self._lock:
            if self._error is not None:
                raise self._error
            self._base = parts
            pending = self._pending[0] = Pending(self._stages)
            if self._connections:
                self._ship(parts)
        pending.wait()

    def step(self, order: StepOrder, switches: Switches, inputs: list[Any], targets: list[Any]) -> Pending:
        """See ``backend.Backend``."""
        parts = 2 if order.apply and self._clips else 1
        # Values of groups may be the script's own objects: they go by value, with the trees.
        bare = dataclasses.replace(order, groups=[])
        pending = self._ask_batch(parts, "step", (bare, switches), inputs, targets, order.groups)
        self._steps_logged += 1
        if order.apply:
            self._snapshot_if_due()
        return pending

    def evaluate(self, order: EvaluateOrder, switches: Switches, inputs: list[Any], targets: list[Any]) -> Pending:
        """See ``backend.Backend``."""
        return self._ask_batch(1, "evaluate", (order, switches), inputs, targets)

    def _ask_batch(
        self,
        parts: int,
        kind: str,
        arguments: tuple[Any, ...],
        inputs: list[Any],
        targets: list[Any],
        groups: list[dict[str, Any]] | None = None,
    ) -> Pending:
        """Inputs to the first stage, targets to the last, the rest to all. The caller may change its batch at once."""
        by_stage: list[Any] = [(None, None, groups)] * self._stages
        by_stage[0] = (trees.cloned(inputs), None, groups)
        by_stage[-1] = (by_stage[-1][0], trees.cloned(targets), groups)
        return self._ask(parts, kind, arguments, by_stage, range(self._stages))

    def set_metric(self, number: int, function: Callable[..., Any]) -> None:
        """See ``backend.Backend``."""
        data, found = shipping.dump(function, "metric_fn")
        by_stage: list[Any] = [None] * self._stages
        by_stage[-1] = (trees.cloned(found), None, None)
        with self._lock:  # every evaluation by an earlier one has been answered
            self._log = [entry for entry in self._log if entry.message[0] != "metric"]
        self._ask(0, "metric", (number, data), by_stage, [self._stages - 1])

    def pull(self, what: str) -> dict[str, Any]:
        """See ``backend.Backend``."""
        parts = self._ask(self._stages, "pull", (what,), [None] * self._stages, range(self._stages)).wait()
        return merge_tensors([parts[str(stage)] for stage in range(self._stages)])

    def load(self, what: str, state: dict[str, Any]) -> None:
        """See ``backend.Backend``."""
        self._ask(self._stages, "load", (what,), [([state], None, None)] * self._stages, range(self._stages)).wait()

    def _snapshot_if_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._snapshot_begun is not None or not self._connections or not self._recovers:
                return
            waited = now - self._snapshot_ended >= max(SNAPSHOT_SECONDS, 20 * self._snapshot_took)
            enough = self._steps_logged >= SNAPSHOT_STEPS and (waited or "JAP_SNAPSHOT_STEPS" in os.environ)
            if not enough and sum(e.bytes for e in self._log) < SNAPSHOT_BYTES:
                return
            self._snapshot_begun = now
        pending = self._ask(self._stages, "snapshot", (), [None] * self._stages, range(self._stages))
        serial = self._serial
        pending.when_done(lambda done: self._snapshot_taken(serial, done))

    def _snapshot_taken(self, serial: int, done: Pending) -> None:
        if done.failed:
            return
        parts = done.wait()
        with self._lock:
            self._base = [parts[str(stage)] for stage in range(self._stages)]
            # A metric function outlives the evaluations that were done: the next ones need it again.
            metrics = [e for e in self._log if e.serial <= serial and e.message[0] == "metric"]
            self._log = metrics[-1:] + [e for e in self._log if e.serial > serial]
            self._steps_logged = sum(e.message[0] == "step" for e in self._log)
            self._snapshot_ended = time.monotonic()
            if self._snapshot_begun is not None:
                self._snapshot_took = self._snapshot_ended - self._snapshot_begun
            self._snapshot_begun = None

    def close(self) -> None:
        """See ``backend.Backend``."""
        if self._closing or os.getpid() != self._process:  # a forked child has these connections, and no say in them
            return
        self._closing = True
        for connection in self._connections:
            connection.close()
        self._hub.stop()
        self._fail(EngineFault("the trainer is closed; call prepare again"))
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        self._watcher.join(GOODBYE_SECONDS)  # jap-run has noted that this member left: it may join again
        self._control.close()


def _revive(stage: int, text: str, pickled: bytes) -> BaseException:
    """The exception as the engine met it, the remote traceback as its cause."""
    cause = RemoteError(f"in stage {stage} of the engine:\n{text}")
    if pickled:
        try:
            error = pickle.loads(pickled)
        except Exception:
            error = None
        if isinstance(error, BaseException):
            error.__cause__ = cause
            return error
    return cause


def _give_memory_back() -> None:
    """Have the C library return what was freed: it keeps pieces of up to 32 MiB, a whole model of ordinary layers."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
