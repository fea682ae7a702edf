"""One member's part of one stage: its blocks, their activations and gradients, its slice of the optimizer.

The actions of one iteration, each run by the engine (or by the in-process Trainer, which is a pipeline of one stage):

    forward(m), backward(m)   ascending m on every stage; a block's draws are seeded by what it computes
    finish                    after the last backward, towards stage 0: gradients divided, tied ones summed, norms taken
    commit                    from stage 0 on: clip, step, after_step

``finish`` and ``commit`` are two actions so that no stage waits inside one for another's norm: the clip coefficient
needs every stage's norms, and travels back ahead of the next iteration's forwards. Where nothing is to be agreed, both
run at once. A parameter used by several blocks is summed into its owner, from the last block to the first, and counted
once in the norm; after the step its copies are overwritten with the owner's value.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _foreach_utils

from slurm_jap import draws, microbatch, shipping, trees
from slurm_jap.blocks import autocasting, call_block
from slurm_jap.errors import UsageError
from slurm_jap.frozen import Holding
from slurm_jap.measure import Measurement, StageReport
from slurm_jap.schedule import Kind
from slurm_jap.shipment import OptimizerParts, StageShipment, take_apart
from slurm_jap.switches import Switches


@dataclasses.dataclass(slots=True)
class Finish:
    """What a stage tells the one before it after its last backward of an iteration."""

    divisor: float | None = None
    """The batch's total count, where gradients are still sums."""
    norms: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """0-d norm of every gradient so far, by parameter name."""
    tied: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Sums of the gradients of copies whose owner lies further towards stage 0."""


@dataclasses.dataclass(slots=True)
class Commit:
    """What a stage tells the one after it once it has stepped."""

    coefficient: Tensor | None = None
    """0-d: every gradient is multiplied by it."""
    norm: Tensor | None = None
    """0-d: the total norm before clipping."""
    tied: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """New values of parameters that later stages hold copies of."""


@dataclasses.dataclass(slots=True, kw_only=True)
class StepOrder:
    """One call of ``Trainer.step`` as every stage sees it; each stage keeps what concerns it."""

    iteration: int
    """Counts calls of ``step`` from 0; part of every draw's key."""
    sizes: tuple[int, ...]
    """Rows of each micro-batch."""
    apply: bool
    """Whether the optimizer steps after this batch (false while accumulating)."""
    step: int
    """Number of the optimizer step that this batch belongs to, from 0."""
    modes: tuple[bool, ...]
    """``training`` of every module of the model, in order."""
    trainable: tuple[bool, ...]
    """``requires_grad`` of every parameter, in order."""
    groups: list[dict[str, Any]]
    """Values of the optimizer's groups, as the script has them."""
    deferred: bool
    """Gradients are sums, to be divided by the total count just before the step (see ``microbatch``)."""


@dataclasses.dataclass(slots=True)
class BatchResult:
    """What the last stage knows when the last forward of a batch is done."""

    loss: Tensor
    """0-d, on the CPU."""
    metrics: dict[str, float]


class _Receive(torch.autograd.Function):
    """Gives a stage's inputs a place in its graph, so that the first block may even change them in place."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, inputs: _Inputs) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inputs = inputs
        values = tuple(inputs.pending)
        inputs.pending = []
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.inputs.grads = list(grads)
        return None, None


class _Inputs:
    """The differentiable inputs of one micro-batch and, after backward, their gradients."""

    def __init__(self) -> None:
        self.pending: list[Tensor] = []
        self.places: list[int] = []
        self.count = 0
        self.grads: list[Tensor | None] = []

    def enter(self, tree: Any) -> Any:
        """The tree with its differentiable tensors made part of the graph."""
        for place, leaf in enumerate(trees.tensors(tree)):
            self.count += 1
            if leaf.requires_grad:
                self.pending.append(leaf.detach())
                self.places.append(place)
        if not self.pending:
            return tree
        token = torch.empty(0, requires_grad=True)
        entered = dict(zip(self.places, _Receive.apply(token, self), strict=True))  # type: ignore[no-untyped-call]
        counter = iter(range(self.count))

        def swap(leaf: Any, path: str) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            place = next(counter)
            return entered.get(place, leaf)

        return trees.tree_map(swap, tree)

    def gradients(self) -> list[Tensor | None]:
        """One per tensor of the tree; None where none is due."""
        result: list[Tensor | None] = [None] * self.count
        for place, grad in zip(self.places, self.grads, strict=False):
            result[place] = grad
        return result


@dataclasses.dataclass(slots=True)
class _Held:
    """What a stage keeps between a micro-batch's forward and its backward."""

    inputs: _Inputs
    roots: list[Tensor | None]
    """The outputs that need a gradient, by place; on the last stage the one scalar to differentiate."""


class _Block:
    """One block as it lies on the device."""

    def __init__(self, number: int, loaded: Any, world: shipping.World) -> None:
        self.number, self.world = number, world
        self.call: Callable[..., Any]
        self.modules: list[tuple[int, nn.Module]]
        self.parameters: dict[str, nn.Parameter]
        self.buffers: dict[str, Tensor]
        self.call, self.modules, self.parameters, self.buffers = loaded
        self.every_module = [module for _, module in self.modules]
        if isinstance(self.call, nn.Module):
            self.every_module += list(self.call.modules())
        self.homes = {
            id(buffer): (module, place)
            for module in reversed(self.every_module)
            for place, buffer in module._buffers.items()
            if buffer is not None
        }
        """``id`` of each buffer as shipped -> the module and name that hold it."""


class _ChangingBuffers:
    """Buffers that forward changes in place.

    One micro-batch's backward may need a buffer as it was in its own forward, when the next micro-batch's forward has
    already run. Alone, backward always comes first. So such a buffer gets new memory before a forward that comes early.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        unique = {id(module): module for module in modules}
        self._all = [(module, name) for module in unique.values() for name in module._buffers]
        self._found: list[tuple[nn.Module, str]] = []
        self._first: int | None = None
        """Iteration in which they are looked for."""

    def versions(self, iteration: int) -> list[tuple[nn.Module, str, Tensor, int]]:
        """How buffers are before an action; empty after the first batch."""
        if self._first is None:
            self._first = iteration
        if iteration != self._first:
            return []
        held = [(module, name, module._buffers[name]) for module, name in self._all]
        return [(module, name, buffer, buffer._version) for module, name, buffer in held if buffer is not None]

    def note(self, before: list[tuple[nn.Module, str, Tensor, int]]) -> None:
        """Forward has run."""
        for module, name, buffer, version in before:
            here = (module, name)
            if buffer._version != version and module._buffers[name] is buffer and here not in self._found:
                self._found.append(here)

    def changed(self, before: list[tuple[nn.Module, str, Tensor, int]]) -> str:
        """The name of a buffer that is no longer what it was; empty if there is none."""
        for module, name, buffer, version in before:
            if buffer._version != version or module._buffers[name] is not buffer:
                return f"{type(module).__name__}.{name}"
        return ""

    def part(self) -> None:
        """Leave the memory of those found to whoever still needs it."""
        copies: dict[int, Tensor] = {}
        for module, name in self._found:
            buffer = module._buffers[name]
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())


class MemberStage:
    """See the module's text. Not thread-safe: one thread acts at a time."""

    def __init__(
        self, shipment: StageShipment, device: torch.device, *, copy: bool, common: Holding | None = None
    ) -> None:
        """Put a shipment on ``device``.

        Args:
            copy: whether the shipment's tensors belong to somebody else.
            common: where frozen parameters are looked for that siblings have too.

        Raises:
            Exception: whatever the user's classes raise when they are unpickled.
        """
        self.settings = shipment.settings
        self.stage, self.stages = shipment.stage, shipment.stages
        self.first, self.last = self.stage == 0, self.stage == self.stages - 1
        self.device = device
        self._loss_block = shipment.loss_block
        bare = [dataclasses.replace(block, data=b"", tensors=[]) for block in shipment.blocks]
        self._shipment = dataclasses.replace(shipment, blocks=bare, optimizer=(b"", []), after_step=None)

        self.common = common

        def place(data: bytes, found: Sequence[Tensor], world: shipping.World | None = None) -> Any:
            frozen = None if common is None else common.parameter
            return shipping.load(data, found, lambda tensor: tensor.to(device, copy=copy), frozen, world=world)

        worlds = [shipping.World() for _ in shipment.blocks]
        everything = [
            _Block(b.number, place(b.data, b.tensors, world), world)
            for b, world in zip(shipment.blocks, worlds, strict=True)
        ]
        self._everything = everything
        self._blocks = everything[:-1] if self.last else everything
        self._loss = everything[-1].call if self.last else None

        owned = set(shipment.owned)
        self.parameters: dict[str, nn.Parameter] = {}
        """Owned here."""
        self._copies: dict[str, list[nn.Parameter]] = defaultdict(list)
        """Other uses of tied parameters on this stage, owner here or not, in ascending block order."""
        self._buffer_homes: dict[str, tuple[nn.Module, str]] = {}
        """Where each buffer that this stage answers for is held: a module may put another tensor under the name."""
        for block in everything:
            for name, parameter in block.parameters.items():
                if name in owned and name not in self.parameters:
                    self.parameters[name] = parameter
                else:
                    self._copies[name].append(parameter)
            homes = block.homes
            for name, buffer in block.buffers.items():
                if name in shipment.buffers and name not in self._buffer_homes and id(buffer) in homes:
                    self._buffer_homes[name] = homes[id(buffer)]
        self._tied_elsewhere = [name for name in self._copies if name not in self.parameters]
        self._order = {name: place for place, name in enumerate(self.settings.parameter_order)}
        self._given = shipment.given
        self._optimizer, self._group_numbers = self._build_optimizer(*shipment.optimizer)
        self._after_step: Callable[..., Any] | None = None
        self.after_step_result: Any = None
        if shipment.after_step is not None:
            self._after_step, self.after_step_result = place(*shipment.after_step)
        self._held: dict[int, _Held] = {}
        self._changing = _ChangingBuffers([module for block in everything for module in block.every_module])
        self._modes: tuple[bool, ...] | None = None
        self._trainable: tuple[bool, ...] | None = None
        self._totals = microbatch.LossTotals()
        self._counts: list[float] = []
        self._deferred = False
        self._divisor: float | None = None
        self._finish: Finish | None = None
        self.watch: Callable[[str, int, list[Tensor]], None] | None = None
        """Called with every block's number and ``output``, and with the ``gradient`` of each, as they come."""
        self._measurement: Measurement | None = Measurement(device)
        """None once this stage's blocks have been measured."""

    # --- the optimizer's slice --------------------------------------------------------------------------------------

    def _build_optimizer(self, data: bytes, found: list[Tensor]) -> tuple[torch.optim.Optimizer | None, list[int]]:
        kind, instance, values, members, state = shipping.load(data, [t.clone() for t in found])
        self._group_count = len(values)
        if self._given is None:
            self._given = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in value.items()} for value in values]
        groups, numbers = [], []
        for number, (value, names) in enumerate(zip(values, members, strict=True)):
            if names:
                groups.append({**value, "params": [self.parameters[name] for name in names]})
                numbers.append(number)
        if not groups:
            return None, []
        optimizer: torch.optim.Optimizer = kind.__new__(kind)
        optimizer.__dict__.update(instance)
        slots: dict[Any, Any] = defaultdict(dict)
        for name, values_of in state.items():
            slots[self.parameters[name]] = self._on_device(values_of)
        optimizer.__setstate__({"defaults": instance.get("defaults", {}), "state": slots, "param_groups": groups})
        for hook in (
            "_optimizer_step_pre_hooks",
            "_optimizer_step_post_hooks",
            "_optimizer_state_dict_pre_hooks",
            "_optimizer_state_dict_post_hooks",
            "_optimizer_load_state_dict_pre_hooks",
            "_optimizer_load_state_dict_post_hooks",
        ):
            optimizer.__dict__.setdefault(hook, {})
        return optimizer, numbers

    def _on_device(self, values: dict[str, Any]) -> dict[str, Any]:
        # torch keeps AdamW's 0-d step counter on the host; everything else lies with its parameter.
        return {
            key: (v.to(self.device) if isinstance(v, Tensor) and not (key == "step" and v.dim() == 0) else v)
            for key, v in values.items()
        }

    # --- actions ----------------------------------------------------------------------------------------------------

    def prepare(self, order: StepOrder, targets: Sequence[Any] | None) -> None:
        """Take up a new batch: modes, trainability and, on the last stage, the weight of every micro-batch."""
        self._set_modes(order.modes)
        self._deferred = order.deferred
        if order.trainable != self._trainable:
            for block in self._everything:
                for name, parameter in block.parameters.items():
                    trainable = order.trainable[self._order[name]]
                    if trainable and self.common is not None:
                        self.common.own(parameter)
                    parameter.requires_grad_(trainable)
            self._trainable = order.trainable
        if self.last:
            assert targets is not None
            assert self._loss is not None
            self._totals = microbatch.LossTotals()
            self._counts = microbatch.item_counts(self._loss, targets, order.sizes)

    def _set_modes(self, modes: tuple[bool, ...]) -> None:
        if modes == self._modes:
            return
        for block in self._everything:
            if isinstance(block.call, nn.Module):
                for module in block.call.modules():
                    module.training = modes[0]  # modules that the model itself does not hold follow its root
            for number, module in block.modules:
                module.training = modes[number]
        self._modes = modes

    def forward(self, order: StepOrder, number: int, tree: Any, target: Any) -> Any:
        """Run micro-batch ``number`` forward.

        Args:
            tree: ``(args, kwargs)`` on stage 0, else what the stage before it sent (tensors that require grad wait for
                a gradient).
            target: the micro-batch's target, last stage only.

        Returns:
            The tree for the next stage; None on the last.
        """
        inputs = _Inputs()
        if self._held:
            self._changing.part()
        before = self._changing.versions(order.iteration)
        value = trees.to_device(tree, self.device)
        if not self.first:
            value = inputs.enter(value)
        value = self._run_blocks(value, order.iteration, number, draws.FORWARD)
        self._changing.note(before)
        if not self.last:
            self._held[number] = _Held(inputs, [t if t.requires_grad else None for t in trees.tensors(value)])
            return trees.cut_off(value)
        scalar = self._forward_loss(order, number, value, trees.to_device(target, self.device))
        if self.watch is not None:
            self.watch("output", self._loss_block, [scalar])
        self._held[number] = _Held(inputs, [scalar if scalar.requires_grad else None])
        return None

    def _run_blocks(self, value: Any, iteration: int, number: int, direction: int) -> Any:
        grad = direction == draws.FORWARD
        switches = Switches.current()
        for block in self._blocks:
            before = {id(t): t.grad_fn for t in trees.tensors(value)} if grad else {}
            draws.reseed(draws.key(self.settings.seed, iteration, number, block.number, direction), self.device)
            with self._timing(block, grad), autocasting(self.settings.autocast, self.device):
                value = call_block(block.call, block.number, trees.moved(value, block.world))
            switches.apply(Switches.current())
            value = trees.settle(value)
            if grad and self.watch is not None:
                self.watch("output", block.number, trees.tensors(value))
            if grad:
                if self._measurement is not None:
                    self._measurement.output(block.number, value)
                self._meet_gradients(value, before, iteration, number, block.number)
            elif self.settings.differentiates:
                value = trees.cut_off(value)
        return value

    def _meet_gradients(self, value: Any, before: dict[int, Any], iteration: int, number: int, block: int) -> None:
        """Have the first node of this block that runs in backward seed the generators for the whole block.

        Gradients are settled where they enter the block, for they might have come from another stage.
        """
        seeded = False
        key = draws.key(self.settings.seed, iteration, number, block, draws.BACKWARD)

        def arrive(grad: Tensor) -> Tensor:
            nonlocal seeded
            if not seeded:
                seeded = True
                if self._measurement is not None:
                    self._measurement.gradient_reaches(block)
                draws.reseed(key, self.device)
            if self.watch is not None:
                self.watch("gradient", block, [grad])
            return trees.settled(grad)

        for tensor in trees.tensors(value):
            # What only passes through belongs to an earlier block, which seeds it itself.
            if tensor.grad_fn is not None and tensor.grad_fn is not before.get(id(tensor)):
                tensor.register_hook(arrive)  # type: ignore[no-untyped-call]

    def _forward_loss(self, order: StepOrder, number: int, output: Any, target: Any) -> Tensor:
        assert self._loss is not None
        draws.reseed(
            draws.key(self.settings.seed, order.iteration, number, self._loss_block, draws.FORWARD), self.device
        )
        switches = Switches.current()
        with self._timing(self._everything[-1], True), autocasting(self.settings.autocast, self.device):
            result = self._loss(*trees.moved((output, target), self._everything[-1].world))
        switches.apply(Switches.current())
        only = len(order.sizes) == 1
        if isinstance(result, microbatch.Loss):
            if not (self._deferred or (only and self.settings.accumulate == 1)):
                raise UsageError(
                    "loss_fn returned a Loss here and a tensor on the first micro-batch; return the same kind always"
                )
            total = microbatch.check_scalar(result.sum)
            count = float(result.count)
            self._totals.add(total.detach(), count, result.metrics)
            return total if self._deferred else total / count
        mean = microbatch.check_scalar(result)
        if microbatch.reduction_of(self._loss) == "sum":
            self._totals.add(mean.detach(), None, {})
            return mean
        count, batch = self._counts[number], sum(self._counts)
        if count == 0.0 and (self._deferred or batch):
            # Every item is ignored: the mean is 0/0, but its share of the whole batch is nothing.
            mean = sum(
                (t.sum() * 0.0 for t in trees.tensors(output) if t.is_floating_point()), start=mean.new_zeros(())
            )
        if self._deferred:
            self._totals.add(mean.detach() * count, count, {})
            return mean * count
        share = count / batch if batch else 1.0
        self._totals.add(mean.detach() if share == 1.0 else mean.detach() * share, None, {})
        return mean if share == 1.0 else mean * share

    def result(self) -> BatchResult:
        """Loss and metrics of the batch whose last forward has just run; last stage only."""
        totals = self._totals
        assert totals.weighted is not None
        loss = totals.weighted if totals.count is None else totals.weighted / totals.count
        if totals.count is not None:
            self._divisor = (self._divisor or 0.0) + totals.count
        return BatchResult(loss.to("cpu"), totals.means())

    def backward(self, order: StepOrder, number: int, grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Run micro-batch ``number`` backward.

        Args:
            grads: for each tensor that this stage sent, its gradient or None; None on the last stage.

        Returns:
            The same for the stage before it, one per tensor that this stage received.
        """
        held = self._held.pop(number)
        before = self._changing.versions(order.iteration)
        measurement = self._measurement
        if measurement is not None:
            measurement.backward_begins(self._everything[-1].number)
        if self.last:
            draws.reseed(
                draws.key(self.settings.seed, order.iteration, number, self._loss_block, draws.BACKWARD), self.device
            )
            if held.roots[0] is not None:
                held.roots[0].backward()  # type: ignore[no-untyped-call]
        else:
            assert grads is not None
            pairs = [
                (root, grad.to(self.device))
                for root, grad in zip(held.roots, grads, strict=True)
                if root is not None and grad is not None
            ]
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
        if measurement is not None:
            measurement.backward_ends()
        if len(order.sizes) > 1 and (changed := self._changing.changed(before)):
            raise UsageError(
                f"buffer {changed!r} is changed during backward (where checkpointing repeats a BatchNorm's forward, "
                "for example), and forwards of later micro-batches may run before it or after it; change it in forward "
                "or in after_step, or use microbatches=1"
            )
        return held.inputs.gradients()

    @property
    def activations(self) -> int:
        """Micro-batches whose backward is still due here."""
        return len(self._held)

    @property
    def must_agree(self) -> bool:
        """Whether ``finish`` and ``commit`` need what other stages say."""
        s = self.settings
        return self.stages > 1 and (s.clip_norm is not None or self._deferred or bool(s.tied))

    def finish(self, later: Finish | None) -> Finish:
        """Settle this stage's gradients.

        Args:
            later: what the next stage's ``finish`` returned; None on the last stage or where nothing must agree.
        """
        with torch.no_grad():
            out = Finish()
            if self._deferred:
                out.divisor = self._divisor if self.last else (later.divisor if later else None)
            self._sum_tied(later, out)
            gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
            if out.divisor is not None:
                for grad in gradients.values():
                    grad.div_(out.divisor)
            if self.settings.clip_norm is not None:
                out.norms = dict(later.norms) if later else {}
                out.norms.update(_norms(gradients, self.settings.clip_norm_type, self.device))
        self._divisor = None
        self._finish = out
        return out

    def _sum_tied(self, later: Finish | None, out: Finish) -> None:
        sums = {n: g.to(self.device) for n, g in later.tied.items()} if later else {}
        for name, copies in self._copies.items():
            for copy in reversed(copies):
                if copy.grad is not None:
                    sums[name] = copy.grad if name not in sums else sums[name] + copy.grad
                    copy.grad = None
        for name, total in sums.items():
            parameter = self.parameters.get(name)
            if parameter is None:
                out.tied[name] = total
            elif parameter.grad is None:
                parameter.grad = total
            else:
                parameter.grad = total + parameter.grad

    def commit(self, order: StepOrder, earlier: Commit | None) -> Commit:
        """Clip, step, forget the gradients.

        Args:
            earlier: what the stage before it returned; None on stage 0 or where nothing must agree.
        """
        finished, self._finish = self._finish, None
        assert finished is not None
        s = self.settings
        out = Commit() if earlier is None else Commit(earlier.coefficient, earlier.norm, dict(earlier.tied))
        with torch.no_grad():
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            if s.clip_norm is not None:
                if self.first:
                    out.norm, out.coefficient = _clip_coefficient(
                        finished.norms, self._order, s.clip_norm, s.clip_norm_type
                    )
                assert out.coefficient is not None
                coefficient = out.coefficient.to(self.device)
                for grad in gradients:
                    grad.mul_(coefficient)
            if s.clip_value is not None:
                for grad in gradients:
                    grad.clamp_(-s.clip_value, s.clip_value)
        if self._optimizer is not None:
            self._take_values(self._optimizer, order.groups)
            self._optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        with torch.no_grad():
            if self._after_step is not None:
                self.after_step_result = self._after_step(dict(self.parameters), order.step)
            self._refresh_copies(out)
        return out

    def _take_values(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        """Take over what the script has changed; what the optimizer itself changes in its groups stays."""
        assert self._given is not None
        for group, number in zip(optimizer.param_groups, self._group_numbers, strict=True):
            before = self._given[number]
            for key, value in groups[number].items():
                if key not in before or not _same_value(before[key], value):
                    group[key] = value.clone() if isinstance(value, Tensor) else value
        self._given = groups

    def _refresh_copies(self, out: Commit) -> None:
        for name in self.settings.tied:
            if name in self.parameters:
                out.tied[name] = self.parameters[name].detach()
            value = out.tied.get(name)
            for copy in self._copies.get(name, ()):
                if value is not None and copy.data_ptr() != value.data_ptr():
                    copy.copy_(value)

    # --- measuring --------------------------------------------------------------------------------------------------

    def _timing(self, block: _Block, training: bool) -> contextlib.AbstractContextManager[None]:
        if self._measurement is None or not training:
            return contextlib.nullcontext()
        return self._measurement.block(block.number, block.call)

    def timed(self, kind: Kind) -> contextlib.AbstractContextManager[None]:
        """To be put around each whole action of a step."""
        return contextlib.nullcontext() if self._measurement is None else self._measurement.action(kind)

    def measured(self) -> StageReport | None:
        """To be asked after each batch: what has been measured, when that is due."""
        measurement = self._measurement
        if measurement is None or not measurement.iteration_ends():
            return None
        if measurement.over:
            self._measurement = None
        everything = [(block.number, {**block.buffers, **block.parameters}) for block in self._everything]
        state = self._optimizer.state if self._optimizer is not None else {}
        return measurement.report(
            self.stage, everything, {name: state[p] for name, p in self.parameters.items() if p in state}
        )

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, iteration: int, number: int, tree: Any, modes: tuple[bool, ...]) -> Any:
        """Run one micro-batch forward without gradients, in the given modes; the output tree."""
        self._set_modes(modes)
        with torch.set_grad_enabled(self.settings.differentiates):
            return self._run_blocks(trees.to_device(tree, self.device), iteration, number, draws.EVALUATION)

    # --- state ------------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Tensor]:
        """Host copies of the parameters and buffers that this stage answers for, by name."""
        return {
            name: trees.contiguous(tensor.detach().to("cpu", copy=True))
            for name, tensor in [*self.parameters.items(), *self._buffers()]
        }

    def _buffers(self) -> list[tuple[str, Tensor]]:
        held = ((name, module._buffers[place]) for name, (module, place) in self._buffer_homes.items())
        return [(name, tensor) for name, tensor in held if tensor is not None]

    def after_step_state(self) -> dict[str, Any]:
        """What ``after_step`` returned last, tensors copied to the host."""
        result = self.after_step_result
        return _on_host(result) if isinstance(result, dict) else {}

    def optimizer_state(self) -> dict[Any, dict[str, Any]]:
        """Host copies of the optimizer's state by parameter name, and of what it changed in groups by their number."""
        if self._optimizer is None:
            return {}
        names = {id(p): name for name, p in self.parameters.items()}
        state: dict[Any, dict[str, Any]] = {
            names[id(p)]: _on_host(values) for p, values in self._optimizer.state.items()
        }
        assert self._given is not None
        for group, number in zip(self._optimizer.param_groups, self._group_numbers, strict=True):
            given = self._given[number]
            own = {k: v for k, v in group.items() if k in given and not _same_value(v, given[k])}
            if own:
                state[number] = _on_host(own)
        return state

    @property
    def optimizer_slots(self) -> int:
        """Parameters for which the optimizer has made its state."""
        return 0 if self._optimizer is None else len(self._optimizer.state)

    def state_tensors(self) -> Iterator[Tensor]:
        """All that this member keeps on its device between two batches, but for what it has in common with siblings.

        Parameters, gradients, buffers, the optimizer's and after_step's state; a tensor may come twice.
        """
        modules: dict[int, nn.Module] = {}
        for block in self._everything:
            modules.update((id(module), module) for _, module in block.modules)
            if isinstance(block.call, nn.Module):
                modules.update((id(module), module) for module in block.call.modules())
            for parameter in block.parameters.values():
                if self.common is None or not self.common.shares(parameter):
                    yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
            yield from block.buffers.values()
        for module in modules.values():
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)
        state = self._optimizer.state.values() if self._optimizer is not None else ()
        for found in (list(state), self.after_step_result):
            yield from _tensors_in(found)

    def snapshot(self) -> StageShipment:
        """All of this stage between two steps, on the host: put on a device again, it goes on where this one was."""

        def on_host(dumped: tuple[bytes, list[Tensor]]) -> tuple[bytes, list[Tensor]]:
            return dumped[0], [t.to("cpu", copy=True) for t in dumped[1]]

        blocks = []
        for block, bare in zip(self._everything, self._shipment.blocks, strict=True):
            homes = {name: block.homes.get(id(buffer)) for name, buffer in block.buffers.items()}
            live = {name: (home[0]._buffers[home[1]] if home else block.buffers[name]) for name, home in homes.items()}
            whole = (block.call, block.modules, block.parameters, live)
            data, tensors = on_host(shipping.dump(whole, f"block {block.number}"))
            blocks.append(dataclasses.replace(bare, data=data, tensors=tensors))
        return dataclasses.replace(
            self._shipment,
            blocks=blocks,
            optimizer=on_host(self._optimizer_parts().dump(set(self.parameters))),
            given=self._given,
            after_step=None
            if self._after_step is None
            else on_host(shipping.dump((self._after_step, self.after_step_result), "after_step")),
        )

    def _optimizer_parts(self) -> OptimizerParts:
        names = {id(p): name for name, p in self.parameters.items()}
        count = self._group_count
        if self._optimizer is None:
            return OptimizerParts(torch.optim.SGD, {}, [{}] * count, [[] for _ in range(count)], {})
        parts = take_apart(self._optimizer, names)
        groups: list[dict[str, Any]] = [{} for _ in range(count)]
        members: list[list[str]] = [[] for _ in range(count)]
        for number, group, mine in zip(self._group_numbers, parts.groups, parts.members, strict=True):
            groups[number], members[number] = group, mine
        return dataclasses.replace(parts, groups=groups, members=members)

    @torch.no_grad()
    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Overwrite parameters, their copies and buffers, by name."""
        for block in self._everything:
            homes = block.homes
            for name, parameter in block.parameters.items():
                if name in state:
                    if self.common is not None:
                        self.common.own(parameter)
                    parameter.copy_(state[name])
            for name, buffer in block.buffers.items():
                if name in state and id(buffer) in homes:
                    module, place = homes[id(buffer)]
                    live = module._buffers[place]
                    if live is not None:
                        live.copy_(state[name])

    def load_optimizer_state(self, state: dict[Any, dict[str, Any]]) -> None:
        """Replace the optimizer's state: by parameter name, and by number what groups shall hold."""
        if self._optimizer is None:
            return
        assert self._given is not None
        self._optimizer.state.clear()
        for name, values in state.items():
            if name in self.parameters:
                self._optimizer.state[self.parameters[name]] = self._on_device(
                    {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
                )
        for group, number in zip(self._optimizer.param_groups, self._group_numbers, strict=True):
            group.update(state.get(number, {}))
            self._given[number] = {**self._given[number], **state.get(number, {})}

    def load_after_step_state(self, state: dict[str, Any]) -> None:
        """Give ``after_step`` back what it had: its ``load_state_dict`` gets what concerns this stage's parameters."""
        if self._after_step is None:
            return
        mine = {k: v for k, v in state.items() if k in self.parameters or k not in self._order}
        tensors = {k: v.to(self.device, copy=True) if isinstance(v, Tensor) else v for k, v in mine.items()}
        self._after_step.load_state_dict(tensors)  # type: ignore[attr-defined]
        self.after_step_result = tensors


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def _on_host(values: dict[Any, Any]) -> dict[Any, Any]:
    return {k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in values.items()}


def _norms(gradients: dict[str, Tensor], kind: float, device: torch.device) -> dict[str, Tensor]:
    """The norm of each gradient by the kernel that ``torch.nn.utils.clip_grad_norm_`` uses on this device."""
    if not gradients:
        return {}
    values = list(gradients.values())
    if device.type == "cpu":
        norms: Sequence[Tensor] = [torch.linalg.vector_norm(grad, kind) for grad in values]
    else:
        norms = torch._foreach_norm(values, kind)
    return dict(zip(gradients, norms, strict=True))


def _clip_coefficient(
    norms: dict[str, Tensor], order: dict[str, int], limit: float, kind: float
) -> tuple[Tensor, Tensor]:
    """Total norm and coefficient as ``torch.nn.utils.clip_grad_norm_`` computes them from the norms in model order."""
    in_order = [norms[name].to("cpu") for name in sorted(norms, key=order.__getitem__)]
    if len({norm.dtype for norm in in_order}) > 1:  # torch takes each dtype by itself, in an order of its own
        groups = _foreach_utils._group_tensors_by_device_and_dtype([[*in_order]])
        in_order = [norm for (values,), _ in groups.values() for norm in values if norm is not None]
    total = torch.linalg.vector_norm(torch.stack(in_order), kind) if in_order else torch.tensor(0.0)
    return total, torch.clamp(limit / (total + 1e-6), max=1.0)
