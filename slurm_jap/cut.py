"""Where a model is cut into stages. Pure: no I/O, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_jap.errors import UsageError


def cut(costs: Sequence[float], stages: int) -> list[tuple[int, int]]:
    """Cut blocks into ``stages`` contiguous, non-empty ranges ``(first, last + 1)`` with the smallest heaviest range.

    >>> cut([1, 1, 1, 3], 2)
    [(0, 3), (3, 4)]

    Raises:
        UsageError: fewer blocks than stages.
    """
    count = len(costs)
    if count < stages:
        raise UsageError(
            f"--stages={stages}: the model has {count} blocks, and a stage needs at least one; "
            f"type --stages={count} or fewer, or cut the model into more blocks"
        )
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best: list[list[float]] = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    came: list[list[int]] = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                heaviest = max(best[stage - 1][start], prefix[end] - prefix[start])
                if heaviest < best[stage][end]:
                    best[stage][end], came[stage][end] = heaviest, start
    ranges = []
    end = count
    for stage in range(stages, 0, -1):
        ranges.append((came[stage][end], end))
        end = came[stage][end]
    return ranges[::-1]
