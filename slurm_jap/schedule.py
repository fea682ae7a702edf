"""Actions, and the order in which each stage takes them.

Pure: no I/O, no torch. A ``Schedule`` is data: scheduler, simulator, validator, Gantt view and engine share it. Its
text form has one line per stage and parses back:

    0: i0m0F0 i0m0F1 i0m0B0 i0m0B1 i0m0S         i: iteration, counted from the period's own;  m: member
    1: i0m0F0 i0m0B0 i0m0F1 i0m0B1 i0m0S         F, B: forward, backward of a micro-batch;  S: optimizer step

Without a schedule the engine follows its rule: among the actions that are ready, take step before backward before
forward; within a kind, the smallest (iteration, member, micro-batch). ``Action`` orders exactly so. A forward never
starts while the stage holds its cap of activations, counted over all members together.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from slurm_jap.errors import UsageError


class Kind(enum.IntEnum):
    """What an action does, in the order of the rule."""

    STEP = 0
    BACKWARD = 1
    FORWARD = 2


_LETTER = {Kind.STEP: "S", Kind.BACKWARD: "B", Kind.FORWARD: "F"}
_ACTION = re.compile(r"i(-?\d+)m(\d+)(?:F(\d+)|B(\d+)|(S))")


class Action(NamedTuple):
    """One unit of work on one stage; tuple order is the rule's order, ``str`` its text form (``i0m2F3``, ``i0m2S``)."""

    kind: Kind
    iteration: int
    member: int
    microbatch: int = 0

    def __str__(self) -> str:
        number = "" if self.kind is Kind.STEP else str(self.microbatch)
        return f"i{self.iteration}m{self.member}{_LETTER[self.kind]}{number}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read ``i0m2F3``, ``i0m2B3`` or ``i0m2S``. Raises ``ScheduleError``."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is not an action; write i0m2F3, i0m2B3 or i0m2S")
        iteration, member, forward, backward, _ = match.groups()
        if forward is not None:
            return Action(Kind.FORWARD, int(iteration), int(member), int(forward))
        if backward is not None:
            return Action(Kind.BACKWARD, int(iteration), int(member), int(backward))
        return Action(Kind.STEP, int(iteration), int(member))


class ScheduleError(UsageError):
    """A schedule that cannot be run; the message says where and why, and may carry a table after its first line."""


def activation_cap(stages: int, stage: int) -> int:
    """How many micro-batches' activations ``stage`` may hold, over all members: 2 x (S - s).

    One 1F1B pipeline holds S - s; twice that loses nothing to the bound at link delays up to 5% of a forward.
    """
    return 2 * (stages - stage)


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """Per stage, the ordered actions of one period; the stage repeats them for ever.

    In its n-th period a stage runs each of its actions for iteration ``n + action.iteration``, leaving out iterations
    that do not exist. A period holds every action of every member exactly once. Periods of different stages need not
    begin together.
    """

    stages: tuple[tuple[Action, ...], ...]

    @property
    def microbatches(self) -> tuple[int, ...]:
        """M of each member, read off the first stage."""
        counts: dict[int, int] = {}
        for action in self.stages[0]:
            counts[action.member] = counts.get(action.member, 0) + (action.kind is Kind.FORWARD)
        return tuple(counts.get(member, 0) for member in range(max(counts, default=-1) + 1))

    def unrolled(self, stage: int, iterations: int) -> Iterator[Action]:
        """What ``stage`` does, in order, when every member trains ``iterations`` iterations from 0."""
        order = self.stages[stage]
        offsets = [action.iteration for action in order]
        for period in range(-max(offsets), iterations - min(offsets)):
            for action in order:
                iteration = period + action.iteration
                if 0 <= iteration < iterations:
                    yield action._replace(iteration=iteration)

    def places(self, stage: int) -> dict[tuple[Kind, int, int], tuple[int, int]]:
        """Where ``stage`` has each (kind, member, micro-batch) in its period: (iteration offset, place).

        Of the actions that are ready, the one with the least ``(iteration - offset, place)`` comes first in the
        schedule's order; that also serves an engine which does not wait for an action that is late.
        """
        return {
            (action.kind, action.member, action.microbatch): (action.iteration, place)
            for place, action in enumerate(self.stages[stage])
        }

    def __str__(self) -> str:
        return "".join(f"{stage}: {' '.join(map(str, order))}\n" for stage, order in enumerate(self.stages))

    @staticmethod
    def parse(text: str) -> Schedule:
        """Read the text form; blank lines and lines that begin with ``#`` are left out. Raises ``ScheduleError``."""
        stages: list[tuple[Action, ...]] = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            head, colon, rest = line.partition(":")
            if not colon or head.strip() != str(len(stages)):
                raise ScheduleError(
                    f"line {number} of the schedule begins with {head[:20]!r}; "
                    f"stage lines are numbered from 0 upwards, write '{len(stages)}: ' and its actions"
                )
            try:
                stages.append(tuple(map(Action.parse, rest.split())))
            except ScheduleError as error:
                raise ScheduleError(f"line {number} of the schedule: {error}") from None
        if not stages:
            raise ScheduleError("the schedule has no stages; write one line per stage: '0: i0m0F0 i0m0B0 i0m0S'")
        return Schedule(tuple(stages))

    def check_complete(self, microbatches: Sequence[int] | None = None) -> None:
        """Check that each stage's period holds every action once, in an order that training allows.

        On a stage, a member's forwards ascend, its backwards ascend, a backward follows its own forward, the step
        follows the last backward, and the next iteration's first forward follows the step. ``microbatches`` is M per
        member, by default what stage 0 shows. Raises ``ScheduleError``.
        """
        counts = tuple(self.microbatches if microbatches is None else microbatches)
        wanted = {
            (kind, member, microbatch)
            for member, count in enumerate(counts)
            for kind in Kind
            for microbatch in range(1 if kind is Kind.STEP else count)
        }
        for stage, order in enumerate(self.stages):
            # Where each action of iteration 0 falls in the stage's endless order.
            place: dict[tuple[Kind, int, int], int] = {}
            for position, action in enumerate(order):
                key = (action.kind, action.member, action.microbatch)
                if key in place:
                    raise ScheduleError(f"stage {stage} runs {action} twice in one period; name each action once")
                if key not in wanted:
                    raise ScheduleError(f"stage {stage} runs {action}, but the members' micro-batches are {counts}")
                place[key] = position - action.iteration * len(order)
            if len(place) < len(wanted):
                kind, member, microbatch = min(wanted - place.keys())
                missing = Action(kind, 0, member, microbatch)
                raise ScheduleError(f"stage {stage} never runs {missing}; name every action once per period")
            self._check_order(stage, place, counts)

    def _check_order(self, stage: int, place: dict[tuple[Kind, int, int], int], counts: Sequence[int]) -> None:
        for member, count in enumerate(counts):
            forward = [Action(Kind.FORWARD, 0, member, microbatch) for microbatch in range(count)]
            backward = [Action(Kind.BACKWARD, 0, member, microbatch) for microbatch in range(count)]
            step = Action(Kind.STEP, 0, member)
            chains = [*pairwise(forward), *pairwise([*backward, step]), *zip(forward, backward, strict=True)]
            for earlier, later in chains:
                if place[earlier.kind, member, earlier.microbatch] > place[later.kind, member, later.microbatch]:
                    raise ScheduleError(f"stage {stage} runs {later} before {earlier}; exchange them")
            if place[Kind.STEP, member, 0] > place[Kind.FORWARD, member, 0] + len(self.stages[stage]):
                raise ScheduleError(f"stage {stage} runs i1m{member}F0 before {step}; exchange them")
