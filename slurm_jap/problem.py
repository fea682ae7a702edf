"""The scheduling problem of one pipeline, and lower bounds on its period.

Pure: no I/O, no torch. Times are seconds, memory is bytes. The *period* is the time of one iteration of every member in
the steady state; with ``barrier`` it is the time from the start of the first action to the end of the last step of one
iteration. docs/scheduling.md states the problem and proves each bound.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

from slurm_jap.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemberCost:
    """What one member asks of every stage."""

    forward: tuple[float, ...]
    """Seconds of one micro-batch's forward, per stage."""
    backward: tuple[float, ...]
    """Seconds of one micro-batch's backward, per stage."""
    step: tuple[float, ...]
    """Seconds of one optimizer step, per stage."""
    microbatches: int
    """Micro-batches of one iteration."""
    activation: tuple[int, ...] = ()
    """Bytes that one micro-batch holds on each stage from the start of its forward to the end of its backward;
    empty when they are not counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One pipeline and the members that share it. Raises ``UsageError`` for what cannot be scheduled."""

    members: tuple[MemberCost, ...]
    link: float = 0.0
    """Seconds that one activation, or one gradient, occupies the link between two stages (one link per direction)."""
    switch: float = 0.0
    """Seconds that a stage loses whenever the next action belongs to another member."""
    caps: tuple[int, ...] | None = None
    """Per stage, how many micro-batches' activations may be held at once, over all members; None: any number."""
    memory: tuple[int, ...] | None = None
    """Per stage, the bytes that activations may take at once, over all members; None: any number."""
    barrier: bool = False
    """Whether no member starts its next iteration before every member has ended this one."""

    def __post_init__(self) -> None:
        if not self.members:
            raise UsageError("a scheduling problem without members: give at least one MemberCost")
        stages = len(self.members[0].forward)
        if stages == 0:
            raise UsageError("a scheduling problem without stages: give each member one forward time per stage")
        for index, member in enumerate(self.members):
            _check_member(index, member, stages)
        for name, value in (("link", self.link), ("switch", self.switch)):
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} time {value!r} is not a number of seconds >= 0; give one")
        if self.caps is not None and (len(self.caps) != stages or min(self.caps) < 1):
            raise UsageError(f"caps {self.caps} must be {stages} counts >= 1, one per stage; give {stages} of them")
        if self.memory is not None:
            self._check_memory(stages)

    def _check_memory(self, stages: int) -> None:
        assert self.memory is not None
        if len(self.memory) != stages:
            raise UsageError(f"memory {self.memory} must be {stages} byte counts, one per stage; give {stages} of them")
        for index, member in enumerate(self.members):
            if len(member.activation) != stages:
                raise UsageError(
                    f"memory is limited but member {index} has {len(member.activation)} activation sizes for "
                    f"{stages} stages; give one per stage, or no memory limit"
                )
            for stage, (need, limit) in enumerate(zip(member.activation, self.memory, strict=True)):
                if need > limit:
                    raise UsageError(
                        f"one micro-batch of member {index} holds {need} bytes on stage {stage}, whose limit is "
                        f"{limit}; use more micro-batches or more stages"
                    )

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return len(self.members[0].forward)

    @property
    def microbatches(self) -> tuple[int, ...]:
        """M of each member."""
        return tuple(member.microbatches for member in self.members)

    @property
    def actions(self) -> int:
        """How many actions one period has, over all stages."""
        return self.stages * sum(2 * m + 1 for m in self.microbatches)

    def alone(self, member: int) -> Problem:
        """The same pipeline with this member only."""
        return dataclasses.replace(self, members=(self.members[member],))


def _check_member(index: int, member: MemberCost, stages: int) -> None:
    for name, times in (("forward", member.forward), ("backward", member.backward), ("step", member.step)):
        if len(times) != stages:
            raise UsageError(f"member {index} has {len(times)} {name} times for {stages} stages; give one per stage")
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise UsageError(f"member {index} has a {name} time that is not a number of seconds >= 0: {times}; mend it")
    if member.microbatches < 1:
        raise UsageError(f"member {index} has {member.microbatches} micro-batches; give at least 1")


def uniform(
    *,
    stages: int,
    members: int,
    microbatches: int,
    forward: float = 1.0,
    backward: float = 2.0,
    step: float = 0.0,
    link: float = 0.0,
    memory: float | None = None,
    barrier: bool = False,
) -> Problem:
    """Equal members on equal stages. ``memory`` is a multiple of one 1F1B pipeline's activations (S - s on stage s)."""
    cost = MemberCost(
        forward=(forward,) * stages, backward=(backward,) * stages, step=(step,) * stages, microbatches=microbatches
    )
    return Problem(
        members=(cost,) * members,
        link=link,
        caps=None if memory is None else caps_of(stages, memory),
        barrier=barrier,
    )


def caps_of(stages: int, factor: float) -> tuple[int, ...]:
    """Per stage, ``factor`` times the micro-batches that one 1F1B pipeline holds there (S - s), rounded down, >= 1."""
    return tuple(max(1, math.floor(factor * (stages - stage) + 1e-9)) for stage in range(stages))


# --- ticks --------------------------------------------------------------------------------------------------------


def in_ticks(problem: Problem) -> tuple[Problem, float]:
    """The same problem in whole ticks, and the seconds of one tick (a power of ten).

    Sums of ticks are exact, so two events that coincide do so in the simulation as well. The longest time becomes
    10^6 to 10^7 ticks.
    """
    longest = max(max(*m.forward, *m.backward, *m.step) for m in problem.members)
    longest = max(longest, problem.link, problem.switch)
    if longest == 0:
        return scaled(problem, 1.0), 1.0
    exponent = 6 - math.floor(math.log10(longest))
    return scaled(problem, 10.0**exponent), 10.0**-exponent


def scaled(problem: Problem, scale: float) -> Problem:
    """All times multiplied by ``scale`` and rounded to whole numbers."""

    def ticks(times: Sequence[float]) -> tuple[int, ...]:
        return tuple(round(time * scale) for time in times)

    known: dict[MemberCost, MemberCost] = {}
    for member in problem.members:
        if member not in known:
            known[member] = dataclasses.replace(
                member, forward=ticks(member.forward), backward=ticks(member.backward), step=ticks(member.step)
            )
    return dataclasses.replace(
        problem,
        members=tuple(known[member] for member in problem.members),
        link=round(problem.link * scale),
        switch=round(problem.switch * scale),
    )


# --- lower bounds -------------------------------------------------------------------------------------------------


class BoundBy(str, enum.Enum):
    """Which resource a lower bound speaks of."""

    LOAD = "load"
    """A stage must do all its work in one period."""
    PATH = "path"
    """A member's next iteration waits for its own step."""
    LINK = "link"
    """A link must carry all its messages in one period."""
    MEMORY = "memory"
    """A micro-batch holds its activation for its whole way down and back, and only so many fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds on the period, each valid by itself; ``period`` is the largest."""

    load: float
    path: float
    link: float
    memory: float

    @property
    def period(self) -> float:
        """No schedule has a shorter period."""
        return max(self.load, self.path, self.link, self.memory)

    @property
    def by(self) -> BoundBy:
        """The bound that rules; of equal ones the first of load, path, link, memory."""
        return max(
            (BoundBy.LOAD, self.load),
            (BoundBy.PATH, self.path),
            (BoundBy.LINK, self.link),
            (BoundBy.MEMORY, self.memory),
            key=lambda pair: pair[1],
        )[0]


def lower_bound(problem: Problem) -> Bound:
    """All lower bounds of ``problem``; O(K S^2)."""
    ways = _distinct(problem)
    load = max(_stage_load(problem, stage) for stage in range(problem.stages))
    path = max(_member_path(problem, way) for way, _ in ways)
    if problem.barrier:
        load = max(load, max(_barrier_load(problem, ways, stage) for stage in range(problem.stages)))
    messages = sum(problem.microbatches) if problem.stages > 1 else 0
    return Bound(load=load, path=path, link=messages * problem.link, memory=_memory_time(problem, ways))


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """One member's way through the pipeline without any waiting."""

    member: MemberCost
    down: tuple[float, ...]
    """Per stage, from the start of a forward on stage 0 to the start of this stage's forward, backward likewise:
    the sum over earlier stages of F + B + 2 links."""
    below: tuple[float, ...]
    """Per stage, from the end of its forward to the start of its backward: the way to the last stage and back."""


def _distinct(problem: Problem) -> list[tuple[_Way, int]]:
    """Each distinct member cost with how many members have it."""
    counts: dict[MemberCost, int] = {}
    for member in problem.members:
        counts[member] = counts.get(member, 0) + 1
    return [(_way(problem, member), count) for member, count in counts.items()]


def _way(problem: Problem, member: MemberCost) -> _Way:
    both = [f + b for f, b in zip(member.forward, member.backward, strict=True)]
    down = [0.0]
    for stage in range(problem.stages - 1):
        down.append(down[-1] + both[stage] + 2 * problem.link)
    whole = down[-1] + both[-1]
    return _Way(member, tuple(down), tuple(whole - down[s] - both[s] for s in range(problem.stages)))


def _stage_load(problem: Problem, stage: int) -> float:
    """T >= sum over members of M (F + B) + step on one stage, and at least one switch to each member.

    With a barrier the stage comes to its first member for nothing.
    """
    work = sum(m.microbatches * (m.forward[stage] + m.backward[stage]) + m.step[stage] for m in problem.members)
    members = len(problem.members)
    return work + problem.switch * (members - problem.barrier if members > 1 else 0)


def _interval(problem: Problem, way: _Way, stage: int) -> float:
    """The least time from a member's first forward to its last backward on ``stage``."""
    member = way.member
    forward, backward, count = member.forward[stage], member.backward[stage], member.microbatches
    held = forward + way.below[stage] + backward
    rounds = math.ceil(count / _held_at_once(problem, member, stage))
    return max(
        count * (forward + backward),
        held + (count - 1) * forward,
        held + (count - 1) * backward,
        rounds * held,
    )


def _member_path(problem: Problem, way: _Way) -> float:
    """T >= from a member's step on stage a, down to stage b, all its work there, and back up to its step on stage a."""
    longest = begin = 0.0
    for b in range(problem.stages):
        # The best a so far: its step, less the way down to it.
        begin = max(begin, way.member.step[b] - way.down[b]) if b else way.member.step[0]
        longest = max(longest, begin + way.down[b] + _interval(problem, way, b))
    return longest


def _held_at_once(problem: Problem, member: MemberCost, stage: int) -> int:
    """How many micro-batches of this member alone may be held on ``stage``."""
    held = member.microbatches
    if problem.caps is not None:
        held = min(held, problem.caps[stage])
    if problem.memory is not None and member.activation[stage] > 0:
        held = min(held, problem.memory[stage] // member.activation[stage])
    return held


def _memory_time(problem: Problem, ways: list[tuple[_Way, int]]) -> float:
    """Little's law: what is held times how long, over all micro-batches, fits in the limit times the period."""
    best = 0.0
    for stage in range(problem.stages):
        holds = [
            (
                way.member,
                count * way.member.microbatches,
                way.member.forward[stage] + way.below[stage] + way.member.backward[stage],
            )
            for way, count in ways
        ]
        if problem.caps is not None:
            best = max(best, sum(count * held for _, count, held in holds) / problem.caps[stage])
        if problem.memory is not None and problem.memory[stage] > 0:
            spent = sum(member.activation[stage] * count * held for member, count, held in holds)
            best = max(best, spent / problem.memory[stage])
    return best


def _barrier_load(problem: Problem, ways: list[tuple[_Way, int]], stage: int) -> float:
    """With a barrier: nothing reaches the stage before the shortest way down, and something still goes back up."""
    arrive = min(sum(way.member.forward[:stage]) for way, _ in ways) + stage * problem.link
    leave = min(sum(way.member.backward[:stage]) + way.member.step[0] for way, _ in ways) + stage * problem.link
    work = sum(m.microbatches * (m.forward[stage] + m.backward[stage]) for m in problem.members)
    return arrive + work + leave
