"""Measures one member's blocks while it trains: the profile that the planner and the next cut read.

Each stage of a member times its own blocks over the first iterations and then stops; nothing is computed twice and no
value changes. Forwards are timed around each block. Backwards need no hooks of their own: the hooks that seed each
block's backward (see ``stage``) tell when gradients reach it, and the next such moment is its end. On an accelerator
the marks are events on its stream, read when the measuring is over.

A member's process puts the stages' reports together (``Collector``), on top of what ``estimate`` told at first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slurm_jap import blocks as blocks_module
from slurm_jap import trees
from slurm_jap.profile import BlockProfile, Profile
from slurm_jap.schedule import Kind
from slurm_jap.shipment import BlockShipment, OptimizerParts

WARM_UP = 1
"""Iterations that are not measured: memory is allocated, kernels are chosen, optimizers make their state."""
REPORT_AFTER = (2, 8)
"""Iterations measured when a stage reports; the last report ends the measuring."""
OPERATIONS_PER_SECOND = 1e12
"""What turns operations into the seconds of an estimate: only the ratios mean anything."""


def device_name(device: torch.device) -> str:
    """``cpu``, or what the accelerator calls itself."""
    if device.type == "cpu":
        return "cpu"
    with contextlib.suppress(Exception):
        return str(torch.get_device_module(device).get_device_name(device))
    return device.type


def device_bytes(device: torch.device) -> int | None:
    """Memory of an accelerator; None for the CPU, or where it is not told."""
    if device.type == "cpu":
        return None
    with contextlib.suppress(Exception):
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return None


@dataclasses.dataclass(slots=True, kw_only=True)
class StageReport:
    """What one stage of a member measured; per block by its number."""

    stage: int
    device: str
    device_bytes: int | None
    iterations: int
    forward: dict[int, float]
    backward: dict[int, float]
    activation: dict[int, int]
    """Only blocks whose saved tensors could be counted."""
    output: dict[int, int]
    parameter: dict[int, int]
    gradient: dict[int, int]
    optimizer: dict[int, int]
    step: float
    """Seconds of one optimizer step on this stage."""
    forward_overhead: float
    backward_overhead: float


class Measurement:
    """The stop-watch of one member's stage. All of it is called from the thread that acts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._iterations = -WARM_UP
        """Measured so far; negative while warming up."""
        self._reports = list(REPORT_AFTER)
        self._forward: dict[int, list[tuple[Any, Any]]] = defaultdict(list)
        self._backward: dict[int, list[list[tuple[Any, Any]]]] = defaultdict(list)
        """Per block and micro-batch, the intervals in which it ran."""
        self._steps: list[list[tuple[Any, Any]]] = []
        self._step: list[tuple[Any, Any]] = []
        """The parts of the step that is going on."""
        self._actions: dict[Kind, list[tuple[float, float]]] = {Kind.FORWARD: [], Kind.BACKWARD: []}
        """Host seconds of whole actions, and of the blocks in them."""
        self._blocks = 0.0
        self._marks: list[tuple[int, Any]] = []
        self._activation: dict[int, int] = {}
        self._output: dict[int, int] = {}
        self._seen: set[int] = set()

    @property
    def over(self) -> bool:
        """Nothing more is to be measured."""
        return not self._reports

    def mark(self) -> Any:
        """Now: seconds, or an event on the device's stream."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device.type, enable_timing=True)
        event.record()
        return event

    def _seconds(self, interval: tuple[Any, Any]) -> float:
        begin, end = interval
        if isinstance(begin, float):
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    @contextlib.contextmanager
    def block(self, number: int, call: Any) -> Iterator[None]:
        """Around one block's forward."""
        if self._iterations < 0:
            yield
            return
        if number not in self._activation and self._iterations == 0 and _plain(call):
            # The one call in which saved tensors are counted is not timed.
            saved, host = _Saved(call, self._seen), time.perf_counter()
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                yield
            self._activation[number] = saved.bytes
            self._blocks += time.perf_counter() - host
            return
        begin, host = self.mark(), time.perf_counter()
        yield
        self._forward[number].append((begin, self.mark()))
        self._blocks += time.perf_counter() - host

    def output(self, number: int, value: Any) -> None:
        """What a block returned."""
        if number not in self._output:
            self._output[number] = sum(map(trees.nbytes, trees.tensors(value)))

    def backward_begins(self, number: int) -> None:
        """Gradients enter this stage's last block, or the loss."""
        self._marks = [(number, self.mark())] if self._iterations >= 0 else []

    def gradient_reaches(self, number: int) -> None:
        """The backward of a block begins, and that of the one after it has ended."""
        if self._marks:
            self._marks.append((number, self.mark()))

    def backward_ends(self) -> None:
        """The stage's backward of one micro-batch is done."""
        if not self._marks:
            return
        self._marks.append((-1, self.mark()))
        intervals: dict[int, list[tuple[Any, Any]]] = defaultdict(list)
        for (number, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            intervals[number].append((begin, end))
        for number, parts in intervals.items():
            self._backward[number].append(parts)
        if self._device.type == "cpu":
            self._blocks += float(self._marks[-1][1] - self._marks[0][1])
        self._marks = []

    @contextlib.contextmanager
    def action(self, kind: Kind) -> Iterator[None]:
        """Around one whole action, its messages included."""
        if self._iterations < 0:
            yield
        elif kind is Kind.STEP:
            begin = self.mark()
            yield
            self._step.append((begin, self.mark()))
        else:
            self._blocks, host = 0.0, time.perf_counter()
            yield
            if self._blocks > 0.0:
                self._actions[kind].append((time.perf_counter() - host, self._blocks))

    def iteration_ends(self) -> bool:
        """One more batch is done; whether a report is due."""
        self._iterations += 1
        if self._step:
            self._steps.append(self._step)
            self._step = []
        if self._reports and self._iterations >= self._reports[0]:
            del self._reports[0]
            return True
        return False

    def report(
        self, stage: int, everything: Sequence[tuple[int, Mapping[str, Tensor]]], states: Mapping[str, Any]
    ) -> StageReport:
        """What was measured so far.

        Args:
            everything: per block its number and its parameters and buffers, by name.
            states: the optimizer's state of each parameter that this stage owns.
        """
        parameter: dict[int, int] = {}
        gradient: dict[int, int] = {}
        optimizer: dict[int, int] = defaultdict(int)
        met: set[str] = set()
        for number, tensors in everything:
            parameter[number] = sum(map(trees.nbytes, tensors.values()))
            gradient[number] = sum(trees.nbytes(t) for t in tensors.values() if t.requires_grad)
            for name in tensors:
                if name in states and name not in met:
                    met.add(name)
                    values = states[name].values() if isinstance(states[name], dict) else ()
                    optimizer[number] += sum(v.nbytes for v in values if isinstance(v, Tensor) and v.dim() > 0)
        overheads = {
            kind: statistics.median(whole - blocks for whole, blocks in pairs) if pairs else 0.0
            for kind, pairs in self._actions.items()
        }
        on_host = self._device.type == "cpu"  # elsewhere an action only launches what the device does later
        return StageReport(
            stage=stage,
            device=device_name(self._device),
            device_bytes=device_bytes(self._device),
            iterations=max(0, self._iterations),
            forward={n: statistics.median(map(self._seconds, found)) for n, found in self._forward.items()},
            backward={
                n: statistics.median(sum(map(self._seconds, parts)) for parts in found)
                for n, found in self._backward.items()
            },
            activation=dict(self._activation),
            output=dict(self._output),
            parameter=parameter,
            gradient=gradient,
            optimizer=dict(optimizer),
            step=statistics.median(sum(map(self._seconds, step)) for step in self._steps) if self._steps else 0.0,
            forward_overhead=max(0.0, overheads[Kind.FORWARD]) if on_host else 0.0,
            backward_overhead=max(0.0, overheads[Kind.BACKWARD]) if on_host else 0.0,
        )


def _plain(call: Any) -> bool:
    """Whether counting saved tensors cannot make a compiler look at the block anew."""
    modules = call.modules() if isinstance(call, nn.Module) else ()
    return not any(type(module).__name__ == "OptimizedModule" for module in modules)


class _Saved:
    """Counts what autograd keeps, each storage once, the block's own parameters and buffers apart."""

    def __init__(self, call: Any, seen: set[int]) -> None:
        """``seen``: storages that are counted already; what one block returns, the next one keeps as well."""
        own = [*call.parameters(), *call.buffers()] if isinstance(call, nn.Module) else []
        seen.update(map(_storage, own))
        self._seen = seen
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._seen:
            self._seen.add(storage)
            with contextlib.suppress(RuntimeError, NotImplementedError):
                self.bytes += tensor.untyped_storage().nbytes()
        return tensor

    @staticmethod
    def unpack(tensor: Tensor) -> Tensor:
        return tensor


def _storage(tensor: Tensor) -> int:
    with contextlib.suppress(RuntimeError, NotImplementedError):
        return tensor.untyped_storage().data_ptr()
    return id(tensor)


# --- the member's side ------------------------------------------------------------------------------------------------


def signature(
    blocks: Sequence[BlockShipment],
    names: Sequence[str],
    parameters: Mapping[str, Tensor],
    first_inputs: Any,
    microbatches: int,
    settings: Sequence[Any],
) -> str:
    """A word that is equal for equal networks trained alike on batches of equal shape.

    Args:
        names: of each block.
        settings: whatever else makes a difference: optimizer, precision, batches per step.
    """
    inputs = [f"{list(t.shape)}{t.dtype}" for t in trees.tensors(first_inputs)]
    told = [(names[place], block.names) for place, block in enumerate(blocks)]
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters.items()]
    text = repr((told, shapes, inputs, microbatches, [str(value) for value in settings]))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def estimate(
    *,
    blocks: Sequence[BlockShipment],
    names: Sequence[str],
    passes: Sequence[blocks_module.Profile],
    parameters: Mapping[str, Tensor],
    owners: Mapping[str, int],
    optimizer: OptimizerParts,
    signature: str,
    microbatches: int,
    accumulate: int,
) -> Profile:
    """The profile as far as the first micro-batch tells it, before anything has trained: bytes, and operations.

    Args:
        blocks: the loss is the last.
        passes: of each block but the loss.
        owners: parameter name -> number of the block that owns it.
    """
    copies = _states_per_parameter(optimizer)
    found = []
    for place, block in enumerate(blocks):
        sizes = {name: parameters[name] for name in block.names if name in parameters}
        trained = [p.nbytes for p in sizes.values() if p.requires_grad]
        mine = [p.nbytes for name, p in sizes.items() if p.requires_grad and owners.get(name) == block.number]
        told = passes[place] if place < len(passes) else None
        seconds = told.cost / OPERATIONS_PER_SECOND if told else 0.0
        found.append(
            BlockProfile(
                name=names[place],
                forward=seconds,
                backward=2 * seconds if trained else seconds,
                parameter_bytes=sum(p.nbytes for p in sizes.values()),
                gradient_bytes=sum(trained),
                optimizer_bytes=copies * sum(mine),
                activation_bytes=told.activation_bytes if told else 0,
                output_bytes=told.output_bytes if told else 0,
            )
        )
    return Profile(
        signature=signature, device="cpu", blocks=tuple(found), microbatches=microbatches, accumulate=accumulate
    )


def _states_per_parameter(optimizer: OptimizerParts) -> int:
    """How many tensors of a parameter's size the optimizer keeps for it; two where its class is not known."""
    name = optimizer.kind.__name__.lower()
    if name == "sgd":
        return int(any(group.get("momentum") for group in optimizer.groups))
    return {"adagrad": 1, "rmsprop": 1, "lion": 1, "rprop": 2}.get(name, 2)


class Collector:
    """Puts the stages' reports of one member together."""

    def __init__(self, estimated: Profile, stages: int) -> None:
        self._estimated, self._stages = estimated, stages
        self._reports: dict[int, StageReport] = {}

    def add(self, report: StageReport) -> Profile | None:
        """One more report; the profile, once every stage has measured as many iterations."""
        self._reports[report.stage] = report
        reports = list(self._reports.values())
        if len(reports) < self._stages or len({r.iterations for r in reports}) > 1:
            return None
        return assemble(self._estimated, reports)


def assemble(estimated: Profile, reports: Sequence[StageReport]) -> Profile:
    """The measured profile; what no stage could measure stays as it was estimated."""
    count = len(estimated.blocks)
    blocks = list(estimated.blocks)
    for report in reports:
        weights = {n: report.parameter[n] + 1 for n in report.parameter}
        total = sum(weights.values()) or 1
        for number, size in report.parameter.items():
            if not 0 <= number < count:
                continue
            old = blocks[number]
            blocks[number] = dataclasses.replace(
                old,
                forward=report.forward.get(number, 0.0),
                backward=report.backward.get(number, 0.0),
                step=report.step * weights[number] / total,
                parameter_bytes=size,
                gradient_bytes=report.gradient[number],
                optimizer_bytes=report.optimizer.get(number, 0),
                activation_bytes=report.activation.get(number, old.activation_bytes),
                output_bytes=report.output.get(number, old.output_bytes),
            )
    known = [report.device_bytes for report in reports if report.device_bytes is not None]
    return dataclasses.replace(
        estimated,
        device=reports[0].device,
        blocks=tuple(blocks),
        measured=True,
        iterations=min(report.iterations for report in reports),
        device_bytes=min(known, default=None),
        forward_overhead=max(report.forward_overhead for report in reports),
        backward_overhead=max(report.backward_overhead for report in reports),
    )
