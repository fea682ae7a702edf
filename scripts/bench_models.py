"""What the engine's benchmark trains: stages that sleep for an exact time, and small ones that compute."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 64
"""Features of an activation: 256 bytes per row."""
ROWS = 2
"""Rows of a micro-batch."""


def sleep_exactly() -> None:
    """Have sleeps end when they are due, here and in every process and thread started from now on.

    Linux lets a sleep end up to 50 us late ("timer slack") to save wake-ups; both sides of a comparison would pay it.
    """
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, nanoseconds


class _Sleep(torch.autograd.Function):
    """The identity; takes ``forward`` seconds there and ``backward`` seconds back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()  # a view could not be detached in place, as zero-bubble schedules do

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


class SleepBlock(nn.Module):
    """A linear layer that takes a given time. In eval mode, and with both times 0, it only computes."""

    def __init__(self, forward: float, backward: float, width: int = WIDTH) -> None:
        super().__init__()
        self.seconds = (forward, backward)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return _Sleep.apply(x, *self.seconds) if self.training and any(self.seconds) else x


class SplitSleepBlock(SleepBlock):
    """The same for schedules that run the weights' half of a backward later: half its time lies on either path."""

    def forward(self, x: Tensor) -> Tensor:
        forward, backward = self.seconds
        weight = _Sleep.apply(self.linear.weight, 0.0, backward / 2)
        return _Sleep.apply(nn.functional.linear(x, weight, self.linear.bias), forward, backward / 2)


class ChattyBlock(nn.Module):
    """Many tiny operations: a stage whose time is Python's and the kernel launches'."""

    def __init__(self, operations: int, width: int = WIDTH) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(8)])
        self.operations = operations

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.operations):
            x = torch.tanh(x * self.scales[number % 8])
        return x
