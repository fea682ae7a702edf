"""Actions, and the order in which a stage takes them.

Pure: no I/O, no torch. The engine's rule: among the actions that are ready, take step before backward before forward;
within a kind, the smallest (iteration, member, micro-batch). ``Action`` orders exactly so. A forward never starts while
the stage holds its cap of activations, counted over all members together.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.IntEnum):
    """What an action does, in the order of the rule."""

    STEP = 0
    BACKWARD = 1
    FORWARD = 2


class Action(NamedTuple):
    """One unit of work on one stage; tuple order is the rule's order."""

    kind: Kind
    iteration: int
    member: int
    microbatch: int = 0


def activation_cap(stages: int, stage: int) -> int:
    """How many micro-batches' activations ``stage`` may hold, over all members: 2 x (S - s).

    One 1F1B pipeline holds S - s; twice that loses nothing to the bound at link delays up to 5% of a forward.
    """
    return 2 * (stages - stage)
