"""What a Trainer asks of whoever computes, and the in-process answer: a pipeline of one stage, run at once.

``LocalBackend`` is the meaning of "alone": the engine must give its bits. See ``remote`` for the other backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from slurm_jap import draws, microbatch, profile_cache, shipping, trees
from slurm_jap.errors import EngineFault
from slurm_jap.measure import Collector, StageReport
from slurm_jap.profile import Profile
from slurm_jap.schedule import Kind
from slurm_jap.selfcheck import make_stage
from slurm_jap.shipment import Shipment
from slurm_jap.stage import BatchResult, MemberStage, StepOrder
from slurm_jap.switches import Switches


class Pending:
    """An answer that may not be here yet. Every wait ends: with the answer, or with the one cause that prevents it."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._values: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._event = threading.Event()
        self._callbacks: list[Callable[[Pending], None]] = []
        if parts == 0:
            self._event.set()

    def put(self, name: str, value: Any) -> None:
        """One part of the answer; a part that comes again replaces itself."""
        self._values[name] = value
        if len(self._values) == self._parts:
            self._finish()

    def fail(self, error: BaseException) -> None:
        """No more parts will come."""
        if not self._event.is_set():
            self._error = error
            self._finish()

    def _finish(self) -> None:
        self._event.set()
        for callback in self._callbacks:
            callback(self)

    def when_done(self, callback: Callable[[Pending], None]) -> None:
        """Call it once done, from whichever thread that is."""
        self._callbacks.append(callback)
        if self._event.is_set():
            callback(self)

    @property
    def done(self) -> bool:
        """Whether waiting would end at once."""
        return self._event.is_set()

    @property
    def failed(self) -> bool:
        """Whether waiting would raise."""
        return self._error is not None

    def wait(self) -> dict[str, Any]:
        """The parts by name.

        Raises:
            BaseException: what user code raised in the engine, or :class:`EngineFault`.
        """
        # Whoever holds a Pending fails it when its connection ends; the time-out only lets signal handlers run.
        while not self._event.wait(timeout=0.5):
            pass
        if self._error is not None:
            raise self._error
        return self._values


@dataclasses.dataclass(slots=True, kw_only=True)
class EvaluateOrder:
    """One batch of ``Trainer.evaluate`` or ``Trainer.forward``."""

    iteration: int
    sizes: tuple[int, ...]
    modes: tuple[bool, ...]
    metric: int | None
    """Which metric function (see ``set_metric``); None: the output itself comes back."""


class Backend(Protocol):
    """Every method may raise :class:`EngineFault` or what user code raised."""

    def start(self, shipment: Shipment, profile: Profile) -> None:
        """Put the member's model where it is computed.

        Args:
            profile: what the first micro-batch told of it.
        """

    def step(self, order: StepOrder, switches: Switches, inputs: list[Any], targets: list[Any]) -> Pending:
        """Train on one batch; parts ``result`` (BatchResult) and, where gradients are clipped by norm, ``norm``."""

    def set_metric(self, number: int, function: Callable[..., Any]) -> None:
        """Announce a metric function."""

    def evaluate(self, order: EvaluateOrder, switches: Switches, inputs: list[Any], targets: list[Any]) -> Pending:
        """Part ``outputs``: per micro-batch the output tree, or what the metric function returned as sums."""

    def pull(self, what: str) -> dict[str, Any]:
        """``model``, ``optimizer`` (by parameter name) or ``after_step`` state, as of the last step asked for."""

    def load(self, what: str, state: dict[str, Any]) -> None:
        """Put ``model``, ``optimizer`` or ``after_step`` state back."""

    def close(self) -> None:
        """Forget the member."""


class LocalBackend:
    """One stage in this process, on the device of the model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stage: MemberStage | None = None
        self._metrics: dict[int, Callable[..., Any]] = {}
        self._collector: Collector | None = None
        self._error: BaseException | None = None

    @property
    def _running(self) -> MemberStage:
        if self._stage is None:
            raise EngineFault("the trainer is closed; call prepare again")
        return self._stage

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Run the model's code as the engine would: away from the script's generators, switches and gradient mode.

        What it raises ends the training for good, as in the engine: a step half done cannot be taken up again.
        """
        if self._error is not None:
            raise self._error
        switches = Switches.current()
        try:
            with draws.preserved(self._device), torch.inference_mode(False), torch.enable_grad():
                yield
        except BaseException as error:
            self._error = error
            raise
        finally:
            switches.apply(Switches.current())

    def start(self, shipment: Shipment, profile: Profile) -> None:
        """See :class:`Backend`."""
        (only,) = shipment.for_stages(1)
        with self._apart():
            self._stage = make_stage(only, self._device, copy=False)
        self._collector = Collector(profile, 1)

    def _note_profile(self, report: StageReport | None) -> None:
        """Where ``JAP_PROFILE`` names a file, leave there what was measured, for jap-plan."""
        path = os.environ.get(profile_cache.ENV_PROFILE)
        if report is None or not path or self._collector is None:
            return
        profile = self._collector.add(report)
        if profile is not None:
            try:
                profile_cache.write(path, profile_cache.Entry(profile=profile))
            except OSError as error:
                warnings.warn(f"jap: cannot write {profile_cache.ENV_PROFILE}={path}: {error.strerror}", stacklevel=2)

    def step(self, order: StepOrder, switches: Switches, inputs: list[Any], targets: list[Any]) -> Pending:
        """See :class:`Backend`."""
        stage = self._running
        pending = Pending(2 if order.apply and stage.settings.clip_norm is not None else 1)
        with self._apart():
            targets = trees.as_sent(targets)
            order = dataclasses.replace(order, groups=trees.as_sent(order.groups))
            stage.prepare(order, targets)
            for number, (tree, target) in enumerate(zip(trees.as_sent(inputs), targets, strict=True)):
                with stage.timed(Kind.FORWARD):
                    stage.forward(order, number, tree, target)
                if number == len(inputs) - 1:
                    result: BatchResult = stage.result()
                with stage.timed(Kind.BACKWARD):
                    stage.backward(order, number, None)
            if order.apply:
                with stage.timed(Kind.STEP):
                    stage.finish(None)
                    norm = stage.commit(order, None).norm
                if stage.settings.clip_norm is not None:
                    pending.put("norm", norm)
            self._note_profile(stage.measured())
        pending.put("result", result)
        return pending

    def set_metric(self, number: int, function: Callable[..., Any]) -> None:
        """See :class:`Backend`."""
        self._metrics = {number: load_metric(*shipping.dump(function, "metric_fn"), self._device)}

    def evaluate(self, order: EvaluateOrder, switches: Switches, inputs: list[Any], targets: list[Any]) -> Pending:
        """See :class:`Backend`."""
        pending = Pending(1)
        outputs = []
        with self._apart():
            for number, (tree, target) in enumerate(zip(trees.as_sent(inputs), trees.as_sent(targets), strict=True)):
                output = self._running.evaluate(order.iteration, number, tree, order.modes)
                outputs.append(answer(output, target, order, number, self._metrics, self._device))
        pending.put("outputs", trees.decode(*trees.encode(outputs)))
        return pending

    def pull(self, what: str) -> dict[str, Any]:
        """See :class:`Backend`."""
        with self._apart():
            return pull_from(self._running, what)

    def load(self, what: str, state: dict[str, Any]) -> None:
        """See :class:`Backend`."""
        with self._apart():
            load_into(self._running, what, state)

    def close(self) -> None:
        """See :class:`Backend`."""
        self._stage = None


def load_metric(data: bytes, found: list[Tensor], device: torch.device) -> Callable[..., Any]:
    """A metric function as it was dumped, in a world of its own."""
    world = shipping.World()
    function = shipping.load(data, found, lambda tensor: tensor.to(device, copy=True), world=world)
    return lambda output, target: function(*trees.moved((output, target), world))


def answer(
    output: Any,
    target: Any,
    order: EvaluateOrder,
    number: int,
    metrics: dict[int, Callable[..., Any]],
    device: torch.device,
) -> Any:
    """What the last stage sends back for one evaluated micro-batch."""
    output = trees.tree_map(lambda leaf, _: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
    if order.metric is None:
        return trees.to_device(output, torch.device("cpu"))
    switches = Switches.current()
    with torch.no_grad():
        values = metrics[order.metric](output, trees.to_device(target, device))
    switches.apply(Switches.current())
    return microbatch.metric_sums(values, order.sizes[number])


def pull_from(stage: MemberStage, what: str) -> dict[str, Any]:
    """One stage's part of a state."""
    if what == "model":
        return dict(stage.model_state())
    if what == "optimizer":
        return dict(stage.optimizer_state())
    return dict(stage.after_step_state())


def load_into(stage: MemberStage, what: str, state: dict[str, Any]) -> None:
    """Put one stage's part of a state back."""
    if what == "model":
        stage.load_model_state(state)
    elif what == "optimizer":
        stage.load_optimizer_state(state)
    else:
        stage.load_after_step_state(state)


def merge_tensors(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One mapping from the stages' disjoint ones."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    return merged
