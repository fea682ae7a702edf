"""What coalescing does to the jobs of a trace: which arrays become which jobs, and the figures of both replays.

Pure: no I/O, no torch. An array opts in or not (a seeded draw), the plan of ``gain`` says how its members share
pipelines, ``cluster_sim`` replays the trace with and without, and the rest is counting. Members of a coalesced job hold
all its GPUs until the last of them ends, however uneven they are: a plan that loses by it is counted as it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from slurm_jap.cluster_sim import Request, replay, shape_of
from slurm_jap.errors import UsageError
from slurm_jap.gain import Assumptions, CoalescedPlan, busy_share, finish_times, plan_array, split_devices
from slurm_jap.traces import RULE_TOO_LARGE, Trace, TraceJob

REASON_OPTED_OUT = "did not opt in"
SIZES: tuple[tuple[str, int], ...] = (
    ("1", 1), ("2", 2), ("3-4", 4), ("5-8", 8), ("9-16", 16), ("17-32", 32), ("33-64", 64), ("65+", 1 << 62)
)  # fmt: skip
_HOUR = 3_600_000


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of ``gpus_per_node`` GPUs; partitions named in ``pools`` have nodes of their own, all others share."""

    gpus_per_node: int
    nodes: int
    pools: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def pool_of(self, partition: str) -> str:
        """The pool that serves a partition; empty: the shared one."""
        return partition if partition in self.pools else ""

    def nodes_of(self, pool: str) -> int:
        """Nodes of a pool."""
        return self.pools[pool] if pool else self.nodes

    def all_nodes(self) -> int:
        """Nodes of the whole cluster."""
        return self.nodes + sum(self.pools.values())

    def gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.all_nodes() * self.gpus_per_node


def size_cluster(jobs: Sequence[TraceJob], gpus_per_node: int, load: float) -> int:
    """Nodes for which the GPU time of ``jobs`` is ``load`` of what the nodes offer between first and last arrival.

    Never too few for the largest job.
    """
    work = sum(job.gpus * job.duration for job in jobs)
    span = max(job.submit for job in jobs) - min(job.submit for job in jobs)
    span = max(span, max(job.duration for job in jobs), 1)
    largest = max(shape_of(job.gpus, job.nodes, gpus_per_node).nodes for job in jobs)
    return max(math.ceil(work / (span * load * gpus_per_node)), largest, 1)


def drop_too_large(trace: Trace, cluster: Cluster) -> None:
    """Leave out, and count as skipped, the jobs that no pool of theirs can ever hold. UsageError if none is left."""
    kept = []
    for job in trace.jobs:
        nodes = cluster.nodes_of(cluster.pool_of(job.partition))
        if shape_of(job.gpus, job.nodes, cluster.gpus_per_node).nodes > nodes:
            text = f"{job.gpus} GPUs on {nodes} nodes of {cluster.gpus_per_node}"
            trace.skipped.add(RULE_TOO_LARGE, job.row, text)
        else:
            kept.append(job)
    if not kept:
        raise UsageError(f"{trace.source}: every job is larger than the cluster; give more with --nodes")
    trace.jobs = kept


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """One job as the scheduler sees it: a plain one, or a coalesced one with its members' ends after its start."""

    members: tuple[int, ...]
    ends: tuple[int, ...]
    gpus: int
    nodes: int
    submit: int
    duration: int
    estimate: int


@dataclasses.dataclass(slots=True)
class Coalescing:
    """What became of the arrays."""

    units: list[Unit]
    arrays: int = 0
    arrays_coalesced: int = 0
    coalesced_jobs: int = 0
    members: int = 0
    """Members of coalesced jobs."""
    plain: dict[str, int] = dataclasses.field(default_factory=dict)
    """Jobs of arrays that stay plain, by reason."""
    losing_jobs: int = 0
    """Coalesced jobs that held more GPU time than their members would have alone."""
    lost_gpu_ms: int = 0
    """What those held too much."""
    plain_gpu_ms: int = 0
    """GPU time of the coalesced jobs' members, each alone."""
    coalesced_gpu_ms: int = 0
    """GPU time of the coalesced jobs."""
    busy_gpu_ms: float = 0.0
    """Part of both in which, by the model, a GPU computes."""
    predicted: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """(gain predicted by the plan, GPU time of the members alone) of each coalesced job."""


def _estimate(job: TraceJob, overestimate: float) -> int:
    return job.limit if job.limit is not None else math.ceil(job.duration * overestimate)


def plain_units(jobs: Sequence[TraceJob], overestimate: float) -> list[Unit]:
    """Every job by itself."""
    return [_plain_unit(index, job, overestimate) for index, job in enumerate(jobs)]


def _plain_unit(index: int, job: TraceJob, overestimate: float) -> Unit:
    estimate = _estimate(job, overestimate)
    return Unit((index,), (job.duration,), job.gpus, job.nodes, job.submit, job.duration, estimate)


def coalesce(
    jobs: Sequence[TraceJob],
    arrays: Iterable[Sequence[int]],
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    opt_in: float,
    seed: int,
    overestimate: float,
    job_per_group: bool = False,
) -> Coalescing:
    """Turn the arrays that opt in and gain into coalesced jobs; every job is in exactly one unit.

    The draws are one per array in the arrays' order, so that a larger ``opt_in`` only adds arrays.
    ``job_per_group``: one job per pipeline, rather than one for all the pipelines of equal depth of an array.
    """
    draw = random.Random(seed)
    result = Coalescing([])
    alone = [True] * len(jobs)
    for array in arrays:
        result.arrays += 1
        if draw.random() >= opt_in:
            _count(result.plain, REASON_OPTED_OUT, len(array))
            continue
        first = jobs[array[0]]
        pool_gpus = cluster.nodes_of(cluster.pool_of(first.partition)) * cluster.gpus_per_node
        plan = plan_array(len(array), first.gpus, pool_gpus, assumptions)
        if plan.plain:
            _count(result.plain, plan.reason, plan.plain)
        result.arrays_coalesced += bool(plan.jobs)
        stages, _ = split_devices(first.gpus, assumptions)
        plain_busy = busy_share(1, 1, stages, assumptions)
        position = 0
        for job in plan.jobs:
            depth = job.members_per_group
            for groups, count in _split(job, job_per_group):
                members = tuple(array[position : position + count])
                position += count
                ends = finish_times([jobs[index].duration for index in members], groups, depth, stages, assumptions)
                duration = max(ends)
                limits = [limit for index in members if (limit := jobs[index].limit) is not None]
                # No member takes longer than alone, so the members' longest limit holds for each wave of them.
                waves = -(-count // (groups * depth))
                estimate = max(limits) * waves if len(limits) == count else math.ceil(duration * overestimate)
                gpus = groups * depth * first.gpus
                submit = max(jobs[index].submit for index in members)
                result.units.append(Unit(members, tuple(ends), gpus, 0, submit, duration, estimate))
                for index in members:
                    alone[index] = False
                before = sum(jobs[index].duration for index in members) * first.gpus
                after = duration * gpus
                result.coalesced_jobs += 1
                result.members += len(members)
                result.plain_gpu_ms += before
                result.coalesced_gpu_ms += after
                result.busy_gpu_ms += before * plain_busy
                result.predicted.append((job.gain, before))
                if after > before:
                    result.losing_jobs += 1
                    result.lost_gpu_ms += after - before
    result.units += [_plain_unit(index, jobs[index], overestimate) for index, plain in enumerate(alone) if plain]
    return result


def _split(job: CoalescedPlan, job_per_group: bool) -> list[tuple[int, int]]:
    """(groups, members) of the jobs that ``job`` is submitted as."""
    if not job_per_group:
        return [(job.groups, job.members)]
    shares = [job.members * group // job.groups for group in range(job.groups + 1)]
    return [(1, after - before) for before, after in itertools.pairwise(shares)]


def _count(tally: dict[str, int], key: str, amount: int) -> None:
    tally[key] = tally.get(key, 0) + amount


@dataclasses.dataclass(slots=True)
class Outcome:
    """One replay, by index of the trace's jobs (members); times in ms after the trace's first arrival."""

    starts: list[int]
    ends: list[int]
    gpu_ms: list[float]
    """GPU time a job accounts for; the members of a coalesced job share its evenly."""
    scheduled: int
    """Jobs the scheduler had to place."""


def run(units: Sequence[Unit], jobs: Sequence[TraceJob], cluster: Cluster) -> Outcome:
    """Replay the units, pool by pool."""
    outcome = Outcome([0] * len(jobs), [0] * len(jobs), [0.0] * len(jobs), len(units))
    by_pool: dict[str, list[Unit]] = {}
    for unit in units:
        by_pool.setdefault(cluster.pool_of(jobs[unit.members[0]].partition), []).append(unit)
    for pool, of_pool in by_pool.items():
        # Among arrivals at one instant the trace's order holds, whichever jobs were coalesced.
        of_pool.sort(key=lambda unit: (unit.submit, unit.members[-1]))
        requests = [Request(unit.submit, unit.duration, unit.estimate, unit.gpus, unit.nodes) for unit in of_pool]
        starts = replay(requests, cluster.nodes_of(pool), cluster.gpus_per_node).starts
        for unit, start in zip(of_pool, starts, strict=True):
            share = unit.gpus * unit.duration / len(unit.members)
            for index, end in zip(unit.members, unit.ends, strict=True):
                outcome.starts[index] = start
                outcome.ends[index] = start + end
                outcome.gpu_ms[index] = share
    return outcome


def _spread(values: list[int]) -> dict[str, float]:
    """Mean, median and 95th percentile (nearest rank) in seconds."""
    values.sort()
    count = len(values)
    middle = (values[(count - 1) // 2] + values[count // 2]) / 2
    rank95 = values[max(0, math.ceil(0.95 * count) - 1)]
    return {"mean_s": sum(values) / count / 1000, "median_s": middle / 1000, "p95_s": rank95 / 1000}


def figures(jobs: Sequence[TraceJob], outcome: Outcome, chosen: Sequence[int]) -> dict[str, Any]:
    """Job completion time, queueing and GPU-hours of the ``chosen`` jobs (at least one)."""
    return {
        "jobs": len(chosen),
        "completion": _spread([outcome.ends[index] - jobs[index].submit for index in chosen]),
        "queueing": _spread([outcome.starts[index] - jobs[index].submit for index in chosen]),
        "gpu_hours": sum(outcome.gpu_ms[index] for index in chosen) / _HOUR,
    }


def cluster_figures(jobs: Sequence[TraceJob], outcome: Outcome, cluster: Cluster) -> dict[str, Any]:
    """``figures`` of all jobs, with makespan and GPU utilisation (GPU time allocated over GPU time there was)."""
    result = figures(jobs, outcome, range(len(jobs)))
    makespan = max(outcome.ends) - min(job.submit for job in jobs)
    result["makespan_s"] = makespan / 1000
    result["utilisation"] = result["gpu_hours"] * _HOUR / (makespan * cluster.gpus()) if makespan else 0.0
    result["scheduled_jobs"] = outcome.scheduled
    return result


def breakdown(
    jobs: Sequence[TraceJob], key: Callable[[int], str], without: Outcome, with_: Outcome, order: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """``figures`` of both replays for every value of ``key`` over job indexes, in ``order``, then by GPU-hours."""
    chosen: dict[str, list[int]] = {}
    for index in range(len(jobs)):
        chosen.setdefault(key(index), []).append(index)
    rows: list[dict[str, Any]] = [
        {"name": name, "without": figures(jobs, without, members), "with": figures(jobs, with_, members)}
        for name, members in chosen.items()
    ]
    place = {name: index for index, name in enumerate(order)}
    rows.sort(key=lambda row: (place.get(row["name"], len(place)), -row["without"]["gpu_hours"], row["name"]))
    return rows


def size_name(gpus: int) -> str:
    """The size class of a job."""
    return next(name for name, largest in SIZES if gpus <= largest)


def coalescing_figures(coalescing: Coalescing) -> dict[str, Any]:
    """What became of the arrays, for the report."""
    before, after = coalescing.plain_gpu_ms, coalescing.coalesced_gpu_ms
    weight = sum(gpu_ms for _, gpu_ms in coalescing.predicted)
    predicted = sum(gain * gpu_ms for gain, gpu_ms in coalescing.predicted) / weight if weight else None
    return {
        "arrays": coalescing.arrays,
        "arrays_coalesced": coalescing.arrays_coalesced,
        "coalesced_jobs": coalescing.coalesced_jobs,
        "members": coalescing.members,
        "kept_plain": dict(sorted(coalescing.plain.items())),
        "gpu_hours_alone": before / _HOUR,
        "gpu_hours_coalesced": after / _HOUR,
        "gain_predicted": predicted,
        "gain_achieved": before / after if after else None,
        "busy_alone": coalescing.busy_gpu_ms / before if before else None,
        "busy_coalesced": coalescing.busy_gpu_ms / after if after else None,
        "losing_jobs": coalescing.losing_jobs,
        "gpu_hours_lost": coalescing.lost_gpu_ms / _HOUR,
    }
