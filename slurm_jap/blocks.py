"""Blocks: the forward pass as a list of functions whose composition is the model, and who owns which parameter.

``[f0, f1, ...]``: ``f0`` takes what the model takes, each later one the tree that the one before it returned. The first
micro-batch is put through both the model and the composition, in eval mode, and must give equal bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from slurm_jap import draws, trees
from slurm_jap.errors import UsageError

Block = Callable[..., Any]
HOW_TO_PASS = (
    "pass blocks=[f0, f1, ...] to prepare, functions or modules such that f1(f0(x)) and so on is exactly model(x)"
)


def find_blocks(model: nn.Module) -> list[Block]:
    """The blocks of an ``nn.Sequential``, or of a model around one ``nn.ModuleList`` (children in order of definition).

    Raises:
        UsageError: the model is neither; the message says what to pass.
    """
    while isinstance(model, nn.Sequential) and len(model) == 1 and isinstance(model[0], nn.Sequential):
        model = model[0]
    if isinstance(model, nn.Sequential):
        return list(model)
    children = list(model.children())
    lists = [child for child in children if isinstance(child, nn.ModuleList) and len(child) > 0]
    if len(lists) == 1:
        blocks: list[Block] = []
        for child in children:
            blocks.extend(child if child is lists[0] else [child])
        if not any(isinstance(block, (nn.ModuleList, nn.ModuleDict, nn.ParameterList)) for block in blocks):
            return blocks
    raise UsageError(
        f"model {type(model).__name__} has nothing to cut: it is no nn.Sequential and has {len(lists)} nn.ModuleLists "
        f"among its children, where one is needed; {HOW_TO_PASS}"
    )


def call_block(block: Block, number: int, value: Any) -> Any:
    """Run one block. ``value`` is ``(args, kwargs)`` for block 0, else the tree that the block before it returned."""
    if number == 0:
        args, kwargs = value
        return block(*args, **kwargs)
    return block(value)


@contextlib.contextmanager
def autocasting(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """``torch.autocast`` around one block where the user asked for it."""
    if dtype is None:
        yield
        return
    with torch.autocast(device.type, dtype=dtype):
        yield


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """What one pass of the first micro-batch told about a block."""

    cost: float
    """Forward operations; where none are counted, the elements that it touches."""
    touched: frozenset[int]
    """``id`` of every tensor handed to a torch function."""
    activation_bytes: int
    """Of the tensors handed to torch functions, parameters apart: about what a backward would need."""
    output_bytes: int


class _Touched(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()
        self.keep: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(args)
        if kwargs:
            self._note(tuple(kwargs.values()))
        return func(*args, **(kwargs or {}))

    def _note(self, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self.ids.add(id(value))
                self.keep.append(value)  # an id is only unique while its tensor lives
            elif isinstance(value, (list, tuple)):
                self._note(value)


def check_and_profile(
    model: nn.Module,
    blocks: Sequence[Block],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    device: torch.device,
) -> tuple[Any, list[Profile]]:
    """Require that the composition of the blocks gives the model's own bits on ``args``; profile each block.

    Runs in eval mode without gradients, leaves modes and random generators as they were.

    Returns:
        The output tree, and one profile per block.

    Raises:
        UsageError: the two differ, or a block failed on what the one before it returned.
    """
    modes = [(module, module.training) for module in model.modules()]
    for block in blocks:
        if isinstance(block, nn.Module):
            modes += [(module, module.training) for module in block.modules()]
    seed = draws.key(0, 0, 0, 0, draws.EVALUATION)
    profiles: list[Profile] = []
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad(), draws.preserved(device):
            draws.reseed(seed, device)
            with autocasting(dtype, device):
                expected = model(*args, **kwargs)
            draws.reseed(seed, device)
            value: Any = (args, kwargs)
            for number, block in enumerate(blocks):
                touched, flops = _Touched(), FlopCounterMode(display=False)
                try:
                    with autocasting(dtype, device), flops, touched:
                        value = call_block(block, number, value)
                except Exception as error:
                    raise UsageError(
                        f"block {number} ({describe(block)}) failed on the output of the block before it: "
                        f"{type(error).__name__}: {error}; model {type(model).__name__} does something between its "
                        f"blocks: {HOW_TO_PASS}"
                    ) from error
                value = trees.settle(value)
                elements = sum(t.numel() for t in trees.tensors(value)) + sum(
                    t.numel() for t in touched.keep if isinstance(t, nn.Parameter)
                )
                profiles.append(
                    Profile(
                        cost=float(flops.get_total_flops()) + elements,
                        touched=frozenset(touched.ids),
                        activation_bytes=held_bytes(t for t in touched.keep if not isinstance(t, nn.Parameter)),
                        output_bytes=sum(t.nbytes for t in trees.tensors(value)),
                    )
                )
    finally:
        for module, training in modes:
            module.training = training
    difference = _difference(expected, value)
    if difference:
        raise UsageError(
            f"model {type(model).__name__} is not the composition of its {len(blocks)} blocks: {difference}; it does "
            f"something outside its blocks: {HOW_TO_PASS}"
        )
    return value, profiles


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse tensors have none, and may have several
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def describe(block: Block) -> str:
    """A block's name in messages."""
    return type(block).__name__ if isinstance(block, nn.Module) else getattr(block, "__qualname__", repr(block))


def _difference(expected: Any, found: Any) -> str:
    left, right = list(trees.leaves(expected, "output")), list(trees.leaves(found, "output"))
    if [path for path, _ in left] != [path for path, _ in right]:
        return f"the model returns {_shape_of(expected)}, the blocks return {_shape_of(found)}"
    for (path, a), (_, b) in zip(left, right, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{path} is {_shape_of(a)} from the model, {_shape_of(b)} from the blocks"
            if not torch.equal(a, b) and not _same_bits(a, b):
                gap = (a.double() - b.double()).abs().max().item() if a.is_floating_point() else float("nan")
                return f"{path} differs by up to {gap:.3g} on the first micro-batch"
        elif type(a) is not type(b) or (not isinstance(a, Tensor) and a != b):
            return f"{path} is {a!r} from the model, {b!r} from the blocks"
    return ""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.is_floating_point()
        and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        and bool((a.isnan() == b.isnan()).all())
    )


def _shape_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
