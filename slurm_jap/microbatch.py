"""The loss of a batch from the losses of its micro-batches, each row weighing what it weighs in the whole batch.

A loss function returns either a 0-d tensor, understood as the mean over the rows it was given, or ``Loss(sum, count)``.
torch's own cross entropy and negative log-likelihood, as modules, functions or partial functions, say more
(``reduction``, ``ignore_index``, ``weight``), and it is used.

Where the total weight is known before the first backward, each micro-batch's loss is multiplied by its share. Where it
is not (``Loss`` of several micro-batches, or accumulated batches), sums are differentiated and the gradients are
divided by the total just before they are clipped: ``deferred``. Either way the gradient is the whole batch's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slurm_jap.errors import UsageError


@dataclasses.dataclass(slots=True)
class Loss:
    """What a loss function may return instead of a mean over rows."""

    sum: Tensor
    """0-d tensor: the sum over ``count`` items (rows, tokens, ...)."""
    count: float | Tensor
    """How many items were summed."""
    metrics: Mapping[str, Tensor | float] = dataclasses.field(default_factory=dict)
    """Further sums over the same items; ``StepResult.metrics`` gives them divided by the whole batch's count."""


@dataclasses.dataclass(slots=True)
class LossTotals:
    """Running sums over the micro-batches of one batch, on the last stage."""

    weighted: Tensor | None = None
    count: float | None = None
    """What the sum is to be divided by; None: it is the loss."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, value: Tensor, count: float | None, metrics: Mapping[str, Tensor | float]) -> None:
        """Add one micro-batch's detached contribution, in ascending order."""
        self.weighted = value if self.weighted is None else self.weighted + value
        if count is not None:
            self.count = (self.count or 0.0) + count
        for name, number in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(number)

    def means(self) -> dict[str, float]:
        """The metrics divided by the count."""
        return means({name: (total, self.count or 0.0) for name, total in self.metrics.items()})


def _keywords(loss_fn: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function and the keywords that ``functools.partial`` gave it, the outermost winning."""
    keywords: dict[str, Any] = {}
    while isinstance(loss_fn, functools.partial) and not loss_fn.args:
        keywords = {**loss_fn.keywords, **keywords}
        loss_fn = loss_fn.func
    return loss_fn, keywords


def reduction_of(loss_fn: Callable[..., Any]) -> str:
    """``mean`` or ``sum``: what the tensor that ``loss_fn`` returns is over the rows it is given."""
    function, keywords = _keywords(loss_fn)
    return "sum" if keywords.get("reduction", getattr(function, "reduction", "mean")) == "sum" else "mean"


def says_its_reduction(loss_fn: Callable[..., Any]) -> bool:
    """Whether ``reduction_of`` knows rather than assumes."""
    function, keywords = _keywords(loss_fn)
    return "reduction" in keywords or hasattr(function, "reduction") or _class_loss(loss_fn) is not None


def _class_loss(loss_fn: Callable[..., Any]) -> tuple[int, Tensor | None] | None:
    """``ignore_index`` and ``weight``, where the loss is torch's cross entropy or negative log-likelihood."""
    function, keywords = _keywords(loss_fn)
    if isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)) and not keywords:
        return function.ignore_index, function.weight
    if function in (nn.functional.cross_entropy, nn.functional.nll_loss):
        return keywords.get("ignore_index", -100), keywords.get("weight")
    return None


def item_counts(loss_fn: Callable[..., Any], targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """How many items the mean of each micro-batch runs over: rows, unless torch's own losses say otherwise.

    Args:
        targets: one tree per micro-batch.
        sizes: rows of each micro-batch.
    """
    known = _class_loss(loss_fn)
    if known is not None and all(isinstance(t, Tensor) and not t.is_floating_point() for t in targets):
        ignored, weight = known
        kept = [target[target != ignored] for target in targets]
        return [float(k.numel() if weight is None else weight[k.to(weight.device)].sum()) for k in kept]
    return [float(size) for size in sizes]


def check_scalar(result: Any) -> Tensor:
    """The loss function's tensor.

    Raises:
        UsageError: it returned something else, or a tensor with dimensions.
    """
    if not isinstance(result, Tensor):
        raise UsageError(
            f"loss_fn returned a {type(result).__name__}; return a 0-d tensor (a mean over rows) or "
            "slurm_jap.Loss(sum, count)"
        )
    if result.dim() != 0:
        raise UsageError(
            f"loss_fn returned a tensor of shape {tuple(result.shape)}; reduce it: .mean(), or "
            "slurm_jap.Loss(loss.sum(), loss.numel())"
        )
    return result


def means(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """``{name: sum / count}``."""
    return {name: (total / count if count else float("nan")) for name, (total, count) in totals.items()}


def metric_sums(values: Any, rows: int) -> dict[str, tuple[float, float]]:
    """What a metric function returned, as ``{name: (sum, count)}``; a bare number is a mean over ``rows``.

    Raises:
        UsageError: not a mapping of numbers or (sum, count) pairs.
    """
    if not isinstance(values, Mapping):
        values = {"value": values}
    sums: dict[str, tuple[float, float]] = {}
    for name, value in values.items():
        try:
            if isinstance(value, (tuple, list)):
                total, count = value
                sums[str(name)] = (float(total), float(count))
            else:
                sums[str(name)] = (float(value) * rows, float(rows))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"metric_fn returned {name}={value!r}; return {{name: number}} or {{name: (sum, count)}} ({error})"
            ) from None
    return sums


def whole_batch_kind(loss_fn: Callable[..., Any], output: Any, target: Any, rows: int, halve: Any) -> str:
    """How the loss of a batch relates to those of its halves: ``mean``, ``sum``, or ``other``.

    Called once, on one micro-batch, so that a sum is not silently taken for a mean.

    Args:
        halve: function that cuts a tree of ``rows`` rows in two.
    """
    (out_a, out_b), (target_a, target_b) = halve(output), halve(target)
    with torch.no_grad():
        whole = float(check_scalar(loss_fn(output, target)))
        first = float(check_scalar(loss_fn(out_a, target_a)))
        second = float(check_scalar(loss_fn(out_b, target_b)))
    left = rows - rows // 2
    mean = (first * left + second * (rows - left)) / rows
    scale = max(abs(whole), abs(first), abs(second), 1e-12)
    if abs(whole - mean) <= 1e-3 * scale or not all(map(_finite, (whole, first, second))):
        return "mean"
    return "sum" if abs(whole - (first + second)) <= 1e-3 * scale else "other"


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
