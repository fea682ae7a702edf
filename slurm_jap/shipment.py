"""A shipment: one member's model, optimizer and loss, taken apart by block, ready to be put into stages.

Every block is dumped by itself, so blocks share nothing but tied parameters and what travels in the tree, whatever the
cut. A parameter that several blocks use is owned by the first of them; the others hold copies (see ``stage``). The loss
is the last block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slurm_jap import shipping, trees
from slurm_jap.blocks import Block
from slurm_jap.cut import cut
from slurm_jap.errors import UsageError

LOSS_PREFIX = "loss_fn()."
"""Before the names of the loss's own parameters and buffers; no name in a model can begin so."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What ``prepare`` was told, and what holds for every stage of the member."""

    seed: int
    accumulate: int
    clip_norm: float | None
    clip_norm_type: float
    clip_value: float | None
    autocast: torch.dtype | None
    differentiates: bool
    """Whether the model takes gradients in its own forward, and needs them enabled in evaluation, too."""
    selfcheck: bool
    """Whether the first step is run twice (see ``selfcheck``)."""
    parameter_order: tuple[str, ...]
    """Every parameter in the model's own order: the order in which norms are gathered."""
    tied: tuple[str, ...]
    """Parameters that more than one block uses."""


@dataclasses.dataclass(slots=True)
class BlockShipment:
    """One block, dumped: ``(callable, [(module number, module)], {name: parameter}, {name: buffer})``."""

    number: int
    data: bytes
    tensors: list[Tensor]
    cost: float
    names: tuple[str, ...]
    """Parameters that it uses."""


@dataclasses.dataclass(slots=True)
class StageShipment:
    """What one stage of the member gets; its pickled form travels with ``tensors`` beside it."""

    stage: int
    stages: int
    settings: Settings
    blocks: list[BlockShipment]
    optimizer: tuple[bytes, list[Tensor]]
    """Dump of ``(class, instance dict, [group values], [[names] per group], {name: state})``."""
    owned: tuple[str, ...]
    """Parameters whose gradient sum and step happen on this stage."""
    buffers: tuple[str, ...]
    """Buffers whose value this stage answers for."""
    after_step: tuple[bytes, list[Tensor]] | None
    """Dump of ``(function, what it returned last)``."""
    loss_block: int
    """Number of the loss's block."""
    given: list[dict[str, Any]] | None = None
    """What the script last said of the groups' values, where the optimizer has gone on since."""


@dataclasses.dataclass(slots=True)
class Shipment:
    """All of one member, whole."""

    settings: Settings
    blocks: list[BlockShipment]
    owners: dict[str, int]
    """Parameter name -> block that owns it."""
    buffer_owners: dict[str, int]
    optimizer: OptimizerParts
    after_step: tuple[bytes, list[Tensor]] | None

    def for_stages(self, stages: int, costs: Sequence[float] | None = None) -> list[StageShipment]:
        """Cut into stages; the loss goes with the last.

        Args:
            costs: what each block but the loss takes, where that was measured; else the operations counted rule.

        Raises:
            UsageError: fewer blocks than stages.
        """
        model_blocks, loss = self.blocks[:-1], self.blocks[-1]
        if costs is None or len(costs) != len(model_blocks):
            costs = [block.cost for block in model_blocks]
        ranges = cut(costs, stages)
        shipments = []
        for stage, (first, end) in enumerate(ranges):
            last = stage == stages - 1
            mine = model_blocks[first:end] + ([loss] if last else [])
            numbers = {block.number for block in mine}
            owned = tuple(name for name, number in self.owners.items() if number in numbers)
            shipments.append(
                StageShipment(
                    stage=stage,
                    stages=stages,
                    settings=self.settings,
                    blocks=mine,
                    optimizer=self.optimizer.dump(set(owned)),
                    owned=owned,
                    buffers=tuple(name for name, number in self.buffer_owners.items() if number in numbers),
                    after_step=self.after_step,
                    loss_block=loss.number,
                )
            )
        return shipments


@dataclasses.dataclass(slots=True)
class OptimizerParts:
    """An optimizer taken apart; parameters are named."""

    kind: type
    instance: dict[str, Any]
    """The instance's dict without groups and state."""
    groups: list[dict[str, Any]]
    """Values of each group, without its parameters."""
    members: list[list[str]]
    """Names of each group's parameters."""
    state: dict[str, dict[str, Any]]
    """Per parameter name; empty before the first step."""

    def dump(self, owned: set[str]) -> tuple[bytes, list[Tensor]]:
        """The part of it that concerns ``owned``."""
        members = [[name for name in names if name in owned] for names in self.members]
        state = {name: values for name, values in self.state.items() if name in owned}
        return shipping.dump((self.kind, self.instance, self.groups, members, state), f"optimizer {self.kind.__name__}")


_PER_INSTANCE = ("param_groups", "state", "step", "state_dict", "load_state_dict", "_opt_called")


def take_apart(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> OptimizerParts:
    """Split an optimizer into named parts.

    Args:
        names: ``id(parameter)`` to its name, for every parameter of model and loss.
    """
    instance = {}
    for key, value in optimizer.__dict__.items():
        if key in _PER_INSTANCE or key.endswith("_hooks") or key.startswith("_patch"):
            continue
        if callable(value) and getattr(value, "__wrapped__", None) is not None:
            continue  # a scheduler's or profiler's wrapper around a method of the instance
        _refuse_parameters_in(value, f"{type(optimizer).__name__}.{key}", names)
        instance[key] = value
    groups, members = [], []
    for group in optimizer.param_groups:
        groups.append({key: value for key, value in group.items() if key not in ("params", "param_names")})
        members.append([names[id(parameter)] for parameter in group["params"]])
    unknown = [key for key in optimizer.state if id(key) not in names]
    if unknown:
        raise UsageError(
            f"{type(optimizer).__name__} keeps state that belongs to no parameter ({unknown[0]!r}), which cannot be "
            "cut into stages; use an optimizer that treats each parameter by itself"
        )
    state = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    return OptimizerParts(type(optimizer), instance, groups, members, state)


def _refuse_parameters_in(value: Any, what: str, names: dict[int, str]) -> None:
    def look(tensor: Tensor) -> bool:
        if id(tensor) in names:
            raise UsageError(
                f"{what} holds parameter {names[id(tensor)]!r} outside the optimizer's groups, so the optimizer cannot "
                "be cut into stages; use one that treats each parameter by itself, without another optimizer inside"
            )
        return True

    if not isinstance(value, (bool, int, float, str, type(None))):
        shipping.dump(value, what, look)


def make_shipment(
    *,
    model: nn.Module,
    blocks: Sequence[Block],
    loss_fn: Callable[..., Any],
    optimizer: OptimizerParts,
    after_step: Callable[..., Any] | None,
    uses: Sequence[set[str]],
    settings: dict[str, Any],
) -> Shipment:
    """Dump every block of a model, and its loss as the last one. What a block costs is noted later.

    Args:
        uses: for each block, and last the loss, names of what it uses beyond what its own modules hold.
        settings: fields of :class:`Settings` but for the order and the ties, which follow from the blocks.

    Raises:
        UsageError: something cannot be pickled; the message names the block.
    """
    parameters, buffers = named_parameters(model, loss_fn), named_buffers(model, loss_fn)
    all_modules = modules_of(model, loss_fn)
    numbers = {id(module): number for number, module in enumerate(all_modules)}
    registered = {id(tensor) for tensor in [*parameters.values(), *buffers.values()]}

    shipped: list[BlockShipment] = []
    owners: dict[str, int] = {}
    buffer_owners: dict[str, int] = {}
    users: dict[str, int] = {}
    everything: list[Any] = [*blocks, loss_fn]
    for number, block in enumerate(everything):
        inside: set[int] = set()
        modules = [(numbers[id(m)], m) for m in modules_of(block, None) if id(m) in numbers]
        if isinstance(block, nn.Module):
            inside = {id(p) for p in block.parameters()} | {id(b) for b in block.buffers()}
        mine = {name: p for name, p in parameters.items() if id(p) in inside or name in uses[number]}
        mine_buffers = {name: b for name, b in buffers.items() if id(b) in inside or name in uses[number]}
        for name in mine:
            owners.setdefault(name, number)
            users[name] = users.get(name, 0) + 1
        for name in mine_buffers:
            buffer_owners.setdefault(name, number)
        what = f"block {number} ({type(block).__name__})" if number < len(blocks) else "loss_fn"
        keep = {id(tensor) for tensor in [*mine.values(), *mine_buffers.values()]}
        beyond: set[int] = set()

        def untouched(tensor: Tensor, keep: set[int] = keep, beyond: set[int] = beyond) -> bool:
            if id(tensor) in registered and id(tensor) not in keep:
                beyond.add(id(tensor))
                return True
            return False

        data, found = shipping.dump((block, modules, mine, mine_buffers), what, untouched)
        if beyond or (uses[number] and not isinstance(block, nn.Module)):
            # It holds modules that are not its own, whose modes it may ask for.
            modules = list(enumerate(all_modules))
            data, found = shipping.dump((block, modules, mine, mine_buffers), what, untouched)
        shipped.append(BlockShipment(number, data, [trees.settled(t) for t in found], 0.0, tuple(mine)))
    _adopt_orphans(shipped, parameters, buffers, owners, buffer_owners)
    return Shipment(
        settings=Settings(
            parameter_order=tuple(parameters),
            tied=tuple(name for name, count in users.items() if count > 1),
            **settings,
        ),
        blocks=shipped,
        owners={name: owners[name] for name in parameters},
        buffer_owners={name: buffer_owners[name] for name in buffers},
        optimizer=optimizer,
        after_step=None if after_step is None else shipping.dump((after_step, None), "after_step"),
    )


def _adopt_orphans(
    shipped: list[BlockShipment],
    parameters: dict[str, nn.Parameter],
    buffers: dict[str, Tensor],
    owners: dict[str, int],
    buffer_owners: dict[str, int],
) -> None:
    """Parameters and buffers that no block uses go with block 0: they never get a gradient, but they are state."""
    lost = {name: p for name, p in parameters.items() if name not in owners}
    lost_buffers = {name: b for name, b in buffers.items() if name not in buffer_owners}
    if not lost and not lost_buffers:
        return
    first = shipped[0]
    block = shipping.load(first.data, first.tensors)
    call, modules, mine, mine_buffers = block
    data, found = shipping.dump((call, modules, {**mine, **lost}, {**mine_buffers, **lost_buffers}), "block 0")
    shipped[0] = BlockShipment(first.number, data, [trees.settled(t) for t in found], first.cost, (*first.names, *lost))
    for name in lost:
        owners[name] = first.number
    for name in lost_buffers:
        buffer_owners[name] = first.number


def modules_of(model: Any, loss_fn: Any) -> list[nn.Module]:
    """Every module of the model, then those of the loss alone, in order: the numbers by which stages know them."""
    found: dict[int, nn.Module] = {}
    for home in (model, loss_fn):
        if isinstance(home, nn.Module):
            found.update({id(m): m for m in home.modules() if id(m) not in found})
    return list(found.values())


def named_buffers(model: nn.Module, loss_fn: Any) -> dict[str, Tensor]:
    """Every buffer of the model, then of the loss, each once."""
    found: dict[str, Tensor] = dict(model.named_buffers())
    if isinstance(loss_fn, nn.Module):
        seen = {id(b) for b in found.values()}
        found.update({LOSS_PREFIX + n: b for n, b in loss_fn.named_buffers() if id(b) not in seen})
    return found


def named_parameters(model: nn.Module, loss_fn: Any) -> dict[str, nn.Parameter]:
    """Every parameter of the model, then of the loss (``LOSS_PREFIX`` before its name), each once.

    Raises:
        UsageError: a parameter is not initialised, or carries a hook that would be lost.
    """
    found: dict[str, nn.Parameter] = dict(model.named_parameters())
    if isinstance(loss_fn, nn.Module):
        seen = {id(p) for p in found.values()}
        found.update({LOSS_PREFIX + n: p for n, p in loss_fn.named_parameters() if id(p) not in seen})
    for name, parameter in found.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(f"parameter {name!r} is not initialised; run one batch through the model before prepare")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"parameter {name!r} has a gradient hook, which cannot travel; use clip_grad_norm, clip_grad_value or "
                "after_step of prepare instead"
            )
    return found
