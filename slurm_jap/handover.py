"""No stale model: what stands in the script's model and optimizer in place of what ``prepare`` took.

Parameters and buffers become meta tensors, which frees their memory. Reading or changing the model or the optimizer
directly either goes to the trainer or raises, naming the call to use.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from slurm_jap.errors import UsageError

if TYPE_CHECKING:
    from slurm_jap.client import Trainer


class _Instead:
    """A hook or method that raises, naming what to call; it cannot be pickled, and says so likewise."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(self._message)

    def __reduce__(self) -> NoReturn:
        raise UsageError("the model was handed over to the trainer and holds no values; save trainer.state_dict()")


_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "is_leaf", "is_meta", "requires_grad", "is_sparse", "is_cuda",
    "is_cpu", "is_mps", "is_quantized", "is_nested", "is_mkldnn", "names", "itemsize", "nbytes", "grad_fn", "output_nr",
    "_version",
)  # fmt: skip
_MAY_BE_ASKED = frozenset(
    [
        "size", "stride", "dim", "numel", "nelement", "element_size", "ndimension", "storage_offset", "requires_grad_",
        "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_same_size", "is_conj", "is_neg",
        "is_inference", "get_device", "type", "__len__", "__hash__", "__format__", "requires_grad.__set__",
        "grad.__set__", *(f"{name}.__get__" for name in _PROPERTIES),
    ]
)  # fmt: skip


class _HandedOver:
    """A tensor without values: what it is like may be asked, what it holds may not."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = f"{getattr(func.__self__, '__name__', '')}.{name}"
        if name == "__repr__":
            return "<handed over to the trainer>"
        if name not in _MAY_BE_ASKED:
            raise UsageError(
                f"{name.removesuffix('.__get__')} of a parameter or buffer: the model was handed over to the trainer "
                "and holds no values or gradients here; call trainer.state_dict() for values, clip with "
                "clip_grad_norm=... of prepare, change values in after_step=... or by trainer.load_state_dict(...)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError("the model was handed over to the trainer and holds no values; save trainer.state_dict()")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(2)


class _Parameter(_HandedOver, nn.Parameter):
    pass


class _Buffer(_HandedOver, Tensor):
    pass


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
            module.__dict__["zero_grad"] = _nothing
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
    optimizer.__dict__["zero_grad"] = _nothing
    optimizer.state = _NoState()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """``zero_grad``: the trainer has done it."""


def _hollow(tensor: Tensor) -> Tensor:
    """Turn a tensor into a hollow one in place, so that every reference to it is hollow; else give a hollow twin."""
    empty = torch.empty_like(tensor, device="meta")
    twin: Tensor
    if isinstance(tensor, nn.Parameter):
        twin = empty.as_subclass(_Parameter).requires_grad_(tensor.requires_grad)
    else:
        twin = empty.as_subclass(_Buffer) if tensor.layout is torch.strided else empty
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
