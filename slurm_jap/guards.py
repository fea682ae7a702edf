"""What ``prepare`` refuses, each by name and with what to use instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slurm_jap.errors import UsageError

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel", "DeepSpeedEngine")


def check_arguments(model: Any, optimizer: Any, loss_fn: Any, blocks: Sequence[Any] | None, after_step: Any) -> None:
    """Refuse, by name, what cannot be trained in a pipeline.

    Raises:
        UsageError: with what to use instead.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"prepare: model is of type {type(model).__name__}; pass an nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"prepare: optimizer is of type {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    if not callable(loss_fn):
        raise UsageError(f"prepare: loss_fn is of type {type(loss_fn).__name__}; pass a function of (output, target)")
    if after_step is not None and not callable(after_step):
        raise UsageError(
            f"prepare: after_step is of type {type(after_step).__name__}; pass a function of (params, step)"
        )
    if blocks is not None:
        if len(blocks) == 0:
            raise UsageError("prepare: blocks=[] is empty; pass the functions whose composition is model(x)")
        for number, block in enumerate(blocks):
            if not callable(block):
                raise UsageError(
                    f"prepare: blocks[{number}] is of type {type(block).__name__}; pass functions or modules"
                )
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS:
                raise UsageError(
                    f"prepare: the model is wrapped in {kind.__name__}, which spreads one model over processes by "
                    "itself; pass the plain module: the engine does the spreading"
                )
        if type(module).__name__ == "OptimizedModule":
            raise UsageError(
                "prepare: the model is compiled (torch.compile), and what was compiled cannot be cut; pass the plain "
                "module"
            )
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UsageError(
                f"prepare: {type(module).__name__} keeps extra state (get_extra_state), which cannot be gathered from "
                "stages; keep it in buffers"
            )
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        raise UsageError(
            "prepare: global module hooks are registered (torch.nn.modules.module.register_module_forward_hook and "
            "the like), which do not reach the engine; remove them"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("prepare: LBFGS calls the model again and again inside its step; use a first-order optimizer")
    if getattr(model, "_jap_prepared", False) or getattr(optimizer, "_jap_prepared", False):
        raise UsageError("prepare called twice with the same model or optimizer; build new ones")
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if getattr(optimizer, name, None):
            raise UsageError(
                f"prepare: the optimizer has step hooks ({name}), which cannot travel; use after_step=... of prepare"
            )


def check_ownership(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    """Require that every parameter of the optimizer is the model's or the loss's.

    Raises:
        UsageError: one is not.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UsageError(
                    f"the optimizer's group {number} holds a parameter of shape {tuple(parameter.shape)} that is not "
                    "the model's; build the optimizer from model.parameters() once the model is final"
                )


def check_memory(parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> None:
    """Require that no parameter lies in the memory of another, or of a buffer, and that no gradient is pending.

    Raises:
        UsageError: one does; each stage would get memory of its own, and what was one would become two.
    """
    ranges: list[tuple[Any, int, int, str]] = []
    for name, tensor in [*parameters.items(), *buffers.items()]:
        if name in parameters and tensor.grad is not None and bool(tensor.grad.any()):
            raise UsageError(
                f"parameter {name!r} has a gradient already, which would be lost; call optimizer.zero_grad() before "
                "prepare"
            )
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
            begin = tensor.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            ranges.append((str(tensor.device), begin, begin + (last + 1) * tensor.element_size(), name))
    reach: dict[tuple[str, bool], tuple[int, str]] = {}
    for device, begin, end, name in sorted(ranges):
        for other_is_parameter in (True, False):
            other_end, other = reach.get((device, other_is_parameter), (begin, ""))
            if begin < other_end and (name in parameters or other_is_parameter):
                raise UsageError(
                    f"{other!r} and {name!r} lie in the same memory, but are two tensors, and would come apart; make "
                    "them one (module.weight = other.weight, not .data), or clone one of them"
                )
        key = (device, name in parameters)
        reach[key] = max(reach.get(key, (0, "")), (end, name))


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Every group's values without its parameters; tensors are copied, for schedulers change them in place."""
    return [
        {k: (v.detach().clone() if isinstance(v, Tensor) else v) for k, v in group.items() if k not in _NOT_VALUES}
        for group in optimizer.param_groups
    ]


_NOT_VALUES = ("params", "param_names")
