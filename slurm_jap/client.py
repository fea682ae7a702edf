"""What a member script uses: ``prepare``, ``Trainer``, ``StepResult``, ``report``.

``prepare`` takes the model, optimizer and loss over. From then on they live with the trainer -- in this process, or
in the engine of the sweep that this process is a member of -- and the script's own copies hold nothing: parameters are
meta tensors, and what would read or change them names the Trainer's call instead. Both kinds of trainer behave alike,
to the bit.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
import numbers
import os
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from slurm_jap import blocks as blocks_module
from slurm_jap import guards, handover, inspection, measure, membership, microbatch, separable, shipping, trees
from slurm_jap.backend import Backend, EvaluateOrder, LocalBackend, Pending
from slurm_jap.errors import PREFIX, USAGE_EXIT_CODE, UsageError
from slurm_jap.profile import Profile
from slurm_jap.shipment import (
    LOSS_PREFIX,
    OptimizerParts,
    Shipment,
    make_shipment,
    modules_of,
    named_buffers,
    named_parameters,
    take_apart,
)
from slurm_jap.stage import BatchResult, StepOrder
from slurm_jap.switches import Switches

RUN_AHEAD = 2
"""Batches that ``step`` may be ahead of the last known loss, so that a pipeline is never short of work."""


class StepResult:
    """The outcome of one ``Trainer.step``; reading it waits for it."""

    __slots__ = ("_pending",)

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    @property
    def loss(self) -> Tensor:
        """0-d CPU tensor: the batch's mean loss, before the step."""
        result: BatchResult = self._pending.wait()["result"]
        return result.loss

    @property
    def metrics(self) -> dict[str, float]:
        """What ``Loss.metrics`` summed, divided by the batch's count."""
        result: BatchResult = self._pending.wait()["result"]
        return result.metrics

    @property
    def grad_norm(self) -> Tensor | None:
        """0-d CPU tensor: gradient norm before clipping; None without ``clip_grad_norm`` or while accumulating."""
        norm: Tensor | None = self._pending.wait().get("norm")
        return norm

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: ``step`` has done it."""
        raise UsageError("backward(): trainer.step(x, target=y) has done backward and optimizer step; leave them out")

    def item(self) -> float:
        """The loss as a number."""
        return float(self.loss)

    def __float__(self) -> float:
        return float(self.loss)

    def __repr__(self) -> str:
        if not self._pending.done:
            return "StepResult(pending)"
        return "StepResult(failed)" if self._pending.failed else f"StepResult(loss={self.loss.item():.6g})"


@dataclasses.dataclass(slots=True)
class _Taken:
    """What ``prepare`` took, as it was then, until the first batch has told how to take it apart."""

    whole: inspection.Whole
    after_step: Callable[..., Any] | None
    optimizer: OptimizerParts


class Trainer:
    """Trains one model; made by :func:`prepare`."""

    def __init__(
        self,
        taken: _Taken,
        user_model: nn.Module,
        user_loss: Callable[..., Any],
        user_optimizer: torch.optim.Optimizer,
        backend: Backend,
        *,
        microbatches: int,
        accumulate: int,
        clip_norm: tuple[float, float] | None,
        clip_value: float | None,
        autocast: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._taken: _Taken | None = taken
        self._loss: tuple[bytes, list[Tensor]] | None = None
        """Dump of the loss, until the first step has told what it returns."""
        self._first_output: Any = None
        self._deferred: bool | None = None
        self._user_optimizer = user_optimizer
        self._user_modules = modules_of(user_model, user_loss)
        self._trainable_of: list[Tensor] = []
        self._state_names = _State.of(taken.whole.model, "")
        self._loss_names = _State.of(taken.whole.loss_fn, LOSS_PREFIX)
        self._after_step_loads = hasattr(taken.after_step, "load_state_dict")
        self._group_sizes = [len(group["params"]) for group in user_optimizer.param_groups]
        self._group_names = taken.optimizer.members
        self._backend = backend
        self._microbatches = microbatches
        self._accumulate = accumulate
        self._clip_norm, self._clip_value, self._autocast = clip_norm, clip_value, autocast
        self._device = device
        self._seed = torch.initial_seed()
        self._batches = 0
        self._evaluations = 0
        self._metrics = 0
        self._ahead: deque[Pending] = deque()
        self._closed = False
        self._progress = membership.Progress(accumulate)
        self._registered: dict[str, Any] = {}
        self._kept_after_step: dict[str, Any] = {}
        """State of ``after_step`` from a checkpoint, until there is an ``after_step`` to take it."""

    def _bind(self, parameters: list[Tensor]) -> None:
        """Take the script's own, now hollow parameters: their ``requires_grad`` is the user's word."""
        self._trainable_of = parameters

    # --- training ---------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Optimizer steps asked for so far."""
        return self._batches // self._accumulate

    def step(self, *inputs: Any, target: Any = None, **named_inputs: Any) -> StepResult:
        """Train on one batch: forward, backward, clip, optimizer step, gradients cleared.

        Args:
            inputs, named_inputs: what ``model(...)`` takes; trees whose tensors have one row per sample in dimension 0.
            target: what ``loss_fn(output, target)`` gets; split by row alike.

        Returns:
            The result, which need not be computed yet.

        Raises:
            UsageError: a batch that cannot be split; on the first batch also a model that is not its blocks.
            EngineFault: the engine is gone; the message tells the one cause.
            BaseException: what the model, loss or optimizer raised, the remote traceback as its cause.
        """
        self._check_open()
        sizes, micro_inputs, micro_targets = self._split(inputs, named_inputs, target)
        self._open(micro_inputs[0], micro_targets[0], with_loss=True)
        deferred = self._is_deferred(micro_inputs[0], micro_targets[0], sizes[0])
        self._check_groups()
        while len(self._ahead) >= RUN_AHEAD:
            self._ahead.popleft().wait()
        with torch._C.DisableTorchFunctionSubclass():  # hollow parameters answer slowly otherwise
            trainable = tuple([parameter.requires_grad for parameter in self._trainable_of])
        order = StepOrder(
            iteration=self._batches,
            sizes=tuple(sizes),
            apply=(self._batches + 1) % self._accumulate == 0,
            step=self._batches // self._accumulate,
            modes=tuple([module.training for module in self._user_modules]),
            trainable=trainable,
            groups=guards.group_values(self._user_optimizer),
            deferred=deferred,
        )
        pending = self._backend.step(order, Switches.current(), micro_inputs, micro_targets)
        self._batches += 1
        self._user_optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
        pending.when_done(functools.partial(self._progress.note, self._batches))
        self._ahead.append(pending)
        return StepResult(pending)

    def _split(
        self, inputs: tuple[Any, ...], named: dict[str, Any], target: Any
    ) -> tuple[list[int], list[Any], list[Any]]:
        if not inputs and not named:
            raise UsageError("step(): no inputs; pass what model(...) takes, e.g. trainer.step(x, target=y)")
        parts = [(f"inputs[{i}]", value) for i, value in enumerate(inputs)] + list(named.items())
        for name, value in [*parts, ("target", target)]:
            for path, leaf in trees.leaves(value, name):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    raise UsageError(
                        f"{path} is the result of a computation with gradients, which would not flow back; detach() "
                        "it, or make what computes it part of the model"
                    )
        for kind in {"cpu", "cuda", self._device.type}:
            if torch.is_autocast_enabled(kind):
                raise UsageError(
                    "the trainer was called inside torch.autocast, which does not reach it; leave the with statement "
                    "out, and give prepare autocast=torch.bfloat16"
                )
        rows = trees.row_count([*parts, ("target", target)])
        if rows == 0:
            raise UsageError("step(): the batch has 0 rows; skip empty batches, or use drop_last=True")
        sizes = trees.microbatch_sizes(rows, self._microbatches)
        pieces = {name: [trees.settle(p) for p in trees.split_rows(name, value, sizes)] for name, value in parts}
        micro_inputs = [
            (
                tuple(pieces[f"inputs[{i}]"][m] for i in range(len(inputs))),
                {name: pieces[name][m] for name in named},
            )
            for m in range(len(sizes))
        ]
        return sizes, micro_inputs, [trees.settle(p) for p in trees.split_rows("target", target, sizes)]

    def _open(self, inputs: Any, target: Any, *, with_loss: bool) -> None:
        """Check and take the model apart on the first batch, and send it to where it is computed."""
        taken = self._taken
        if taken is None:
            return
        args, kwargs = inputs
        how = inspection.Pass(args, kwargs, target, with_loss, self._autocast, self._device)
        whole = taken.whole
        try:
            differentiates, expected = self._output_of(whole, how)
        except Exception as error:
            if target is None and with_loss and len(args) > 1:
                raise UsageError(
                    f"step got {len(args)} inputs and no target, and the model failed on them "
                    f"({type(error).__name__}: {error}); name the target: trainer.step(x, target=y)"
                ) from error
            raise
        with inspection.unseen(self._device, grad=differentiates):
            shipment = make_shipment(
                model=whole.model,
                blocks=whole.blocks,
                loss_fn=whole.loss_fn,
                optimizer=taken.optimizer,
                after_step=taken.after_step,
                uses=inspection.uses_of(whole, how),
                settings={
                    "seed": self._seed,
                    "accumulate": self._accumulate,
                    "clip_norm": None if self._clip_norm is None else self._clip_norm[0],
                    "clip_norm_type": 2.0 if self._clip_norm is None else self._clip_norm[1],
                    "clip_value": self._clip_value,
                    "autocast": self._autocast,
                    "differentiates": differentiates,
                    "selfcheck": os.environ.get("JAP_SELFCHECK", "") not in ("", "0"),
                },
            )
            output, passes, warning = inspection.check(whole, shipment.blocks, expected, how)
        if warning:
            warnings.warn(warning, stacklevel=3)
        self._backend.start(shipment, self._estimate(taken, shipment, passes, inputs))
        self._taken = None
        if self._kept_after_step:
            self._backend.load("after_step", self._kept_after_step)
            self._kept_after_step = {}
        self._loss = shipment.blocks[-1].data, shipment.blocks[-1].tensors
        self._first_output = output if with_loss else None

    def _output_of(self, whole: inspection.Whole, how: inspection.Pass) -> tuple[bool, Any]:
        """Whether the model takes gradients in its forward, and its output."""
        try:
            with inspection.unseen(self._device):
                return False, inspection.output_of(whole, how)
        except RuntimeError:
            with inspection.unseen(self._device, grad=True):
                return True, inspection.output_of(whole, how)

    def _estimate(
        self,
        taken: _Taken,
        shipment: Shipment,
        passes: Sequence[blocks_module.Profile],
        first_inputs: Any,
    ) -> Profile:
        """What the first micro-batch tells the planner."""
        whole = taken.whole
        parameters = named_parameters(whole.model, whole.loss_fn)
        names = [blocks_module.describe(block) for block in [*whole.blocks, whole.loss_fn]]
        settings = (taken.optimizer.kind.__name__, self._autocast, self._accumulate)
        word = measure.signature(shipment.blocks, names, parameters, first_inputs, self._microbatches, settings)
        return measure.estimate(
            blocks=shipment.blocks,
            names=names,
            passes=passes,
            parameters=parameters,
            owners=shipment.owners,
            optimizer=taken.optimizer,
            signature=word,
            microbatches=self._microbatches,
            accumulate=self._accumulate,
        )

    def _is_deferred(self, inputs: Any, target: Any, rows: int) -> bool:
        """Whether gradients are divided late, which the first step decides; refuses a sum taken for a mean."""
        if self._deferred is None:
            output = self._first_output
            if output is None:  # the model was opened by forward or evaluate
                order = EvaluateOrder(iteration=-1, sizes=(rows,), modes=self._eval_modes(), metric=None)
                pending = self._backend.evaluate(order, Switches.current(), [inputs], [None])
                output = pending.wait()["outputs"][0]
            several, warning = self._look_at_loss(output, target, rows)
            if warning:
                warnings.warn(warning, stacklevel=3)
            self._loss = self._first_output = None
            self._deferred = self._accumulate > 1 or several
        return self._deferred

    def _look_at_loss(self, output: Any, target: Any, rows: int) -> tuple[bool, str]:
        """Whether the total over micro-batches is known only in the end, and what to warn of."""
        assert self._loss is not None
        data, found = self._loss
        world, device = shipping.World(), self._device

        def call(output: Any, target: Any) -> Any:
            with blocks_module.autocasting(self._autocast, device):
                return loss_fn(*trees.cloned((output, target)))

        with inspection.unseen(device):
            loss_fn, *_ = shipping.load(data, [t.clone() for t in found], world=world)
            output, target = trees.moved(trees.to_device(trees.as_sent((output, target)), device), world)
            try:
                result = call(output, target)
            except RuntimeError:  # perhaps only because it takes gradients
                with torch.enable_grad():
                    result = call(trees.differentiable(output), target)
            if isinstance(result, microbatch.Loss):
                microbatch.check_scalar(result.sum)
                return self._microbatches > 1, ""
            microbatch.check_scalar(result)
            if rows < 2 or self._microbatches == 1 or microbatch.says_its_reduction(loss_fn):
                return False, ""
            sizes = [rows - rows // 2, rows // 2]
            try:
                kind = microbatch.whole_batch_kind(
                    call, output, target, rows, lambda tree: trees.split_rows("output", tree, sizes)
                )
            except (UsageError, RuntimeError):
                return False, ""  # what cannot be halved by row cannot be judged here
        if kind == "sum":
            raise UsageError(
                "loss_fn returns a sum over rows, and a tensor is taken for their mean; return "
                "slurm_jap.Loss(sum, count), or the mean"
            )
        if kind == "mean":
            return False, ""
        return False, (
            "jap: loss_fn is not a mean over rows: its value over a batch is not the mean of its micro-batches; use "
            "microbatches=1, or return slurm_jap.Loss(sum, count)"
        )

    def _eval_modes(self) -> tuple[bool, ...]:
        return (False,) * len(self._user_modules)

    def _check_groups(self) -> None:
        if [len(group["params"]) for group in self._user_optimizer.param_groups] != self._group_sizes:
            raise UsageError(
                "the optimizer's groups gained or lost parameters after prepare; add them before prepare, and freeze "
                "or unfreeze them with requires_grad_()"
            )

    # --- without training -------------------------------------------------------------------------------------------

    def evaluate(self, loader: Iterable[Any], metric_fn: Callable[..., Any]) -> dict[str, float]:
        """Run a loader's batches in eval mode and average a metric over them; training modes are left as they are.

        Args:
            loader: yields ``(input, target)`` or ``(*inputs, target)``.
            metric_fn: ``metric_fn(output, target)`` runs where the last stage is and returns ``{name: (sum, count)}``
                or ``{name: mean over the rows}``.

        Returns:
            ``{name: mean}``.
        """
        self._check_open()
        self._metrics += 1
        announced = False
        waiting: deque[Pending] = deque()
        totals: dict[str, tuple[float, float]] = {}

        def collect(pending: Pending) -> None:
            for sums in pending.wait()["outputs"]:
                for name, (total, count) in sums.items():
                    before = totals.get(name, (0.0, 0.0))
                    totals[name] = (before[0] + total, before[1] + count)

        for batch in loader:
            if not isinstance(batch, (tuple, list)) or len(batch) < 2:
                raise UsageError(
                    f"evaluate: the loader gave a {type(batch).__name__}; it must give (input, target) or "
                    "(*inputs, target)"
                )
            *inputs, target = batch
            sizes, micro_inputs, micro_targets = self._split(tuple(inputs), {}, target)
            self._open(micro_inputs[0], None, with_loss=False)
            if not announced:
                self._backend.set_metric(self._metrics, metric_fn)
                announced = True
            while len(waiting) >= 2 * RUN_AHEAD:
                collect(waiting.popleft())
            waiting.append(self._evaluate(sizes, micro_inputs, micro_targets, self._eval_modes(), self._metrics))
        while waiting:
            collect(waiting.popleft())
        return microbatch.means(totals)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """``model(*inputs)`` without gradients, in the model's current train or eval mode; the output on the CPU."""
        self._check_open()
        sizes, micro_inputs, _ = self._split(inputs, named_inputs, None)
        self._open(micro_inputs[0], None, with_loss=False)
        modes = tuple([module.training for module in self._user_modules])
        pending = self._evaluate(sizes, micro_inputs, [None] * len(sizes), modes, None)
        return _join_rows(pending.wait()["outputs"], sizes)

    def _evaluate(
        self,
        sizes: list[int],
        inputs: list[Any],
        targets: list[Any],
        modes: tuple[bool, ...],
        metric: int | None,
    ) -> Pending:
        order = EvaluateOrder(iteration=self._evaluations, sizes=tuple(sizes), modes=modes, metric=metric)
        self._evaluations += 1
        return self._backend.evaluate(order, Switches.current(), inputs, targets)

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model after the last step asked for, as ``model.state_dict()`` would give it: CPU tensors."""
        return self._state_names.choose(self._values())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers with a state of the whole model.

        Raises:
            UsageError: a name is missing or unknown, or a shape differs; nothing is changed.
        """
        self._load_values(self._state_names.places(state, "load_state_dict"))

    def loss_state_dict(self) -> dict[str, Tensor]:
        """``state_dict()`` of a loss that is a module; empty for a function."""
        return self._loss_names.choose(self._values())

    def load_loss_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of :meth:`loss_state_dict`.

        Raises:
            UsageError: as for :meth:`load_state_dict`.
        """
        self._load_values(self._loss_names.places(state, "load_loss_state_dict"))

    def _values(self) -> dict[str, Tensor]:
        """Every parameter and buffer, those that no ``state_dict`` has included."""
        self._check_open()
        if self._taken is None:
            return self._backend.pull("model")
        return {name: _on_host(tensor) for name, tensor in self._untrained().items()}

    def _untrained(self) -> dict[str, Tensor]:
        assert self._taken is not None
        whole = self._taken.whole
        return {**named_parameters(whole.model, whole.loss_fn), **named_buffers(whole.model, whole.loss_fn)}

    def _load_values(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers by the names under which the stages know them; all or nothing."""
        self._check_open()
        current: Mapping[str, Tensor] = self._untrained() if self._taken is not None else self._backend.pull("model")
        for name, value in values.items():
            if not isinstance(value, Tensor):
                raise UsageError(f"load_state_dict: {name} is a {type(value).__name__}; load a state of tensors")
            if name not in current or current[name].shape != value.shape:
                there = tuple(current[name].shape) if name in current else "none"
                raise UsageError(
                    f"load_state_dict: {name} has shape {tuple(value.shape)}, the model's is {there}; load a state of "
                    "the same model"
                )
        if self._taken is None:
            self._backend.load("model", {name: value.detach().to("cpu") for name, value in values.items()})
            return
        with torch.no_grad():
            for name, value in values.items():
                current[name].copy_(value)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's state, indexed as ``optimizer.state_dict()`` of the whole model would be."""
        self._check_open()
        state: Mapping[Any, dict[str, Any]] = (
            self._taken.optimizer.state if self._taken is not None else self._backend.pull("optimizer")
        )
        numbers_of = {name: i for i, name in enumerate(n for group in self._group_names for n in group)}
        groups = []
        for number, (values, names) in enumerate(
            zip(guards.group_values(self._user_optimizer), self._group_names, strict=True)
        ):
            groups.append({**values, **state.get(number, {}), "params": [numbers_of[name] for name in names]})
        by_number = {numbers_of[name]: values for name, values in state.items() if isinstance(name, str)}
        return {"state": dict(sorted(by_number.items())), "param_groups": groups}

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`optimizer_state_dict`; also takes ``optimizer.state_dict()`` of the same model alone.

        Raises:
            UsageError: the groups do not match; nothing is changed.
        """
        self._check_open()
        names = [name for group in self._group_names for name in group]
        if not (isinstance(state, Mapping) and "param_groups" in state and "state" in state):
            raise UsageError(
                f"load_optimizer_state_dict: a {type(state).__name__} without 'state' and 'param_groups'; load what "
                "optimizer_state_dict() gave"
            )
        saved = [len(group["params"]) for group in state["param_groups"]]
        if saved != self._group_sizes:
            raise UsageError(
                f"load_optimizer_state_dict: groups of {saved} parameters, the optimizer has {self._group_sizes}; load "
                "a state of the same optimizer"
            )
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        by_name: dict[Any, dict[str, Any]] = {
            name: dict(state["state"][number])
            for name, number in zip(names, numbers, strict=True)
            if number in state["state"]
        }
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in state["param_groups"]
        ]
        for group, values in zip(self._user_optimizer.param_groups, groups, strict=True):
            group.update(trees.cloned(values))
        if self._taken is not None:
            self._taken.optimizer.state = by_name
            self._taken.optimizer.groups = groups
        else:
            by_name.update(enumerate(groups))
            self._backend.load("optimizer", by_name)

    def after_step_state(self) -> dict[str, Any]:
        """What ``after_step`` returned last, from all stages; it should return ``{parameter name: tensor}``."""
        self._check_open()
        return {} if self._taken is not None else self._backend.pull("after_step")

    def register(self, *, scheduler: Any = None, loader: Any = None) -> None:
        """Name what :meth:`save` and :meth:`resume` shall cover besides model and optimizer.

        Args:
            scheduler, loader: anything with ``state_dict`` and ``load_state_dict``.

        Raises:
            UsageError: it has no such methods.
        """
        for name, value in (("scheduler", scheduler), ("loader", loader)):
            if value is None:
                continue
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise UsageError(
                    f"register({name}=...): a {type(value).__name__} has no state_dict and load_state_dict; "
                    "wrap it in an object that has"
                )
            self._registered[name] = value

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint of everything that training needs, whole or not at all.

        ``torch.load(path, weights_only=True)`` reads it without this package: keys ``model``, ``optimizer``, ``others``
        (parameters and buffers that are in no ``state_dict``, and the loss's), ``after_step``, ``registered``,
        ``batches``, ``accumulate``, ``evaluations``, ``seed``, ``draws``.

        Raises:
            UsageError: the folder does not exist; it is not a step boundary; a registered state cannot be read back.
        """
        from slurm_jap import checkpoint

        self._check_open()
        if self._batches % self._accumulate:
            raise UsageError(
                f"save: {self._batches % self._accumulate} of {self._accumulate} batches are accumulated; save after "
                "the batch that completes a step"
            )
        values = self._values()
        model = self._state_names.choose(values)
        checkpoint.write(
            path,
            {
                "model": model,
                "optimizer": self.optimizer_state_dict(),
                "others": {name: value for name, value in values.items() if name not in model},
                "after_step": self._kept_after_step or self.after_step_state(),
                "registered": {name: value.state_dict() for name, value in self._registered.items()},
                "batches": self._batches,
                "accumulate": self._accumulate,
                "evaluations": self._evaluations,
                "seed": self._seed,
                "draws": checkpoint.generator_states(),
            },
        )

    def resume(self, path: str | os.PathLike[str]) -> bool:
        """Go on from a checkpoint that :meth:`save` wrote; False where there is none yet.

        Raises:
            UsageError: the checkpoint is of another model, or holds what this script does not register.
        """
        from slurm_jap import checkpoint

        self._check_open()
        if self._batches % self._accumulate:
            raise UsageError(
                f"resume: {self._batches % self._accumulate} of {self._accumulate} batches are accumulated; resume "
                "before the first batch of a step"
            )
        saved = checkpoint.read(path)
        if saved is None:
            return False
        self._check_resumable(saved, path)
        self._load_values(self._state_names.places(saved["model"], "resume"))
        self._load_values(saved["others"])
        self.load_optimizer_state_dict(saved["optimizer"])
        if saved["after_step"]:
            if self._taken is not None:
                self._kept_after_step = saved["after_step"]
            else:
                self._backend.load("after_step", saved["after_step"])
        for name, value in self._registered.items():
            value.load_state_dict(saved["registered"][name])
        self._batches, self._evaluations = saved["batches"], saved["evaluations"]
        self._seed = saved["seed"]
        checkpoint.set_generator_states(saved["draws"])
        return True

    def _check_resumable(self, saved: dict[str, Any], path: Any) -> None:
        here, there = set(self._registered), set(saved["registered"])
        if here != there:
            raise UsageError(
                f"resume({str(path)!r}): the checkpoint covers {sorted(there) or 'nothing'} besides the model, this "
                f"script registers {sorted(here) or 'nothing'}; call trainer.register(...) with the same before resume"
            )
        if saved["accumulate"] != self._accumulate:
            raise UsageError(
                f"resume({str(path)!r}): saved with accumulate={saved['accumulate']}, prepare was given "
                f"accumulate={self._accumulate}; give it the same"
            )
        if saved["after_step"] and not self._after_step_loads:
            raise UsageError(
                f"resume({str(path)!r}): the checkpoint holds what after_step returned, and after_step has no "
                "load_state_dict to take it back; make it an object with __call__ and load_state_dict"
            )
        if self._taken is None and saved["seed"] != self._seed:
            raise UsageError(
                f"resume({str(path)!r}): saved under seed {saved['seed']}, this training began under {self._seed}; "
                "call resume before the first step"
            )

    # --- end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what was asked for, then leave the engine and free the model. Further calls do nothing."""
        if self._closed:
            return
        try:
            while self._ahead:
                self._ahead.popleft().wait()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leave at once."""
        if not self._closed:
            self._closed = True
            self._progress.left(self.steps)
            self._backend.close()
            _release(self)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this trainer is closed; call slurm_jap.prepare with a new model and optimizer")


def _join_rows(outputs: list[Any], sizes: Sequence[int]) -> Any:
    """One output from those of the micro-batches.

    Raises:
        UsageError: a part that has no row per sample differs between them.
    """
    if len(outputs) == 1:
        return outputs[0]
    columns = [[leaf for _, leaf in trees.leaves(output)] for output in outputs]
    paths = [path for path, _ in trees.leaves(outputs[0], "output")]
    joined = []
    for path, leaves in zip(paths, zip(*columns, strict=True), strict=True):
        by_row = all(
            isinstance(t, Tensor) and t.dim() > 0 and t.shape[0] == n for t, n in zip(leaves, sizes, strict=True)
        )
        if not by_row and any(not _same(leaves[0], leaf) for leaf in leaves[1:]):
            raise UsageError(
                f"forward: {path} has no row per sample and differs between micro-batches; use microbatches=1, or "
                "return one row per sample"
            )
        joined.append(torch.cat(leaves) if by_row else leaves[0])
    values = iter(joined)
    return trees.tree_map(lambda leaf, path: next(values), outputs[0])


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.shape == right.shape and torch.equal(left, right)
    return bool(left == right)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """Names in a module's ``state_dict`` -> the names under which the stages know the tensors."""

    names: dict[str, str]

    @classmethod
    def of(cls, module: Any, prefix: str) -> _State:
        """Of a model (no prefix), or a loss."""
        if not isinstance(module, nn.Module):
            return cls({})
        first: dict[int, str] = {id(p): n for n, p in module.named_parameters()}
        first.update({id(b): n for n, b in module.named_buffers()})
        known = {n: id(p) for n, p in module.named_parameters(remove_duplicate=False)}
        known.update({n: id(b) for n, b in module.named_buffers(remove_duplicate=False)})
        return cls({name: prefix + first[known[name]] for name in module.state_dict() if name in known})

    def choose(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The ``state_dict`` from all values."""
        return {name: values[place] for name, place in self.names.items()}

    def places(self, state: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """Inverse of ``choose``.

        Raises:
            UsageError: a name is missing or unknown.
        """
        missing = [name for name in self.names if name not in state]
        unknown = [name for name in state if name not in self.names]
        if missing or unknown:
            raise UsageError(f"{what}: missing {missing[:3]}, unknown {unknown[:3]}; load a state of the same model")
        return {self.names[name]: value for name, value in state.items()}


# --- prepare ---------------------------------------------------------------------------------------------------------

_open_trainer: weakref.ref[Trainer] | None = None


def _release(trainer: Trainer) -> None:
    global _open_trainer
    if _open_trainer is not None and _open_trainer() is trainer:
        _open_trainer = None


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Any],
    *,
    microbatches: int,
    blocks: Sequence[Callable[..., Any]] | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | tuple[float, float] | None = None,
    clip_grad_value: float | None = None,
    autocast: torch.dtype | None = None,
    after_step: Callable[[dict[str, nn.Parameter], int], Any] | None = None,
) -> Trainer:
    """Hand a model, its optimizer and its loss over to a :class:`Trainer`.

    Alone, the trainer computes in this process. In a member of a coalesced sweep it joins the engine. The numbers are
    the same.

    Args:
        model: made of blocks, see ``blocks``.
        optimizer: over the model's (and the loss's) parameters; any that treats each parameter by itself.
        loss_fn: ``loss_fn(output, target)`` gives a 0-d tensor, the mean over rows, or :class:`Loss`.
        microbatches: M, how many pieces each batch is cut into by row.
        blocks: functions whose composition is the model; found for an ``nn.Sequential`` and for a model around one
            ``nn.ModuleList``.
        accumulate: batches per optimizer step.
        clip_grad_norm: largest total norm, or ``(largest, type of norm)``, as ``torch.nn.utils.clip_grad_norm_``.
        clip_grad_value: largest absolute value, as ``torch.nn.utils.clip_grad_value_``; after the norm's.
        autocast: ``torch.bfloat16`` for mixed precision.
        after_step: called with ``{name: parameter}`` and the step's number after every optimizer step, on each stage
            with the parameters that lie there: elementwise work such as an average of weights.

    Raises:
        UsageError: something cannot be; the message says what to type. Uncaught, it ends the program with code 2.
        EngineFault: the engine did not start; the message tells the one cause.
    """
    global _open_trainer
    _exit_with_usage_code()
    if _open_trainer is not None and _open_trainer() is not None:
        raise UsageError(
            "prepare called twice: this process has a trainer already; one member trains one model: call "
            "trainer.close() first, or put both models into one nn.Module"
        )
    guards.check_arguments(model, optimizer, loss_fn, blocks, after_step)
    _check_counts(microbatches=microbatches, accumulate=accumulate)
    clip_norm = _clip_norm(clip_grad_norm)
    if clip_grad_value is not None and not (_is_number(clip_grad_value) and clip_grad_value > 0):
        raise UsageError(f"clip_grad_value={clip_grad_value!r}: it must be a positive number")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise UsageError(f"autocast={autocast!r}: give a dtype, e.g. autocast=torch.bfloat16")
    if autocast is torch.float16:
        raise UsageError("autocast=torch.float16 needs a GradScaler, which is not supported; use torch.bfloat16")
    found = blocks_module.find_blocks(model) if blocks is None else list(blocks)
    if microbatches > 1 and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        warnings.warn(
            f"jap: BatchNorm statistics are per micro-batch ({microbatches} per batch), here as in every pipeline; "
            "microbatches=1 gives whole-batch statistics",
            stacklevel=2,
        )
    parameters = named_parameters(model, loss_fn)
    names = {id(p): name for name, p in parameters.items()}
    guards.check_ownership(optimizer, names)
    guards.check_memory(parameters, named_buffers(model, loss_fn))
    parts = take_apart(optimizer, names)
    with inspection.unseen(torch.device("cpu")):
        separable.check(optimizer)
    shipping.forget_own_classes()
    data, tensors = shipping.dump((model, found, loss_fn, after_step), "the model, its blocks, loss_fn or after_step")
    world = shipping.World()
    own_model, own_blocks, own_loss, own_after = shipping.load(data, tensors, world=world)
    taken = _Taken(inspection.Whole(own_model, own_blocks, own_loss, world), own_after, parts)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    member = membership.current()
    backend: Backend
    if member is None:
        backend = LocalBackend(device)
    else:
        from slurm_jap.remote import RemoteBackend

        backend = RemoteBackend(member, block_count=len(found))
    trainer = Trainer(
        taken,
        model,
        loss_fn,
        optimizer,
        backend,
        microbatches=microbatches,
        accumulate=accumulate,
        clip_norm=clip_norm,
        clip_value=clip_grad_value,
        autocast=autocast,
        device=torch.device("cpu") if member is not None else device,
    )
    handover.empty_out(model, loss_fn, optimizer, trainer)
    with torch._C.DisableTorchFunctionSubclass():
        trainer._bind(list(named_parameters(model, loss_fn).values()))
    _open_trainer = weakref.ref(trainer)
    weakref.finalize(trainer, backend.close).atexit = False  # at exit it leaves as below
    atexit.register(_abandon, weakref.ref(trainer), os.getpid())
    return trainer


def _abandon(trainer: weakref.ref[Trainer], process: int) -> None:
    alive = trainer()
    if alive is not None and os.getpid() == process:  # a forked child inherits this, and its parent's connections
        alive.abandon()


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name}={value!r}: it must be a whole number of at least 1")


def _clip_norm(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    limit, kind = value if isinstance(value, tuple) and len(value) == 2 else (value, 2.0)
    if not (_is_number(limit) and limit > 0 and _is_number(kind) and kind > 0):
        raise UsageError(f"clip_grad_norm={value!r}: give a positive number, or (number, type of norm)")
    return float(limit), float(kind)


def report(**values: Any) -> None:
    """Tell jap-status something about this member, e.g. ``report(accuracy=0.97)``; outside a sweep it does nothing."""
    membership.report(values)


_hooked = False


def _exit_with_usage_code() -> None:
    """Have an uncaught UsageError end the script with one line and code 2, as the command-line programs do."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: types.TracebackType | None) -> None:
        if isinstance(value, UsageError):
            print(PREFIX, " ".join(str(value).split()), file=sys.stderr)
            raise SystemExit(USAGE_EXIT_CODE)
        previous(kind, value, traceback)

    sys.excepthook = hook
