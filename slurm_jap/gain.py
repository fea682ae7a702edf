"""What coalescing the members of one array gains: the scheduler's own periods, for equal members on equal stages.

Pure: no I/O, no torch. One member alone is a pipeline of ``stages`` devices. ``g`` members in one group share a
pipeline ``g`` times as deep, on the same devices with the same state per device. The time of one iteration of all
members is the period of the schedule that ``slurm_jap.stream`` finds, or its lower bound. Times are in units of one
forward of one micro-batch on one stage of the member alone.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections import deque
from collections.abc import Sequence

from slurm_jap.errors import UsageError
from slurm_jap.problem import Bound, Problem, lower_bound, uniform
from slurm_jap.stream import stream

SEARCH = 60_000
"""Work that ``stream`` may spend on one schedule: less than when a job is planned, since a trace needs hundreds."""
PERIODS = ("schedule", "bound")
NO_GAIN_ONE_STAGE = "a member fits one device, so its pipeline has no idle time to share"
NO_GAIN_ALONE = "no sibling to share a pipeline with"
NO_GAIN_DEPTH = "the deeper pipeline would need more stages than --max-stages allows"
NO_GAIN_DEVICES = "two members need more devices than --max-gpus or the cluster allows"
NO_GAIN_MEMBERS = "--max-members leaves no room for two members at a time"
NO_GAIN_SMALL = "the predicted gain is below --min-gain"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What the model takes as given about the members' networks and the site's limits."""

    microbatches: int = 8
    """Micro-batches per iteration (M)."""
    stages: int | None = None
    """Stages of one member's own pipeline; None: as many as its devices. More devices than stages: replicas."""
    link: float = 0.05
    """Delay of one transfer between neighbouring stages, in forwards of one micro-batch on one plain stage."""
    backward: float = 2.0
    """Time of a backward, in forwards."""
    activations: float = 2.0
    """Micro-batches that a stage may hold, as a multiple of what one 1F1B pipeline holds there."""
    periods: str = "schedule"
    """``schedule``: the period of a schedule that was found; ``bound``: the lower bound, which may be out of reach."""
    max_stages: int = 32
    """The deepest pipeline that the networks have blocks for."""
    max_members: int = 64
    """Members that one coalesced job may hold."""
    max_gpus: int | None = None
    """Devices that one coalesced job may hold; None: no limit but the cluster's."""
    min_gain: float = 1.02
    """Arrays whose predicted gain is smaller stay plain arrays."""
    waves: int = 1
    """Members per place: with 2, a coalesced job has places (and devices) for half its members, and the others take
    the place of those that end."""

    def __post_init__(self) -> None:
        for name in ("microbatches", "max_stages", "max_members", "waves"):
            if getattr(self, name) < 1:
                raise UsageError(_at_least(name, getattr(self, name), 1))
        for name in ("stages", "max_gpus"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(_at_least(name, value, 1))
        for name in ("link", "backward"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(_at_least(name, getattr(self, name), 0))
        for name in ("activations", "min_gain"):
            if not 1 <= getattr(self, name) < float("inf"):
                raise UsageError(_at_least(name, getattr(self, name), 1))
        if self.periods not in PERIODS:
            raise UsageError(f"--periods is {self.periods!r}, but must be one of {', '.join(PERIODS)}")


def _at_least(name: str, value: object, least: int) -> str:
    return f"--{name.replace('_', '-')} is {value}, but must be a number of at least {least}"


def group_problem(members: int, depth: int, stages: int, assumptions: Assumptions) -> Problem:
    """``members`` equal members on one pipeline of ``depth`` x ``stages`` stages.

    ``depth`` is the number of members the group was sized for: a stage holds 1/``depth`` of the work of a stage of a
    member alone. ``members`` may be smaller, once siblings have left.
    """
    return uniform(
        stages=depth * stages,
        members=members,
        microbatches=assumptions.microbatches,
        forward=1.0 / depth,
        backward=assumptions.backward / depth,
        link=assumptions.link,
        memory=assumptions.activations,
    )


def group_bound(members: int, depth: int, stages: int, assumptions: Assumptions) -> Bound:
    """The lower bounds on the period of ``group_problem``."""
    return lower_bound(group_problem(members, depth, stages, assumptions))


def group_period(members: int, depth: int, stages: int, assumptions: Assumptions) -> float:
    """One iteration of every member of the group."""
    period = _period(group_problem(members, depth, stages, assumptions), assumptions.periods)
    if members < depth:
        # Leaving a member out of a schedule makes it no longer, whatever the search found for fewer members.
        period = min(period, _period(group_problem(depth, depth, stages, assumptions), assumptions.periods))
    return period


@functools.cache
def _period(problem: Problem, periods: str) -> float:
    return lower_bound(problem).period if periods == "bound" else stream(problem, work=SEARCH).period


def plain_period(stages: int, assumptions: Assumptions) -> float:
    """One iteration of a member alone on ``stages`` stages."""
    return group_period(1, 1, stages, assumptions)


def gain(depth: int, stages: int, assumptions: Assumptions) -> float:
    """How many times faster ``depth`` members train together than side by side on the same devices."""
    return plain_period(stages, assumptions) / group_period(depth, depth, stages, assumptions)


def busy_share(members: int, depth: int, stages: int, assumptions: Assumptions) -> float:
    """Share of a period in which a device of the group computes."""
    load = group_bound(members, depth, stages, assumptions).load
    return load / group_period(members, depth, stages, assumptions)


def split_devices(gpus: int, assumptions: Assumptions) -> tuple[int, int]:
    """(stages, replicas) of one member of ``gpus`` devices: the most stages that divide them and are allowed."""
    wanted = gpus if assumptions.stages is None else min(gpus, assumptions.stages)
    stages = next(count for count in range(wanted, 0, -1) if gpus % count == 0)
    return stages, gpus // stages


@dataclasses.dataclass(frozen=True, slots=True)
class CoalescedPlan:
    """One coalesced job: ``groups`` pipelines of ``stages`` stages, ``members_per_group`` members on each."""

    groups: int
    members_per_group: int
    """Members on one pipeline at a time."""
    stages: int
    replicas: int
    gain: float
    bound_by: str
    members: int
    """Members of the whole job; more than ``groups`` x ``members_per_group`` where some wait for a place."""

    @property
    def gpus(self) -> int:
        """Devices of the whole job: as many as ``groups`` x ``members_per_group`` members ask for one by one."""
        return self.groups * self.stages * self.replicas


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayPlan:
    """How the members of one array run: coalesced jobs, and how many members stay plain, with the reason."""

    jobs: tuple[CoalescedPlan, ...]
    plain: int
    reason: str
    """Why ``plain`` members stay plain; empty where none does."""


@functools.cache
def plan_array(members: int, gpus: int, cluster_gpus: int, assumptions: Assumptions) -> ArrayPlan:
    """The split of an array of equal members into coalesced jobs that costs the least device time.

    ``gpus`` is what one member asks for, ``cluster_gpus`` what the cluster has. Never more devices than the members
    would have asked for together, and never more state per device.
    """
    stages, replicas = split_devices(gpus, assumptions)
    device_limit = cluster_gpus if assumptions.max_gpus is None else min(cluster_gpus, assumptions.max_gpus)
    if members < 2:
        return ArrayPlan((), members, NO_GAIN_ALONE)
    if stages == 1:
        return ArrayPlan((), members, NO_GAIN_ONE_STAGE)
    if 2 * stages > assumptions.max_stages:
        return ArrayPlan((), members, NO_GAIN_DEPTH)
    most_places = min(max(1, assumptions.max_members // assumptions.waves), device_limit // gpus)
    if most_places < 2:
        return ArrayPlan((), members, NO_GAIN_DEVICES if device_limit // gpus < 2 else NO_GAIN_MEMBERS)
    places = max(2, -(-members // assumptions.waves))
    deepest = min(places, most_places, assumptions.max_stages // stages)
    gains = {depth: gain(depth, stages, assumptions) for depth in range(2, deepest + 1)}
    useful = {depth: value for depth, value in gains.items() if value >= assumptions.min_gain}
    if not useful:
        return ArrayPlan((), members, NO_GAIN_SMALL)
    jobs: list[CoalescedPlan] = []
    placed, assigned = 0, 0
    for depth, groups in _cheapest_groups(places, tuple(sorted(useful.items()))):
        if depth == 1:
            continue
        bound_by = group_bound(depth, depth, stages, assumptions).by.value
        while groups:
            count = min(groups, most_places // depth)
            groups -= count
            placed += count * depth
            # Members go to the jobs in proportion to their places, in the array's order.
            of_job = members * placed // places - assigned
            assigned += of_job
            jobs.append(CoalescedPlan(count, depth, depth * stages, replicas, useful[depth], bound_by, of_job))
    return ArrayPlan(tuple(jobs), members - assigned, NO_GAIN_ALONE if assigned < members else "")


def _cheapest_groups(members: int, gains: tuple[tuple[int, float], ...]) -> list[tuple[int, int]]:
    """(depth, groups) pairs, deepest first, of the split of ``members`` with the least device time; depth 1: plain.

    ``cost[k]`` is the device time of k members in units of one plain member's; among equals the shallower groups win.
    """
    cost = [0.0]
    choice = [0]
    for count in range(1, members + 1):
        best, best_depth = cost[count - 1] + 1.0, 1
        for depth, value in gains:
            if depth > count:
                break
            candidate = cost[count - depth] + depth / value
            if candidate < best - 1e-9:
                best, best_depth = candidate, depth
        cost.append(best)
        choice.append(best_depth)
    tally: dict[int, int] = {}
    while members:
        tally[choice[members]] = tally.get(choice[members], 0) + 1
        members -= choice[members]
    return sorted(tally.items(), reverse=True)


def finish_times(durations: Sequence[int], groups: int, depth: int, stages: int, assumptions: Assumptions) -> list[int]:
    """When each member of a coalesced job ends, after the job's start, in the unit of ``durations`` and rounded up.

    ``durations`` are what the members take alone on ``stages`` devices; members differ only in how many iterations
    they run. The first ``groups`` x ``depth`` members start together, the first ``depth`` of them in group 0 and so on.
    When a member leaves, the next waiting member takes its place; with none waiting its group goes on at the period
    of fewer members, on the same devices.
    """
    alone = plain_period(stages, assumptions)
    # pace[k]: time per unit of each member's own progress while k members are active.
    pace = [0.0] + [group_period(count, depth, stages, assumptions) / alone for count in range(1, depth + 1)]
    ends = [0.0] * len(durations)
    waiting = deque(range(groups * depth, len(durations)))
    progress, clock = [0.0] * groups, [0.0] * groups
    # Per group a heap of (the group's progress at which the member ends, member).
    active: list[list[tuple[float, int]]] = []
    events: list[tuple[float, int]] = []

    def schedule(group: int) -> None:
        if active[group]:
            left = active[group][0][0] - progress[group]
            heapq.heappush(events, (clock[group] + left * pace[len(active[group])], group))

    for group in range(groups):
        first = range(group * depth, min((group + 1) * depth, len(durations)))
        active.append([(float(durations[member]), member) for member in first])
        heapq.heapify(active[group])
        schedule(group)
    while events:
        clock_now, group = heapq.heappop(events)
        clock[group] = clock_now
        progress[group], member = heapq.heappop(active[group])
        ends[member] = clock_now
        if waiting:
            joining = waiting.popleft()
            heapq.heappush(active[group], (progress[group] + durations[joining], joining))
        schedule(group)
    # A tiny slack keeps a whole number that floating point left just above itself from being rounded up.
    return [max(0, math.ceil(end - 1e-6)) for end in ends]
