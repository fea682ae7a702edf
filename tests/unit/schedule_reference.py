"""A second, slow and simple implementation of what a schedule costs and whether it hangs, to check the real one by."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from fractions import Fraction

from hypothesis import strategies as st

from slurm_jap.problem import MemberCost, Problem, caps_of
from slurm_jap.schedule import Action, Kind, Schedule


def times(problem: Problem, schedule: Schedule, iterations: int) -> dict[tuple[int, Action], tuple[Fraction, Fraction]]:
    """(start, end) of every (stage, action), by looking for something that can run until nothing can."""
    exact = {}
    orders = [list(schedule.unrolled(stage, iterations)) for stage in range(problem.stages)]
    link, switch = Fraction(str(problem.link)), Fraction(str(problem.switch))
    place = [0] * problem.stages
    free = [Fraction(0)] * problem.stages
    line: dict[tuple[int, int], Fraction] = {}  # (from, to) -> when that link is free
    arrival: dict[tuple[int, Action], Fraction] = {}
    while True:
        ran = False
        for stage, order in enumerate(orders):
            if place[stage] == len(order):
                continue
            action = order[place[stage]]
            begin = free[stage]
            if place[stage] and order[place[stage] - 1].member != action.member:
                begin += switch
            source = {Kind.FORWARD: stage - 1, Kind.BACKWARD: stage + 1, Kind.STEP: stage}[action.kind]
            if source != stage and 0 <= source < problem.stages:
                if (stage, action) not in arrival:
                    continue
                begin = max(begin, arrival[stage, action])
            if problem.barrier and action.iteration:
                earlier = [
                    exact.get((other, done))
                    for other in range(problem.stages)
                    for done in orders[other]
                    if done.iteration == action.iteration - 1
                ]
                if None in earlier:
                    continue
                begin = max(begin, *(end for _, end in earlier))
            end = begin + cost(problem, stage, action)
            exact[stage, action] = begin, end
            free[stage] = end
            place[stage] += 1
            ran = True
            target = {Kind.FORWARD: stage + 1, Kind.BACKWARD: stage - 1, Kind.STEP: stage}[action.kind]
            if target != stage and 0 <= target < problem.stages:
                through = max(end, line.get((stage, target), Fraction(0))) + link
                line[stage, target] = arrival[target, action] = through
        if not ran:
            return exact


def cost(problem: Problem, stage: int, action: Action) -> Fraction:
    member = problem.members[action.member]
    rows = {Kind.FORWARD: member.forward, Kind.BACKWARD: member.backward, Kind.STEP: member.step}
    return Fraction(str(rows[action.kind][stage]))


def period(problem: Problem, schedule: Schedule, iterations: int = 40) -> float:
    """The mean distance of iterations in the middle of a long run; infinite for a schedule that hangs."""
    done = times(problem, schedule, iterations)
    if len(done) < problem.actions * iterations:
        return float("inf")
    if problem.barrier:
        iterations = 1
        return float(max(end for (_, action), (_, end) in done.items() if action.iteration == 0))
    # The slowest action's growth, seen well before the pipeline drains.
    first, last = iterations // 3, 2 * iterations // 3
    growth = [
        done[stage, action._replace(iteration=last)][0] - begin
        for (stage, action), (begin, _) in done.items()
        if action.iteration == first
    ]
    return float(max(growth) / (last - first))


def held(schedule: Schedule, stage: int, iterations: int, sizes: list[int]) -> int:
    """The most that any prefix of a run holds, with ``sizes`` per member."""
    most = now = 0
    for action in schedule.unrolled(stage, iterations):
        now += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.STEP: 0}[action.kind] * sizes[action.member]
        most = max(most, now)
    return most


def legal_orders(microbatches: list[int]) -> Iterator[tuple[Action, ...]]:
    """Every order of one stage's period in which all actions belong to the same iteration."""
    chains = []
    for member, count in enumerate(microbatches):
        step = Action(Kind.STEP, 0, member)
        names = [*(Action(Kind.FORWARD, 0, member, m) for m in range(count))]
        names += [Action(Kind.BACKWARD, 0, member, m) for m in range(count)]
        alone = [
            order
            for order in itertools.permutations(names)
            if all(
                order.index(one) < order.index(two)
                for one, two in itertools.combinations(names, 2)
                if one.kind is two.kind or one.microbatch == two.microbatch
            )
        ]
        chains.append([(*order, step) for order in alone])
    for choice in itertools.product(*chains):
        yield from interleavings(list(choice))


def interleavings(rows: list[tuple[Action, ...]]) -> Iterator[tuple[Action, ...]]:
    rows = [row for row in rows if row]
    if not rows:
        yield ()
    for index, row in enumerate(rows):
        for rest in interleavings([*rows[:index], row[1:], *rows[index + 1 :]]):
            yield (row[0], *rest)


seconds = st.integers(0, 40).map(lambda tenths: tenths / 10)


@st.composite
def problems(draw: st.DrawFn, most_stages: int = 4, most_members: int = 4, most_microbatches: int = 4) -> Problem:
    """Small problems of every kind: unequal members, micro-batches and stages, zero times, caps, bytes, slow links."""
    stages = draw(st.integers(1, most_stages))
    times = st.lists(seconds, min_size=stages, max_size=stages).map(tuple)
    kinds = [
        MemberCost(
            forward=draw(times), backward=draw(times), step=draw(times),
            microbatches=draw(st.integers(1, most_microbatches)),
            activation=tuple(draw(st.lists(st.integers(0, 5), min_size=stages, max_size=stages))),
        )
        for _ in range(draw(st.integers(1, 2)))
    ]  # fmt: skip
    members = tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most_members)))
    return Problem(
        members=members,
        link=draw(st.sampled_from((0.0, 0.05, 0.3, 2.0))),
        switch=draw(st.sampled_from((0.0, 0.0, 0.1))),
        caps=draw(st.sampled_from((None, caps_of(stages, 1), caps_of(stages, 2)))),
        memory=draw(st.sampled_from((None, (6,) * stages))),
        barrier=draw(st.booleans()),
    )


def uneven(stages: int, members: int, microbatches: int, seed: int, **more: object) -> Problem:
    """Members and stages of different speeds, in hundredths."""
    draw = random.Random(seed)
    speeds = [draw.uniform(0.7, 1.4) for _ in range(stages)]
    made = []
    for _ in range(members):
        size = draw.uniform(0.6, 1.6)
        forward = tuple(round(size * speed, 2) for speed in speeds)
        made.append(
            MemberCost(
                forward=forward, backward=tuple(round(2 * f, 2) for f in forward),
                step=tuple(round(0.2 * f, 2) for f in forward), microbatches=microbatches,
            )
        )  # fmt: skip
    return Problem(members=tuple(made), **more)  # type: ignore[arg-type]
