"""An imported file with a constant that members sweep over."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SLOPE = 0.01


def scale() -> float:
    return 1.0 + SLOPE


class Leaky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, SLOPE * x)


def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target) * scale()
