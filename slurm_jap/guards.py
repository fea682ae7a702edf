"""No stale model: what ``prepare`` refuses, and what it puts in place of what it took.

After ``prepare`` the script's own parameters and buffers are meta tensors, which frees their memory. Reading or
changing the model or the optimizer directly either goes to the trainer or raises, naming the call to use.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from slurm_jap.errors import UsageError

if TYPE_CHECKING:
    from slurm_jap.client import Trainer

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


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Every group's values without its parameters; tensors are copied, for schedulers change them in place."""
    return [
        {k: (v.detach().clone() if isinstance(v, Tensor) else v) for k, v in group.items() if k not in _NOT_VALUES}
        for group in optimizer.param_groups
    ]


_NOT_VALUES = ("params", "param_names")


class _Instead:
    """A hook or method that raises, naming what to call; it cannot be pickled, and says so likewise."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(self._message)

    def __reduce__(self) -> NoReturn:
        raise UsageError("the model was handed over to the trainer and holds no values; save trainer.state_dict()")


class _NoState(defaultdict[Any, Any]):
    """Stands where ``optimizer.state`` was."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise UsageError(
            "optimizer.state was handed over to the trainer; call trainer.optimizer_state_dict() for its values"
        )

    __missing__ = __getitem__ = __setitem__ = __iter__ = __contains__ = __len__ = __bool__ = _refuse
    get = items = keys = values = pop = clear = update = setdefault = _refuse  # type: ignore[assignment]
    __reduce__ = __reduce_ex__ = __copy__ = __deepcopy__ = _refuse

    def __repr__(self) -> str:
        return "<handed over to the trainer>"


def empty_out(model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, trainer: Trainer) -> None:
    """Make the script's own model and optimizer hollow."""
    held: dict[int, Tensor] = {}
    learned_loss = isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None
    homes = [model, loss_fn] if learned_loss else [model]
    for home in homes:
        for tensor in [*home.parameters(), *home.buffers()]:
            held[id(tensor)] = tensor
    replaced = {id(tensor): _hollow(tensor) for tensor in held.values()}
    for home in homes:
        for module in home.modules():
            holders: list[dict[str, Any]] = [module._parameters, module._buffers]
            for slots in holders:
                slots.update({name: replaced[id(t)] for name, t in slots.items() if id(t) in replaced})
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(p), p) for p in group["params"]]
    instead = _Instead(
        "the model was handed over to the trainer and holds no values here; call trainer.forward(...) for its output, "
        "trainer.evaluate(...) for a metric, trainer.step(...) to train"
    )
    moving = _Instead(
        "the model was handed over to the trainer; move it or change its dtype (.to, .cuda, .half, ...) before prepare"
    )
    for home in homes:
        for module in home.modules():
            module.register_forward_pre_hook(instead)
            module.__dict__["_apply"] = moving
            module.__dict__["load_state_dict"] = _Instead(
                "this module was handed over to the trainer; load the whole model with trainer.load_state_dict(...)"
            )
    for name, module in model.named_modules():
        module.__dict__["state_dict"] = _pull(trainer, "state_dict", part=name)
    model.__dict__["load_state_dict"] = _pull(trainer, "load_state_dict")
    if learned_loss:
        for name, module in loss_fn.named_modules():
            if "state_dict" not in module.__dict__:
                module.__dict__["state_dict"] = _pull(trainer, "loss_state_dict", part=name)
        loss_fn.__dict__["load_state_dict"] = _pull(trainer, "load_loss_state_dict")
    model.__dict__["_jap_prepared"] = True
    optimizer.__dict__["_jap_prepared"] = True
    optimizer.__dict__["state_dict"] = _pull(trainer, "optimizer_state_dict")
    optimizer.__dict__["load_state_dict"] = _pull(trainer, "load_optimizer_state_dict")
    step = types.MethodType(_no_step, optimizer)
    optimizer.__dict__["step"] = _marked(step) if hasattr(optimizer.step, "_wrapped_by_lr_sched") else step
    optimizer.state = _NoState()


def _hollow(tensor: Tensor) -> Tensor:
    """Turn a tensor into a meta tensor in place, so that every reference to it is hollow; else give a meta twin."""
    empty = torch.empty_like(tensor, device="meta")
    twin: Tensor = (
        nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    )
    tensor.grad = None
    try:
        torch.utils.swap_tensors(tensor, twin)  # type: ignore[no-untyped-call]
    except RuntimeError:  # somebody holds a weak reference or a view
        return twin
    return tensor


def _pull(trainer: Trainer, method: str, part: str = "") -> Callable[..., Any]:
    """A method that asks the trainer instead; ``part``: of one module within the model only."""

    def call(*args: Any, **kwargs: Any) -> Any:
        unknown = sorted(kwargs.keys() - {"strict"}) if kwargs.get("strict", True) else ["strict=False"]
        if unknown:
            raise UsageError(
                f"{method}({unknown[0]}): the model was handed over to the trainer, whose {method}() knows no such "
                f"argument; call trainer.{method}() and change what it gives"
            )
        result = getattr(trainer, method)(*args)
        if not part:
            return result
        return {name[len(part) + 1 :]: value for name, value in result.items() if name.startswith(part + ".")}

    return call


def _no_step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError("optimizer.step(): the trainer steps the optimizer; call trainer.step(x, target=y) instead")


def _marked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the mark by which a scheduler knows that it has wrapped ``step``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    call._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return call
