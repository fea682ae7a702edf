"""What coalescing the members of one array gains: the planner's bounds in closed form.

Pure: no I/O, no torch. One member alone is a pipeline of ``stages`` devices whose iteration cannot be shorter than its
critical path. ``g`` members in one group share a pipeline ``g`` times as deep, on the same devices with the same state
per device; a period of theirs cannot be shorter than the busiest stage's load, one member's critical path, or the
busiest link. Times are in units of one forward of one micro-batch on one stage of the member alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from slurm_jap.errors import UsageError

NO_GAIN_ONE_STAGE = "a member fits one device, so its pipeline has no idle time to share"
NO_GAIN_ALONE = "no sibling to share a pipeline with"
NO_GAIN_DEPTH = "the deeper pipeline would need more stages than --max-stages allows"
NO_GAIN_DEVICES = "two members need more devices than --max-gpus or the cluster allows"
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
    max_stages: int = 32
    """The deepest pipeline that the networks have blocks for."""
    max_members: int = 64
    """Members that one coalesced job may hold."""
    max_gpus: int | None = None
    """Devices that one coalesced job may hold; None: no limit but the cluster's."""
    min_gain: float = 1.02
    """Arrays whose predicted gain is smaller stay plain arrays."""

    def __post_init__(self) -> None:
        for name in ("microbatches", "max_stages", "max_members"):
            if getattr(self, name) < 1:
                raise UsageError(_at_least(name, getattr(self, name), 1))
        for name in ("stages", "max_gpus"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(_at_least(name, value, 1))
        for name in ("link", "backward"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(_at_least(name, getattr(self, name), 0))
        if not 1 <= self.min_gain < float("inf"):
            raise UsageError(_at_least("min_gain", self.min_gain, 1))


def _at_least(name: str, value: object, least: int) -> str:
    return f"--{name.replace('_', '-')} is {value}, but must be a number of at least {least}"


@dataclasses.dataclass(frozen=True, slots=True)
class Period:
    """A lower bound on one iteration of every member of a group, with the bound that rules."""

    load: float
    """Forward and backward work of all members on one stage."""
    path: float
    """One member's critical path: fill, micro-batches, drain, transfers."""
    links: float
    """Occupation of one direction of one link."""

    @property
    def bound(self) -> float:
        """The largest of the three."""
        return max(self.load, self.path, self.links)

    @property
    def bound_by(self) -> str:
        """``load``, ``path`` or ``link``: the bound that rules (the first of them, where equal)."""
        return max((("load", self.load), ("path", self.path), ("link", self.links)), key=lambda pair: pair[1])[0]


@functools.cache
def group_period(members: int, depth: int, stages: int, assumptions: Assumptions) -> Period:
    """The bounds for ``members`` equal members on one pipeline of ``depth`` x ``stages`` stages.

    ``depth`` is the number of members the group was sized for: a stage holds 1/``depth`` of the work of a stage of a
    member alone. ``members`` may be smaller, once siblings have left.
    """
    slot = (1.0 + assumptions.backward) / depth
    total_stages = depth * stages
    return Period(
        load=members * assumptions.microbatches * slot,
        path=(assumptions.microbatches + total_stages - 1) * slot + 2 * (total_stages - 1) * assumptions.link,
        links=members * assumptions.microbatches * assumptions.link if total_stages > 1 else 0.0,
    )


def plain_period(stages: int, assumptions: Assumptions) -> float:
    """One iteration of a member alone on ``stages`` stages."""
    return group_period(1, 1, stages, assumptions).bound


def gain(depth: int, stages: int, assumptions: Assumptions) -> float:
    """How many times faster ``depth`` members train together than side by side on the same devices."""
    return plain_period(stages, assumptions) / group_period(depth, depth, stages, assumptions).bound


def busy_share(members: int, depth: int, stages: int, assumptions: Assumptions) -> float:
    """Share of a period in which a device of the group computes."""
    period = group_period(members, depth, stages, assumptions)
    return period.load / period.bound


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
    stages: int
    replicas: int
    gain: float
    bound_by: str

    @property
    def members(self) -> int:
        """Members of the whole job."""
        return self.groups * self.members_per_group

    @property
    def gpus(self) -> int:
        """Devices of the whole job: as many as its members would have asked for one by one."""
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
    job_members = min(assumptions.max_members, device_limit // gpus)
    if job_members < 2:
        return ArrayPlan((), members, NO_GAIN_DEVICES)
    deepest = min(members, job_members, assumptions.max_stages // stages)
    gains = {depth: gain(depth, stages, assumptions) for depth in range(2, deepest + 1)}
    useful = {depth: value for depth, value in gains.items() if value >= assumptions.min_gain}
    if not useful:
        return ArrayPlan((), members, NO_GAIN_SMALL)
    jobs: list[CoalescedPlan] = []
    plain = 0
    for depth, groups in _cheapest_groups(members, tuple(sorted(useful.items()))):
        if depth == 1:
            plain = groups
            continue
        bound_by = group_period(depth, depth, stages, assumptions).bound_by
        per_job = job_members // depth
        while groups:
            count = min(groups, per_job)
            jobs.append(CoalescedPlan(count, depth, depth * stages, replicas, useful[depth], bound_by))
            groups -= count
    return ArrayPlan(tuple(jobs), plain, NO_GAIN_ALONE if plain else "")


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


def finish_times(durations: Sequence[int], depth: int, stages: int, assumptions: Assumptions) -> list[int]:
    """When each member of a group ends, after the group's start, in the unit of ``durations`` and rounded up.

    ``durations`` are what the members take alone on ``stages`` devices. Members differ only in how many iterations
    they run; when one leaves, the others go on at the period of the smaller group, on the same devices.
    """
    alone = plain_period(stages, assumptions)
    order = sorted(range(len(durations)), key=durations.__getitem__)
    ends = [0] * len(durations)
    elapsed, done, active = 0.0, 0, len(durations)
    for member in order:
        elapsed += (durations[member] - done) * group_period(active, depth, stages, assumptions).bound / alone
        done, active = durations[member], active - 1
        # A tiny slack keeps a whole number that floating point left just above itself from being rounded up.
        ends[member] = max(0, -int(-(elapsed - 1e-6) // 1))
    return ends
