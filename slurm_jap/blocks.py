"""Blocks: the forward pass as a list of functions whose composition is the model, and who owns which parameter.

``[f0, f1, ...]``: ``f0`` takes what the model takes, each later one the tree that the one before it returned.
``inspection`` requires that this is what the model does.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

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
    activation_bytes: int
    """Of the tensors handed to torch functions, parameters apart: about what a backward would need."""
    output_bytes: int


def describe(block: Block) -> str:
    """A block's name in messages."""
    return type(block).__name__ if isinstance(block, nn.Module) else getattr(block, "__qualname__", repr(block))
