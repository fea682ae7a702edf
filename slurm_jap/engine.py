"""The engine: one process per device, holding one stage of every member of its group.

``python -m slurm_jap.engine`` is the agent of a node. It imports torch once, asks jap-run which engines to run, forks
them and watches them. Each engine runs one loop with one rule (see ``schedule``): of the actions that are ready, step
before backward before forward, then the smallest (iteration, member, micro-batch); no forward beyond the cap of
activations.

Members are independent: what one member's code raises removes that member from every stage of the group and touches no
other. Its prints go to its own process. What ends the process (a segmentation fault, ``os._exit``, code that never
returns) is noticed by the agent, which knows from a ``Marker`` whose code was running; jap-run starts a new engine set
and the members send again what was lost (see ``remote``). Neighbouring stages talk through one FIFO each way:

    F  tree of a micro-batch, forward        B  gradients, backward      (message = (kind, token, serial, micro-batch))
    E  tree of a micro-batch, evaluation     finish / commit             agreement about a step (see ``stage``)
    gone  the member was removed: forget it, whatever of it is still on the way
    have  where memory is bounded: the command is here and on every later stage (see ``turns``)

A ``token`` names one membership (a member that comes back has a new one), a ``serial`` one command of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import mmap
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from typing import Any, TextIO

import cloudpickle
import torch

from slurm_jap import backend, transport, turns, wire
from slurm_jap.errors import UsageError
from slurm_jap.frozen import Commons, Holding
from slurm_jap.measure import device_name
from slurm_jap.schedule import Action, Kind, activation_cap
from slurm_jap.selfcheck import make_stage
from slurm_jap.stage import Finish, MemberStage, StepOrder
from slurm_jap.switches import Switches
from slurm_jap.transport import Connection, Hub, Received

STOP_SECONDS = 5.0
"""How long an engine that was told to end may finish what it is doing."""
ACTION_SECONDS = 600.0
"""An action that takes longer will not end (``JAP_ACTION_TIMEOUT``)."""
CAUSE_SECONDS = 5.0
"""How long an engine whose neighbour vanished waits to be told to end, so that the first cause is the one reported."""


_MOVED = object()
"""In an engine's inbox: a member's state has been moved."""


class Marker:
    """Memory that an engine shares with its agent: whose code is running, and since when. Survives the engine.

    Both facts are one aligned 64-bit word, written in one store, so that no reader ever sees half of a change: the
    clock in milliseconds above ``_BITS`` bits of the member's array index plus one (0: nobody).
    """

    _BITS = 24

    def __init__(self) -> None:
        self._word = memoryview(mmap.mmap(-1, 8)).cast("q")
        self.set(None)

    def set(self, member: int | None) -> None:
        """This member's code runs from now on; None: nobody's."""
        self._word[0] = (int(time.monotonic() * 1000) << self._BITS) | (0 if member is None else member + 1)

    def get(self) -> tuple[int | None, float]:
        """The member, or None, and the seconds since then."""
        word = self._word[0]
        member = word & ((1 << self._BITS) - 1)
        return (member - 1 if member else None), time.monotonic() - (word >> self._BITS) / 1000


class Command:
    """One request of a member, as this stage sees it, and how far it has got here."""

    def __init__(self, received: Received) -> None:
        assert received.message is not None
        self.kind: str = received.message[0]
        self.arguments = received.message[1:]
        self.received: Received | None = received
        self.inputs: list[Any] | None = None
        self.targets: list[Any] | None = None
        self.answers: list[Any] = []
        """Per micro-batch, what an evaluation gives back."""
        self.forwarded = self.backwarded = 0
        self.finished = False

    @property
    def serial(self) -> int:
        """Counts a membership's commands."""
        return int(self.arguments[0])

    def open(self) -> None:
        """Decode the trees, in the acting member's name."""
        if self.received is not None:
            opened = self.received.tree()
            if opened is not None:
                self.inputs, self.targets, groups = opened
                if groups is not None:
                    self.arguments[1].groups = groups
            self.received = None


class Lane:
    """One member on this stage."""

    def __init__(self, index: int, token: int, connection: Connection) -> None:
        self.index, self.token, self.connection = index, token, connection
        self.stage: MemberStage | None = None
        self.common: Holding | None = None
        self.commands: deque[Command] = deque()
        self.inbox: dict[tuple[str, int, int], Received] = {}
        """What neighbours sent, by (kind, serial, micro-batch)."""
        self.iteration = 0
        """Steps done here."""
        self.turn = 0
        """What the rule compares: a member that had nothing to do does not get the turns back that it missed."""
        self.metrics: dict[int, Any] = {}
        self.urgent: Action | None = None
        """The best action that could be taken whatever the stage holds,"""
        self.forward: Action | None = None
        """and the forward that needs room under the cap."""
        self.quiet_to = 0
        """Commands up to this serial are played again after a restart: their prints have been seen."""

    def receive(self, kind: str, serial: int, number: int) -> Any:
        """The tree that a neighbour sent."""
        return self.inbox.pop((kind, serial, number)).tree()

    def note(self, received: Received) -> None:
        """A command of the member, or what a neighbour sent for one."""
        message = received.message
        assert message is not None
        if received.connection is self.connection:
            self.commands.append(Command(received))
        else:
            self.inbox[message[0], message[2], message[3]] = received
        self.changed()

    def changed(self) -> None:
        """Look again at what could be done: something arrived or was done."""
        self.urgent, self.forward = self._look()

    def _look(self) -> tuple[Action | None, Action | None]:
        if not self.commands:
            return None, None
        command, stage = self.commands[0], self.stage
        if command.kind not in ("step", "evaluate"):
            return Action(Kind.STEP, self.turn, self.index), None
        assert stage is not None
        serial, number, count = command.serial, command.forwarded, len(command.arguments[1].sizes)
        if command.kind == "evaluate":
            here = stage.first or ("E", serial, number) in self.inbox
            # It holds no activations: no cap applies, and it takes its turn among the backwards.
            return (Action(Kind.FORWARD, self.turn, self.index, number) if here else None), None
        if command.backwarded == count:
            alone = not stage.must_agree
            if not command.finished:
                here = alone or stage.last or ("finish", serial, 0) in self.inbox
            else:
                here = alone or stage.first or ("commit", serial, 0) in self.inbox
            return (Action(Kind.STEP, self.turn, self.index) if here else None), None
        urgent = forward = None
        back = command.backwarded
        if back < number and (stage.last or ("B", serial, back) in self.inbox):
            urgent = Action(Kind.BACKWARD, self.turn, self.index, back)
        if number < count and (stage.first or ("F", serial, number) in self.inbox):
            forward = Action(Kind.FORWARD, self.turn, self.index, number)
        return urgent, forward


class _MemberOutput(io.TextIOBase):
    """Stands for ``sys.stdout`` or ``sys.stderr``: what a member's code prints goes to that member."""

    def __init__(self, engine: Engine, name: str, fallback: TextIO) -> None:
        self._engine, self._name, self._fallback = engine, name, fallback

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        lane = self._engine.acting
        if lane is None:
            return self._fallback.write(text)
        if not lane.commands or lane.commands[0].kind == "metric" or lane.commands[0].serial > lane.quiet_to:
            lane.connection.send(("print", self._name, text))
        return len(text)

    def flush(self) -> None:
        if self._engine.acting is None:
            self._fallback.flush()


class Engine:
    """One stage of one group. The main thread acts; the hub's thread only moves messages."""

    def __init__(self, group: int, stage: int, stages: int, device: torch.device, marker: Marker) -> None:
        self.group, self.stage, self.stages, self.device = group, stage, stages, device
        self._marker = marker
        self.acting: Lane | None = None
        """Whose code is running."""
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hub = Hub(self._inbox.put)
        self._lanes: dict[int, Lane] = {}
        self._early: dict[int, list[Received]] = {}
        """What neighbours sent for a member that has not joined here yet."""
        self._gone: deque[int] = deque(maxlen=4096)
        self._neighbours: dict[int, Connection] = {}
        self._switches = Switches.current()
        self._cap = activation_cap(stages, stage)
        self._neighbour_lost = threading.Event()
        self._commons = Commons(device)
        self._joining: deque[Received] = deque()
        """Members that wait for room."""
        self._turns = turns.from_environment(
            stage, stages, device, self._commons,
            wake=lambda: self._inbox.put(_MOVED),
            announce=lambda token, serial: self._neighbours[stage - 1].send(("have", token, serial, 0)),
        )  # fmt: skip
        """None where everything may lie on the device."""

    # --- getting connected ------------------------------------------------------------------------------------------

    def join_set(self, sweep_dir: str, node: str, sockets: str, control_address: str) -> socket.socket:
        """Say hello to jap-run, connect to the neighbours; returns the control connection.

        Raises:
            WireError: jap-run or a neighbour cannot be reached.
        """
        key = wire.read_key(sweep_dir)
        name = f"engine_{self.group}_{self.stage}_{os.getpid()}"
        servers, addresses = transport.bind(sockets, name, node, tcp="tcp:" in control_address)
        arrived: queue.SimpleQueue[None] = queue.SimpleQueue()

        def accept(sock: socket.socket, hello: dict[str, Any]) -> None:
            if "stage" in hello:
                self._neighbours[int(hello["stage"])] = self._hub.add(sock, ("stage", int(hello["stage"])))
                arrived.put(None)
            else:
                self._hub.add(sock, ("member", int(hello["member"])))

        transport.Listener(servers, key, accept)
        control = wire.connect(control_address, key)
        wire.send_json(
            control,
            {
                "kind": "engine",
                "group": self.group,
                "stage": self.stage,
                "pid": os.getpid(),
                "addresses": addresses,
                "device": device_name(self.device),
            },
        )
        topology = wire.recv_json(control)
        if topology.get("kind") != "topology":
            raise wire.WireError(f"jap-run answered {topology}")
        if self.stage + 1 < self.stages:
            sock = transport.connect_to(topology["engines"][self.stage + 1], node, key, {"stage": self.stage})
            self._neighbours[self.stage + 1] = self._hub.add(sock, ("stage", self.stage + 1))
        if self.stage > 0:
            try:
                arrived.get(timeout=wire.CONNECT_SECONDS)
            except queue.Empty:
                raise wire.WireError(
                    f"stage {self.stage - 1} did not connect within {wire.CONNECT_SECONDS:g} s"
                ) from None
        wire.send_json(control, {"kind": "ready"})
        threading.Thread(target=self._watch_control, args=(control,), name="jap-control", daemon=True).start()
        return control

    def _watch_control(self, control: socket.socket) -> None:
        while True:
            try:
                message = wire.recv_json(control)
            except (wire.WireError, ValueError):
                message = {"kind": "stop"}
            if message.get("kind") == "stop":
                self.stop()
                return

    def stop(self) -> None:
        """Have ``run`` return, and make sure that the process ends even if user code never does."""
        self._inbox.put(None)
        threading.Timer(STOP_SECONDS, os._exit, (0,)).start()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Act until told to stop."""
        chosen: tuple[Action, Lane] | None = None
        while True:
            while not self._inbox.empty() or chosen is None:
                received = self._wait_for_move() if chosen is None and self._stalled else self._inbox.get()
                if received is None:
                    return
                if received is not _MOVED:
                    self._note(received)
                del received  # it may hold a whole model
                if self._inbox.empty():
                    chosen = self._choose()
            self._act(*chosen)
            chosen = self._choose()

    def _choose(self) -> tuple[Action, Lane] | None:
        held = sum(lane.stage.activations for lane in self._lanes.values() if lane.stage is not None)
        may_forward = held < self._cap
        if self._turns is not None:
            while self._joining and self._turns.room_to_join(turns.total_bytes(self._joining[0].tensors)):
                self._join(self._joining.popleft())
            return self._turns.choose(may_forward, bool(self._joining))
        best: tuple[Action, Lane] | None = None
        for lane in self._lanes.values():
            action = lane.urgent
            if action is None and may_forward:
                action = lane.forward
            if action is not None and (best is None or action < best[0]):
                best = action, lane
        return best

    @property
    def _stalled(self) -> bool:
        return self._turns is not None and self._turns.stalled

    def _wait_for_move(self) -> Any:
        assert self._turns is not None
        began = time.perf_counter()
        received = self._inbox.get()
        self._turns.residency.waited(time.perf_counter() - began)
        return received

    def _note(self, received: Received) -> None:
        """Take one message in; whose code it concerns, if anybody's, runs later or under that member's name."""
        tag, peer = received.connection.tag
        message = received.message
        if message is None:
            if tag == "stage":
                self._lose_neighbour(peer)
            else:
                self._forget(received.connection)
        elif message[0] == "join":
            if self._turns is None:
                self._join(received)
            else:
                self._joining.append(received)
        elif tag == "member":
            lane = self._lane_of(received.connection)
            if lane is not None:
                self._pass_to(lane, received)
            else:
                self._too_early(received)
        else:
            token = message[1]
            lane = self._lanes.get(token)
            if message[0] == "gone":
                self._pass_on_gone(token, peer)
            elif lane is not None:
                self._pass_to(lane, received)
            elif token not in self._gone:
                self._early.setdefault(token, []).append(received)

    def _pass_to(self, lane: Lane, received: Received) -> None:
        if not lane.commands:
            # Who had nothing to do, or has just come, begins at the present: else it would go before all others until
            # it had made as many steps as they.
            busy = [other.turn for other in self._lanes.values() if other.commands]
            lane.turn = max(lane.turn, min(busy, default=0))
        lane.note(received)
        if self._turns is not None:
            assert received.message is not None
            own = received.connection is lane.connection
            self._turns.noted(lane, received.message[0], 0 if own else received.message[3])

    def _too_early(self, received: Received) -> None:
        """A command of a member that still waits for room: it comes right behind ``join``."""
        for waiting in self._joining:
            if waiting.connection is received.connection and waiting.message is not None:
                self._early.setdefault(waiting.message[1], []).append(received)

    def _lane_of(self, connection: Connection) -> Lane | None:
        return next((lane for lane in self._lanes.values() if lane.connection is connection), None)

    def _lose_neighbour(self, stage: int) -> None:
        """The set is broken. jap-run learns the cause from whoever died; this process waits to be told to end."""
        if not self._neighbour_lost.is_set():
            self._neighbour_lost.set()
            print(f"jap: stage {self.stage} of group {self.group} lost stage {stage}", file=sys.__stderr__, flush=True)
            threading.Timer(CAUSE_SECONDS, os._exit, (1,)).start()

    # --- joining and leaving ----------------------------------------------------------------------------------------

    def _join(self, received: Received) -> None:
        assert received.message is not None
        _, token, switches, quiet_to = received.message
        _, index = received.connection.tag
        lane = Lane(index, token, received.connection)
        lane.quiet_to = quiet_to
        lane.common = self._commons.holding()
        with self._for_member(lane, switches):
            lane.stage = make_stage(received.tree(), self.device, copy=True, common=lane.common)
            if token in self._gone:  # another stage has removed it already
                lane.common.leave()
            else:
                self._lanes[token] = lane
                if self._turns is not None:
                    self._turns.joined(lane)
                for message in self._early.pop(token, ()):
                    self._note(message)
                received.connection.send(("joined",))

    def _forget(self, connection: Connection) -> None:
        self._joining = deque(waiting for waiting in self._joining if waiting.connection is not connection)
        lane = self._lane_of(connection)
        if lane is not None:
            self._remove(lane)

    def _remove(self, lane: Lane) -> None:
        """Drop all of a member here and tell the neighbours, so that nobody waits for it."""
        self._drop(lane.token)
        if lane.common is not None:
            lane.common.leave()
        self._gone.append(lane.token)
        for neighbour in self._neighbours.values():
            neighbour.send(("gone", lane.token, 0, 0))

    def _drop(self, token: int) -> Lane | None:
        self._early.pop(token, None)
        if self._turns is not None:
            self._turns.left(token)
        return self._lanes.pop(token, None)

    def _pass_on_gone(self, token: int, source: int) -> None:
        if token in self._gone:
            return
        self._gone.append(token)
        lane = self._drop(token)
        if lane is not None and lane.common is not None:
            lane.common.leave()
        for stage, neighbour in self._neighbours.items():
            if stage != source:
                neighbour.send(("gone", token, 0, 0))

    @contextlib.contextmanager
    def _for_member(self, lane: Lane, switches: Switches) -> Any:
        """Run a member's code: with its switches, its output, and its exceptions going back to it alone."""
        switches.apply(Switches.current())  # and not what was set last: a member's code may have changed it
        self._switches = switches
        self.acting = lane
        self._marker.set(lane.index)
        try:
            yield
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: this is somebody else's code
            self.acting = None
            self._report(lane, error)
            self._remove(lane)
        finally:
            self.acting = None
            self._marker.set(None)

    def _report(self, lane: Lane, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        try:
            with contextlib.suppress(AttributeError):
                error.__traceback__ = None
            pickled = cloudpickle.dumps(error)
        except Exception:
            pickled = b""
        lane.connection.send(("error", self.stage, text, pickled))

    # --- acting -----------------------------------------------------------------------------------------------------

    def _act(self, action: Action, lane: Lane) -> None:
        command = lane.commands[0]
        stage = lane.stage
        assert stage is not None
        if command.kind in ("step", "evaluate"):
            order, switches = command.arguments[1], command.arguments[2]
        else:
            order, switches = None, self._switches
        if self._turns is not None:
            self._turns.begins(lane)
        if lane.common is not None:
            lane.common.act()
        with self._for_member(lane, switches):
            command.open()
            if command.kind == "step":
                iteration = lane.iteration
                with stage.timed(action.kind):
                    self._act_step(lane, stage, command, order, action)
                if lane.iteration > iteration and (measured := stage.measured()) is not None:
                    lane.connection.send(("profile", measured))
            elif command.kind == "evaluate":
                self._act_evaluate(lane, stage, command, order)
            else:
                self._act_other(lane, stage, command)
                lane.commands.popleft()
            if lane.common is not None:
                lane.common.acted(idle=stage.activations == 0)
            lane.changed()
            if self._turns is not None and not (lane.commands and lane.commands[0] is command):
                self._turns.ended(lane, command)

    def _act_step(self, lane: Lane, stage: MemberStage, command: Command, order: StepOrder, action: Action) -> None:
        serial, number = command.serial, action.microbatch
        if action.kind is Kind.FORWARD:
            if number == 0:
                stage.prepare(order, command.targets)
            tree = command.inputs[number] if command.inputs is not None else lane.receive("F", serial, number)
            target = None if command.targets is None else command.targets[number]
            output = stage.forward(order, number, tree, target)
            command.forwarded += 1
            if not stage.last:
                self._neighbours[self.stage + 1].send(("F", lane.token, serial, number), output)
            elif command.forwarded == len(order.sizes):
                lane.connection.send(("part", serial, "result"), stage.result())
        elif action.kind is Kind.BACKWARD:
            grads = None if stage.last else lane.receive("B", serial, number)
            result = stage.backward(order, number, grads)
            command.backwarded += 1
            if not stage.first:
                self._neighbours[self.stage - 1].send(("B", lane.token, serial, number), result)
            if command.backwarded == len(order.sizes) and not order.apply:
                self._complete(lane)
        elif not command.finished:
            self._finish(lane, stage, command)
        else:
            self._commit(lane, stage, command, order)

    def _finish(self, lane: Lane, stage: MemberStage, command: Command) -> None:
        received = lane.inbox.pop(("finish", command.serial, 0), None)
        later: Finish | None = None if received is None else received.tree()
        said = stage.finish(later)
        command.finished = True
        if stage.must_agree and not stage.first:
            self._neighbours[self.stage - 1].send(("finish", lane.token, command.serial, 0), said)

    def _commit(self, lane: Lane, stage: MemberStage, command: Command, order: StepOrder) -> None:
        received = lane.inbox.pop(("commit", command.serial, 0), None)
        said = stage.commit(order, None if received is None else received.tree())
        if stage.must_agree and not stage.last:
            self._neighbours[self.stage + 1].send(("commit", lane.token, command.serial, 0), said, copy=bool(said.tied))
        if stage.first and stage.settings.clip_norm is not None:
            lane.connection.send(("part", command.serial, "norm"), said.norm)
        self._complete(lane)

    def _complete(self, lane: Lane) -> None:
        lane.commands.popleft()
        lane.iteration += 1
        lane.turn += 1

    def _act_evaluate(self, lane: Lane, stage: MemberStage, command: Command, order: backend.EvaluateOrder) -> None:
        serial, number = command.serial, command.forwarded
        tree = command.inputs[number] if command.inputs is not None else lane.receive("E", serial, number)
        output = stage.evaluate(order.iteration, number, tree, order.modes)
        command.forwarded += 1
        last_one = command.forwarded == len(order.sizes)
        if not stage.last:
            # What shows a parameter or a buffer must be on its way before the member's state may be moved.
            copy = self._turns is not None
            self._neighbours[self.stage + 1].send(("E", lane.token, serial, number), output, copy=copy)
        else:
            target = None if command.targets is None else command.targets[number]
            command.answers.append(backend.answer(output, target, order, number, lane.metrics, self.device))
            if last_one:
                lane.connection.send(("part", serial, "outputs"), command.answers, copy=self._turns is not None)
        if last_one:
            lane.commands.popleft()

    def _act_other(self, lane: Lane, stage: MemberStage, command: Command) -> None:
        if command.kind == "metric":
            _, number, data = command.arguments
            lane.metrics = {number: backend.load_metric(data, command.inputs or [], self.device)}
        elif command.kind == "pull":
            serial, what = command.arguments
            if what == turns.MEMORY:
                everybody = [lane.stage for lane in self._lanes.values() if lane.stage is not None]
                pulled: dict[str, Any] = {str(self.stage): turns.memory_report(everybody, self._commons, self._turns)}
            else:
                pulled = backend.pull_from(stage, what)
            lane.connection.send(("part", serial, str(self.stage)), pulled)
        elif command.kind == "snapshot":
            lane.connection.send(("part", command.serial, str(self.stage)), stage.snapshot())
        elif command.kind == "load":
            serial, what = command.arguments
            backend.load_into(stage, what, command.inputs[0] if command.inputs else {})
            lane.connection.send(("part", serial, str(self.stage)))
        else:
            raise UsageError(f"the engine does not know the command {command.kind!r}")


# --- processes -------------------------------------------------------------------------------------------------------


def device_for(number: int) -> torch.device:
    """The node's accelerator with this number, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, number)


def ignore_job_signals() -> None:
    """scancel and requeue signal every step at once; the engine ends when jap-run says so, after its members."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def run_engine(entry: dict[str, int], stages: int, sockets: str, marker: Marker) -> None:
    """The life of one engine process."""
    sys.setswitchinterval(0.0005)
    sweep_dir, control_address = os.environ[wire.ENV_SWEEP_DIR], os.environ[wire.ENV_CONTROL]
    device = device_for(entry["device"])
    if device.type != "cpu":
        torch.accelerator.set_device_index(entry["device"])
    engine = Engine(entry["group"], entry["stage"], stages, device, marker)
    sys.stdout = _MemberOutput(engine, "stdout", sys.stdout)
    sys.stderr = _MemberOutput(engine, "stderr", sys.stderr)
    control: socket.socket | None = None
    try:
        control = engine.join_set(sweep_dir, os.environ.get(wire.ENV_NODE, ""), sockets, control_address)
        engine.run()
    except BaseException as error:
        traceback.print_exc(file=sys.__stderr__)
        with contextlib.suppress(Exception):
            if control is None:
                control = wire.connect(control_address, wire.read_key(sweep_dir))
            wire.send_json(control, {"kind": "fatal", "reason": f"{type(error).__name__}: {error}"})
        raise


def _die_with_parent() -> None:
    """Have the kernel end this process when its agent goes: an engine alone serves nobody."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Agent:
    """Forks this node's engines, reports one that dies, ends them all on ``stop``."""

    def __init__(self) -> None:
        self._node = os.environ.get(wire.ENV_NODE, "")
        given = os.environ.get(wire.ENV_SOCKET_DIR)
        self._own_sockets = None if given else wire.make_socket_folder()
        self._sockets = given or str(self._own_sockets)
        self._children: dict[int, tuple[dict[str, int], Marker]] = {}
        self._overdue: dict[int, float] = {}
        """Engines that were killed because a member's code did not return, and after how many seconds."""
        self._limit = float(os.environ.get("JAP_ACTION_TIMEOUT") or ACTION_SECONDS)
        self._stopping = threading.Event()

    def run(self) -> int:
        """Until told to stop, or until an engine dies; the exit code."""
        control = wire.connect(os.environ[wire.ENV_CONTROL], wire.read_key(os.environ[wire.ENV_SWEEP_DIR]))
        wire.send_json(control, {"kind": "node", "node": self._node, "pid": os.getpid()})
        assigned = wire.recv_json(control)
        if assigned.get("kind") != "assign":
            raise wire.WireError(f"jap-run answered {assigned}")
        sys.path += [entry for entry in assigned["path"] if entry not in sys.path]
        for entry in assigned["engines"]:
            self._fork(entry, int(assigned["stages"]), control)
        threading.Thread(target=self._watch_control, args=(control,), daemon=True).start()
        threading.Thread(target=self._watch_actions, daemon=True).start()
        try:
            return self._wait_for_children(control)
        finally:
            if self._own_sockets is not None:
                shutil.rmtree(self._own_sockets, ignore_errors=True)

    def _fork(self, entry: dict[str, int], stages: int, control: socket.socket) -> None:
        marker = Marker()
        child = os.fork()
        if child:
            self._children[child] = entry, marker
            return
        code = 1
        try:
            _die_with_parent()
            control.close()
            run_engine(entry, stages, self._sockets, marker)
            code = 0
        finally:
            with contextlib.suppress(Exception):
                sys.__stderr__.flush()  # type: ignore[union-attr]
            os._exit(code)

    def _watch_control(self, control: socket.socket) -> None:
        with contextlib.suppress(wire.WireError, ValueError):
            while wire.recv_json(control).get("kind") != "stop":
                pass
        self._stopping.set()
        time.sleep(STOP_SECONDS)  # engines get the news on their own connections
        for child in list(self._children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def _watch_actions(self) -> None:
        """Kill an engine in which one action takes longer than any may: its code does not return."""
        late: dict[int, int] = {}
        while not self._stopping.wait(min(1.0, self._limit / 4)):
            before, late = late, {}
            for child, (_, marker) in list(self._children.items()):
                member, seconds = marker.get()
                if member is None or seconds <= self._limit or child in self._overdue:
                    continue
                late[child] = member
                if before.get(child) == member:  # a machine that slept is given one more look
                    self._overdue[child] = seconds
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)

    def _wait_for_children(self, control: socket.socket) -> int:
        """Until every engine has ended; where there is none, until told to stop."""
        if not self._children:
            self._stopping.wait()
        worst = 0
        while self._children:
            child, status = os.wait()
            entry, marker = self._children.pop(child, (None, None))
            if entry is None or marker is None or self._stopping.is_set():
                continue
            code, acting = os.waitstatus_to_exitcode(status), marker.get()[0]
            if code == 0 and acting is None:  # it was told to stop before we were
                continue
            worst = 1
            report = {"group": entry["group"], "stage": entry["stage"], "code": code, "acting": acting}
            with contextlib.suppress(wire.WireError):
                wire.send_json(control, {"kind": "engine_died", **report, "overdue": self._overdue.get(child)})
        return worst


def main() -> int:
    """The agent's entry point."""
    ignore_job_signals()
    # torch loads this (1.5 s of CPU) with the first optimizer; loaded before the fork, it is loaded once per node.
    importlib.import_module("torch._dynamo")
    try:
        return Agent().run()
    except (wire.WireError, OSError, KeyError) as error:
        print(f"jap: engine agent: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
