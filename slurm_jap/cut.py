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
        before = best[stage - 1]
        start = stage - 1
        for end in range(stage, count + 1):
            # As the last range begins later it gets lighter and what is before it heavier, and the best beginning
            # never moves back when the end moves on. Of equals the latest: the stage with the loss is the lighter one.
            heaviest = max(before[start], prefix[end] - prefix[start])
            while start + 1 < end:
                following = max(before[start + 1], prefix[end] - prefix[start + 1])
                if following > heaviest:
                    break
                start, heaviest = start + 1, following
            best[stage][end], came[stage][end] = heaviest, start
    ranges = []
    end = count
    for stage in range(stages, 0, -1):
        ranges.append((came[stage][end], end))
        end = came[stage][end]
    return ranges[::-1]
