"""The engine as a Trainer's backend: what a member process says to jap-run and to the engines of its group.

One connection to jap-run (join, faults), one to each stage of the group. Answers arrive on the hub's thread and
complete a ``Pending``; the end of any connection, or a fault, fails everything that is still awaited with the one
cause.
"""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import threading
from collections.abc import Callable
from typing import Any

from slurm_jap import membership, shipping, transport, wire
from slurm_jap.backend import EvaluateOrder, Pending, merge_tensors
from slurm_jap.errors import EngineFault, RemoteError, UsageError
from slurm_jap.membership import Membership
from slurm_jap.shipment import Shipment
from slurm_jap.stage import StepOrder
from slurm_jap.switches import Switches
from slurm_jap.transport import Connection, Hub, Received

CAUSE_SECONDS = 10.0
"""How long the end of an engine's connection may wait for jap-run to tell the cause."""


class RemoteBackend:
    """See ``backend.Backend``."""

    def __init__(self, member: Membership, *, block_count: int) -> None:
        """Join the sweep; returns once the engine is ready.

        Raises:
            UsageError: jap-run refuses this member; its reason says what to type.
            EngineFault: the engine cannot start, or jap-run is gone.
        """
        self._member = member
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._serial = 0
        self._error: BaseException | None = None
        self._closing = False
        self._clips = False
        self._fault_known = threading.Event()
        key = wire.read_key(member.sweep_dir)
        self._control = wire.connect(member.control, key)
        wire.send_json(
            self._control,
            {
                "kind": "join",
                "member": member.index,
                "pid": os.getpid(),
                "versions": wire.versions(),
                "executable": sys.executable,
                "path": sys.path,
                "cwd": os.getcwd(),
                "environment": dict(os.environ),
                "blocks": block_count,
            },
        )
        group = wire.recv_json(self._control)
        if group["kind"] == "refused":
            raise UsageError(str(group["reason"]))
        if group["kind"] != "group":
            raise EngineFault(str(group.get("reason", group)))
        self._stages = int(group["stages"])
        self._hub = Hub(self._take_in)
        self._connections: list[Connection] = []
        for engine in group["engines"]:
            sock = transport.connect_to(engine, member.node, key, {"member": member.index})
            self._connections.append(self._hub.add(sock, ("engine", int(engine["stage"]))))
        threading.Thread(target=self._watch_control, name="jap-control", daemon=True).start()
        membership.joined(int(group["group"]), self._stages)

    # --- what arrives (other threads) -------------------------------------------------------------------------------

    def _watch_control(self) -> None:
        while True:
            try:
                message = wire.recv_json(self._control)
            except (wire.WireError, ValueError):
                message = {"kind": "fault", "reason": "jap-run is gone; see the job's own output"}
            if message.get("kind") == "fault":
                self._fault_known.set()
                self._fail(EngineFault(str(message["reason"])))
                return

    def _take_in(self, received: Received) -> None:
        message = received.message
        if message is None:
            if not self._closing and self._error is None:
                # jap-run knows why; an unexplained end is reported when it does not tell in time.
                threading.Thread(target=self._explain, args=(received,), daemon=True).start()
        elif message[0] == "print":
            stream = sys.stdout if message[1] == "stdout" else sys.stderr
            stream.write(message[2])
            stream.flush()
        elif message[0] == "error":
            self._fail(_revive(*message[1:]))
        else:
            serial, name = (0, str(received.connection.tag[1])) if message[0] == "joined" else message[1:3]
            with self._lock:
                pending = self._pending.get(serial)
            if pending is not None:
                pending.put(name, received.tree())
                if pending.done:
                    with self._lock:
                        self._pending.pop(serial, None)

    def _explain(self, received: Received) -> None:
        self._fault_known.wait(CAUSE_SECONDS)
        self._fail(EngineFault(f"lost stage {received.connection.tag[1]} of the engine ({received.reason})"))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            waiting, self._pending = list(self._pending.values()), {}
        for pending in waiting:
            pending.fail(self._error)

    # --- what is asked ----------------------------------------------------------------------------------------------

    def _ask(self, parts: int) -> tuple[int, Pending]:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._closing:
                raise EngineFault("the trainer is closed; call prepare again")
            self._serial += 1
            pending = self._pending[self._serial] = Pending(parts)
            return self._serial, pending

    def start(self, shipment: Shipment) -> None:
        """See ``backend.Backend``."""
        parts = shipment.for_stages(self._stages)
        self._clips = shipment.settings.clip_norm is not None
        with self._lock:
            if self._error is not None:
                raise self._error
            pending = self._pending[0] = Pending(self._stages)
        token = secrets.randbits(63)
        for connection, part in zip(self._connections, parts, strict=True):
            connection.send(("join", token, Switches.current()), part)
        pending.wait()

    def step(self, order: StepOrder, switches: Switches, inputs: list[Any], targets: list[Any]) -> Pending:
        """See ``backend.Backend``."""
        clipped = order.apply and self._clips
        serial, pending = self._ask(2 if clipped else 1)
        self._send_batch("step", serial, (order, switches), inputs, targets)
        return pending

    def evaluate(self, order: EvaluateOrder, switches: Switches, inputs: list[Any], targets: list[Any]) -> Pending:
        """See ``backend.Backend``."""
        serial, pending = self._ask(1)
        self._send_batch("evaluate", serial, (order, switches), inputs, targets)
        return pending

    def _send_batch(
        self, kind: str, serial: int, arguments: tuple[Any, ...], inputs: list[Any], targets: list[Any]
    ) -> None:
        """Inputs to the first stage, targets to the last, the order to all."""
        last = self._stages - 1
        for stage, connection in enumerate(self._connections):
            tree = (inputs if stage == 0 else None, targets if stage == last else None)
            connection.send((kind, serial, *arguments), tree, copy=True)

    def set_metric(self, number: int, function: Callable[..., Any]) -> None:
        """See ``backend.Backend``."""
        data, found = shipping.dump(function, "metric_fn")
        serial, _ = self._ask(0)
        with self._lock:
            self._pending.pop(serial, None)
        self._connections[-1].send(("metric", serial, number, data), (found, None), copy=True)

    def pull(self, what: str) -> dict[str, Any]:
        """See ``backend.Backend``."""
        serial, pending = self._ask(self._stages)
        for connection in self._connections:
            connection.send(("pull", serial, what))
        parts = pending.wait()
        return merge_tensors([parts[str(stage)] for stage in range(self._stages)])

    def load(self, what: str, state: dict[str, Any]) -> None:
        """See ``backend.Backend``."""
        serial, pending = self._ask(self._stages)
        for connection in self._connections:
            connection.send(("load", serial, what), ([state], None), copy=True)
        pending.wait()

    def close(self) -> None:
        """See ``backend.Backend``."""
        self._closing = True
        for connection in self._connections:
            connection.close()
        self._hub.stop()
        self._control.close()
        self._fail(EngineFault("the trainer is closed; call prepare again"))


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
